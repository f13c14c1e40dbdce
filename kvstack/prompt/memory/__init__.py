"""
Which conversation a request continues, and what went out in its earlier turns.

    fingerprint  an item to one digest of what it says
    state        what is kept of a conversation, and by what a request is known
    store        the chain of a request's digests to the state that it continues; bounded
    item_memo    the raw text of an item to what the rules did inside it; bounded
"""
