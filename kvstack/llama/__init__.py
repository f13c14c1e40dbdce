"""
What a llama-server can do, and what it says. Pure.

    command   config and what `--help` says -> the command line
    model     GGUF header -> shape and memory of a model
    log       log bytes -> lines and log facts
    response  bytes of an answer -> cached, evaluated and generated tokens, times, error; one record per API
"""
