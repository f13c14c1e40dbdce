"""The state of a stack as a whole, and its shape as JSON; `kvstack.state.reducer.reduce` makes new ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvstack.state.attribution import Join
from kvstack.state.events import Difference
from kvstack.state.lifecycle import State
from kvstack.state.records import LogView, RamCacheView, RequestRow, ServerView, SlotView, Totals, WarmupView
from kvstack.state.totals import decode_by_context

NOTICES_KEPT = 50

WITHOUT_SERVER = frozenset({State.BACKOFF, State.STOPPED, State.FAILED})
"""In these no server lives; the log may still have last words of one."""


@dataclass(frozen=True, slots=True)
class StackState:
    """One stack at one moment."""

    name: str
    proxy_url: str
    state: State = State.STARTING
    """Before anything has happened a stack is about to start."""
    reason: str = ""
    state_since_s: float | None = None
    started_s: float | None = None
    restarts: int = 0
    server: ServerView = field(default_factory=ServerView)
    warmup: WarmupView = field(default_factory=WarmupView)
    totals: Totals = field(default_factory=Totals)
    settled_totals: Totals = field(default_factory=Totals)
    """The same sums over requests whose verdict is final."""
    requests: tuple[RequestRow, ...] = ()
    ram_cache: RamCacheView = field(default_factory=RamCacheView)
    log: LogView = field(default_factory=LogView)
    join: Join = field(default_factory=Join)
    """The joining's memory; not part of the published shape."""
    log_lines: tuple[str, ...] = ()
    notices: tuple[tuple[float, str, str], ...] = ()
    """Time, level and text."""

    @property
    def counters(self) -> Totals:
        """The sums in a form that only grows, for metrics: a request counts once its verdict is final."""
        settled = self.settled_totals
        return replace(
            self.totals,
            requests=settled.requests,
            prompt_tokens=settled.prompt_tokens,
            cached_tokens=settled.cached_tokens,
            evaluated_tokens=settled.evaluated_tokens,
            generated_tokens=settled.generated_tokens,
            prefill_ms=settled.prefill_ms,
            decode_ms=settled.decode_ms,
            saved_s=settled.saved_s,
            cost_s=settled.cost_s,
            verdicts=settled.verdicts,
        )

    @property
    def slots(self) -> tuple[SlotView, ...]:
        """What each slot holds, as the log of the present run tells it; nothing once its server is gone."""
        return () if self.state in WITHOUT_SERVER else self.join.slots

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The prefill rate that this run measured."""
        return self.join.prefill_tokens_per_s

    def row(self, request: int) -> RequestRow | None:
        """One request by its number, if it is still remembered."""
        return next((row for row in reversed(self.requests) if row.id == request), None)

    def to_dict(self) -> dict[str, Any]:
        """The documented shape, ready for JSON."""
        return {
            "name": self.name,
            "state": self.state.value,
            "reason": self.reason,
            "state_since_s": self.state_since_s,
            "started_s": self.started_s,
            "restarts": self.restarts,
            "proxy": {"url": self.proxy_url},
            "server": _server_dict(self.server),
            "warmup": {
                "outcome": self.warmup.outcome,
                "prompt_tokens": self.warmup.prompt_tokens,
                "evaluated_tokens": self.warmup.evaluated_tokens,
                "duration_ms": self.warmup.duration_ms,
                "boundary_tokens": self.warmup.boundary_tokens,
                "snapshot": self.warmup.snapshot,
                "is_proved": self.warmup.is_proved,
                "detail": self.warmup.detail,
                "is_running": self.warmup.is_running,
            },
            "totals": _totals_dict(self.totals),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_by_context": [
                {"up_to_tokens": one.up_to_tokens, "requests": one.requests, "tokens_per_s": one.tokens_per_s}
                for one in decode_by_context(self.requests)
            ],
            "slots": [_slot_dict(slot, self) for slot in self.slots],
            "ram_cache": {
                "prompts": self.ram_cache.prompts,
                "size_bytes": self.ram_cache.size_bytes,
                "limit_bytes": self.ram_cache.limit_bytes,
            },
            "log": {
                "facts": self.log.facts,
                "drift": self.log.drift,
                "drift_samples": list(self.log.drift_samples),
                "unclaimed_tasks": self.log.unclaimed_tasks,
            },
            "requests": [_row_dict(row) for row in self.requests],
            "log_lines": list(self.log_lines),
            "notices": [{"time_s": time_s, "level": level, "text": text} for time_s, level, text in self.notices],
        }


def _server_dict(server: ServerView) -> dict[str, Any]:
    return {
        "url": server.url,
        "is_attached": server.is_attached,
        "pid": server.pid,
        "build": server.build,
        "model": server.model,
        "device": server.device,
        "device_name": server.device_name,
        "ctx_per_slot": server.ctx_per_slot,
        "slots": server.slots,
        "kv_unified": server.kv_unified,
        "layers_offloaded": server.layers_offloaded,
        "layers_total": server.layers_total,
        "rss_bytes": server.rss_bytes,
        "buffers_bytes": dict(server.buffers),
        "similarity_threshold_ratio": server.similarity_threshold_ratio,
        "warnings": list(server.warnings),
        "asleep": server.asleep,
        "started_s": server.started_s,
    }


def _totals_dict(totals: Totals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "evaluated_tokens": totals.evaluated_tokens,
        "generated_tokens": totals.generated_tokens,
        "prefill_ms": totals.prefill_ms,
        "decode_ms": totals.decode_ms,
        "saved_s": totals.saved_s,
        "cost_s": totals.cost_s,
        "ts_removed": totals.ts_removed,
        "msg_ids_removed": totals.msg_ids_removed,
        "verdicts": dict(totals.verdicts),
        "rules": dict(totals.rules),
        "full_reprocesses": totals.full_reprocesses,
        "checkpoints_restored": totals.checkpoints_restored,
        "ram_hits": totals.ram_hits,
        "ram_evictions": totals.ram_evictions,
        "context_shifts": totals.context_shifts,
    }


def _slot_dict(slot: SlotView, stack_state: StackState) -> dict[str, Any]:
    task = next((task for task in reversed(stack_state.join.tasks) if task.task == slot.task), None)
    return {
        "slot": slot.slot,
        "tokens": slot.tokens,
        "conversation": slot.conversation,
        "client": slot.client,
        "request": slot.request,
        "is_warmup": slot.is_warmup,
        "is_busy": slot.task is not None,
        "prompt_tokens": task.prompt_tokens if task is not None else slot.prompt_tokens,
        "processed_tokens": slot.processed_tokens,
        "prefill_tokens_per_s": slot.tokens_per_s,
        "checkpoints": slot.checkpoints,
    }


_WORK_SHOWN = (
    "slot",
    "task",
    "how",
    "similarity_ratio",
    "keep_ratio",
    "lcp_tokens",
    "ram_hit",
    "ram_similarity_ratio",
    "holder_request",
    "holder_is_warmup",
    "holder_prompt_tokens",
    "reprocessed",
    "restored_tokens",
    "checkpoints_erased",
    "chunk_tokens",
    "shifted_tokens",
    "truncated",
    "cancelled",
    "rejected",
    "released",
)


def _difference_dict(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else {**asdict(difference), "behind": list(difference.behind)}


def _row_dict(row: RequestRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "time_s": row.time_s,
        "method": row.method,
        "path": row.path,
        "api": row.api,
        "client": row.client,
        "conversation": row.conversation,
        "side": row.side,
        "stream": row.stream,
        "items": row.items,
        "phase": row.phase,
        "status": row.status,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "evaluated_tokens": row.evaluated_tokens,
        "generated_tokens": row.generated_tokens,
        "lcp_similarity_ratio": row.lcp_similarity_ratio,
        "reuse_ratio": row.reuse_ratio,
        "prefill_ms": row.prefill_ms,
        "ttft_ms": row.ttft_ms,
        "is_streamed": row.is_streamed,
        "duration_ms": row.duration_ms,
        "decode_ms": row.decode_ms,
        "decode_tokens_per_s": row.decode_tokens_per_s,
        "slot": row.slot,
        "task": row.task,
        "processed_tokens": row.processed_tokens,
        "verdict": row.verdict,
        "reason": None if row.reason is None else asdict(row.reason),
        "lost_tokens": row.lost_tokens,
        "cost_s": row.cost_s,
        "saved_s": row.saved_s,
        "settled": row.settled,
        "warm_tokens": row.warm_tokens,
        "difference": _difference_dict(row.difference),
        "error": row.error,
        "before": row.before,
        "repeats": row.repeats,
        "run": row.run,
        "work": None if row.work is None else {name: getattr(row.work, name) for name in _WORK_SHOWN},
        "stripped": {
            "ts_removed": row.ts_removed,
            "msg_ids_removed": row.msg_ids_removed,
            "items_modified": row.items_modified,
        },
        "rules": dict(row.rules),
    }


def add_notice(stack_state: StackState, time_s: float, level: str, text: str) -> StackState:
    """Keep something that a person should read."""
    return replace(stack_state, notices=(*stack_state.notices[-(NOTICES_KEPT - 1) :], (time_s, level, text)))
