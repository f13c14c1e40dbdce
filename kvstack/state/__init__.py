"""
What happened: events go in, one value of the whole stack comes out.  Pure; nothing here reads or waits.

    lifecycle      the states of a stack
    causes         kinds of change that a client makes, with meaning and advice: the one table of causes
    verdict        verdicts and their reasons: one table each
    events         everything that happens, as values; `Difference` is where a request leaves its former one
    log_facts      what the records of a llama-server's log say, as values
    records        the parts of a stack's state: requests, tasks, slots, the server, the warm-up, totals
    attribution    log facts and answers in, who works for whom out: slots, tasks and their requests
    request_stats  a request and its task in, its figures out
    totals         requests in, sums and decode speeds out
    stack_state    the stack's state as a whole
    status_json    the state in, its JSON out, and back
    assessment     a request in, its figures, verdict and reason out
    reducer        state and event in, the next state out; the only way to a new one
    explain        a request in, sentences out
"""
