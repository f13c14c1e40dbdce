"""
For people: what rules exist, and what they did.

    listing   a rule set -> its rules in words; edits with what stands around them
    replay    captured requests -> what each rule did to them, and what that is worth
    mismatch  two requests -> why one was not taken for the next of the other
"""
