"""
The one picture of a stack: what the dashboard draws, `status` prints and the metrics count.

`reduce` is the only way to a new Snapshot.  `to_dict` is the documented shape of `GET /kvstack/status` and of the
`data` in `kvstack status --json`; what is not known is null there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from kvstack.core import logfacts as facts
from kvstack.core.events import (
    AnswerSeen,
    Event,
    FirstByteSent,
    LogFactSeen,
    LogLineSeen,
    MemorySampled,
    Notice,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    ServerDescribed,
    ServerSpawned,
    StateChanged,
    WarmupEnded,
)
from kvstack.core.join import Join, claim_warmup, compose, fold, measured, settle, task_of
from kvstack.core.lifecycle import State
from kvstack.core.verdict import judge
from kvstack.core.views import (
    LogView,
    RamCacheView,
    RequestRow,
    ServerView,
    SlotView,
    Totals,
    WarmupView,
)

__all__ = [
    "REQUESTS_KEPT",
    "LogView",
    "RamCacheView",
    "RequestRow",
    "ServerView",
    "SlotView",
    "Snapshot",
    "Totals",
    "WarmupView",
    "reduce",
]

REQUESTS_KEPT = 100
"""Requests that a Snapshot remembers, newest last."""

LOG_LINES_KEPT = 50
NOTICES_KEPT = 50
DRIFT_SAMPLES_KEPT = 5
WARNINGS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    One stack at one moment.
    """

    name: str
    proxy_url: str
    state: State = State.STOPPED
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
        """
        The sums in a form that only grows, for metrics: a request counts once its verdict is final.
        """
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
        """
        What each slot holds, as the log of the present run tells it.
        """
        return self.join.slots

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """
        The prefill rate that this run measured.
        """
        return self.join.prefill_tokens_per_s

    def row(self, request: int) -> RequestRow | None:
        """
        One request by its number, if it is still remembered.
        """
        return next((row for row in reversed(self.requests) if row.id == request), None)

    def to_dict(self) -> dict[str, Any]:
        """
        The documented shape, ready for JSON.
        """
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
                "detail": self.warmup.detail,
            },
            "totals": _totals_dict(self.totals),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
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


def _slot_dict(slot: SlotView, snapshot: Snapshot) -> dict[str, Any]:
    task = next((task for task in reversed(snapshot.join.tasks) if task.task == slot.task), None)
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
        "decode_ms": row.decode_ms,
        "decode_tokens_per_s": row.decode_tokens_per_s,
        "slot": row.slot,
        "task": row.task,
        "processed_tokens": row.processed_tokens,
        "verdict": row.verdict,
        "cause": row.cause,
        "lost_tokens": row.lost_tokens,
        "cost_s": row.cost_s,
        "saved_s": row.saved_s,
        "settled": row.settled,
        "divergence": row.divergence,
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
    }


# --- reduce --------------------------------------------------------------------------------------------------------


def reduce(snapshot: Snapshot, event: Event) -> Snapshot:
    """
    The picture after *event*.  Never raises; an event of a request that is forgotten changes nothing of it.
    """
    match event:
        case LogLineSeen():
            return replace(snapshot, log_lines=(*snapshot.log_lines[-(LOG_LINES_KEPT - 1) :], event.text))
        case LogFactSeen():
            return _log_fact(snapshot, event)
        case StateChanged():
            return _state(snapshot, event)
        case ServerSpawned():
            server = ServerView(
                url=snapshot.server.url,
                pid=event.pid,
                argv=event.argv,
                started_s=event.time_s,
            )
            return _new_run(replace(snapshot, server=server), snapshot.join.run + 1)
        case ServerDescribed():
            return replace(snapshot, server=_described(snapshot.server, event))
        case MemorySampled():
            return replace(snapshot, server=replace(snapshot.server, rss_bytes=event.rss_bytes))
        case RequestReceived():
            return _received(snapshot, event)
        case RequestForwarded():
            return _change_row(snapshot, event.id, lambda row: _forwarded(row, snapshot.join.run))
        case FirstByteSent():
            return _change_row(snapshot, event.id, lambda row: _first_byte(row, event.time_s))
        case AnswerSeen():
            return _answered(snapshot, event)
        case RequestEnded():
            snapshot = _change_row(snapshot, event.id, lambda row: _ended(row, event))
            return _rejoin(snapshot, [event.id])
        case WarmupEnded():
            return _warmed(snapshot, event)
        case Notice():
            return _notice(snapshot, event.time_s, event.level, event.text)
        case _:
            assert_never(event)


