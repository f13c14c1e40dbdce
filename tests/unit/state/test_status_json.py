"""Tests of reading a Snapshot back from its JSON."""

from __future__ import annotations

import json

from kvstack.state.lifecycle import State
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import snapshot_from_dict
from kvstack.terminal.dashboard.frame import frame
from tests.golden.terminal.scenes import NOW_S, scenes


def _over_the_wire(stack_state: StackState) -> StackState:
    return snapshot_from_dict(json.loads(json.dumps(stack_state.to_dict())))


def test_the_picture_is_the_same_from_another_terminal() -> None:
    """What `status --watch` draws equals what `up` draws, in every scene."""
    for name, stack_state in scenes().items():
        here = [line.plain for line in frame(stack_state, 200, 60, NOW_S)]
        there = [line.plain for line in frame(_over_the_wire(stack_state), 200, 60, NOW_S)]
        assert there == here, name


def test_another_version_is_read_as_far_as_it_goes() -> None:
    """Unknown, missing and mistyped fields do not keep the rest from being read."""
    data = {"name": "box", "state": "ready", "proxy": {"url": "http://127.0.0.1:1"}, "new": 1, "restarts": "many"}
    data |= {"server": {"pid": 5, "turbo": True, "build": None}, "requests": [{"id": 1, "time_s": 2, "bad": None}]}
    stack_state = snapshot_from_dict(data)
    assert (stack_state.name, stack_state.state, stack_state.proxy_url) == ("box", State.READY, "http://127.0.0.1:1")
    assert (stack_state.server.pid, stack_state.server.build, stack_state.restarts) == (5, None, 0)
    assert stack_state.requests == ()


def test_nothing_at_all() -> None:
    """An empty object is a stack of which nothing is known."""
    assert snapshot_from_dict({}) == StackState("?", "?")
