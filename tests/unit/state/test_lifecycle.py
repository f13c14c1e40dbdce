"""The states and the back-off."""

from __future__ import annotations

import pytest

from kvstack.state.lifecycle import TRANSITIONS, State, backoff_s, may_go


def test_every_state_has_its_ways() -> None:
    """The table knows every state, names only known ones, and none follows itself."""
    assert set(TRANSITIONS) == set(State)
    assert all(old not in nexts for old, nexts in TRANSITIONS.items())


def test_names_are_those_of_the_status() -> None:
    """The states are spelled as scripts read them."""
    words = ["stopped", "starting", "loading", "warming", "ready", "backoff", "stopping", "failed"]
    assert {state.value for state in State} == set(words)


@pytest.mark.parametrize("state", [State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF])
def test_stop_is_possible_from_everywhere(state: State) -> None:
    """Every state of a running stack may go to stopping, and to failed."""
    assert may_go(state, State.STOPPING)
    assert may_go(state, State.FAILED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (State.STARTING, State.READY),
        (State.LOADING, State.READY),
        (State.BACKOFF, State.READY),
        (State.READY, State.STARTING),
        (State.STOPPING, State.STARTING),
        (State.STOPPING, State.READY),
        (State.STOPPED, State.READY),
        (State.FAILED, State.STARTING),
    ],
)
def test_short_cuts_are_illegal(old: State, new: State) -> None:
    """Nothing is ready without loading and warming, and nothing comes back from a stop."""
    assert not may_go(old, new)


def test_backoff_doubles_to_a_minute() -> None:
    """The wait doubles from one second to a minute and stays there, however many attempts there are."""
    assert [backoff_s(attempt) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(10**6) == 60
    assert backoff_s(3, first_s=0.5, cap_s=1.5) == 1.5
    with pytest.raises(ValueError, match="counted from 1"):
        backoff_s(0)
