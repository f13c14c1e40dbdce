"""
JSON read and edited in its own spelling: nothing is written anew that nobody changed.

    scan     raw text -> values with their offsets; edits -> the text with only those places changed
    offsets  an offset in a decoded string -> the offset of the same character in its raw literal
    keys     names of keys -> the spans to cut so that a JSON value no longer has them
"""