def _state(snapshot: Snapshot, event: StateChanged) -> Snapshot:
    since = snapshot.state_since_s if event.state is snapshot.state else event.time_s
    started = snapshot.started_s
    if started is None and event.state is not State.STOPPED:
        started = event.time_s
    snapshot = replace(
        snapshot,
        state=event.state,
        reason=event.reason,
        state_since_s=since,
        started_s=started,
        restarts=event.restarts,
    )
    if event.state in {State.BACKOFF, State.STOPPED, State.FAILED}:
        snapshot = replace(snapshot, server=replace(snapshot.server, pid=None, rss_bytes=None))
    return snapshot


def _described(server: ServerView, event: ServerDescribed) -> ServerView:
    said = {
        "url": event.url,
        "build": event.build,
        "model": event.model,
        "device": event.device,
        "ctx_per_slot": event.ctx_per_slot,
        "slots": event.slots,
        "layers_offloaded": event.layers_offloaded,
        "layers_total": event.layers_total,
        "similarity_threshold_ratio": event.similarity_threshold_ratio,
    }
    known: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    return replace(server, **known)


def _new_run(snapshot: Snapshot, run: int) -> Snapshot:
    return replace(
        snapshot,
        join=Join(run=run, unclaimed=snapshot.join.unclaimed),
        ram_cache=RamCacheView(limit_bytes=snapshot.ram_cache.limit_bytes),
    )


def _notice(snapshot: Snapshot, time_s: float, level: str, text: str) -> Snapshot:
    return replace(snapshot, notices=(*snapshot.notices[-(NOTICES_KEPT - 1) :], (time_s, level, text)))


def _warmed(snapshot: Snapshot, event: WarmupEnded) -> Snapshot:
    view = WarmupView(
        outcome=event.outcome,
        prompt_tokens=event.prompt_tokens,
        evaluated_tokens=event.evaluated_tokens,
        duration_ms=event.duration_ms,
        boundary_tokens=event.boundary_tokens,
        detail=event.detail,
    )
    join = claim_warmup(snapshot.join, event.evaluated_tokens, event.prompt_tokens)
    return replace(snapshot, warmup=view, join=join, log=replace(snapshot.log, unclaimed_tasks=join.unclaimed))


# --- requests ------------------------------------------------------------------------------------------------------


def _received(snapshot: Snapshot, event: RequestReceived) -> Snapshot:
    former = [
        row
        for row in snapshot.requests
        if event.conversation is not None
        and (row.conversation, row.side) == (event.conversation, event.side)
        and row.verdict != "FAILED"
    ]
    before = next((row.id for row in reversed(former) if row.items < event.items), None)
    row = RequestRow(
        id=event.id,
        time_s=event.time_s,
        method=event.method,
        path=event.path,
        api=event.api,
        client=event.client,
        conversation=event.conversation,
        side=event.side,
        stream=event.stream,
        items=event.items,
        ts_removed=event.ts_removed,
        msg_ids_removed=event.msg_ids_removed,
        items_modified=event.items_modified,
        divergence=event.divergence,
        before=before,
        repeats=any(row.items >= event.items for row in former),
        run=snapshot.join.run,
    )
    rules = dict(snapshot.totals.rules)
    for hit in event.hits:
        rules[hit.rule] = rules.get(hit.rule, 0) + hit.count
    totals = replace(
        snapshot.totals,
        ts_removed=snapshot.totals.ts_removed + event.ts_removed,
        msg_ids_removed=snapshot.totals.msg_ids_removed + event.msg_ids_removed,
        rules=rules,
    )
    settled = snapshot.settled_totals
    for forgotten in snapshot.requests[: -(REQUESTS_KEPT - 1)]:
        if not forgotten.settled:
            settled = _account(settled, forgotten, 1)  # nothing more will be heard of it
    requests = (*snapshot.requests[-(REQUESTS_KEPT - 1) :], row)
    return replace(snapshot, totals=totals, settled_totals=settled, requests=requests)


