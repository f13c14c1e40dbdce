"""
How a rule recognises text: literals and named tokens, linear.

    pattern  the text of a pattern -> a Pattern that matches and searches
    tokens   the named tokens, `{date}`, `{uuid}` and so on: text and offset -> where the token ends
"""
