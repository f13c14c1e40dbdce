"""
What to take out of a request: rule packs in, matches, a plan and edits out.

    ruleset            the compiled rules of a stack, by client
    compiler           packs and the user's settings to a rule set
    client_detection   a document to its client, and what kind of side request it is
    leading_blocks     a user text to the blocks that its client wrote in front of the words
    matcher            a document and its client to `matches`: replacements, texts to append, trailing messages
    known_items        the matches of one item to what the memo keeps of it, and back
    planner            matches and what the memory holds to a plan
    trailing_messages  which of them say something new
    edits              replacements and a plan to edits of the raw body
    unchanged          matches that had nothing to do, and why
    trace              by what a request is known, to be shown
    matches            what the rules found in one request: replacements, texts to append, trailing messages
"""
