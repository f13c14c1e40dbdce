"""What the log says of the server as a whole: device, context, buffers, RAM cache, warnings, drift, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvstack.state import log_facts as facts
from kvstack.state.records import RamCacheView
from kvstack.state.stack_state import StackState, add_notice

DRIFT_SAMPLES_KEPT = 5
WARNINGS_KEPT = 20


def note_fact(stack_state: StackState, fact: facts.LogFact, time_s: float) -> StackState:
    """Keep what a fact says of the server as a whole."""
    server, totals = stack_state.server, stack_state.totals
    match fact:
        case facts.SlotSelected(threshold_ratio=float(threshold)) if threshold != server.similarity_threshold_ratio:
            return replace(stack_state, server=replace(server, similarity_threshold_ratio=threshold))
        case facts.SlotsInitialised():
            return replace(
                stack_state,
                server=replace(
                    server,
                    slots=fact.slots,
                    ctx_per_slot=fact.ctx_per_slot or server.ctx_per_slot,
                    kv_unified=server.kv_unified if fact.kv_unified is None else fact.kv_unified,
                ),
            )
        case facts.SlotCreated():
            return replace(stack_state, server=replace(server, ctx_per_slot=fact.ctx_per_slot))
        case facts.DeviceUsed():
            return replace(stack_state, server=replace(server, device=fact.device, device_name=fact.description))
        case facts.LayersOffloaded():
            return replace(
                stack_state, server=replace(server, layers_offloaded=fact.layers, layers_total=fact.layers_total)
            )
        case facts.BufferAllocated():
            key = f"{fact.kind} {fact.device}"
            buffers: Mapping[str, int] = {**server.buffers, key: server.buffers.get(key, 0) + fact.size_bytes}
            return replace(stack_state, server=replace(server, buffers=buffers))
        case facts.ServerSlept():
            return replace(stack_state, server=replace(server, asleep=fact.asleep))
        case facts.ServerWarned() if fact.text not in server.warnings:
            warnings = (*server.warnings[-(WARNINGS_KEPT - 1) :], fact.text)
            stack_state = replace(stack_state, server=replace(server, warnings=warnings))
            return add_notice(stack_state, time_s, "warning", f"llama-server: {fact.text}")
        case facts.CacheRamLimited():
            return replace(stack_state, ram_cache=replace(stack_state.ram_cache, limit_bytes=fact.limit_bytes))
        case facts.RamCacheState():
            limit = fact.limit_bytes if fact.limit_bytes is not None else stack_state.ram_cache.limit_bytes
            return replace(stack_state, ram_cache=RamCacheView(fact.prompts, fact.size_bytes, limit))
        case facts.RamCacheHit():
            return replace(stack_state, totals=replace(totals, ram_hits=totals.ram_hits + 1))
        case facts.RamCacheEvicted():
            return replace(stack_state, totals=replace(totals, ram_evictions=totals.ram_evictions + 1))
        case facts.FullReprocess():
            return replace(stack_state, totals=replace(totals, full_reprocesses=totals.full_reprocesses + 1))
        case facts.CheckpointRestored():
            return replace(stack_state, totals=replace(totals, checkpoints_restored=totals.checkpoints_restored + 1))
        case facts.ContextShifted():
            return replace(stack_state, totals=replace(totals, context_shifts=totals.context_shifts + 1))
        case facts.UnknownRecord():
            samples = stack_state.log.drift_samples
            if len(samples) < DRIFT_SAMPLES_KEPT and fact.text not in samples:
                samples = (*samples, fact.text)
            return replace(
                stack_state, log=replace(stack_state.log, drift=stack_state.log.drift + 1, drift_samples=samples)
            )
        case _:
            return stack_state
