"""Whatever happens, in whatever order: the picture stays whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstack.state import log_facts as facts
from kvstack.state.attribution import Join
from kvstack.state.causes import Cause
from kvstack.state.events import (
    AnswerSeen,
    Difference,
    Event,
    FirstByteSent,
    LogFactSeen,
    MemorySampled,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    ServerSpawned,
    StateChanged,
    WarmupEnded,
    WarmupJudged,
    WarmupStarted,
    WarmupStepped,
)
from kvstack.state.lifecycle import State
from kvstack.state.log_facts import LogFact
from kvstack.state.records import ProxyView, Totals
from kvstack.state.reducer import reduce
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import decode, encode
from tests.property.budget import examples

NUMBERS = st.integers(1, 6)
TOKENS = st.sampled_from([0, 1, 4, 70, 500, 3000])
MAYBE_TOKENS = st.none() | TOKENS
MS = st.none() | st.sampled_from([0.0, 0.5, 70.0, 500.0])
TIMES = st.just(1.0)
CLOCK_CHANGED = Difference(Cause.CLOCK, "system", 3)

_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "slot": st.integers(0, 2),
    "task": st.sampled_from([0, 7, 14]),
    "how": st.sampled_from(["lcp", "lcs", "lru", "id"]),
    "why": st.sampled_from(["invalidated", "list full", "too close", "superseded"]),
    "kind": st.sampled_from(["model", "kv", "recurrent", "compute", "output"]),
    "text": st.sampled_from(["a", "b"]),
    "family": st.just("slot"),
    "url": st.just("http://x"),
    "device": st.just("Vulkan0"),
    "description": st.just("GPU"),
    "prefill_ms": MS,
    "decode_ms": MS,
}


def _field(name: str, kind: str) -> st.SearchStrategy[object]:
    if name in _FIELDS:
        return _FIELDS[name]
    if "bool" in kind:
        return st.booleans()
    if "float" in kind:
        return st.none() | st.sampled_from([0.0, 0.13, 0.5, 1.0])
    return TOKENS


FACTS: st.SearchStrategy[LogFact] = st.one_of(
    *(
        st.builds(kind, **{name: _field(name, str(kind.__annotations__[name])) for name in kind.__match_args__})
        for kind in vars(facts).values()
        if isinstance(kind, type) and issubclass(kind, LogFact) and kind is not LogFact
    )
)

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        RequestReceived,
        time_s=TIMES,
        id=NUMBERS,
        method=st.just("POST"),
        path=st.just("/x"),
        api=st.sampled_from(["chat", None]),
        client=st.none(),
        conversation=st.sampled_from(["a", "b", None]),
        items=st.integers(0, 3),
        stream=st.booleans(),
        ts_removed=st.integers(0, 2),
        msg_ids_removed=st.integers(0, 2),
        items_modified=st.just(0),
        hits=st.just(()),
        side=st.none() | st.just("title"),
        difference=st.none() | st.just(CLOCK_CHANGED),
    ),
    st.builds(RequestForwarded, TIMES, NUMBERS),
    st.builds(FirstByteSent, TIMES, NUMBERS),
    st.builds(AnswerSeen, NUMBERS, MAYBE_TOKENS, MAYBE_TOKENS, MAYBE_TOKENS, MAYBE_TOKENS, MS, MS),
    st.builds(
        RequestEnded,
        TIMES,
        NUMBERS,
        st.sampled_from([200, 500, None]),
        st.sampled_from(["done", "cancelled", "failed"]),
    ),
    st.builds(LogFactSeen, TIMES, st.integers(1, 2), FACTS),
    st.builds(LogFactSeen, TIMES, st.just(1), FACTS),
    st.builds(ServerSpawned, TIMES, st.just(7), st.just(())),
    st.builds(MemorySampled, st.sampled_from([1.0, 100.0]), TOKENS),
    st.builds(StateChanged, TIMES, st.sampled_from(State), st.just("")),
    st.builds(WarmupStarted, TIMES),
    st.builds(
        WarmupEnded,
        TIMES,
        st.sampled_from(["done", "failed"]),
        MAYBE_TOKENS,
        MAYBE_TOKENS,
        snapshot=st.sampled_from([None, "saved", "restored"]),
    ),
    st.builds(WarmupStepped, TIMES, st.integers(0, 9), st.integers(0, 9)),
    st.builds(WarmupJudged, TIMES, st.booleans(), st.integers(0, 9)),
)


SIZES = st.sampled_from([(500, 70), (500, 500), (3000, 4), (3000, 3000)])
"""Prompt and evaluated tokens: few, so that tasks and answers often agree, and sometimes by accident."""


@st.composite
def request_scripts(draw: st.DrawFn, number: int) -> list[Event]:
    """One request from its receipt to its end, with some steps left out."""
    prompt, new = draw(SIZES)
    timed = draw(st.booleans())
    times = (new * 0.1, 8.0) if timed else (None, None)
    conversation = draw(st.sampled_from(["a", "b", None]))
    difference = draw(st.sampled_from([None, None, CLOCK_CHANGED]))
    received = RequestReceived(
        1.0, number, "POST", "/x", draw(st.sampled_from(["chat", "chat", None])), None, conversation,
        draw(st.integers(1, 6)), False, 1, 1, 1, (), None, difference,
    )  # fmt: skip
    outcome, status = draw(st.sampled_from([("done", 200), ("done", 200), ("cancelled", None), ("failed", 500)]))
    steps: list[Event] = [
        received,
        RequestForwarded(1.1, number),
        FirstByteSent(1.2, number),
        AnswerSeen(number, prompt, prompt - new, new, 4, *times),
        RequestEnded(1.3, number, status, outcome),  # type: ignore[arg-type]
    ]
    return [step for step in steps if draw(st.integers(0, 9)) or isinstance(step, RequestReceived)]


@st.composite
def task_scripts(draw: st.DrawFn, number: int) -> list[Event]:
    """One task's records, with some left out."""
    prompt, new = draw(SIZES)
    slot = draw(st.integers(0, 2))
    similarity = (prompt - new) / prompt
    records: list[LogFact] = [
        facts.SlotSelected(slot, draw(st.sampled_from(["lcp", "lru"])), similarity, 0.1, 1.0),
        facts.TaskLaunched(slot, number),
        facts.PromptStarted(slot, number, prompt),
        facts.ReusePoint(slot, number, prompt - new),
        facts.PrefillTimed(slot, number, new * 0.1, new),
        facts.DecodeTimed(slot, number, 8.0, 4),
        facts.SlotReleased(slot, number, prompt + 3),
    ]
    return [LogFactSeen(1.0, 1, record) for record in records if draw(st.integers(0, 9))]


