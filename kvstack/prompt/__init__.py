"""
What a request says, and what the rules do to it. Pure. Imports point down only.

    report          for people: rules listed, captured requests replayed, two requests laid beside each other
    engine          a body, its path and headers -> RewriteResult: one request through all of these, once
    warmup_request  a recorded request -> the request that evaluates its prefix, and where that ends
    rules           what to take out of a request
    diff            what the client changed since its former request
    memory          which conversation a request continues, and what went out
    pattern         literals and named tokens -> linear matchers
    recording       JSON Lines of `kvstack capture` -> recorded requests
    request         one request, whatever its API
    rawjson         byte-exact reading and cutting of JSON
"""