def _forwarded(row: RequestRow, run: int) -> RequestRow:
    return row if row.is_over else replace(row, phase="forwarded", run=run)


def _ended(row: RequestRow, event: RequestEnded) -> RequestRow:
    return row if row.is_over else replace(row, phase=event.outcome, status=event.status)


def _first_byte(row: RequestRow, time_s: float) -> RequestRow:
    return replace(
        row,
        phase=row.phase if row.is_over else "answering",
        ttft_ms=max(time_s - row.time_s, 0.0) * 1000.0 if row.ttft_ms is None else row.ttft_ms,
    )


def _answered(snapshot: Snapshot, event: AnswerSeen) -> Snapshot:
    snapshot = _change_row(snapshot, event.id, lambda row: _with_answer(row, event))
    if not _has_log(snapshot):
        # A server that is only attached to: its answers are all that there is to measure the rate by.
        snapshot = replace(snapshot, join=measured(snapshot.join, event.evaluated_tokens, event.prefill_ms))
    return _rejoin(snapshot, [event.id])


def _with_answer(row: RequestRow, answer: AnswerSeen) -> RequestRow:
    return row if row.settled else replace(row, answer=answer, error=answer.error or row.error)


def _change_row(snapshot: Snapshot, request: int, change: Callable[[RequestRow], RequestRow]) -> Snapshot:
    for index in range(len(snapshot.requests) - 1, -1, -1):
        row = snapshot.requests[index]
        if row.id == request:
            return _with_row(snapshot, index, change(row))
    return snapshot


def _with_row(snapshot: Snapshot, index: int, row: RequestRow) -> Snapshot:
    old = snapshot.requests[index]
    if row is old or row == old:
        return snapshot
    totals = snapshot.totals
    if old.verdict is not None or row.verdict is not None:
        totals = _account(_account(totals, old, -1), row, 1)
    settled = snapshot.settled_totals
    if row.settled and not old.settled:
        settled = _account(settled, row, 1)
    requests = (*snapshot.requests[:index], row, *snapshot.requests[index + 1 :])
    return replace(snapshot, totals=totals, settled_totals=settled, requests=requests)


def _account(totals: Totals, row: RequestRow, sign: int) -> Totals:
    if row.verdict is None or row.api is None:
        return totals
    verdicts = dict(totals.verdicts)
    verdicts[row.verdict] = verdicts.get(row.verdict, 0) + sign
    known = row.prompt_tokens is not None and row.cached_tokens is not None and row.evaluated_tokens is not None
    return replace(
        totals,
        requests=totals.requests + sign,
        prompt_tokens=totals.prompt_tokens + sign * ((row.prompt_tokens or 0) if known else 0),
        cached_tokens=totals.cached_tokens + sign * ((row.cached_tokens or 0) if known else 0),
        evaluated_tokens=totals.evaluated_tokens + sign * ((row.evaluated_tokens or 0) if known else 0),
        generated_tokens=totals.generated_tokens + sign * (row.generated_tokens or 0),
        prefill_ms=totals.prefill_ms + sign * (row.prefill_ms or 0.0),
        decode_ms=totals.decode_ms + sign * (row.decode_ms or 0.0),
        saved_s=totals.saved_s + sign * (row.saved_s or 0.0),
        cost_s=totals.cost_s + sign * (row.cost_s or 0.0),
        verdicts={verdict: count for verdict, count in verdicts.items() if count},
    )


