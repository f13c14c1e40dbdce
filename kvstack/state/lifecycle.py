"""
The states of a stack, the legal ways between them, and the back-off.

```
            ┌──────────────────────────────────────────────┐
            v                                              │
stopped -> starting -> loading -> warming -> ready -> stopping -> stopped
               │          │          │         │           ^
               └──────────┴──────────┴─────────┴─> backoff ┤   (died; budget left: -> starting)
                                                     │     │
                                                     └─> failed
```

Each state but `stopped` and `failed` may also go to `stopping`; each that has a child may go to `failed`.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a stack is in its life."""

    STOPPED = "stopped"
    """Nothing runs."""
    STARTING = "starting"
    """The child is being spawned, or the attached server looked for."""
    LOADING = "loading"
    """The child lives and loads the model; `/health` says 503, or refuses."""
    WARMING = "warming"
    """The server is healthy; the prefix is being evaluated."""
    READY = "ready"
    """Requests are served."""
    STOPPING = "stopping"
    """Streams end, then the child."""
    BACKOFF = "backoff"
    """The child died; the next start waits."""
    FAILED = "failed"
    """The stack gave up."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.LOADING, State.BACKOFF, State.STOPPING, State.FAILED}),
    State.LOADING: frozenset({State.WARMING, State.BACKOFF, State.STOPPING, State.FAILED}),
    State.WARMING: frozenset({State.READY, State.BACKOFF, State.STOPPING, State.FAILED}),
    State.READY: frozenset({State.BACKOFF, State.STOPPING, State.FAILED}),
    State.BACKOFF: frozenset({State.STARTING, State.STOPPING, State.FAILED}),
    State.STOPPING: frozenset({State.STOPPED}),
    State.FAILED: frozenset({State.STOPPING, State.STOPPED}),
}
"""Legal next states of each state."""


def may_go(old: State, new: State) -> bool:
    """Whether *new* may follow *old*."""
    return new in TRANSITIONS[old]


def backoff_s(attempt: int, first_s: float = 1.0, cap_s: float = 60.0) -> float:
    """
    How long to wait before restart number *attempt*.

    Args:
        attempt: Counted from 1.
        first_s: Wait before the first restart, in seconds; doubled for each further one.
        cap_s: The longest wait, in seconds.
    """
    if attempt < 1:
        raise ValueError("attempts are counted from 1")
    exponent = min(attempt - 1, 32)
    return float(min(first_s * 2**exponent, cap_s))
