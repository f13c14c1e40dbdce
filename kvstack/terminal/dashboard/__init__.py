"""
The dashboard: the stack's state in, lines of text out.  All of it is pure but `live`.

    frame            a whole frame of a given width and height, or the summary that `status` prints
    headline         the one sentence: does the cache work, and if not, why?
    request_table    the table of requests: which columns fit, and what stands in them
    slots            what each slot holds, and running prefills
    getting_started  what stands there before the first request
    glyphs           shapes that a terminal can show; sparkline, chart, cutting to a width
    live             draws frames on a terminal, and leaves it as it was
"""
