"""
The table of log patterns: what one record can say, with a real sample and the builds that print it.

A pattern is a value: the literal words that its message starts with, an expression for the whole message, and how a
fact is made of it.  `SLOT` holds the messages behind `slot FUNCTION: id S | task T | `, `SERVER` those behind
`srv FUNCTION: `, `LOADING` lines of the libraries below, `BARE` what is printed without any prefix.  The function
column is never looked at: it is cut to twelve characters and changes with every refactoring.

Numbers may be `nan`, `-nan(ind)` or `inf` (a full hit divides by nothing).  A pattern without `make` is known and
says nothing that kvstack needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstack.core import logfacts as facts

__all__ = ["BARE", "LOADING", "SERVER", "SLOT", "TIMING", "Pattern", "index"]

Make = Callable[["re.Match[str]", int, "int | None"], "facts.LogFact | None"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """
    One form of one message.

    Attributes:
        name: What it says, in a few words.
        head: The literal text that the message starts with (for `LOADING`: that it contains).
        regex: The whole message.
        make: Match, slot and task in, a fact out; None for a message that says nothing which is needed.
        builds: First and last build that is known to print it.
        sample: A real message.
    """

    name: str
    head: str
    regex: re.Pattern[str]
    make: Make | None
    builds: str
    sample: str


_TOKENS = {
    "INT": r"(-?\d{1,18})",
    "NUM": r"(-?(?:\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?|nan(?:\((?:ind|snan)\))?|inf))",
    "ANY": r"(.*)",
    "*": r".*",
}
_TOKEN = re.compile(r"<(INT|NUM|ANY|\*)>")


def _compile(form: str) -> re.Pattern[str]:
    """
    Make an expression of a form: literal text with `<INT>`, `<NUM>`, `<ANY>` (kept) and `<*>` (not kept).

    Any run of blanks stands for any other, as the servers pad their numbers.
    """
    parts: list[str] = []
    position = 0
    for token in _TOKEN.finditer(form):
        parts.append(_literal(form[position : token.start()]))
        parts.append(_TOKENS[token.group(1)])
        position = token.end()
    parts.append(_literal(form[position:]))
    return re.compile("".join(parts))


def _literal(text: str) -> str:
    return re.sub(r"(?:\\? )+", " +", re.escape(text))


def _pattern(name: str, form: str, make: Make | None, builds: str, sample: str) -> Pattern:
    head = re.split(r"<(?:INT|NUM|ANY|\*)>|  ", form, maxsplit=1)[0]
    return Pattern(name, head, _compile(form), make, builds, sample)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None  # `-nan(ind)`
    return value if math.isfinite(value) else None


def _amount(text: str) -> float | None:
    value = _number(text)
    return value if value is not None and value >= 0 else None


def _ratio(text: str) -> float | None:
    value = _amount(text)
    return None if value is None else min(value, 1.0)


def _mib(text: str) -> int:
    return round((_amount(text) or 0.0) * 1048576)


# --- slot choice ---------------------------------------------------------------------------------------------------


def _selected(how: Literal["lcp", "lcs", "lru", "id"], *groups: int) -> Make:
    # Groups of similarity, threshold and keep, as far as the form has them.
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
        values = [_ratio(m.group(group)) for group in groups]
        values += [None] * (3 - len(values))
        return facts.SlotSelected(slot, how, *values)

    return make


def _compared(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.SlotCompared(slot, _ratio(m.group(1)), int(m.group(2)), int(m.group(3)))


# --- task life -----------------------------------------------------------------------------------------------------


def _launched(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    if task is None:
        return None
    is_child = m.re.groups > 0 and m.group(1) != "0"
    return facts.TaskLaunched(slot, task, is_child)


def _prompt(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.PromptStarted(slot, task, int(m.group(2)), int(m.group(1)))


def _reuse(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.ReusePoint(slot, task, int(m.group(1)))


def _progress(processed: int, ratio: int | None = None, speed: int | None = None) -> Make:
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
        if task is None:
            return None
        return facts.PrefillProgressed(
            slot,
            task,
            int(m.group(processed)),
            1.0 if ratio is None else _ratio(m.group(ratio)),
            None if speed is None else _amount(m.group(speed)),
        )

    return make


def _prefill(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.PrefillTimed(slot, task, _amount(m.group(1)), int(m.group(2)))


def _decode(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    if task is None:
        return None
    return facts.DecodeTimed(slot, task, _amount(m.group(1)), int(m.group(2)), _amount(m.group(3)))


def _decoding(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.DecodeProgressed(slot, task, int(m.group(1)), _amount(m.group(2)))


def _drafted(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.DraftTimed(slot, task, int(m.group(1)), int(m.group(2)))


def _released(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.SlotReleased(slot, task, int(m.group(1)), m.group(2) != "0")


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _created(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointCreated(
        slot, task, int(m.group(4)), _mib(m.group(5)), number=int(m.group(1)), limit=int(m.group(2))
    )


def _created_by_position(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    # Older forms give only the last position; the tokens before the cut are one more.
    return facts.CheckpointCreated(
        slot, task, int(m.group(3)) + 1, _mib(m.group(4)), number=int(m.group(1)), limit=int(m.group(2))
    )


def _created_2025(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointCreated(
        slot, task, int(m.group(1)) + 1, _mib(m.group(2)), number=int(m.group(3)), limit=int(m.group(4))
    )


def _restored(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointRestored(slot, task, int(m.group(1)))


def _restored_by_position(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.CheckpointRestored(slot, task, int(m.group(1)) + 1)


def _erased(why: Literal["invalidated", "list full", "too close", "superseded"]) -> Make:
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
        return facts.CheckpointErased(slot, task, int(m.group(1)) if m.re.groups else None, why)

    return make


def _failed(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.RestoreFailed(slot if slot >= 0 else None, task, m.group(0).strip())


# --- the server as a whole -----------------------------------------------------------------------------------------


def _ram_state(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    limit = _mib(m.group(3))
    return facts.RamCacheState(int(m.group(1)), _mib(m.group(2)), limit or None)


def _warned(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.ServerWarned(m.group(0).strip())


def _fatal(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.ServerFailed(m.group(0).strip())


_BUFFERS: Mapping[str, Literal["model", "kv", "recurrent", "compute", "output"]] = {
    "model": "model",
    "KV": "kv",
    "RS": "recurrent",
    "compute": "compute",
    "output": "output",
}


def _buffer(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    kind = _BUFFERS.get(m.group(2))
    return None if kind is None else facts.BufferAllocated(m.group(1), kind, _mib(m.group(3)))


_SPEED = "( <NUM> ms per token, <NUM> tokens per second)"

TIMING: tuple[Pattern, ...] = (
    _pattern(
        "prefill time",
        "prompt eval time = <NUM> ms / <INT> tokens<*>",
        _prefill,
        "2025 on",
        "prompt eval time =     232.15 ms /  3164 tokens (    0.07 ms per token, 13628.94 tokens per second)",
    ),
    _pattern(
        "decode time",
        "eval time = <NUM> ms / <INT> tokens (<*>ms per token, <NUM> tokens per second)",
        _decode,
        "2025 on",
        "       eval time =       1.72 ms /     8 tokens (    0.21 ms per token,  4659.29 tokens per second)",
    ),
    _pattern(
        "total time",
        "total time = <NUM> ms / <INT> tokens",
        None,
        "2025 on",
        "      total time =      26.99 ms /  1027 tokens",
    ),
    _pattern(
        "speculative decoding",
        "draft acceptance rate = <*>( <INT> accepted / <INT> generated)<*>",
        _drafted,
        "2025 to b9093",
        "draft acceptance rate = 0.73684 (   14 accepted /    19 generated)",
    ),
    _pattern(
        "speculative decoding",
        "draft acceptance = <*>( <INT> accepted / <INT> generated)<*>",
        _drafted,
        "b9254 on",
        "draft acceptance = 0.73684 (   14 accepted /    19 generated), mean len =  2.75",
    ),
    _pattern("graphs", "graphs reused = <INT>", None, "b9246 on", "   graphs reused =          7"),
    _pattern("graphs", "graph reallocs = <*>", None, "newer than b11549", "graph reallocs = 3 / 40"),
    _pattern("speculative decoding", "acc per pos = <*>", None, "b9993 on", "    acc per pos = (0.81, 0.60)"),
)
"""The timings: four records of their own, or (to b9093) the lines behind one empty `print_timing` record."""

SLOT: tuple[Pattern, ...] = (
    *TIMING,
    _pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, sim_best = <NUM> (> <NUM> thold), f_keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "b6700 (October 2025) to b10068",
        "selected slot by LCP similarity, sim_best = 0.915 (> 0.100 thold), f_keep = 0.913",
    ),
    _pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, f_sim_best = <NUM> (> <NUM> thold), f_keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "b10261 on",
        "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), f_keep = 0.993",
    ),
    _pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, <*>sim_best = <NUM> (> <NUM> thold), keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "newer than b11549",
        "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), keep = 0.993",
    ),
    _pattern(
        "slot by common subsequence",
        "selected slot by lcs similarity, lcs_len = <INT>, similarity = <NUM> (> <NUM> thold)",
        _selected("lcs", 2, 3),
        "September 2025",
        "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958 (> 0.100 thold)",
    ),
    _pattern(
        "slot by common subsequence",
        "selected slot by lcs similarity, lcs_len = <INT>, similarity = <NUM>",
        _selected("lcs", 2),
        "to August 2025, debug level",
        "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958029",
    ),
    _pattern(
        "slot by age",
        "selected slot by LRU, t_last = <INT>",
        _selected("lru"),
        "September 2025 on",
        "selected slot by LRU, t_last = -1",
    ),
    _pattern(
        "slot by age",
        "selected slot by lru, t_last = <INT>",
        _selected("lru"),
        "to August 2025, debug level",
        "selected slot by lru, t_last = 86857173",
    ),
    _pattern(
        "slot by age",
        "selected slot by LRU, n_tokens = <INT>",
        _selected("lru"),
        "newer than b11549",
        "selected slot by LRU, n_tokens = 1026",
    ),
    _pattern("slot by id", "selected slot by id (<INT>)", _selected("id"), "b9725 on", "selected slot by id (0)"),
    _pattern(
        "slot compared",
        "- checking sim = <NUM> (<INT>/<INT>) > <NUM>",
        _compared,
        "b10434 on, trace level",
        " - checking sim = 0.004 (10/2404) > 0.100",
    ),
    _pattern("slot compared", "- skipping, <*>", None, "b10434 on, trace level", " - skipping, slot is empty"),
    _pattern(
        "task launched",
        "processing task, is_child = <INT>",
        _launched,
        "b8227 on",
        "processing task, is_child = 0",
    ),
    _pattern("task launched", "processing task", _launched, "2025", "processing task"),
    _pattern(
        "new prompt",
        "new prompt, n_ctx_slot = <INT>, n_keep = <*>, task.n_tokens = <INT>",
        _prompt,
        "November 2025 on; from b9246 trace level",
        "new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 2404",
    ),
    _pattern(
        "new prompt",
        "new prompt, n_ctx_slot = <INT>, n_keep = <*>, n_prompt_tokens = <INT>",
        _prompt,
        "2025",
        "new prompt, n_ctx_slot = 32768, n_keep = 0, n_prompt_tokens = 2404",
    ),
    _pattern(
        "reuse point",
        "cached n_tokens = <INT>, memory_seq_rm [<INT>, end)",
        _reuse,
        "b9246 on, trace level",
        "cached n_tokens = 2400, memory_seq_rm [2400, end)",
    ),
    _pattern(
        "reuse point",
        "n_tokens = <INT>, memory_seq_rm [<INT>, end)",
        _reuse,
        "November 2025 to b9093",
        "n_tokens = 2400, memory_seq_rm [2400, end)",
    ),
    _pattern("reuse point", "kv cache rm [<INT>, end)", _reuse, "to autumn 2025", "kv cache rm [2400, end)"),
    _pattern(
        "prefill progress",
        "prompt processing, n_tokens = <INT>, progress = <NUM>, t = <NUM> s / <NUM> tokens per second",
        _progress(1, 2, 4),
        "b9246 on, after three seconds",
        "prompt processing, n_tokens =  24576, progress = 0.83, t =   3.48 s / 7070.30 tokens per second",
    ),
    _pattern(
        "prefill progress",
        "prompt processing progress, n_tokens = <INT>, batch.n_tokens = <INT>, progress = <NUM>",
        _progress(1, 3),
        "November 2025 to b9093",
        "prompt processing progress, n_tokens = 2048, batch.n_tokens = 2048, progress = 0.500000",
    ),
    _pattern(
        "prefill progress",
        "prompt processing progress, n_past = <INT>, n_tokens = <INT>, progress = <NUM>",
        _progress(1, 3),
        "to October 2025",
        "prompt processing progress, n_past = 2048, n_tokens = 2048, progress = 0.500000",
    ),
    _pattern(
        "prefill done",
        "prompt processing done, n_tokens = <INT>, batch.n_tokens = <INT>",
        _progress(1),
        "November 2025 to b9093",
        "prompt processing done, n_tokens = 4096, batch.n_tokens = 2048",
    ),
    _pattern(
        "prefill done",
        "prompt done, n_past = <INT>, n_tokens = <INT>",
        _progress(1),
        "to October 2025",
        "prompt done, n_past = 4096, n_tokens = 2048",
    ),
    _pattern(
        "decode progress",
        "n_decoded = <INT>, tg = <NUM> t/s<*>",
        _decoding,
        "b9246 to b10331",
        "n_decoded =    100, tg =  20.00 t/s, tg_3s =  19.87 t/s",
    ),
    _pattern(
        "decode progress",
        "n_gen = <INT>, tg = <NUM> t/s<*>",
        _decoding,
        "b10434 on",
        "n_gen =    100, tg =  20.00 t/s, tg_3s =  19.87 t/s",
    ),
    _pattern(
        "released",
        "stop processing: n_tokens = <INT>, truncated = <INT>",
        _released,
        "November 2025 on",
        "stop processing: n_tokens = 1026, truncated = 0",
    ),
    _pattern(
        "released",
        "stop processing: n_past = <INT>, truncated = <INT>",
        _released,
        "to autumn 2025",
        "stop processing: n_past = 1026, truncated = 0",
    ),
    _pattern(
        "checkpoint created",
        "created context checkpoint <INT> of <INT> (pos_min = <*>, pos_max = <INT>, n_tokens = <INT>, size = <NUM> MiB)",
        _created,
        "April 2026 on; from b9847 trace level",
        "created context checkpoint 1 of 32 (pos_min = 1887, pos_max = 1887, n_tokens = 1888, size = 0.028 MiB)",
    ),
    _pattern(
        "checkpoint created",
        "created context checkpoint <INT> of <INT> (pos_min = <*>, pos_max = <INT>, size = <NUM> MiB)",
        _created_by_position,
        "October 2025 to March 2026",
        "created context checkpoint 1 of 8 (pos_min = 0, pos_max = 1887, size = 62.813 MiB)",
    ),
    _pattern(
        "checkpoint created",
        "SWA checkpoint create, pos_min = <*>, pos_max = <INT>, size = <NUM> MiB, total = <INT>/<INT> <*>",
        _created_2025,
        "August to September 2025",
        "SWA checkpoint create, pos_min = 0, pos_max = 1887, size = 62.813 MiB, total = 1/3 (62.813 MiB)",
    ),
    _pattern(
        "checkpoint restored",
        "restored context checkpoint (pos_min = <*>, n_past = <INT>, size = <NUM> MiB)",
        _restored,
        "April 2026 on; from b9847 trace level",
        "restored context checkpoint (pos_min = 2399, pos_max = 2399, n_tokens = 2400, n_past = 2400, size = 0.028 MiB)",
    ),
    _pattern(
        "checkpoint restored",
        "restored context checkpoint (pos_min = <*>, pos_max = <INT>, size = <NUM> MiB)",
        _restored_by_position,
        "October 2025 to March 2026",
        "restored context checkpoint (pos_min = 0, pos_max = 2399, size = 62.813 MiB)",
    ),
    _pattern(
        "checkpoint restored",
        "restored context checkpoint took <*> (pos_max = <INT><*>",
        _restored_by_position,
        "a fork",
        "restored context checkpoint took 1.20 ms (pos_max = 2399)",
    ),
    _pattern(
        "checkpoint restored",
        "SWA checkpoint restore, pos_min = <*>, pos_max = <INT>, size = <NUM> MiB",
        _restored_by_position,
        "August to September 2025",
        "SWA checkpoint restore, pos_min = 0, pos_max = 2399, size = 62.813 MiB",
    ),
    _pattern(
        "restore failed",
        "failed to restore context checkpoint (<*>",
        _failed,
        "October 2025 on",
        "failed to restore context checkpoint (pos_min = 0, pos_max = 2399, size = 62.813 MiB)",
    ),
    _pattern(
        "restore failed",
        "failed to load prompt from cache",
        _failed,
        "October 2025 on",
        "failed to load prompt from cache",
    ),
    _pattern(
        "checkpoint erased",
        "erased invalidated context checkpoint (pos_min = <*>, n_tokens = <INT>, n_swa = <*>",
        _erased("invalidated"),
        "April 2026 on; from b9847 trace level",
        "erased invalidated context checkpoint (pos_min = 1887, pos_max = 1887, n_tokens = 1888, n_swa = 0,"
        " pos_next = 0, size = 0.028 MiB)",
    ),
    _pattern(
        "checkpoint erased",
        "erased invalidated context checkpoint (<*>",
        _erased("invalidated"),
        "October 2025 to March 2026",
        "erased invalidated context checkpoint (pos_min = 0, pos_max = 1887, size = 62.813 MiB)",
    ),
    _pattern(
        "checkpoint erased",
        "SWA checkpoint erase, <*>",
        _erased("invalidated"),
        "August to September 2025",
        "SWA checkpoint erase, pos_min = 0, pos_max = 1887, size = 62.813 MiB",
    ),
    _pattern(
        "checkpoint erased",
        "erasing old context checkpoint (<*>n_tokens = <INT><*>",
        _erased("list full"),
        "April 2026 on",
        "erasing old context checkpoint (pos_min = 5966, pos_max = 5966, n_tokens = 5967, size = 0.028 MiB)",
    ),
    _pattern(
        "checkpoint erased",
        "erasing old context checkpoint (<*>",
        _erased("list full"),
        "October 2025 to March 2026",
        "erasing old context checkpoint (pos_min = 0, pos_max = 5966, size = 62.813 MiB)",
    ),
    _pattern(
        "checkpoint erased",
        "erasing context checkpoint too close to an earlier one (<*>n_tokens = <INT><*>",
        _erased("too close"),
        "b10068 on, trace level",
        "erasing context checkpoint too close to an earlier one (pos_min = 2388, pos_max = 2388, n_tokens = 2389,"
        " size = 0.028 MiB)",
    ),
    _pattern(
        "checkpoint erased",
        "superseding context checkpoint at n_tokens = <INT>",
        _erased("superseded"),
        "b11053 on, trace level",
        "superseding context checkpoint at n_tokens = 2400",
    ),
    _pattern(
        "checkpoint tried",
        "checking checkpoint with <*>",
        None,
        "b9847 on, trace level",
        "checking checkpoint with [2399, 2399] against 10...",
    ),
    _pattern(
        "checkpoint tried",
        "Checking checkpoint with <*>",
        None,
        "b9093 to b9785",
        "Checking checkpoint with [2399, 2399] against 10...",
    ),
    _pattern(
        "checkpoint planned",
        "<INT> tokens since last checkpoint at <*>",
        None,
        "April 2026 to June 2026",
        "8192 tokens since last checkpoint at 0, creating new checkpoint during processing at position 8192",
    ),
    _pattern(
        "full re-processing",
        "forcing full prompt re-processing due to lack of cache data<*>",
        lambda m, slot, task: facts.FullReprocess(slot, task),
        "June 2025 on; from b9847 trace level",
        "forcing full prompt re-processing due to lack of cache data (likely due to SWA or hybrid/recurrent memory,"
        " see https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055)",
    ),
    _pattern(
        "full re-processing",
        "failed to truncate tokens <*>",
        lambda m, slot, task: facts.FullReprocess(slot, task),
        "2025 on",
        "failed to truncate tokens with position >= 395 - clearing the memory",
    ),
    _pattern(
        "why re-processed",
        "n_past = <INT>, <*>pos_min = <*>",
        None,
        "August 2025 to b9093",
        "n_past = 395, slot.prompt.tokens.size() = 2996, seq_id = 0, pos_min = 2995, n_swa = 1",
    ),
    _pattern(
        "chunk reused",
        "reusing chunk with size <INT>, shifting KV cache <*>",
        lambda m, slot, task: facts.ChunkReused(slot, task, int(m.group(1))),
        "2025 on",
        "reusing chunk with size 2243, shifting KV cache [745, 2988) -> [495, 2738)",
    ),
    _pattern(
        "context shift",
        "slot context shift, n_keep = <INT>, n_left = <INT>, n_discard = <INT>",
        lambda m, slot, task: facts.ContextShifted(slot, task, int(m.group(1)), int(m.group(3))),
        "2025 on",
        "slot context shift, n_keep = 0, n_left = 2046, n_discard = 1023",
    ),
    _pattern(
        "prompt cut",
        "input truncated, <*>",
        lambda m, slot, task: facts.PromptTruncated(slot, task),
        "2025",
        "input truncated, n_ctx = 2048, n_keep = 0, n_left = 2048, n_prompt_tokens = 1752",
    ),
    _pattern(
        "slot emptied",
        "clearing prompt with <INT> tokens",
        lambda m, slot, task: facts.SlotCleared(slot, int(m.group(1))),
        "2026",
        "clearing prompt with 4818 tokens",
    ),
    _pattern(
        "idle slot saved",
        "saving idle slot to prompt cache",
        None,
        "2026",
        "saving idle slot to prompt cache",
    ),
    _pattern(
        "slot made",
        "new slot, n_ctx = <INT>",
        lambda m, slot, task: facts.SlotCreated(slot, int(m.group(1))),
        "b9093 on; from b9847 trace level",
        "new slot, n_ctx = 32768",
    ),
    _pattern(
        "slot made",
        "new slot n_ctx_slot = <INT>",
        lambda m, slot, task: facts.SlotCreated(slot, int(m.group(1))),
        "2025",
        "new slot n_ctx_slot = 32768",
    ),
    _pattern(
        "one token at least",
        "need to evaluate at least 1 token <*>",
        None,
        "May 2025 on",
        "need to evaluate at least 1 token for each active slot (n_past = 29614, task.n_tokens() = 29614)",
    ),
    _pattern("one token at least", "n_past was set to <INT>", None, "Nov 2025 on", "n_past was set to 29613"),
    _pattern("sampler", "sampler chain: <*>", None, "2026", "sampler chain: logits -> ?penalties -> ?dry -> dist"),
    _pattern("sampler", "sampler params:<*>", None, "2026", "sampler params:"),
    _pattern(
        "sampler",
        "init sampler, took <*>",
        None,
        "2026",
        "init sampler, took 0.50 ms, tokens: text = 2404, total = 2404",
    ),
    _pattern("slot debugging", "old: ...<*>", None, "with LLAMA_SERVER_SLOTS_DEBUG=1", "old: ... the cat"),
    _pattern("slot debugging", "new: ...<*>", None, "with LLAMA_SERVER_SLOTS_DEBUG=1", "new: ... the dog"),
    _pattern("image", "processing image<*>", None, "2025", "processing image..."),
    _pattern("image", "image processed in <*>", None, "2025", "image processed in 812 ms"),
    _pattern("image", "image/slice decoded <*>", None, "2025", "image/slice decoded (batch 1/1) in 91 ms"),
)
"""Messages behind `slot FUNCTION: id S | task T | `.  Anything else there, above the debug level, is drift."""

SERVER: tuple[Pattern, ...] = (
    _pattern(
        "cancelled",
        "cancel task, id_task = <INT>",
        lambda m, slot, task: facts.TaskCancelled(int(m.group(1))),
        "2025 on",
        "cancel task, id_task = 205",
    ),
    _pattern(
        "refused",
        "task id = <INT>, error: <ANY>",
        lambda m, slot, task: facts.RequestRejected(int(m.group(1)), m.group(2)),
        "2025 on",
        "task id = 0, error: request (4776 tokens) exceeds the available context size (2048 tokens), try increasing it",
    ),
    _pattern(
        "RAM cache saves",
        "- saving prompt with length <INT>, total state size = <NUM> MiB<*>",
        lambda m, slot, task: facts.RamCacheSaved(int(m.group(1)), _mib(m.group(2))),
        "b6700 (October 2025) on",
        " - saving prompt with length 2407, total state size = 0.349 MiB (draft: 0.000 MiB)",
    ),
    _pattern(
        "RAM cache searched",
        "- looking for better prompt, base f_keep = <NUM>, sim = <NUM>",
        lambda m, slot, task: facts.RamCacheSearched(_ratio(m.group(1)), _ratio(m.group(2))),
        "b6700 (October 2025) to b10068",
        " - looking for better prompt, base f_keep = -1.000, sim = 0.000",
    ),
    _pattern(
        "RAM cache searched",
        "- looking for better prompt, base f_keep = <NUM>, f_sim = <NUM>",
        lambda m, slot, task: facts.RamCacheSearched(_ratio(m.group(1)), _ratio(m.group(2))),
        "b10261 on",
        " - looking for better prompt, base f_keep = 0.004, f_sim = 0.004",
    ),
    _pattern(
        "RAM cache hit",
        "- found better prompt with f_keep = <NUM>, sim = <NUM>",
        lambda m, slot, task: facts.RamCacheHit(_ratio(m.group(1)), _ratio(m.group(2))),
        "b6700 (October 2025) to b10068",
        " - found better prompt with f_keep = 1.000, sim = 0.996",
    ),
    _pattern(
        "RAM cache hit",
        "- found better prompt with f_keep = <NUM>, f_sim = <NUM>",
        lambda m, slot, task: facts.RamCacheHit(_ratio(m.group(1)), _ratio(m.group(2))),
        "b10261 on",
        " - found better prompt with f_keep = 0.999, f_sim = 1.000",
    ),
    _pattern(
        "RAM cache compared",
        "- prompt with length <*>",
        None,
        "b10434 on",
        "   - prompt with length    2407, lcp =    2404, f_keep = 0.999, f_sim = 1.000",
    ),
    _pattern(
        "RAM cache has it",
        "- prompt is already in the cache, skipping",
        None,
        "b6700 (October 2025) on",
        " - prompt is already in the cache, skipping",
    ),
    _pattern(
        "RAM cache tidied",
        "- removing obsolete cached prompt with length <*>",
        None,
        "b6700 (October 2025) on",
        " - removing obsolete cached prompt with length 2380",
    ),
    _pattern(
        "RAM cache state",
        "- cache state: <INT> prompts, <NUM> MiB (limits: <NUM> MiB<*>",
        _ram_state,
        "b6700 (October 2025) on",
        " - cache state: 1 prompts, 0.433 MiB (limits: 8192.000 MiB, 32768 tokens, 45525344 est)",
    ),
    _pattern(
        "RAM cache entry",
        "- prompt <*>: <INT> tokens, checkpoints: <INT>, <NUM> MiB",
        lambda m, slot, task: facts.RamCacheEntry(int(m.group(1)), int(m.group(2)), _mib(m.group(3))),
        "b6700 (October 2025) on",
        "   - prompt 0x5622e71d5fe0:    2407 tokens, checkpoints:  3,     0.433 MiB",
    ),
    _pattern(
        "RAM cache evicts",
        "- cache size limit reached, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(_mib(m.group(1))),
        "b6700 (October 2025) to b9585",
        " - cache size limit reached, removing oldest entry (size = 3462.850 MiB)",
    ),
    _pattern(
        "RAM cache evicts",
        "- cache token limit <*>reached, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(_mib(m.group(1))),
        "b6700 (October 2025) on",
        " - cache token limit (131072, est: 151000) reached, removing oldest entry (size = 3462.850 MiB)",
    ),
    _pattern(
        "RAM cache evicts",
        "- making room for prompt cache entry, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(_mib(m.group(1))),
        "b9993 on",
        " - making room for prompt cache entry, removing oldest entry (size = 0.433 MiB)",
    ),
    _pattern(
        "RAM cache evicts",
        "purging slot <INT> with <INT> tokens",
        lambda m, slot, task: facts.SlotCleared(int(m.group(1)), int(m.group(2))),
        "2025 on",
        "purging slot 1 with 4818 tokens",
    ),
    _pattern(
        "RAM cache too small",
        "- prompt state size <NUM> MiB exceeds cache size limit <NUM> MiB, skipping",
        lambda m, slot, task: facts.RamCacheSkipped(_mib(m.group(1)), _mib(m.group(2))),
        "b9993 on",
        " - prompt state size 1.321 MiB exceeds cache size limit 1.000 MiB, skipping",
    ),
    _pattern(
        "RAM cache limit",
        "- cache size limit reduced to <NUM> MiB<*>",
        lambda m, slot, task: facts.CacheRamLimited(_mib(m.group(1))),
        "b9993 on",
        " - cache size limit reduced to 4096.000 MiB",
    ),
    _pattern("RAM cache update", "updating prompt cache", None, "b6700 (October 2025) on", "updating prompt cache"),
    _pattern(
        "RAM cache update",
        "prompt cache update took <*>",
        None,
        "b6700 (October 2025) on",
        "prompt cache update took 4.95 ms",
    ),
    _pattern(
        "restore failed", "failed to restore state <*>", _failed, "2025 on", "failed to restore state with size 1234567"
    ),
    _pattern(
        "RAM cache limit",
        "prompt cache is enabled, size limit: <INT> MiB",
        lambda m, slot, task: facts.CacheRamLimited(_mib(m.group(1))),
        "b6700 (October 2025) on",
        "prompt cache is enabled, size limit: 8192 MiB",
    ),
    _pattern(
        "RAM cache limit",
        "prompt cache is enabled, size limit: no limit",
        lambda m, slot, task: facts.CacheRamLimited(None),
        "b6700 (October 2025) on",
        "prompt cache is enabled, size limit: no limit",
    ),
    _pattern(
        "RAM cache limit",
        "prompt cache is disabled<*>",
        lambda m, slot, task: facts.CacheRamLimited(0),
        "b6700 (October 2025) on",
        "prompt cache is disabled - use `--cache-ram N` to enable it",
    ),
    _pattern(
        "slots",
        "initializing slots, n_slots = <INT>",
        lambda m, slot, task: facts.SlotsInitialised(int(m.group(1))),
        "2025 to b9785",
        "initializing slots, n_slots = 4",
    ),
    _pattern(
        "slots",
        "initializing, n_slots = <INT>, n_ctx_slot = <INT>, kv_unified = '<ANY>'",
        lambda m, slot, task: facts.SlotsInitialised(int(m.group(1)), int(m.group(2)), m.group(3) == "true"),
        "b9847 on",
        "initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'false'",
    ),
    _pattern("loaded", "model loaded", lambda m, slot, task: facts.ModelLoaded(), "b9246 on", "model loaded"),
    _pattern(
        "listening",
        "listening on <ANY>",
        lambda m, slot, task: facts.ServerListening(m.group(1)),
        "b9847 on",
        "listening on http://127.0.0.1:18120",
    ),
    _pattern(
        "listening",
        "server is listening on <ANY>",
        lambda m, slot, task: facts.ServerListening(m.group(1).split(" ")[0]),
        "2025 to b9785",
        "server is listening on http://127.0.0.1:18120",
    ),
    _pattern(
        "asleep",
        "entering sleeping state",
        lambda m, slot, task: facts.ServerSlept(asleep=True),
        "2026",
        "entering sleeping state",
    ),
    _pattern(
        "awake",
        "exiting sleeping state",
        lambda m, slot, task: facts.ServerSlept(asleep=False),
        "2026",
        "exiting sleeping state",
    ),
    _pattern(
        "warning",
        "cache_reuse is not supported by <*>",
        _warned,
        "2025 on",
        "cache_reuse is not supported by this context, it will be disabled",
    ),
    _pattern(
        "warning",
        "ctx_shift is not supported by <*>",
        _warned,
        "2025 on",
        "ctx_shift is not supported by multimodal, it will be disabled",
    ),
    _pattern(
        "warning",
        "--cache-idle-slots requires <*>",
        _warned,
        "2026",
        "--cache-idle-slots requires --cache-ram, disabling",
    ),
    _pattern(
        "fatal",
        "failed to load model, <*>",
        _fatal,
        "2025 on",
        "failed to load model, 'nope.gguf'",
    ),
    _pattern(
        "fatal",
        "couldn't bind HTTP server socket, <*>",
        _fatal,
        "2025 on",
        "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18120",
    ),
    _pattern("fatal", "exiting due to <*>", _fatal, "2025 on", "exiting due to model loading error"),
    _pattern("end", "cleaning up before exit<*>", None, "2025 on", "cleaning up before exit..."),
    _pattern(
        "end", "operator(): cleaning up before exit<*>", None, "2025 on", "operator(): cleaning up before exit..."
    ),
)
"""Messages behind `srv FUNCTION: ` (and behind `main: ` to b9093).  Most others there say nothing of the cache."""

LOADING: tuple[Pattern, ...] = (
    _pattern(
        "device",
        "using device <ANY>",
        lambda m, slot, task: _device(m.group(1)),
        "2025 on; from b9246 trace level",
        "using device Vulkan0 (llvmpipe (LLVM 15.0.6, 256 bits)) (unknown id) - 2048 MiB free",
    ),
    _pattern(
        "offload",
        "offloaded <INT>/<INT> layers to GPU",
        lambda m, slot, task: facts.LayersOffloaded(int(m.group(1)), int(m.group(2))),
        "2025 on; from b9246 trace level",
        "offloaded 3/3 layers to GPU",
    ),
    Pattern(
        "buffer",
        " buffer size = ",
        re.compile(r" *(\S+) +(model|KV|RS|compute|output) buffer size = +(\d{1,12}(?:\.\d{1,6})?) MiB"),
        _buffer,
        "2025 on; from b9246 trace level",
        "     Vulkan0 model buffer size =     0.21 MiB",
    ),
    _pattern(
        "fatal",
        "error loading model: <*>",
        _fatal,
        "2025 on",
        "error loading model: tensor 'output.weight' data is not within the file bounds, model is corrupted or incomplete",
    ),
    _pattern(
        "fatal",
        "failed to open GGUF file <*>",
        _fatal,
        "2026",
        "failed to open GGUF file 'nope.gguf' (No such file or directory)",
    ),
)
"""Messages behind any other `FUNCTION: `, of the libraries that load the model."""

BARE: tuple[Pattern, ...] = (
    _pattern("fatal", "error: <*>", _fatal, "2025 on", "error: invalid argument: --no-mmap"),
    _pattern(
        "fatal",
        "error while handling argument <*>",
        _fatal,
        "2025 on",
        'error while handling argument "--device": invalid device: Vulkan7',
    ),
    _pattern("fatal", "AMX is not ready to be used!", _fatal, "builds for other CPUs", "AMX is not ready to be used!"),
    _pattern(
        "fatal",
        "terminate called <*>",
        _fatal,
        "2025 on",
        "terminate called after throwing an instance of 'vk::DeviceLostError'",
    ),
    _pattern("fatal", "what():  <*>", _fatal, "2025 on", "  what():  vk::Queue::submit: ErrorDeviceLost"),
)
"""Lines without any prefix, which a dying process writes past the log."""


def _device(text: str) -> facts.LogFact | None:
    # `Vulkan0 (NAME (driver)) (bus id) - N MiB free`; the name may hold any brackets.
    name, _, rest = text.partition(" ")
    description, _, free = rest.rpartition(" - ")
    amount = free.split(" ")[0]
    description = (description or rest).removesuffix(" (unknown id)")
    if description.startswith("(") and description.endswith(")"):
        description = description[1:-1]
    return facts.DeviceUsed(name, description, int(amount) * 1048576 if amount.isdecimal() else None) if name else None


def index(patterns: Iterable[Pattern]) -> Mapping[str, tuple[Pattern, ...]]:
    """
    Group patterns by their first word, so that a message meets only those that it can match.
    """
    groups: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        groups.setdefault(pattern.head.split(" ", 1)[0], []).append(pattern)
    return {word: tuple(group) for word, group in groups.items()}