def _rejoin(snapshot: Snapshot, requests: Iterable[int]) -> Snapshot:
    """
    Prove owners by what has come since, and compose and judge anew the requests that it concerns.
    """
    join, changed = settle(snapshot.join, snapshot.requests)
    if join is not snapshot.join:
        snapshot = replace(snapshot, join=join, log=replace(snapshot.log, unclaimed_tasks=join.unclaimed))
    for request in dict.fromkeys([*requests, *sorted(changed)]):
        snapshot = _recompose(snapshot, request)
    return snapshot


def _recompose(snapshot: Snapshot, request: int) -> Snapshot:
    return _change_row(snapshot, request, lambda row: _composed(snapshot, row))


def _composed(snapshot: Snapshot, row: RequestRow) -> RequestRow:
    join = snapshot.join
    if row.settled:
        return row
    task = None
    if row.run == join.run:
        # (The log of another run knows nothing of this request any more; what the former said stays.)
        task = task_of(join, row.id)
        row = compose(row, task)
    if not row.is_over:
        return row
    before = snapshot.row(row.before) if row.before is not None else None
    judgement = judge(
        row,
        task,
        before,
        slot_taken_by=_taken_by(snapshot, row, before),
        boundary_tokens=snapshot.warmup.boundary_tokens,
        log_is_read=join.facts > 0,
    )
    rate = join.prefill_tokens_per_s
    if rate is None and row.prefill_ms and row.evaluated_tokens:
        rate = row.evaluated_tokens * 1000.0 / row.prefill_ms
    return replace(
        row,
        verdict=judgement.verdict,
        cause=judgement.cause,
        lost_tokens=judgement.lost_tokens,
        cost_s=_seconds(judgement.lost_tokens, rate),
        saved_s=_seconds(row.cached_tokens, rate),
        processed_tokens=None,
        settled=row.api is None
        or row.phase == "failed"
        or not _has_log(snapshot)
        or (task is not None and task.released and (task.is_proved or not _has_figures(row.answer))),
    )


def _has_log(snapshot: Snapshot) -> bool:
    # Of a server that we started there is one, though it may lag behind; of one that we attached to there is none.
    return snapshot.join.facts > 0 or snapshot.server.pid is not None


def _has_figures(answer: AnswerSeen | None) -> bool:
    return answer is not None and answer.evaluated_tokens is not None


def _seconds(tokens: int | None, rate: float | None) -> float | None:
    if tokens is None:
        return None
    if tokens == 0:
        return 0.0
    return tokens / rate if rate else None


def _taken_by(snapshot: Snapshot, row: RequestRow, before: RequestRow | None) -> str | None:
    """
    Who used the slot of the conversation's former request after it.
    """
    if before is None or before.slot is None:
        return None
    after = [
        task
        for task in snapshot.join.tasks
        if task.slot == before.slot and task.task != row.task and not task.is_child and _came_after(task.task, before)
    ]
    if not after:
        return None
    task = after[0]
    if task.is_warmup:
        return "the warm-up"
    other = snapshot.row(task.owner) if task.owner is not None else None
    if other is None:
        return "a request past the proxy"
    if other.conversation == row.conversation and other.side == row.side:
        return None
    return f"request {other.id} ({other.side or other.client or other.path})"


def _came_after(task: int, before: RequestRow) -> bool:
    return before.task is not None and task > before.task


# --- the log -------------------------------------------------------------------------------------------------------


def _log_fact(snapshot: Snapshot, event: LogFactSeen) -> Snapshot:
    if event.run < snapshot.join.run:
        return snapshot  # the last words of a process that is gone
    if event.run > snapshot.join.run:
        snapshot = _new_run(snapshot, event.run)
    fact = event.fact
    join = fold(snapshot.join, fact, snapshot.requests, warming=snapshot.state is State.WARMING)
    snapshot = replace(
        snapshot,
        join=join,
        log=replace(snapshot.log, facts=snapshot.log.facts + 1, unclaimed_tasks=join.unclaimed),
    )
    snapshot = _note_fact(snapshot, fact, event.time_s)
    match fact:
        case facts.PrefillTimed() | facts.DecodeTimed() | facts.SlotReleased():
            return _rejoin(snapshot, _owner(snapshot, fact.slot, fact.task))
        case facts.TaskLaunched() | facts.PromptStarted() | facts.ReusePoint() | facts.PrefillProgressed():
            for request in _owner(snapshot, fact.slot, fact.task):
                snapshot = _recompose(snapshot, request)
            return snapshot
        case _:
            return snapshot


