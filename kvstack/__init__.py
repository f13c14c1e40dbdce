"""
kvstack starts `llama-server` with the right flags, keeps its KV cache hot, and proves it live.

One command is one *stack*: a supervised llama-server (the *upstream*) behind a stripping proxy.

The rooms, from the person down; imports point down only, and each package's docstring is its map:

    terminal   the person: verbs, dashboard, plain lines
    stack      composition root: a config becomes running parts, started and stopped in order
    warmup     known prefixes as files: found, restored, proved, at the right moment
    process    the child process        |  proxy   HTTP in, rules on the way, bytes out as they come
    upstream   HTTP to the llama-server |  bus     events -> stack state -> readers  |  rundir  one stack's files
    doctor     facts -> findings
    prompt     what a request says, and what the rules do to it
    llama      what a llama-server can do, and what it says
    config     what a user may say      |  state   what happened: events, requests, verdicts, causes
    errors     every error that a person can meet  |  packs  rule packs as data, one TOML file a client

`doctor`, `prompt`, `llama`, `config` and `state` are pure: bytes, text and values in, values out.  Everything that
waits, reads or spawns is above them.  Whatever happens is an event; events are reduced into one stack state, which the
dashboard, `status` and the metrics all read, so they cannot disagree.
"""

from importlib.metadata import version

__version__ = version("kvstack")
