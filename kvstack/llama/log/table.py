"""
The table of log patterns: what one record can say, with a real sample and the builds that print it.

A pattern is a value: the literal words that its message starts with, an expression for the whole message, and how a
fact is made of it.  The function column of a record is never looked at: it is cut to twelve characters and changes
with every refactoring.  Numbers may be `nan`, `-nan(ind)` or `inf` (a full hit divides by nothing).  A pattern without
`make` is known and says nothing that kvstack needs.
"""

from __future__ import annotations

from kvstack.llama.log.checkpoints import CHECKPOINTS
from kvstack.llama.log.ignored import IGNORED
from kvstack.llama.log.pattern import Pattern
from kvstack.llama.log.ram_cache import RAM_CACHE
from kvstack.llama.log.server import SERVER as WHOLE_SERVER
from kvstack.llama.log.server import SLOTS
from kvstack.llama.log.tasks import TASKS, TIMING

SLOT: tuple[Pattern, ...] = (*TIMING, *TASKS, *CHECKPOINTS, *SLOTS, *IGNORED)
"""Messages behind `slot FUNCTION: id S | task T | `.  Anything else there, above the debug level, is drift."""

SERVER: tuple[Pattern, ...] = (*RAM_CACHE, *WHOLE_SERVER)
"""Messages behind `srv FUNCTION: `.  Anything else there that speaks of caches is drift."""
