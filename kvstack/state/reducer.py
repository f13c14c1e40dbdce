"""
The one picture of a stack: what the dashboard draws, `status` prints and the metrics count.

`reduce` is the only way to a new state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, assert_never

from kvstack.state import log_facts as facts
from kvstack.state.assessment import has_log, judged, warm_tokens
from kvstack.state.attribution import Join, begin_warmup, claim_warmup, end_warmup, fold, measured, settle, step_warmup
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
from kvstack.state.lifecycle import State
from kvstack.state.records import (
    Change,
    RamCacheView,
    RequestRow,
    ServerView,
    Stripped,
    WarmupView,
)
from kvstack.state.stack_state import WITHOUT_SERVER, StackState, add_notice, publish_join
from kvstack.state.totals import account, add_seconds, is_late
from kvstack.state.verdict import Verdict

REQUESTS_KEPT = 100
"""Requests that are remembered, newest last."""

LOG_LINES_KEPT = 50
DRIFT_SAMPLES_KEPT = 5
WARNINGS_KEPT = 20


def reduce(stack_state: StackState, event: Event) -> StackState:
    """The picture after *event*.  Never raises; an event of a request that is forgotten changes nothing of it."""
    return publish_join(_reduce(stack_state, event))


def _reduce(stack_state: StackState, event: Event) -> StackState:
    match event:
        case LogLineSeen():
            return replace(stack_state, log_lines=(*stack_state.log_lines[-(LOG_LINES_KEPT - 1) :], event.text))
        case LogFactSeen():
            return _log_fact(stack_state, event)
        case StateChanged():
            return _state(stack_state, event)
        case ServerSpawned():
            server = ServerView(
                url=stack_state.server.url,
                pid=event.pid,
                argv=event.argv,
                started_s=event.time_s,
            )
            return _new_run(replace(stack_state, server=server), stack_state.join.run + 1)
        case ServerDescribed():
            return replace(stack_state, server=_described(stack_state.server, event))
        case MemorySampled():
            stack_state = replace(stack_state, server=replace(stack_state.server, rss_bytes=event.rss_bytes))
            return _count_late(stack_state, event.time_s)
        case RequestReceived() | RequestForwarded() | FirstByteSent() | AnswerSeen() | RequestEnded():
            return _request(stack_state, event)
        case WarmupStarted():
            return _warming(stack_state)
        case WarmupStepped():
            return _warming_goes_on(stack_state, event)
        case WarmupEnded():
            return _warmed(stack_state, event)
        case WarmupJudged():
            return _judged_warmup(stack_state, event)
        case Notice():
            return add_notice(stack_state, event)
        case _:
            assert_never(event)


def _state(stack_state: StackState, event: StateChanged) -> StackState:
    goes_on = event.state is stack_state.state and stack_state.state_since_s is not None
    since = stack_state.state_since_s if goes_on else event.time_s
    started = stack_state.started_s
    if started is None and event.state is not State.STOPPED:
        started = event.time_s
    stack_state = replace(
        stack_state,
        state=event.state,
        reason=event.reason,
        state_since_s=since,
        started_s=started,
        restarts=event.restarts,
    )
    if event.state is State.STARTING:
        stack_state = replace(stack_state, join=replace(stack_state.join, slots=()))
    if event.state in WITHOUT_SERVER:
        # What was warm and what was held died with the server.
        stack_state = replace(
            stack_state,
            server=replace(stack_state.server, pid=None, rss_bytes=None),
            warmup=WarmupView(),
            ram_cache=_emptied(stack_state.ram_cache),
        )
    return stack_state


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


def _new_run(stack_state: StackState, run: int) -> StackState:
    return replace(
        stack_state,
        join=Join(run=run, unclaimed=stack_state.join.unclaimed),
        ram_cache=_emptied(stack_state.ram_cache),
    )


def _warming(stack_state: StackState) -> StackState:
    newest = max((row.id for row in stack_state.requests), default=0)
    join = begin_warmup(stack_state.join, newest)
    return replace(stack_state, warmup=replace(stack_state.warmup, is_running=True), join=join)


def _warming_goes_on(stack_state: StackState, event: WarmupStepped) -> StackState:
    newest = max((row.id for row in stack_state.requests), default=0)
    join = step_warmup(stack_state.join, newest, (event.evaluated_tokens, event.prompt_tokens))
    return replace(stack_state, join=join, log=replace(stack_state.log, unclaimed_tasks=join.unclaimed))


def _judged_warmup(stack_state: StackState, event: WarmupJudged) -> StackState:
    if event.holds:
        return replace(stack_state, warmup=replace(stack_state.warmup, is_proved=True))
    return replace(stack_state, warmup=replace(stack_state.warmup, outcome="failed", detail=event.detail))


def _warmed(stack_state: StackState, event: WarmupEnded) -> StackState:
    view = WarmupView(
        outcome=event.outcome,
        prompt_tokens=event.prompt_tokens,
        evaluated_tokens=event.evaluated_tokens,
        duration_ms=event.duration_ms,
        boundary_tokens=event.boundary_tokens,
        snapshot=event.snapshot,
        head_fingerprint=event.head_fingerprint,
        detail=event.detail,
    )
    join = end_warmup(stack_state.join, event)
    return replace(stack_state, warmup=view, join=join, log=replace(stack_state.log, unclaimed_tasks=join.unclaimed))


# --- requests ------------------------------------------------------------------------------------------------------


def _request(
    stack_state: StackState, event: RequestReceived | RequestForwarded | FirstByteSent | AnswerSeen | RequestEnded
) -> StackState:
    match event:
        case RequestReceived():
            return _received(_count_late(stack_state, event.time_s), event)
        case RequestForwarded():
            return _change_row(stack_state, event.id, lambda row: _forwarded(row, stack_state))
        case FirstByteSent():
            return _change_row(stack_state, event.id, lambda row: _first_byte(row, event.time_s))
        case AnswerSeen():
            return _answered(stack_state, event)
        case RequestEnded():
            stack_state = _change_row(stack_state, event.id, lambda row: _ended(row, event))
            return _rejoin(stack_state, [event.id])


def _received(stack_state: StackState, event: RequestReceived) -> StackState:
    former = [
        row
        for row in stack_state.requests
        if event.conversation is not None
        and (row.conversation, row.side) == (event.conversation, event.side)
        and row.verdict is not Verdict.FAILED
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
        run=stack_state.join.run,
        head_fingerprint=_head_fingerprint(event, former),
        change=Change(event.difference, before, repeats=any(row.items >= event.items for row in former)),
        stripped=Stripped(event.ts_removed, event.msg_ids_removed, event.items_modified, hits),
    )
    rules = dict(stack_state.totals.rules)
    for rule, count in hits.items():
        rules[rule] = rules.get(rule, 0) + count
    totals = replace(
        stack_state.totals,
        ts_removed=stack_state.totals.ts_removed + event.ts_removed,
        msg_ids_removed=stack_state.totals.msg_ids_removed + event.msg_ids_removed,
        rules=rules,
    )
    settled = stack_state.settled_totals
    for forgotten in stack_state.requests[: -(REQUESTS_KEPT - 1)]:
        # Nothing more will be heard of it.
        if not forgotten.settled:
            settled = add_seconds(account(settled, forgotten, 1), forgotten)
        if not forgotten.is_counted:
            totals = add_seconds(totals, forgotten)
    requests = (*stack_state.requests[-(REQUESTS_KEPT - 1) :], row)
    return replace(stack_state, totals=totals, settled_totals=settled, requests=requests)


def _head_fingerprint(event: RequestReceived, former: list[RequestRow]) -> str | None:
    if event.head_fingerprint is not None or not former or (event.difference and event.difference.is_in_head):
        return event.head_fingerprint
    return former[-1].head_fingerprint


def _forwarded(row: RequestRow, stack_state: StackState) -> RequestRow:
    if row.is_over:
        return row
    tokens = replace(row.tokens, warm=warm_tokens(stack_state))
    ours, warmed = row.head_fingerprint, stack_state.warmup.head_fingerprint
    return replace(
        row,
        phase="forwarded",
        run=stack_state.join.run,
        tokens=tokens,
        has_warmed_head=None if None in {ours, warmed} else ours == warmed,
    )


def _ended(row: RequestRow, event: RequestEnded) -> RequestRow:
    if row.is_over:
        return row
    duration_ms = max(event.time_s - row.time_s, 0.0) * 1000.0
    error = row.error or event.error
    timing = replace(row.timing, duration_ms=duration_ms)
    return replace(row, phase=event.outcome, status=event.status, timing=timing, error=error)


def _first_byte(row: RequestRow, time_s: float) -> RequestRow:
    ttft_ms = row.timing.ttft_ms if row.timing.is_streamed else max(time_s - row.time_s, 0.0) * 1000.0
    timing = replace(row.timing, ttft_ms=ttft_ms, is_streamed=True)
    return replace(row, phase=row.phase if row.is_over else "answering", timing=timing)


def _answered(stack_state: StackState, event: AnswerSeen) -> StackState:
    stack_state = _change_row(stack_state, event.id, lambda row: _with_answer(row, event))
    if not has_log(stack_state):
        # A server that is only attached to: its answers are all that there is to measure the rate by.
        stack_state = replace(stack_state, join=measured(stack_state.join, event.evaluated_tokens, event.prefill_ms))
    return _rejoin(stack_state, [event.id])


def _with_answer(row: RequestRow, answer: AnswerSeen) -> RequestRow:
    return row if row.settled else replace(row, answer=answer, error=answer.error or row.error)


def _change_row(stack_state: StackState, request: int, change: Callable[[RequestRow], RequestRow]) -> StackState:
    for index in range(len(stack_state.requests) - 1, -1, -1):
        row = stack_state.requests[index]
        if row.id == request:
            return _with_row(stack_state, index, change(row))
    return stack_state


def _with_row(stack_state: StackState, index: int, row: RequestRow) -> StackState:
    old = stack_state.requests[index]
    if row is old or row == old:
        return stack_state
    totals = stack_state.totals
    if old.verdict is not None or row.verdict is not None:
        totals = account(account(totals, old, -1), row, 1)
    if row.is_counted and not old.is_counted:
        totals = add_seconds(totals, row)
    settled = stack_state.settled_totals
    if row.settled and not old.settled:
        settled = add_seconds(account(settled, row, 1), row)
    requests = (*stack_state.requests[:index], row, *stack_state.requests[index + 1 :])
    return replace(stack_state, totals=totals, settled_totals=settled, requests=requests)


def _count_late(stack_state: StackState, now_s: float) -> StackState:
    """Count requests whose log has not come: they shall not be missing for ever."""
    for index, row in enumerate(stack_state.requests):
        waits = not row.is_counted or row.phase == "cancelled"
        if row.verdict is not None and not row.settled and waits and is_late(row, now_s):
            late = judged(stack_state, row, is_late=True)
            stack_state = _with_row(stack_state, index, replace(late, is_counted=True))
    return stack_state


def _rejoin(stack_state: StackState, requests: Iterable[int]) -> StackState:
    """Prove owners by what has come since, and compose and judge anew the requests that it concerns."""
    join, changed = settle(stack_state.join, stack_state.requests)
    if join is not stack_state.join:
        join = claim_warmup(join)
        stack_state = replace(stack_state, join=join, log=replace(stack_state.log, unclaimed_tasks=join.unclaimed))
    # Whatever happens may decide whose the task of a request is that is over.
    waiting = [row.id for row in stack_state.requests if row.is_over and not row.settled]
    for request in dict.fromkeys([*requests, *sorted(changed), *waiting]):
        stack_state = _recompose(stack_state, request)
    return stack_state


def _recompose(stack_state: StackState, request: int) -> StackState:
    return _change_row(stack_state, request, lambda row: judged(stack_state, row))


# --- the log -------------------------------------------------------------------------------------------------------


def _log_fact(stack_state: StackState, event: LogFactSeen) -> StackState:
    if event.run < stack_state.join.run:
        return stack_state  # the last words of a process that is gone
    if event.run > stack_state.join.run:
        stack_state = _new_run(stack_state, event.run)
    fact = event.fact
    join = fold(stack_state.join, fact, stack_state.requests, warming=stack_state.state is State.WARMING)
    if isinstance(fact, facts.SlotReleased):
        join = claim_warmup(join)
    stack_state = replace(
        stack_state,
        join=join,
        log=replace(stack_state.log, facts=stack_state.log.facts + 1, unclaimed_tasks=join.unclaimed),
    )
    stack_state = _note_fact(stack_state, fact, event.time_s)
    match fact:
        case facts.PrefillTimed() | facts.DecodeTimed() | facts.SlotReleased():
            return _rejoin(stack_state, _owner(stack_state, fact.slot, fact.task))
        case facts.TaskLaunched() | facts.PromptStarted() | facts.ReusePoint() | facts.PrefillProgressed():
            for request in _owner(stack_state, fact.slot, fact.task):
                stack_state = _recompose(stack_state, request)
            return stack_state
        case _:
            return stack_state


def _owner(stack_state: StackState, slot: int, task: int) -> list[int]:
    return [
        view.owner
        for view in stack_state.join.tasks
        if view.slot == slot and view.task == task and view.owner is not None
    ]


# --- the server ----------------------------------------------------------------------------------------------------


def _note_fact(stack_state: StackState, fact: facts.LogFact, time_s: float) -> StackState:
    """Keep what a fact says of the server as a whole."""
    counter = _COUNTERS.get(type(fact))
    if counter is not None:
        counted: dict[str, Any] = {counter: getattr(stack_state.totals, counter) + 1}
        return replace(stack_state, totals=replace(stack_state.totals, **counted))
    match fact:
        case facts.ServerWarned() if fact.text not in stack_state.server.warnings:
            warnings = (*stack_state.server.warnings[-(WARNINGS_KEPT - 1) :], fact.text)
            stack_state = replace(stack_state, server=replace(stack_state.server, warnings=warnings))
            return add_notice(stack_state, Notice(time_s, "warning", f"llama-server: {fact.text}"))
        case facts.CacheRamLimited():
            return replace(stack_state, ram_cache=replace(stack_state.ram_cache, limit_bytes=fact.limit_bytes))
        case facts.RamCacheState():
            limit = fact.limit_bytes if fact.limit_bytes is not None else stack_state.ram_cache.limit_bytes
            return replace(stack_state, ram_cache=RamCacheView(fact.prompts, fact.size_bytes, limit))
        case facts.UnknownRecord():
            samples = stack_state.log.drift_samples
            if len(samples) < DRIFT_SAMPLES_KEPT and fact.text not in samples:
                samples = (*samples, fact.text)
            log = replace(stack_state.log, drift=stack_state.log.drift + 1, drift_samples=samples)
            return replace(stack_state, log=log)
        case _:
            server = _note_server(stack_state.server, fact)
            return stack_state if server is stack_state.server else replace(stack_state, server=server)


_COUNTERS: Mapping[type[facts.LogFact], str] = {
    facts.RamCacheHit: "ram_hits",
    facts.RamCacheEvicted: "ram_evictions",
    facts.FullReprocess: "full_reprocesses",
    facts.CheckpointRestored: "checkpoints_restored",
    facts.ContextShifted: "context_shifts",
}
"""Facts that are only counted, and where in the totals."""


def _note_server(server: ServerView, fact: facts.LogFact) -> ServerView:
    match fact:
        case facts.SlotSelected(threshold_ratio=float(threshold)) if threshold != server.similarity_threshold_ratio:
            return replace(server, similarity_threshold_ratio=threshold)
        case facts.SlotsInitialised():
            return replace(
                server,
                slots=fact.slots,
                ctx_per_slot=fact.ctx_per_slot or server.ctx_per_slot,
                kv_unified=server.kv_unified if fact.kv_unified is None else fact.kv_unified,
            )
        case facts.SlotCreated():
            return replace(server, ctx_per_slot=fact.ctx_per_slot)
        case facts.DeviceUsed():
            return replace(server, device=fact.device, device_name=fact.description)
        case facts.LayersOffloaded():
            return replace(server, layers_offloaded=fact.layers, layers_total=fact.layers_total)
        case facts.BufferAllocated():
            key = f"{fact.kind} {fact.device}"
            return replace(
                server, buffers_bytes={**server.buffers_bytes, key: server.buffers_bytes.get(key, 0) + fact.size_bytes}
            )
        case facts.ServerSlept():
            return replace(server, asleep=fact.asleep)
        case _:
            return server
