"""
Slot messages that say nothing that kvstack needs: listed, so that they do not count as drift.

Complete for b10068 and b11434: compared with the texts in these two binaries.
"""

from __future__ import annotations

from kvstack.llama.log.pattern import Pattern, pattern

_FORMS = (
    "- copying <*>to child <INT>",
    "accepted <INT>/<INT> draft tokens<*>",
    "add accepted tokens: <*>",
    "created speculative checkpoint <*>",
    "restoring speculative checkpoint <*>",
    "generate_draft: <*>",
    "max possible draft: <INT>",
    "after context reuse, new n_past = <INT>",
    "trying to reuse chunks with size > <*>",
    "cache reuse is not supported - ignoring <*>",
    "main/do_checkpoint = <*>",
    "alora <INT> <*>",
    "keeping cache for alora<*>",
    "clearing cache for lora change<*>",
    "only caching to alora <*>",
    "processing pre-alora <*>",
    "stop prompt batch filling at <*>",
    "encoding mtmd batch <*>",
    "failed to <*>mtmd <*>",
    "failed to process image<*>",
    "try adding media chunk <*>",
    "failed to get embeddings<*>",
    "sending rerank result<*>",
    "got exception: <*>",
    "launching slot : <*>",
    "n_gen = <INT>, n_remaining = <*>",
    "slot decode token, <*>",
    "stopped by <*>",
    "stopped due to <*>",
)

IGNORED: tuple[Pattern, ...] = tuple(pattern("ignored", form, None, "2025 on", "") for form in _FORMS)
"""Messages behind `slot FUNCTION: id S | task T | `."""
