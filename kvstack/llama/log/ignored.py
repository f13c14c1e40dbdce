"""
Log patterns that say nothing which kvstack needs: known, so that they are no drift.

The list is complete for b10068 and b11434: it was compared with the texts in these two binaries.
"""

from __future__ import annotations

from kvstack.llama.log.pattern import Pattern, pattern

SILENT: tuple[Pattern, ...] = (
    pattern("child", "- copying <*>to child <INT>", None, "b9093 on", "- copying state to child 1"),
    pattern(
        "speculative decoding",
        "accepted <INT>/<INT> draft tokens<*>",
        None,
        "2025 on",
        "accepted  3/ 8 draft tokens (restore checkpoint)",
    ),
    pattern(
        "speculative decoding",
        "add accepted tokens: <*>",
        None,
        "2025 on",
        "add accepted tokens: sampled=995, ids.size=2, n_draft=4",
    ),
    pattern(
        "speculative decoding",
        "created speculative checkpoint <*>",
        None,
        "2026",
        "created speculative checkpoint (pos_min = 1, pos_max = 9, n_tokens = 10, size = 0.1 MiB, draft = 0.1 MiB)",
    ),
    pattern(
        "speculative decoding",
        "restoring speculative checkpoint <*>",
        None,
        "2026",
        "restoring speculative checkpoint (pos_min = 1, pos_max = 9, size = 4096)",
    ),
    pattern(
        "speculative decoding",
        "generate_draft: <*>",
        None,
        "2025 on",
        "generate_draft: id=995, #tokens=10, #draft=4, pos_next=11",
    ),
    pattern("speculative decoding", "max possible draft: <INT>", None, "2025 on", "max possible draft: 4"),
    pattern(
        "chunks", "after context reuse, new n_past = <INT>", None, "2025 on", "after context reuse, new n_past = 2738"
    ),
    pattern(
        "chunks",
        "trying to reuse chunks with size > <*>",
        None,
        "2025 on",
        "trying to reuse chunks with size > 64, n_past = 495",
    ),
    pattern(
        "chunks",
        "cache reuse is not supported - ignoring <*>",
        None,
        "2025 on",
        "cache reuse is not supported - ignoring n_cache_reuse = 64",
    ),
    pattern(
        "checkpoint planned",
        "main/do_checkpoint = <*>",
        None,
        "2026",
        "main/do_checkpoint = yes, pos_min = 0, pos_max = 2399",
    ),
    pattern("adapter", "alora <INT> <*>", None, "late 2025 on", "alora 1 activated starting at 40"),
    pattern("adapter", "keeping cache for alora<*>", None, "late 2025 on", "keeping cache for alora. 1 target loras"),
    pattern(
        "adapter",
        "clearing cache for lora change<*>",
        None,
        "2025 on",
        "clearing cache for lora change. 0 loras -> 1 loras",
    ),
    pattern(
        "adapter",
        "only caching to alora <*>",
        None,
        "late 2025 on",
        "only caching to alora invocation start (n_past = 40, alora_invocation_start = 40)",
    ),
    pattern(
        "adapter",
        "processing pre-alora <*>",
        None,
        "late 2025 on",
        "processing pre-alora tokens without the adapter (n_tokens = 9, alora_invocation_start = 40)",
    ),
    pattern(
        "adapter",
        "stop prompt batch filling at <*>",
        None,
        "late 2025 on",
        "stop prompt batch filling at (n_tokens = 40, alora_invocation_start = 40)",
    ),
    pattern("media", "encoding mtmd batch <*>", None, "2026", "encoding mtmd batch from idx = 0, n_chunks = 2"),
    pattern("media", "failed to <*>mtmd <*>", None, "2026", "failed to decode mtmd chunk, idx = 0, res = -1"),
    pattern("media", "failed to process image<*>", None, "2025 on", "failed to process image, res = -1"),
    pattern("media", "try adding media chunk <*>", None, "2026", "try adding media chunk idx = 0 to batch, res = 0"),
    pattern(
        "embedding", "failed to get embeddings<*>", None, "2025 on", "failed to get embeddings, token = 7, seq_id = 0"
    ),
    pattern("embedding", "sending rerank result<*>", None, "2025 on", "sending rerank result, res.score = 0.500000"),
    pattern("error", "got exception: <*>", None, "2025 on", "got exception: bad grammar"),
    pattern("task launched", "launching slot : <*>", None, "debug level", "launching slot : {...}"),
    pattern(
        "decode progress",
        "n_gen = <INT>, n_remaining = <*>",
        None,
        "debug level",
        "n_gen = 3, n_remaining = 5, next token:    11 'a'",
    ),
    pattern(
        "decode progress",
        "slot decode token, <*>",
        None,
        "debug level",
        "slot decode token, id=995, n_ctx = 2048, n_tokens = 40, truncated = 0",
    ),
    pattern("decode ended", "stopped by <*>", None, "2025 on", "stopped by limit, n_gen = 8, n_predict = 8"),
    pattern(
        "decode ended",
        "stopped due to <*>",
        None,
        "2025 on",
        "stopped due to running out of context capacity, prompt.n_tokens() = 2047",
    ),
)
"""Messages behind `slot FUNCTION: id S | task T | `."""