@st.composite
def warmup_scripts(draw: st.DrawFn) -> list[Event]:
    """A warm-up that somebody asked for while clients are served."""
    prompt, new = draw(SIZES)
    steps: list[Event] = [WarmupStarted(1.0), WarmupEnded(1.2, "done", prompt, new)]
    return [step for step in steps if draw(st.integers(0, 9))]


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Requests and tasks at the same time, and anything else between them."""
    scripts = [draw(request_scripts(number)) for number in range(1, draw(st.integers(1, 6)))]
    scripts += [draw(task_scripts(number)) for number in range(draw(st.integers(0, 6)))]
    scripts += [draw(warmup_scripts()) for _ in range(draw(st.integers(0, 2)))]
    scripts += [[event] for event in draw(st.lists(EVENTS, max_size=6))]
    turns = draw(st.permutations([place for place, script in enumerate(scripts) for _ in script]))
    waiting = [iter(script) for script in scripts]
    return unique([next(waiting[place]) for place in turns])


def unique(events: list[Event]) -> list[Event]:
    """As the proxy numbers them: no request is received twice."""
    seen: set[int] = set()
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RequestReceived):
            if event.id in seen:
                continue
            seen.add(event.id)
        kept.append(event)
    return kept


def _without_internals(stack_state: StackState) -> StackState:
    """What another process can know of *stack_state*."""
    return replace(
        stack_state,
        join=Join(),
        settled_totals=Totals(),
        server=replace(stack_state.server, argv=()),
        requests=tuple(
            replace(
                row,
                answer=None,
                is_counted=False,
                head_fingerprint=None,
                work=None if row.work is None else replace(row.work, claimants=frozenset()),
            )
            for row in stack_state.requests
        ),
    )


@given(histories())
@settings(max_examples=examples(400), deadline=None)
def test_the_picture_stays_whole(events: list[Event]) -> None:
    """Totals are the sums of what is shown, counters never shrink, a task has one owner, ratios are ratios."""
    stack_state = StackState("test", ProxyView("http://127.0.0.1:1"))
    counted, shown = stack_state.counters, stack_state.totals
    for event in events:
        stack_state = reduce(stack_state, event)
        before, counted = counted, stack_state.counters
        assert stack_state.totals.saved_s >= shown.saved_s
        assert stack_state.totals.cost_s >= shown.cost_s
        shown = stack_state.totals
        assert counted.requests >= before.requests
        assert counted.evaluated_tokens >= before.evaluated_tokens
        assert counted.saved_s >= before.saved_s
        assert all(counted.verdicts.get(verdict, 0) >= count for verdict, count in before.verdicts.items())
    judged = [row for row in stack_state.requests if row.verdict is not None and row.api is not None]
    totals = stack_state.totals
    assert totals.requests == len(judged) == sum(totals.verdicts.values())
    known = [row for row in judged if None not in {row.tokens.prompt, row.tokens.cached, row.tokens.evaluated}]
    assert totals.cached_tokens == sum(row.tokens.cached or 0 for row in known)
    assert totals.evaluated_tokens == sum(row.tokens.evaluated or 0 for row in known)
    assert counted.requests <= totals.requests
    for seconds, sums in (("saved_s", totals.saved_s), ("cost_s", totals.cost_s)):
        rows = [getattr(row.timing, seconds) or 0.0 for row in judged if row.is_counted]
        assert sums == pytest.approx(sum(rows))
    owners = [task.owner for task in stack_state.join.tasks if task.owner is not None]
    assert len(owners) == len(set(owners))
    assert not any(task.is_warmup and task.owner is not None for task in stack_state.join.tasks)
    nobodys = [task for task in stack_state.join.tasks if task.owner is None and not (task.is_warmup or task.is_child)]
    assert stack_state.log.unclaimed_tasks >= sum(task.released for task in nobodys)
    assert stack_state.log.unclaimed_tasks >= 0
    for row in stack_state.requests:
        assert (row.verdict is not None) == row.is_over
        for ratio in (row.tokens.reuse_ratio, row.lcp_similarity_ratio):
            assert ratio is None or 0.0 <= ratio <= 1.0
        if row.tokens.prompt is not None:
            assert (row.tokens.cached or 0) + (row.tokens.evaluated or 0) <= row.tokens.prompt
        assert (row.tokens.lost or 0) >= 0
        assert (row.timing.cost_s or 0) >= 0
        assert (row.timing.saved_s or 0) >= 0
    shape = json.loads(json.dumps(encode(stack_state)))
    read = decode(StackState, shape)
    assert read == _without_internals(stack_state)
    assert encode(read) == shape
