"""Log patterns of what happens to the tokens that a slot holds: checkpoints, re-processing, shifts."""

from __future__ import annotations

import re
from typing import Literal

from kvstack.llama.log.pattern import Make, Pattern, mib, pattern
from kvstack.state import log_facts as facts


def _created(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointCreated(
        slot, task, int(m.group(4)), mib(m.group(5)), number=int(m.group(1)), limit=int(m.group(2))
    )


def _created_by_position(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    # Older forms give only the last position; the tokens before the cut are one more.
    return facts.CheckpointCreated(
        slot, task, int(m.group(3)) + 1, mib(m.group(4)), number=int(m.group(1)), limit=int(m.group(2))
    )


def _created_2025(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointCreated(
        slot, task, int(m.group(1)) + 1, mib(m.group(2)), number=int(m.group(3)), limit=int(m.group(4))
    )


def _restored(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointRestored(slot, task, int(m.group(1)))


def _restored_by_position(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointRestored(slot, task, int(m.group(1)) + 1)


def _erased(why: Literal["invalidated", "list full", "too close", "superseded"]) -> Make:
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
        return facts.CheckpointErased(slot, task, int(m.group(1)) if m.re.groups else None, why)

    return make


def restore_failed(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    """What could not be restored is in the words of the record."""
    return facts.RestoreFailed(slot if slot >= 0 else None, task, m.group(0).strip())


CHECKPOINTS: tuple[Pattern, ...] = (
    pattern(
        "checkpoint created",
        "created context checkpoint <INT> of <INT> (pos_min = <*>, pos_max = <INT>, n_tokens = <INT>,"
        " size = <NUM> MiB)",
        _created,
        "April 2026 on; from b9847 trace level",
        "created context checkpoint 1 of 32 (pos_min = 1887, pos_max = 1887, n_tokens = 1888, size = 0.028 MiB)",
    ),
    pattern(
        "checkpoint created",
        "created context checkpoint <INT> of <INT> (pos_min = <*>, pos_max = <INT>, size = <NUM> MiB)",
        _created_by_position,
        "October 2025 to March 2026",
        "created context checkpoint 1 of 8 (pos_min = 0, pos_max = 1887, size = 62.813 MiB)",
    ),
    pattern(
        "checkpoint created",
        "SWA checkpoint create, pos_min = <*>, pos_max = <INT>, size = <NUM> MiB, total = <INT>/<INT> <*>",
        _created_2025,
        "August to September 2025",
        "SWA checkpoint create, pos_min = 0, pos_max = 1887, size = 62.813 MiB, total = 1/3 (62.813 MiB)",
    ),
    pattern(
        "checkpoint restored",
        "restored context checkpoint (pos_min = <*>, n_past = <INT>, size = <NUM> MiB)",
        _restored,
        "April 2026 on; from b9847 trace level",
        "restored context checkpoint (pos_min = 2399, pos_max = 2399, n_tokens = 2400, n_past = 2400,"
        " size = 0.028 MiB)",
    ),
    pattern(
        "checkpoint restored",
        "restored context checkpoint (pos_min = <*>, pos_max = <INT>, size = <NUM> MiB)",
        _restored_by_position,
        "October 2025 to March 2026",
        "restored context checkpoint (pos_min = 0, pos_max = 2399, size = 62.813 MiB)",
    ),
    pattern(
        "checkpoint restored",
        "restored context checkpoint took <*> (pos_max = <INT><*>",
        _restored_by_position,
        "a fork",
        "restored context checkpoint took 1.20 ms (pos_max = 2399)",
    ),
    pattern(
        "checkpoint restored",
        "SWA checkpoint restore, pos_min = <*>, pos_max = <INT>, size = <NUM> MiB",
        _restored_by_position,
        "August to September 2025",
        "SWA checkpoint restore, pos_min = 0, pos_max = 2399, size = 62.813 MiB",
    ),
    pattern(
        "restore failed",
        "failed to restore context checkpoint (<*>",
        restore_failed,
        "October 2025 on",
        "failed to restore context checkpoint (pos_min = 0, pos_max = 2399, size = 62.813 MiB)",
    ),
    pattern(
        "restore failed",
        "failed to load prompt from cache",
        restore_failed,
        "October 2025 on",
        "failed to load prompt from cache",
    ),
    pattern(
        "checkpoint erased",
        "erased invalidated context checkpoint (pos_min = <*>, n_tokens = <INT>, n_swa = <*>",
        _erased("invalidated"),
        "April 2026 on; from b9847 trace level",
        "erased invalidated context checkpoint (pos_min = 1887, pos_max = 1887, n_tokens = 1888, n_swa = 0,"
        " pos_next = 0, size = 0.028 MiB)",
    ),
    pattern(
        "checkpoint erased",
        "erased invalidated context checkpoint (<*>",
        _erased("invalidated"),
        "October 2025 to March 2026",
        "erased invalidated context checkpoint (pos_min = 0, pos_max = 1887, size = 62.813 MiB)",
    ),
    pattern(
        "checkpoint erased",
        "SWA checkpoint erase, <*>",
        _erased("invalidated"),
        "August to September 2025",
        "SWA checkpoint erase, pos_min = 0, pos_max = 1887, size = 62.813 MiB",
    ),
    pattern(
        "checkpoint erased",
        "erasing old context checkpoint (<*>n_tokens = <INT><*>",
        _erased("list full"),
        "April 2026 on",
        "erasing old context checkpoint (pos_min = 5966, pos_max = 5966, n_tokens = 5967, size = 0.028 MiB)",
    ),
    pattern(
        "checkpoint erased",
        "erasing old context checkpoint (<*>",
        _erased("list full"),
        "October 2025 to March 2026",
        "erasing old context checkpoint (pos_min = 0, pos_max = 5966, size = 62.813 MiB)",
    ),
    pattern(
        "checkpoint erased",
        "erasing context checkpoint too close to an earlier one (<*>n_tokens = <INT><*>",
        _erased("too close"),
        "b10068 on, trace level",
        "erasing context checkpoint too close to an earlier one (pos_min = 2388, pos_max = 2388, n_tokens = 2389,"
        " size = 0.028 MiB)",
    ),
    pattern(
        "checkpoint erased",
        "superseding context checkpoint at n_tokens = <INT>",
        _erased("superseded"),
        "b11053 on, trace level",
        "superseding context checkpoint at n_tokens = 2400",
    ),
    pattern(
        "checkpoint tried",
        "checking checkpoint with <*>",
        None,
        "b9847 on, trace level",
        "checking checkpoint with [2399, 2399] against 10...",
    ),
    pattern(
        "checkpoint tried",
        "Checking checkpoint with <*>",
        None,
        "b9093 to b9785",
        "Checking checkpoint with [2399, 2399] against 10...",
    ),
    pattern(
        "checkpoint planned",
        "<INT> tokens since last checkpoint at <*>",
        None,
        "April 2026 to June 2026",
        "8192 tokens since last checkpoint at 0, creating new checkpoint during processing at position 8192",
    ),
    pattern(
        "full re-processing",
        "forcing full prompt re-processing due to lack of cache data<*>",
        lambda m, slot, task: facts.FullReprocess(slot, task),
        "June 2025 on; from b9847 trace level",
        "forcing full prompt re-processing due to lack of cache data (likely due to SWA or hybrid/recurrent memory,"
        " see https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055)",
    ),
    pattern(
        "full re-processing",
        "failed to truncate tokens <*>",
        lambda m, slot, task: facts.FullReprocess(slot, task),
        "2025 on",
        "failed to truncate tokens with position >= 395 - clearing the memory",
    ),
    pattern(
        "why re-processed",
        "n_past = <INT>, <*>pos_min = <*>",
        None,
        "August 2025 to b9093",
        "n_past = 395, slot.prompt.tokens.size() = 2996, seq_id = 0, pos_min = 2995, n_swa = 1",
    ),
    pattern(
        "chunk reused",
        "reusing chunk with size <INT>, shifting KV cache <*>",
        lambda m, slot, task: facts.ChunkReused(slot, task, int(m.group(1))),
        "2025 on",
        "reusing chunk with size 2243, shifting KV cache [745, 2988) -> [495, 2738)",
    ),
    pattern(
        "context shift",
        "slot context shift, n_keep = <INT>, n_left = <INT>, n_discard = <INT>",
        lambda m, slot, task: facts.ContextShifted(slot, task, int(m.group(1)), int(m.group(3))),
        "2025 on",
        "slot context shift, n_keep = 0, n_left = 2046, n_discard = 1023",
    ),
    pattern(
        "prompt cut",
        "input truncated, <*>",
        lambda m, slot, task: facts.PromptTruncated(slot, task),
        "2025",
        "input truncated, n_ctx = 2048, n_keep = 0, n_left = 2048, n_prompt_tokens = 1752",
    ),
    pattern(
        "slot emptied",
        "clearing prompt with <INT> tokens",
        lambda m, slot, task: facts.SlotCleared(slot, int(m.group(1))),
        "2026",
        "clearing prompt with 4818 tokens",
    ),
    pattern(
        "idle slot saved",
        "saving idle slot to prompt cache",
        None,
        "2026",
        "saving idle slot to prompt cache",
    ),
)
"""Messages behind `slot FUNCTION: id S | task T | `."""
