"""Log patterns of the RAM cache, where the server keeps prompts that lost their slot."""

from __future__ import annotations

import re

from kvstack.llama.log.checkpoints import restore_failed
from kvstack.llama.log.pattern import Pattern, mib, pattern, ratio
from kvstack.state import log_facts as facts


def _ram_state(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    limit = mib(m.group(3))
    return facts.RamCacheState(int(m.group(1)), mib(m.group(2)), limit or None)


RAM_CACHE: tuple[Pattern, ...] = (
    pattern(
        "RAM cache saves",
        "- saving prompt with length <INT>, total state size = <NUM> MiB<*>",
        None,
        "b6700 (October 2025) on",
        " - saving prompt with length 2407, total state size = 0.349 MiB (draft: 0.000 MiB)",
    ),
    pattern(
        "RAM cache searched",
        "- looking for better prompt, base f_keep = <NUM>, sim = <NUM>",
        lambda m, slot, task: facts.RamCacheSearched(ratio(m.group(1)), ratio(m.group(2))),
        "b6700 (October 2025) to b10068",
        " - looking for better prompt, base f_keep = -1.000, sim = 0.000",
    ),
    pattern(
        "RAM cache searched",
        "- looking for better prompt, base f_keep = <NUM>, f_sim = <NUM>",
        lambda m, slot, task: facts.RamCacheSearched(ratio(m.group(1)), ratio(m.group(2))),
        "b10261 on",
        " - looking for better prompt, base f_keep = 0.004, f_sim = 0.004",
    ),
    pattern(
        "RAM cache hit",
        "- found better prompt with f_keep = <NUM>, sim = <NUM>",
        lambda m, slot, task: facts.RamCacheHit(ratio(m.group(1)), ratio(m.group(2))),
        "b6700 (October 2025) to b10068",
        " - found better prompt with f_keep = 1.000, sim = 0.996",
    ),
    pattern(
        "RAM cache hit",
        "- found better prompt with f_keep = <NUM>, f_sim = <NUM>",
        lambda m, slot, task: facts.RamCacheHit(ratio(m.group(1)), ratio(m.group(2))),
        "b10261 on",
        " - found better prompt with f_keep = 0.999, f_sim = 1.000",
    ),
    pattern(
        "RAM cache compared",
        "- prompt with length <*>",
        None,
        "b10434 on",
        "   - prompt with length    2407, lcp =    2404, f_keep = 0.999, f_sim = 1.000",
    ),
    pattern(
        "RAM cache has it",
        "- prompt is already in the cache, skipping",
        None,
        "b6700 (October 2025) on",
        " - prompt is already in the cache, skipping",
    ),
    pattern(
        "RAM cache tidied",
        "- removing obsolete cached prompt with length <*>",
        None,
        "b6700 (October 2025) on",
        " - removing obsolete cached prompt with length 2380",
    ),
    pattern(
        "RAM cache state",
        "- cache state: <INT> prompts, <NUM> MiB (limits: <NUM> MiB<*>",
        _ram_state,
        "b6700 (October 2025) on",
        " - cache state: 1 prompts, 0.433 MiB (limits: 8192.000 MiB, 32768 tokens, 45525344 est)",
    ),
    pattern(
        "RAM cache entry",
        "- prompt <*>: <INT> tokens, checkpoints: <INT>, <NUM> MiB",
        None,
        "b6700 (October 2025) on",
        "   - prompt 0x5622e71d5fe0:    2407 tokens, checkpoints:  3,     0.433 MiB",
    ),
    pattern(
        "RAM cache evicts",
        "- cache size limit reached, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(mib(m.group(1))),
        "b6700 (October 2025) to b9585",
        " - cache size limit reached, removing oldest entry (size = 3462.850 MiB)",
    ),
    pattern(
        "RAM cache evicts",
        "- cache token limit <*>reached, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(mib(m.group(1))),
        "b6700 (October 2025) on",
        " - cache token limit (131072, est: 151000) reached, removing oldest entry (size = 3462.850 MiB)",
    ),
    pattern(
        "RAM cache evicts",
        "- making room for prompt cache entry, removing oldest entry (size = <NUM> MiB)",
        lambda m, slot, task: facts.RamCacheEvicted(mib(m.group(1))),
        "b9993 on",
        " - making room for prompt cache entry, removing oldest entry (size = 0.433 MiB)",
    ),
    pattern(
        "RAM cache evicts",
        "purging slot <INT> with <INT> tokens",
        lambda m, slot, task: facts.SlotCleared(int(m.group(1)), int(m.group(2))),
        "2025 on",
        "purging slot 1 with 4818 tokens",
    ),
    pattern(
        "RAM cache too small",
        "- prompt state size <NUM> MiB exceeds cache size limit <NUM> MiB, skipping",
        lambda m, slot, task: facts.RamCacheSkipped(mib(m.group(1)), mib(m.group(2))),
        "b9993 on",
        " - prompt state size 1.321 MiB exceeds cache size limit 1.000 MiB, skipping",
    ),
    pattern(
        "RAM cache limit",
        "- cache size limit reduced to <NUM> MiB<*>",
        lambda m, slot, task: facts.CacheRamLimited(mib(m.group(1))),
        "b9993 on",
        " - cache size limit reduced to 4096.000 MiB",
    ),
    pattern("RAM cache update", "updating prompt cache", None, "b6700 (October 2025) on", "updating prompt cache"),
    pattern(
        "RAM cache update",
        "prompt cache update took <*>",
        None,
        "b6700 (October 2025) on",
        "prompt cache update took 4.95 ms",
    ),
    pattern(
        "restore failed",
        "failed to restore state <*>",
        restore_failed,
        "2025 on",
        "failed to restore state with size 1234567",
    ),
    pattern(
        "RAM cache limit",
        "prompt cache is enabled, size limit: <INT> MiB",
        lambda m, slot, task: facts.CacheRamLimited(mib(m.group(1))),
        "b6700 (October 2025) on",
        "prompt cache is enabled, size limit: 8192 MiB",
    ),
    pattern(
        "RAM cache limit",
        "prompt cache is enabled, size limit: no limit",
        lambda m, slot, task: facts.CacheRamLimited(None),
        "b6700 (October 2025) on",
        "prompt cache is enabled, size limit: no limit",
    ),
    pattern(
        "RAM cache limit",
        "prompt cache is disabled<*>",
        lambda m, slot, task: facts.CacheRamLimited(0),
        "b6700 (October 2025) on",
        "prompt cache is disabled - use `--cache-ram N` to enable it",
    ),
)
"""Messages behind `srv FUNCTION: `."""
