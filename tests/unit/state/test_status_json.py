"""Tests of the codec between the state and its JSON."""

from __future__ import annotations

import json

from kvstack.state.attribution import Join
from kvstack.state.lifecycle import State
from kvstack.state.records import Timing, Tokens
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import decode, encode
from kvstack.state.verdict import Verdict
from kvstack.terminal.dashboard.frame import frame
from tests.golden.terminal.scenes import NOW_S, scenes
from tests.unit.state.story import Story


def _over_the_wire(stack_state: StackState) -> StackState:
    return decode(StackState, json.loads(json.dumps(encode(stack_state))))


def test_the_picture_is_the_same_from_another_terminal() -> None:
    """What `status --watch` draws equals what `up` draws, in every scene."""
    for name, stack_state in scenes().items():
        assert _over_the_wire(stack_state) == stack_state, name
        here = [line.plain for line in frame(stack_state, 200, 60, NOW_S)]
        there = [line.plain for line in frame(_over_the_wire(stack_state), 200, 60, NOW_S)]
        assert there == here, name


def test_derived_values_are_written_and_internal_ones_are_not() -> None:
    """Ratios and speeds are there for programs; what attribution remembers, and the command line, are not."""
    story = Story()
    story.turn(100, 80)
    shape = encode(story.stack_state)
    row = shape["requests"][0]
    assert row["tokens"]["reuse_ratio"] == 0.8
    assert row["lcp_similarity_ratio"] == row["work"]["similarity_ratio"] == 0.8
    assert [(one["slot"], one["is_busy"]) for one in shape["slots"]] == [(0, False)]
    assert [one["up_to_tokens"] for one in shape["decode_by_context"]] == [1024]
    assert not shape.keys() & {"join", "settled_totals"}
    assert not row.keys() & {"answer", "is_counted"}
    assert "argv" not in shape["server"]
    assert _over_the_wire(story.stack_state).join == Join()


def test_another_version_is_read_as_far_as_it_goes() -> None:
    """Unknown, missing and mistyped fields do not keep the rest from being read."""
    data = {"name": "box", "state": "ready", "proxy": {"url": "http://127.0.0.1:1"}, "new": 1, "restarts": "many"}
    data |= {"server": {"pid": 5, "turbo": True, "build": None}, "requests": [{"id": 1, "time_s": 2, "bad": None}]}
    data |= {"log_lines": {"0": "a"}, "totals": {"verdicts": {"HIT": 3, "COLD": True}, "requests": True}}
    stack_state = decode(StackState, data)
    assert (stack_state.name, stack_state.state, stack_state.proxy.url) == ("box", State.READY, "http://127.0.0.1:1")
    assert (stack_state.server.pid, stack_state.server.build, stack_state.restarts) == (5, None, 0)
    assert (stack_state.requests, stack_state.log_lines) == ((), ())
    assert (stack_state.totals.verdicts, stack_state.totals.requests) == ({"HIT": 3}, 0)


def test_values_that_this_version_does_not_know() -> None:
    """What a newer version alone can name is unknown here, and a request that cannot be read is left out."""
    known = {"id": 1, "time_s": 2, "method": "POST", "path": "/x"}
    newer = known | {"id": 2, "verdict": "BRILLIANT", "reason": {"kind": "luck"}, "timing": 7, "tokens": {"cached": 9}}
    newer |= {"change": {"difference": {"cause": "magic", "path": "system", "offset": 1}, "before": 1}}
    data = {"state": "dreaming", "requests": [known | {"verdict": "HIT"}, {"id": "three"}, newer]}
    stack_state = decode(StackState, data)
    first, second = stack_state.requests
    assert (stack_state.state, first.verdict) == (State.STARTING, Verdict.HIT)
    assert (second.verdict, second.reason, second.change.difference, second.change.before) == (None, None, None, 1)
    assert (second.tokens, second.timing) == (Tokens(cached=9), Timing())


def test_nothing_at_all() -> None:
    """An empty object is a stack of which nothing is known."""
    assert decode(StackState, {}) == StackState()
