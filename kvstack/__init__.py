"""
kvstack starts `llama-server` with the right flags, keeps its KV cache hot, and proves it live.

One command is one *stack*: a supervised llama-server (the *upstream*) behind a stripping proxy.

The rooms, from the person down; imports point down only:

    terminal   what a person sees: verbs, dashboard, plain lines
    stack      composition root: a Config becomes running parts, started and stopped in order; its helpers are plan
               (what can fail before the start), ports, verifying (is it our server?), warming, snapshotting (an
               evaluated prefix as a file, found by prefixes), proving (does it hold?) and gate (who waits meanwhile)
    process    the child process      |  proxy   HTTP in, rules on the way, bytes out as they come
    upstream   HTTP out               |  bus     events -> Snapshot -> readers   |  rundir   one stack's files
    prompt     what a request says    |  llama   what a llama-server can do and what it says
    core       the shared vocabulary: config, states, events, verdicts, snapshot
    errors     every error that a person can meet

`prompt`, `llama` and `core` are pure: bytes, text and values in, values out.  Everything that waits, reads or
spawns is above them.  Whatever happens is an event; events are reduced into one Snapshot; the dashboard, the
status verb and the metrics all read that Snapshot, so they cannot disagree.
"""

from importlib.metadata import version

__version__ = version("kvstack")
