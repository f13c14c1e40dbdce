"""Each pattern of the table reads its own sample, and says the right thing."""

from __future__ import annotations

import pytest

from kvstack.llama.log.pattern import Pattern
from kvstack.llama.log.reader import LogReader
from kvstack.llama.log.server import LOADING
from kvstack.llama.log.table import SERVER, SLOT
from kvstack.llama.log.tasks import TIMING
from kvstack.state import log_facts as facts

MIB = 1048576


def read(line: str) -> tuple[facts.LogFact, ...]:
    """The facts of one line."""
    return LogReader().feed(f"{line}\n".encode()).facts


def slot_record(message: str) -> str:
    """A message as the newest builds print it."""
    return f"0.12.345.678 I slot update_slots: id  2 | task 7 | {message}"


SLOT_FACTS: dict[str, facts.LogFact] = {
    "selected slot by LCP similarity, sim_best = 0.915 (> 0.100 thold), f_keep = 0.913": facts.SlotSelected(
        2, "lcp", 0.915, 0.1, 0.913
    ),
    "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), f_keep = 0.993": facts.SlotSelected(
        2, "lcp", 0.97, 0.1, 0.993
    ),
    "selected slot by LCP similarity, f_sim_best = 0.970 (> 0.100 thold), keep = 0.993": facts.SlotSelected(
        2, "lcp", 0.97, 0.1, 0.993
    ),
    "selected slot by LCP similarity, sim_best = 0.273 (> 0.100 thold)": facts.SlotSelected(2, "lcp", 0.273, 0.1),
    "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958 (> 0.100 thold)": facts.SlotSelected(
        2, "lcs", 0.958, 0.1, None, 2894
    ),
    "selected slot by lcs similarity, lcs_len = 2894, similarity = 0.958029": facts.SlotSelected(
        2, "lcs", None, None, 0.958029, 2894
    ),
    "selected slot by LRU, t_last = -1": facts.SlotSelected(2, "lru"),
    "selected slot by lru, t_last = 86857173": facts.SlotSelected(2, "lru"),
    "selected slot by LRU, n_tokens = 1026": facts.SlotSelected(2, "lru"),
    "selected slot by id (0)": facts.SlotSelected(2, "id"),
    " - checking sim = 0.004 (10/2404) > 0.100": facts.SlotCompared(2, 0.004, 10, 2404),
    "processing task, is_child = 0": facts.TaskLaunched(2, 7),
    "processing task, is_child = 1": facts.TaskLaunched(2, 7, is_child=True),
    "processing task": facts.TaskLaunched(2, 7),
    "new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 2404": facts.PromptStarted(2, 7, 2404, 32768),
    "new prompt, n_ctx_slot = 32768, n_keep = 0, n_prompt_tokens = 2404": facts.PromptStarted(2, 7, 2404, 32768),
    "cached n_tokens = 2400, memory_seq_rm [2400, end)": facts.ReusePoint(2, 7, 2400),
    "n_tokens = 2400, memory_seq_rm [2400, end)": facts.ReusePoint(2, 7, 2400),
    "kv cache rm [2400, end)": facts.ReusePoint(2, 7, 2400),
    "prompt processing, n_tokens =  24576, progress = 0.83, t =   3.48 s / 7070.30 tokens per second": (
        facts.PrefillProgressed(2, 7, 24576, 0.83, 7070.3)
    ),
    "prompt processing progress, n_tokens = 2048, batch.n_tokens = 2048, progress = 0.500000": (
        facts.PrefillProgressed(2, 7, 2048, 0.5)
    ),
    "prompt processing progress, n_past = 2048, n_tokens = 1024, progress = 0.500000": (
        facts.PrefillProgressed(2, 7, 2048, 0.5)
    ),
    "prompt processing done, n_tokens = 4096, batch.n_tokens = 2048": facts.PrefillProgressed(2, 7, 4096, 1.0),
    "prompt done, n_past = 4096, n_tokens = 2048": facts.PrefillProgressed(2, 7, 4096, 1.0),
    "stop processing: n_tokens = 1026, truncated = 0": facts.SlotReleased(2, 7, 1026),
    "stop processing: n_tokens = 2047, truncated = 1": facts.SlotReleased(2, 7, 2047, truncated=True),
    "stop processing: n_past = 1026, truncated = 0": facts.SlotReleased(2, 7, 1026),
    "created context checkpoint 1 of 32 (pos_min = 1887, pos_max = 1887, n_tokens = 1888, size = 0.500 MiB)": (
        facts.CheckpointCreated(2, 7, 1888, MIB // 2, number=1, limit=32)
    ),
    "created context checkpoint 1 of 8 (pos_min = 0, pos_max = 1887, size = 2.000 MiB)": (
        facts.CheckpointCreated(2, 7, 1888, 2 * MIB, number=1, limit=8)
    ),
    "SWA checkpoint create, pos_min = 0, pos_max = 1887, size = 2.000 MiB, total = 1/3 (2.000 MiB)": (
        facts.CheckpointCreated(2, 7, 1888, 2 * MIB, number=1, limit=3)
    ),
    "restored context checkpoint (pos_min = 2399, pos_max = 2399, n_tokens = 2400, n_past = 2400, size = 0.1 MiB)": (
        facts.CheckpointRestored(2, 7, 2400)
    ),
    "restored context checkpoint (pos_min = 0, pos_max = 2399, size = 62.8 MiB)": facts.CheckpointRestored(2, 7, 2400),
    "restored context checkpoint took 1.20 ms (pos_max = 2399)": facts.CheckpointRestored(2, 7, 2400),
    "SWA checkpoint restore, pos_min = 0, pos_max = 2399, size = 62.813 MiB": facts.CheckpointRestored(2, 7, 2400),
    "failed to load prompt from cache": facts.RestoreFailed(2, 7, "failed to load prompt from cache"),
    "failed to restore context checkpoint (pos_max = 2399)": facts.RestoreFailed(
        2, 7, "failed to restore context checkpoint (pos_max = 2399)"
    ),
    "erased invalidated context checkpoint (pos_min = 1887, pos_max = 1887, n_tokens = 1888, n_swa = 0, pos_next = 0": (
        facts.CheckpointErased(2, 7, 1888, "invalidated")
    ),
    "erased invalidated context checkpoint (pos_min = 0, pos_max = 1887, size = 62.813 MiB)": (
        facts.CheckpointErased(2, 7, None, "invalidated")
    ),
    "SWA checkpoint erase, pos_min = 0, pos_max = 1887, size = 62.813 MiB": (
        facts.CheckpointErased(2, 7, None, "invalidated")
    ),
    "erasing old context checkpoint (pos_min = 5966, pos_max = 5966, n_tokens = 5967, size = 0.028 MiB)": (
        facts.CheckpointErased(2, 7, 5967, "list full")
    ),
    "erasing context checkpoint too close to an earlier one (pos_min = 9, pos_max = 9, n_tokens = 10, size = 1 MiB)": (
        facts.CheckpointErased(2, 7, 10, "too close")
    ),
    "superseding context checkpoint at n_tokens = 2400": facts.CheckpointErased(2, 7, 2400, "superseded"),
    "forcing full prompt re-processing due to lack of cache data (likely due to SWA)": facts.FullReprocess(2, 7),
    "failed to truncate tokens with position >= 395 - clearing the memory": facts.FullReprocess(2, 7),
    "reusing chunk with size 2243, shifting KV cache [745, 2988) -> [495, 2738)": facts.ChunkReused(2, 7, 2243),
    "slot context shift, n_keep = 4, n_left = 2046, n_discard = 1023": facts.ContextShifted(2, 7, 4, 1023),
    "input truncated, n_ctx = 2048, n_keep = 0, n_left = 2048, n_prompt_tokens = 1752": facts.PromptTruncated(2, 7),
    "clearing prompt with 4818 tokens": facts.SlotCleared(2, 4818),
    "new slot, n_ctx = 32768": facts.SlotCreated(2, 32768),
    "new slot n_ctx_slot = 32768": facts.SlotCreated(2, 32768),
    "prompt eval time =     232.15 ms /  3164 tokens (    0.07 ms per token, 13628.94 tokens per second)": (
        facts.PrefillTimed(2, 7, 232.15, 3164)
    ),
    "prompt eval time =       0.00 ms /     0 tokens (    -nan ms per token,     -nan tokens per second)": (
        facts.PrefillTimed(2, 7, 0.0, 0)
    ),
    "prompt eval time =        nan ms /     1 tokens (     inf ms per token,      nan tokens per second)": (
        facts.PrefillTimed(2, 7, None, 1)
    ),
    "       eval time =       1.72 ms /     8 tokens (    0.21 ms per token,  4659.29 tokens per second)": (
        facts.DecodeTimed(2, 7, 1.72, 8, 4659.29)
    ),
    "       eval time =       0.00 ms /     1 tokens (    0.00 ms per token,      inf tokens per second)": (
        facts.DecodeTimed(2, 7, 0.0, 1, None)
    ),
    "       eval time =       0.00 ms /     1 tokens (-nan(ind) ms per token, -nan(ind) tokens per second)": (
        facts.DecodeTimed(2, 7, 0.0, 1, None)
    ),
}

SERVER_FACTS: dict[str, facts.LogFact] = {
    "cancel task, id_task = 205": facts.TaskCancelled(205),
    "task id = 3, error: request (4776 tokens) exceeds the available context size (2048 tokens), try increasing it": (
        facts.RequestRejected(
            3, "request (4776 tokens) exceeds the available context size (2048 tokens), try increasing it"
        )
    ),
    " - looking for better prompt, base f_keep = -1.000, sim = 0.000": facts.RamCacheSearched(None, 0.0),
    " - looking for better prompt, base f_keep = 0.004, f_sim = 0.005": facts.RamCacheSearched(0.004, 0.005),
    " - found better prompt with f_keep = 1.000, sim = 0.996": facts.RamCacheHit(1.0, 0.996),
    " - found better prompt with f_keep = 0.999, f_sim = 1.000": facts.RamCacheHit(0.999, 1.0),
    " - cache state: 1 prompts, 0.500 MiB (limits: 8192.000 MiB, 32768 tokens, 45525344 est)": facts.RamCacheState(
        1, MIB // 2, 8192 * MIB
    ),
    " - cache size limit reached, removing oldest entry (size = 2.000 MiB)": facts.RamCacheEvicted(2 * MIB),
    " - cache token limit (131072, est: 151000) reached, removing oldest entry (size = 2.000 MiB)": (
        facts.RamCacheEvicted(2 * MIB)
    ),
    " - making room for prompt cache entry, removing oldest entry (size = 0.500 MiB)": facts.RamCacheEvicted(MIB // 2),
    " - prompt state size 1.500 MiB exceeds cache size limit 1.000 MiB, skipping": facts.RamCacheSkipped(
        3 * MIB // 2, MIB
    ),
    " - cache size limit reduced to 4096.000 MiB": facts.CacheRamLimited(4096 * MIB),
    "purging slot 1 with 4818 tokens": facts.SlotCleared(1, 4818),
    "failed to restore state with size 1234567": facts.RestoreFailed(
        None, None, "failed to restore state with size 1234567"
    ),
    "prompt cache is enabled, size limit: 8192 MiB": facts.CacheRamLimited(8192 * MIB),
    "prompt cache is enabled, size limit: no limit": facts.CacheRamLimited(None),
    "prompt cache is disabled - use `--cache-ram N` to enable it": facts.CacheRamLimited(0),
    "initializing slots, n_slots = 4": facts.SlotsInitialised(4),
    "initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'false'": facts.SlotsInitialised(
        4, 8192, kv_unified=False
    ),
    "entering sleeping state": facts.ServerSlept(asleep=True),
    "exiting sleeping state": facts.ServerSlept(asleep=False),
    "cache_reuse is not supported by this context, it will be disabled": facts.ServerWarned(
        "cache_reuse is not supported by this context, it will be disabled"
    ),
}


@pytest.mark.parametrize("message", SLOT_FACTS)
def test_slot_messages(message: str) -> None:
    """A message behind the slot column gives its fact."""
    assert read(slot_record(message)) == (SLOT_FACTS[message],)


@pytest.mark.parametrize("message", SERVER_FACTS)
def test_server_messages(message: str) -> None:
    """A message behind the server column gives its fact."""
    assert read(f"0.12.345.678 W srv         alloc: {message}") == (SERVER_FACTS[message],)


def _sample_line(pattern: Pattern) -> str:
    if pattern in SLOT:
        return slot_record(pattern.sample)
    if pattern in SERVER:
        return f"0.12.345.678 I srv    load_model: {pattern.sample}"
    if pattern in LOADING:
        return f"0.12.345.678 I load_tensors: {pattern.sample}"
    return pattern.sample


SAMPLED = [pattern for pattern in (*SLOT, *SERVER, *LOADING) if pattern.sample]


@pytest.mark.parametrize("pattern", SAMPLED, ids=lambda pattern: pattern.sample[:40])
def test_each_sample_is_read_by_its_own_pattern(pattern: Pattern) -> None:
    """No pattern is shadowed by an earlier one, and none is a dead row of the table."""
    group = next(table for table in (SLOT, SERVER, LOADING) if pattern in table)
    sample = pattern.sample if pattern in LOADING else pattern.sample.lstrip()
    first = next(other for other in group if other.regex.match(sample) and other.head.split(" ")[0] in sample)
    assert first is pattern
    found = read(_sample_line(pattern))
    assert len(found) == (pattern.make is not None)
    assert not any(isinstance(fact, facts.UnknownRecord) for fact in found)
    assert pattern.builds
    assert pattern.name


def test_task_minus_one_has_no_task() -> None:
    """A record that needs a task says nothing while there is none."""
    assert read("slot launch_slot_: id  0 | task -1 | processing task, is_child = 0") == ()
    assert read("slot prompt_clear: id  0 | task -1 | clearing prompt with 7 tokens") == (facts.SlotCleared(0, 7),)


def test_timings_are_part_of_the_slot_table() -> None:
    """The separate records and the one-block form share their patterns."""
    assert set(TIMING) <= set(SLOT)


@pytest.mark.parametrize("accepted", ["    3", "12345", "1234567"])
def test_a_number_that_fills_its_width(accepted: str) -> None:
    """`(%5d accepted` has no blank before a large number."""
    message = f"draft acceptance = 0.37500 ({accepted} accepted /{accepted} generated), mean len =  2.75"
    assert read(slot_record(message)) == ()  # known, so it is no drift
