"""
What a GGUF file says of its model.

    gguf    first bytes of a file -> header
    memory  header, context, cache types -> bytes on the GPU and in RAM
"""
