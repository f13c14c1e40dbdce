"""
What the client changed since its former request.

    segments     a request -> its texts in the order of the prompt
    difference   two requests as segments -> where they differ first, and the cause
    value_kinds  two texts -> the kinds of values that differ: clock, id, counter
    previous     a request -> the former one of its conversation, and how it differs; bounded
"""
