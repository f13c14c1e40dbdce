"""
The server's log: bytes -> lines and log facts.

    lines        bytes -> clean lines
    reader       lines -> log facts (`kvstack.state.log_facts`), whatever wraps a record
    pattern      how one message is written down: form, builds, sample, the fact that it makes
    table        all patterns, by the column in front of the message
    tasks        slots chosen, tasks launched, prefilled, decoded, released
    checkpoints  context checkpoints, re-processing, shifts, chunk reuse
    ram_cache    the host prompt cache: searched, hit, saved, evicted
    server       start, devices, memory, slots, warnings
    ignored      messages that say nothing that kvstack needs
"""
