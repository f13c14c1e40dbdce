"""
The one picture of a stack: what the dashboard draws, `status` prints and the metrics count.

`reduce` is the only way to a new Snapshot.  `Snapshot.to_dict` is the documented shape of `GET /kvstack/status` and of
the `data` in `kvstack status --json`; what is not known is null there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, assert_never

from kvstack.state import log_facts as facts
from kvstack.state.assessment import has_log, judged
from kvstack.state.attribution import Join, begin_warmup, claim_warmup, end_warmup, measured, settle, step_warmup
from kvstack.state.events import (
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
    WarmupJudged,
    WarmupStarted,
    WarmupStepped,
)
from kvstack.state.holders import warm_tokens
from kvstack.state.lifecycle import State
from kvstack.state.logfold import fold
from kvstack.state.records import (
    RamCacheView,
    RequestRow,
    ServerView,
    WarmupView,
)
from kvstack.state.serverfacts import note_fact
from kvstack.state.stack_state import WITHOUT_SERVER, Snapshot, add_notice
from kvstack.state.totals import account, add_seconds, is_late

REQUESTS_KEPT = 100
"""Requests that a Snapshot remembers, newest last."""

LOG_LINES_KEPT = 50


def reduce(snapshot: Snapshot, event: Event) -> Snapshot:
    """The picture after *event*.  Never raises; an event of a request that is forgotten changes nothing of it."""
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
            snapshot = replace(snapshot, server=replace(snapshot.server, rss_bytes=event.rss_bytes))
            return _count_late(snapshot, event.time_s)
        case RequestReceived():
            return _received(_count_late(snapshot, event.time_s), event)
        case RequestForwarded():
            return _change_row(snapshot, event.id, lambda row: _forwarded(row, snapshot))
        case FirstByteSent():
            return _change_row(snapshot, event.id, lambda row: _first_byte(row, event.time_s))
        case AnswerSeen():
            return _answered(snapshot, event)
        case RequestEnded():
            snapshot = _change_row(snapshot, event.id, lambda row: _ended(row, event))
            return _rejoin(snapshot, [event.id])
        case WarmupStarted():
            return _warming(snapshot)
        case WarmupStepped():
            return _warming_goes_on(snapshot, event)
        case WarmupEnded():
            return _warmed(snapshot, event)
        case WarmupJudged():
            return _judged_warmup(snapshot, event)
        case Notice():
            return add_notice(snapshot, event.time_s, event.level, event.text)
        case _:
            assert_never(event)


def _state(snapshot: Snapshot, event: StateChanged) -> Snapshot:
    goes_on = event.state is snapshot.state and snapshot.state_since_s is not None
    since = snapshot.state_since_s if goes_on else event.time_s
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
    if event.state is State.STARTING:
        snapshot = replace(snapshot, join=replace(snapshot.join, slots=()))
    if event.state in WITHOUT_SERVER:
        # What was warm and what was held died with the server.
        snapshot = replace(
            snapshot,
            server=replace(snapshot.server, pid=None, rss_bytes=None),
            warmup=WarmupView(),
            ram_cache=_emptied(snapshot.ram_cache),
        )
    return snapshot


def _emptied(ram_cache: RamCacheView) -> RamCacheView:
    return RamCacheView(limit_bytes=ram_cache.limit_bytes)


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
        ram_cache=_emptied(snapshot.ram_cache),
    )


def _warming(snapshot: Snapshot) -> Snapshot:
    newest = max((row.id for row in snapshot.requests), default=0)
    join = begin_warmup(snapshot.join, newest)
    return replace(snapshot, warmup=replace(snapshot.warmup, is_running=True), join=join)


def _warming_goes_on(snapshot: Snapshot, event: WarmupStepped) -> Snapshot:
    newest = max((row.id for row in snapshot.requests), default=0)
    join = step_warmup(snapshot.join, newest, (event.evaluated_tokens, event.prompt_tokens))
    return replace(snapshot, join=join, log=replace(snapshot.log, unclaimed_tasks=join.unclaimed))


def _judged_warmup(snapshot: Snapshot, event: WarmupJudged) -> Snapshot:
    if event.holds:
        return replace(snapshot, warmup=replace(snapshot.warmup, is_proved=True))
    return replace(snapshot, warmup=replace(snapshot.warmup, outcome="failed", detail=event.detail))


def _warmed(snapshot: Snapshot, event: WarmupEnded) -> Snapshot:
    view = WarmupView(
        outcome=event.outcome,
        prompt_tokens=event.prompt_tokens,
        evaluated_tokens=event.evaluated_tokens,
        duration_ms=event.duration_ms,
        boundary_tokens=event.boundary_tokens,
        snapshot=event.snapshot,
        detail=event.detail,
    )
    join = end_warmup(snapshot.join, event)
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
    hits: Counter[str] = Counter()
    for hit in event.hits:
        hits[hit.rule] += hit.count
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
        rules=tuple(hits.items()),
        divergence=event.divergence,
        divergence_behind=event.divergence_behind,
        before=before,
        repeats=any(row.items >= event.items for row in former),
        run=snapshot.join.run,
    )
    rules = dict(snapshot.totals.rules)
    for rule, count in hits.items():
        rules[rule] = rules.get(rule, 0) + count
    totals = replace(
        snapshot.totals,
        ts_removed=snapshot.totals.ts_removed + event.ts_removed,
        msg_ids_removed=snapshot.totals.msg_ids_removed + event.msg_ids_removed,
        rules=rules,
    )
    settled = snapshot.settled_totals
    for forgotten in snapshot.requests[: -(REQUESTS_KEPT - 1)]:
        # Nothing more will be heard of it.
        if not forgotten.settled:
            settled = add_seconds(account(settled, forgotten, 1), forgotten)
        if not forgotten.is_counted:
            totals = add_seconds(totals, forgotten)
    requests = (*snapshot.requests[-(REQUESTS_KEPT - 1) :], row)
    return replace(snapshot, totals=totals, settled_totals=settled, requests=requests)


def _forwarded(row: RequestRow, snapshot: Snapshot) -> RequestRow:
    if row.is_over:
        return row
    return replace(row, phase="forwarded", run=snapshot.join.run, warm_tokens=warm_tokens(snapshot))


def _ended(row: RequestRow, event: RequestEnded) -> RequestRow:
    if row.is_over:
        return row
    duration_ms = max(event.time_s - row.time_s, 0.0) * 1000.0
    error = row.error or event.error
    return replace(row, phase=event.outcome, status=event.status, duration_ms=duration_ms, error=error)


def _first_byte(row: RequestRow, time_s: float) -> RequestRow:
    return replace(
        row,
        phase=row.phase if row.is_over else "answering",
        ttft_ms=row.ttft_ms if row.is_streamed else max(time_s - row.time_s, 0.0) * 1000.0,
        is_streamed=True,
    )


def _answered(snapshot: Snapshot, event: AnswerSeen) -> Snapshot:
    snapshot = _change_row(snapshot, event.id, lambda row: _with_answer(row, event))
    if not has_log(snapshot):
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
        totals = account(account(totals, old, -1), row, 1)
    if row.is_counted and not old.is_counted:
        totals = add_seconds(totals, row)
    settled = snapshot.settled_totals
    if row.settled and not old.settled:
        settled = add_seconds(account(settled, row, 1), row)
    requests = (*snapshot.requests[:index], row, *snapshot.requests[index + 1 :])
    return replace(snapshot, totals=totals, settled_totals=settled, requests=requests)


def _count_late(snapshot: Snapshot, now_s: float) -> Snapshot:
    """Count the seconds of requests whose log has not come: they shall not be missing for ever."""
    for index, row in enumerate(snapshot.requests):
        if row.verdict is not None and not row.is_counted and is_late(row, now_s):
            snapshot = _with_row(snapshot, index, replace(row, is_counted=True))
    return snapshot


def _rejoin(snapshot: Snapshot, requests: Iterable[int]) -> Snapshot:
    """Prove owners by what has come since, and compose and judge anew the requests that it concerns."""
    join, changed = settle(snapshot.join, snapshot.requests)
    if join is not snapshot.join:
        join = claim_warmup(join)
        snapshot = replace(snapshot, join=join, log=replace(snapshot.log, unclaimed_tasks=join.unclaimed))
    for request in dict.fromkeys([*requests, *sorted(changed)]):
        snapshot = _recompose(snapshot, request)
    return snapshot


def _recompose(snapshot: Snapshot, request: int) -> Snapshot:
    return _change_row(snapshot, request, lambda row: judged(snapshot, row))


# --- the log -------------------------------------------------------------------------------------------------------


def _log_fact(snapshot: Snapshot, event: LogFactSeen) -> Snapshot:
    if event.run < snapshot.join.run:
        return snapshot  # the last words of a process that is gone
    if event.run > snapshot.join.run:
        snapshot = _new_run(snapshot, event.run)
    fact = event.fact
    join = fold(snapshot.join, fact, snapshot.requests, warming=snapshot.state is State.WARMING)
    if isinstance(fact, facts.SlotReleased):
        join = claim_warmup(join)
    snapshot = replace(
        snapshot,
        join=join,
        log=replace(snapshot.log, facts=snapshot.log.facts + 1, unclaimed_tasks=join.unclaimed),
    )
    snapshot = note_fact(snapshot, fact, event.time_s)
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
