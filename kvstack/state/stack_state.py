"""
The state of a stack as a whole; `kvstack.state.reducer.reduce` makes new ones.

`kvstack.state.status_json` makes it the JSON of `GET /kvstack/status` and of the `data` in `kvstack status --json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvstack.state.attribution import Join
from kvstack.state.events import Notice
from kvstack.state.lifecycle import State
from kvstack.state.records import (
    LogView,
    ProxyView,
    RamCacheView,
    RequestRow,
    ServerView,
    SlotView,
    Totals,
    WarmupView,
)
from kvstack.state.status_json import INTERNAL
from kvstack.state.totals import SpeedAtContext, decode_by_context

NOTICES_KEPT = 50

WITHOUT_SERVER = frozenset({State.BACKOFF, State.STOPPED, State.FAILED})
"""In these no server lives; the log may still have last words of one."""


@dataclass(frozen=True, slots=True)
class StackState:
    """One stack at one moment."""

    derived: ClassVar = ("decode_by_context",)

    name: str = "?"
    proxy: ProxyView = field(default_factory=ProxyView)
    state: State = State.STARTING
    """Before anything has happened a stack is about to start."""
    reason: str = ""
    state_since_s: float | None = None
    started_s: float | None = None
    restarts: int = 0
    server: ServerView = field(default_factory=ServerView)
    warmup: WarmupView = field(default_factory=WarmupView)
    totals: Totals = field(default_factory=Totals)
    settled_totals: Totals = field(default_factory=Totals, metadata=INTERNAL)
    """The same sums over requests whose verdict is final."""
    prefill_tokens_per_s: float | None = None
    """The prefill rate that this run measured."""
    slots: tuple[SlotView, ...] = ()
    """What each slot holds, as the log of the present run tells it; nothing once its server is gone."""
    requests: tuple[RequestRow, ...] = ()
    ram_cache: RamCacheView = field(default_factory=RamCacheView)
    log: LogView = field(default_factory=LogView)
    join: Join = field(default_factory=Join, metadata=INTERNAL)
    """The attribution's memory."""
    log_lines: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()

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
    def decode_by_context(self) -> tuple[SpeedAtContext, ...]:
        """Decode speed of the remembered requests against context length."""
        return decode_by_context(self.requests)

    def row(self, request: int) -> RequestRow | None:
        """One request by its number, if it is still remembered."""
        return next((row for row in reversed(self.requests) if row.id == request), None)


def add_notice(stack_state: StackState, notice: Notice) -> StackState:
    """Keep something that a person should read."""
    return replace(stack_state, notices=(*stack_state.notices[-(NOTICES_KEPT - 1) :], notice))


def publish_join(stack_state: StackState) -> StackState:
    """Show of the attribution's memory what others read: the slots of a server that lives, and the measured rate."""
    join = stack_state.join
    slots = () if stack_state.state in WITHOUT_SERVER else join.slots
    if slots is stack_state.slots and join.prefill_tokens_per_s == stack_state.prefill_tokens_per_s:
        return stack_state
    return replace(stack_state, slots=slots, prefill_tokens_per_s=join.prefill_tokens_per_s)
