"""
Prometheus metrics: the stack's state, counted.  Base units, no labels per request.

Names follow Prometheus' conventions: seconds, bytes, ratios of 0 to 1, `_total` on what only grows.  They add what
llama-server's own `/metrics` lacks: whether the cache works, and what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstack.state.lifecycle import State
from kvstack.state.stack_state import StackState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """
    Makes the metrics of a stack.

    Args:
        stack_state: Gives the stack as it is now.
        version: Version of kvstack.
        strip_failures: Gives the number of requests on which the rules failed.
    """

    def __init__(self, stack_state: Callable[[], StackState], version: str, strip_failures: Callable[[], int]) -> None:
        self._snapshot = stack_state
        self._version = version
        self._strip_failures = strip_failures
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One metric family after the other."""
        stack_state = self._snapshot()
        yield from _of_the_stack(stack_state, self._version)
        yield from _of_the_cache(stack_state)
        yield from _of_the_server(stack_state)
        yield _counter(
            "kvstack_strip_failures",
            "Requests that were sent unchanged because the rules failed",
            self._strip_failures(),
        )


def _of_the_stack(stack_state: StackState, version: str) -> Iterator[Metric]:
    info = InfoMetricFamily("kvstack", "What runs")
    info.add_metric(
        [],
        {
            "name": stack_state.name,
            "version": version,
            "build": stack_state.server.build or "",
            "model": stack_state.server.model or "",
            "device": stack_state.server.device or "",
        },
    )
    yield info
    state = GaugeMetricFamily("kvstack_state", "1 for the state that the stack is in", labels=["state"])
    for one in State:
        state.add_metric([one.value], float(one is stack_state.state))
    yield state
    yield _gauge("kvstack_start_time_seconds", "When the stack was started", stack_state.started_s)
    yield _counter("kvstack_server_restarts", "Times that llama-server was started again", stack_state.restarts)
    running = sum(not row.is_over for row in stack_state.requests)
    yield _gauge("kvstack_requests_in_flight", "Model requests that are under way", running)


def _of_the_cache(stack_state: StackState) -> Iterator[Metric]:
    totals = stack_state.counters
    verdicts = CounterMetricFamily("kvstack_requests", "Model requests that are over, by verdict", labels=["verdict"])
    for verdict, count in sorted(totals.verdicts.items()):
        verdicts.add_metric([verdict], count)
    yield verdicts
    yield _counter("kvstack_prompt_tokens", "Tokens of all prompts", totals.prompt_tokens)
    yield _counter("kvstack_cached_tokens", "Prompt tokens that came from the KV cache", totals.cached_tokens)
    yield _counter("kvstack_evaluated_tokens", "Prompt tokens that were evaluated", totals.evaluated_tokens)
    yield _counter("kvstack_generated_tokens", "Tokens of all answers", totals.generated_tokens)
    yield _counter("kvstack_prefill_seconds", "Time spent on prompts", totals.prefill_ms / 1000)
    yield _counter("kvstack_decode_seconds", "Time spent on answers", totals.decode_ms / 1000)
    yield _counter(
        "kvstack_prefill_saved_seconds", "Prefill that the cache saved, by the measured rate", totals.saved_s
    )
    yield _counter("kvstack_prefill_lost_seconds", "Prefill that a better reuse would have saved", totals.cost_s)
    ratio = totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else None
    yield _gauge("kvstack_reuse_ratio", "Cached tokens / prompt tokens since the start", ratio)
    placed = next((row for row in reversed(stack_state.requests) if row.is_over or row.work is not None), None)
    text = "LCP similarity (sim_best) of the newest request that is over or has a slot; absent if it had none"
    yield _gauge("kvstack_lcp_similarity_ratio", text, placed.lcp_similarity_ratio if placed is not None else None)
    waits = (row.timing.ttft_ms / 1000 for row in reversed(stack_state.requests) if row.timing.ttft_ms is not None)
    yield _gauge("kvstack_ttft_seconds", "Time to first token of the last request that had one", next(waits, None))
    rules = CounterMetricFamily("kvstack_rule_hits", "What each rule did", labels=["rule"])
    for rule, count in sorted(totals.rules.items()):
        rules.add_metric([rule], count)
    yield rules
    yield _counter("kvstack_full_reprocesses", "Prompts that matched but were evaluated whole", totals.full_reprocesses)
    yield _counter("kvstack_checkpoints_restored", "Context checkpoints gone back to", totals.checkpoints_restored)
    yield _counter("kvstack_context_shifts", "Times that a context was shifted", totals.context_shifts)
    yield _counter("kvstack_ram_cache_hits", "Prompts taken from the RAM cache", totals.ram_hits)
    yield _counter("kvstack_ram_cache_evictions", "Prompts thrown out of the RAM cache", totals.ram_evictions)
    yield _gauge("kvstack_ram_cache_bytes", "Size of the RAM cache", stack_state.ram_cache.size_bytes)
    yield _gauge("kvstack_ram_cache_limit_bytes", "Limit of the RAM cache", stack_state.ram_cache.limit_bytes)


def _of_the_server(stack_state: StackState) -> Iterator[Metric]:
    server = stack_state.server
    yield _gauge("kvstack_server_resident_memory_bytes", "Resident memory of llama-server", server.rss_bytes)
    yield _gauge("kvstack_server_slot_context_tokens", "Context of one slot", server.ctx_per_slot)
    slots = GaugeMetricFamily("kvstack_slot_tokens", "Tokens that a slot holds", labels=["slot"])
    for slot in stack_state.slots:
        if slot.tokens is not None:
            slots.add_metric([str(slot.slot)], slot.tokens)
    yield slots
    yield _counter("kvstack_log_drift", "Log records of a known family in an unknown form", stack_state.log.drift)
    # No counter: a late answer or warm-up may still claim a task.
    yield _gauge(
        "kvstack_bypassing_tasks", "Tasks that did not come through the proxy", stack_state.log.unclaimed_tasks
    )


def _gauge(name: str, text: str, value: float | None) -> Metric:
    # What is not known has no sample; its name is declared all the same.
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
