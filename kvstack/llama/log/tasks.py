"""Log patterns of a task's life: which slot it gets, its prompt, its prefill, its decode, its end."""

from __future__ import annotations

import re
from typing import Literal

from kvstack.llama.log.pattern import Make, Pattern, amount, pattern, ratio
from kvstack.state import log_facts as facts


def _selected(how: Literal["lcp", "lru", "id"], *groups: int) -> Make:
    # Groups of similarity, threshold and keep, as far as the form has them.
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
        similarity, threshold, keep = (
            ratio(m.group(groups[place])) if place < len(groups) else None for place in range(3)
        )
        return facts.SlotSelected(slot, how, similarity, threshold, keep)

    return make


def _compared(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.SlotCompared(slot, ratio(m.group(1)), int(m.group(2)), int(m.group(3)))


def _launched(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    if task is None:
        return None
    is_child = m.re.groups > 0 and m.group(1) != "0"
    return facts.TaskLaunched(slot, task, is_child)


def _prompt(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.PromptStarted(slot, task, int(m.group(2)), int(m.group(1)))


def _reuse(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.ReusePoint(slot, task, int(m.group(1)))


def _progress(processed: int, share: int | None = None, speed: int | None = None) -> Make:
    def make(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
        if task is None:
            return None
        return facts.PrefillProgressed(
            slot,
            task,
            int(m.group(processed)),
            1.0 if share is None else ratio(m.group(share)),
            None if speed is None else amount(m.group(speed)),
        )

    return make


def _prefill(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.PrefillTimed(slot, task, amount(m.group(1)), int(m.group(2)))


def _decode(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    if task is None:
        return None
    return facts.DecodeTimed(slot, task, amount(m.group(1)), int(m.group(2)), amount(m.group(3)))


def _released(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    return None if task is None else facts.SlotReleased(slot, task, int(m.group(1)), m.group(2) != "0")


TIMING: tuple[Pattern, ...] = (
    pattern(
        "prefill time",
        "prompt eval time = <NUM> ms / <INT> tokens<*>",
        _prefill,
        "2025 on",
        "prompt eval time =     232.15 ms /  3164 tokens (    0.07 ms per token, 13628.94 tokens per second)",
    ),
    pattern(
        "decode time",
        "eval time = <NUM> ms / <INT> tokens (<*>ms per token, <NUM> tokens per second)",
        _decode,
        "2025 on",
        "       eval time =       1.72 ms /     8 tokens (    0.21 ms per token,  4659.29 tokens per second)",
    ),
    pattern(
        "total time",
        "total time = <NUM> ms / <INT> tokens",
        None,
        "2025 on",
        "      total time =      26.99 ms /  1027 tokens",
    ),
    pattern(
        "speculative decoding",
        "draft acceptance rate = <*>( <INT> accepted / <INT> generated)<*>",
        None,
        "2025 to b9093",
        "draft acceptance rate = 0.73684 (   14 accepted /    19 generated)",
    ),
    pattern(
        "speculative decoding",
        "draft acceptance = <*>( <INT> accepted / <INT> generated)<*>",
        None,
        "b9254 on",
        "draft acceptance = 0.73684 (   14 accepted /    19 generated), mean len =  2.75",
    ),
    pattern("graphs", "graphs reused = <INT>", None, "b9246 on", "   graphs reused =          7"),
    pattern("graphs", "graph reallocs = <*>", None, "newer than b11549", "graph reallocs = 3 / 40"),
    pattern("speculative decoding", "acc per pos = <*>", None, "b9993 on", "    acc per pos = (0.81, 0.60)"),
)
"""The timings: four records of their own, or (to b9093) the lines behind one empty `print_timing` record."""

TASKS: tuple[Pattern, ...] = (
    pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, sim_best = <NUM> (> <NUM> thold), f_keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "b6700 (October 2025) to b10068",
        "selected slot by LCP similarity, sim_best = 0.915 (> 0.100 thold), f_keep = 0.913",
    ),
    pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, f_sim_best = <NUM> (> <NUM> thold), f_keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "b10261 on",
        "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), f_keep = 0.993",
    ),
    pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, <*>sim_best = <NUM> (> <NUM> thold), keep = <NUM>",
        _selected("lcp", 1, 2, 3),
        "newer than b11549",
        "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), keep = 0.993",
    ),
    pattern(
        "slot by LCP similarity",
        "selected slot by LCP similarity, <*>sim_best = <NUM> (> <NUM> thold)",
        _selected("lcp", 1, 2),
        "any build that leaves out what is kept",
        "selected slot by LCP similarity, sim_best = 0.273 (> 0.100 thold)",
    ),
    pattern(
        "slot by common tokens",
        "selected slot by lcs similarity, lcs_len = <INT>, similarity = <NUM> (> <NUM> thold)",
        lambda m, slot, task: facts.SlotSelected(
            slot, "lcs", ratio(m.group(2)), ratio(m.group(3)), lcp_tokens=int(m.group(1))
        ),
        "September 2025",
        "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958 (> 0.100 thold)",
    ),
    pattern(
        "slot by common tokens",
        "selected slot by lcs similarity, lcs_len = <INT>, similarity = <NUM>",
        # Here the figure is the share of the slot's own tokens, which later builds call f_keep.
        lambda m, slot, task: facts.SlotSelected(slot, "lcs", keep_ratio=ratio(m.group(2)), lcp_tokens=int(m.group(1))),
        "to August 2025, debug level",
        "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958029",
    ),
    pattern(
        "slot by age",
        "selected slot by LRU, t_last = <INT>",
        _selected("lru"),
        "September 2025 on",
        "selected slot by LRU, t_last = -1",
    ),
    pattern(
        "slot by age",
        "selected slot by lru, t_last = <INT>",
        _selected("lru"),
        "to August 2025, debug level",
        "selected slot by lru, t_last = 86857173",
    ),
    pattern(
        "slot by age",
        "selected slot by LRU, n_tokens = <INT>",
        _selected("lru"),
        "newer than b11549",
        "selected slot by LRU, n_tokens = 1026",
    ),
    pattern("slot by id", "selected slot by id (<INT>)", _selected("id"), "b9725 on", "selected slot by id (0)"),
    pattern(
        "slot compared",
        "- checking sim = <NUM> (<INT>/<INT>) > <NUM>",
        _compared,
        "b10434 on, trace level",
        " - checking sim = 0.004 (10/2404) > 0.100",
    ),
    pattern("slot compared", "- skipping, <*>", None, "b10434 on, trace level", " - skipping, slot is empty"),
    pattern(
        "task launched",
        "processing task, is_child = <INT>",
        _launched,
        "b8227 on",
        "processing task, is_child = 0",
    ),
    pattern("task launched", "processing task", _launched, "2025", "processing task"),
    pattern(
        "new prompt",
        "new prompt, n_ctx_slot = <INT>, n_keep = <*>, task.n_tokens = <INT>",
        _prompt,
        "November 2025 on; from b9246 trace level",
        "new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 2404",
    ),
    pattern(
        "new prompt",
        "new prompt, n_ctx_slot = <INT>, n_keep = <*>, n_prompt_tokens = <INT>",
        _prompt,
        "2025",
        "new prompt, n_ctx_slot = 32768, n_keep = 0, n_prompt_tokens = 2404",
    ),
    pattern(
        "reuse point",
        "cached n_tokens = <INT>, memory_seq_rm [<INT>, end)",
        _reuse,
        "b9246 on, trace level",
        "cached n_tokens = 2400, memory_seq_rm [2400, end)",
    ),
    pattern(
        "reuse point",
        "n_tokens = <INT>, memory_seq_rm [<INT>, end)",
        _reuse,
        "November 2025 to b9093",
        "n_tokens = 2400, memory_seq_rm [2400, end)",
    ),
    pattern("reuse point", "kv cache rm [<INT>, end)", _reuse, "to autumn 2025", "kv cache rm [2400, end)"),
    pattern(
        "prefill progress",
        "prompt processing, n_tokens = <INT>, progress = <NUM>, t = <NUM> s / <NUM> tokens per second",
        _progress(1, 2, 4),
        "b9246 on, after three seconds",
        "prompt processing, n_tokens =  24576, progress = 0.83, t =   3.48 s / 7070.30 tokens per second",
    ),
    pattern(
        "prefill progress",
        "prompt processing progress, n_tokens = <INT>, batch.n_tokens = <INT>, progress = <NUM>",
        _progress(1, 3),
        "November 2025 to b9093",
        "prompt processing progress, n_tokens = 2048, batch.n_tokens = 2048, progress = 0.500000",
    ),
    pattern(
        "prefill progress",
        "prompt processing progress, n_past = <INT>, n_tokens = <INT>, progress = <NUM>",
        _progress(1, 3),
        "to October 2025",
        "prompt processing progress, n_past = 2048, n_tokens = 2048, progress = 0.500000",
    ),
    pattern(
        "prefill done",
        "prompt processing done, n_tokens = <INT>, batch.n_tokens = <INT>",
        _progress(1),
        "November 2025 to b9093",
        "prompt processing done, n_tokens = 4096, batch.n_tokens = 2048",
    ),
    pattern(
        "prefill done",
        "prompt done, n_past = <INT>, n_tokens = <INT>",
        _progress(1),
        "to October 2025",
        "prompt done, n_past = 4096, n_tokens = 2048",
    ),
    pattern(
        "decode progress",
        "n_decoded = <INT>, tg = <NUM> t/s<*>",
        None,
        "b9246 to b10331",
        "n_decoded =    100, tg =  20.00 t/s, tg_3s =  19.87 t/s",
    ),
    pattern(
        "decode progress",
        "n_decoded = <INT>, n_remaining = <*>",
        None,
        "debug level",
        "n_decoded = 3, n_remaining = 5, next token:    11 'a'",
    ),
    pattern(
        "decode progress",
        "n_decoded = <INT>",
        None,
        "some builds, at the first token",
        "n_decoded = 1",
    ),
    pattern(
        "decode progress",
        "n_gen = <INT>, tg = <NUM> t/s<*>",
        None,
        "b10434 on",
        "n_gen =    100, tg =  20.00 t/s, tg_3s =  19.87 t/s",
    ),
    pattern(
        "released",
        "stop processing: n_tokens = <INT>, truncated = <INT>",
        _released,
        "November 2025 on",
        "stop processing: n_tokens = 1026, truncated = 0",
    ),
    pattern(
        "released",
        "stop processing: n_past = <INT>, truncated = <INT>",
        _released,
        "to autumn 2025",
        "stop processing: n_past = 1026, truncated = 0",
    ),
    pattern(
        "one token at least",
        "need to evaluate at least 1 token <*>",
        None,
        "May 2025 on",
        "need to evaluate at least 1 token for each active slot (n_past = 29614, task.n_tokens() = 29614)",
    ),
    pattern("one token at least", "n_past was set to <INT>", None, "Nov 2025 on", "n_past was set to 29613"),
    pattern("sampler", "sampler chain: <*>", None, "2026", "sampler chain: logits -> ?penalties -> ?dry -> dist"),
    pattern("sampler", "sampler params:<*>", None, "2026", "sampler params:"),
    pattern(
        "sampler",
        "init sampler, took <*>",
        None,
        "2026",
        "init sampler, took 0.50 ms, tokens: text = 2404, total = 2404",
    ),
    pattern("slot debugging", "old: ...<*>", None, "with LLAMA_SERVER_SLOTS_DEBUG=1", "old: ... the cat"),
    pattern("slot debugging", "new: ...<*>", None, "with LLAMA_SERVER_SLOTS_DEBUG=1", "new: ... the dog"),
    pattern("image", "processing image<*>", None, "2025", "processing image..."),
    pattern("image", "image processed in <*>", None, "2025", "image processed in 812 ms"),
    pattern("image", "image/slice decoded <*>", None, "2025", "image/slice decoded (batch 1/1) in 91 ms"),
)
"""Messages behind `slot FUNCTION: id S | task T | `."""
