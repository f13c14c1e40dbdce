"""
HTTP in: control routes, and everything else through the rules to the upstream.

    app             an ASGI request -> `control` or `forward`, by its path and key
    forward         a request -> read, rewritten, logged, sent, its answer relayed; events
    body            ASGI messages -> one decoded body within its limit
    target          a raw path -> whether the server would read it differently
    headers         headers of one side -> those that cross to the other
    keys            a request's credentials -> admitted or not, and the key for the upstream
    replies         a status and message -> the proxy's own answer, with CORS headers
    error_bodies    an API, a status, a message -> the error's JSON in the client's dialect
    request_log     a request and what the rules made of it -> found by its number
    capture         logged requests -> listeners, as JSON Lines
    capture_record  a request -> its line, without credentials
    control         `/kvstack/...` -> what another terminal may see or do
    metrics         the stack's state -> Prometheus text
    serve           an application and a port -> embedded uvicorn
"""