def _owner(snapshot: Snapshot, slot: int, task: int) -> list[int]:
    return [
        view.owner for view in snapshot.join.tasks if view.slot == slot and view.task == task and view.owner is not None
    ]


def _note_fact(snapshot: Snapshot, fact: facts.LogFact, time_s: float) -> Snapshot:
    """
    Keep what a fact says of the server as a whole.
    """
    server, totals = snapshot.server, snapshot.totals
    match fact:
        case facts.SlotSelected(threshold_ratio=float(threshold)) if threshold != server.similarity_threshold_ratio:
            return replace(snapshot, server=replace(server, similarity_threshold_ratio=threshold))
        case facts.SlotsInitialised():
            return replace(
                snapshot,
                server=replace(
                    server,
                    slots=fact.slots,
                    ctx_per_slot=fact.ctx_per_slot or server.ctx_per_slot,
                    kv_unified=server.kv_unified if fact.kv_unified is None else fact.kv_unified,
                ),
            )
        case facts.SlotCreated():
            return replace(snapshot, server=replace(server, ctx_per_slot=fact.ctx_per_slot))
        case facts.DeviceUsed():
            return replace(snapshot, server=replace(server, device=fact.device, device_name=fact.description))
        case facts.LayersOffloaded():
            return replace(
                snapshot, server=replace(server, layers_offloaded=fact.layers, layers_total=fact.layers_total)
            )
        case facts.BufferAllocated():
            key = f"{fact.kind} {fact.device}"
            buffers: Mapping[str, int] = {**server.buffers, key: server.buffers.get(key, 0) + fact.size_bytes}
            return replace(snapshot, server=replace(server, buffers=buffers))
        case facts.ServerSlept():
            return replace(snapshot, server=replace(server, asleep=fact.asleep))
        case facts.ServerWarned() if fact.text not in server.warnings:
            warnings = (*server.warnings[-(WARNINGS_KEPT - 1) :], fact.text)
            snapshot = replace(snapshot, server=replace(server, warnings=warnings))
            return _notice(snapshot, time_s, "warning", f"llama-server: {fact.text}")
        case facts.CacheRamLimited():
            return replace(snapshot, ram_cache=replace(snapshot.ram_cache, limit_bytes=fact.limit_bytes))
        case facts.RamCacheState():
            limit = fact.limit_bytes if fact.limit_bytes is not None else snapshot.ram_cache.limit_bytes
            return replace(snapshot, ram_cache=RamCacheView(fact.prompts, fact.size_bytes, limit))
        case facts.RamCacheHit():
            return replace(snapshot, totals=replace(totals, ram_hits=totals.ram_hits + 1))
        case facts.RamCacheEvicted():
            return replace(snapshot, totals=replace(totals, ram_evictions=totals.ram_evictions + 1))
        case facts.FullReprocess():
            return replace(snapshot, totals=replace(totals, full_reprocesses=totals.full_reprocesses + 1))
        case facts.CheckpointRestored():
            return replace(snapshot, totals=replace(totals, checkpoints_restored=totals.checkpoints_restored + 1))
        case facts.ContextShifted():
            return replace(snapshot, totals=replace(totals, context_shifts=totals.context_shifts + 1))
        case facts.UnknownRecord():
            samples = snapshot.log.drift_samples
            if len(samples) < DRIFT_SAMPLES_KEPT and fact.text not in samples:
                samples = (*samples, fact.text)
            return replace(snapshot, log=replace(snapshot.log, drift=snapshot.log.drift + 1, drift_samples=samples))
        case _:
            return snapshot
