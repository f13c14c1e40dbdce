"""
The supervisor under arbitrary children, orders and times: no live child is left, only legal states are seen.

Nothing here is real but the supervisor: time is a number, children are objects.  A rule does one thing and lets the
loop run until it has nothing more to do.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstack.errors import ChildLost, KvstackError, StartFailed
from kvstack.process.contract import Hooks, Launch
from kvstack.process.supervisor import HEALTHY_RUN_S, Supervisor
from kvstack.state.events import Event, ServerSpawned, StateChanged
from kvstack.state.lifecycle import State, may_go
from kvstack.upstream import Health
from tests.fakes.fake_child import Clock, FakeChild, Nowhere

SEEN: set[tuple[State, State]] = set()

CHILDLESS = {State.STOPPED, State.BACKOFF, State.FAILED}


class IdleSelector(selectors.DefaultSelector):
    """Says when a loop would wait for something to happen: then nothing is ready any more."""

    idle: Callable[[], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Do not wait."""
        if timeout != 0:
            self.idle()
        return super().select(0)


class Machine(RuleBasedStateMachine):
    """One stack's life."""

    def __init__(self) -> None:
        super().__init__()
        selector = IdleSelector()
        self.loop = asyncio.SelectorEventLoop(selector)
        selector.idle = self.loop.stop
        self.clock = Clock()
        self.children: list[FakeChild] = []
        self.history: list[State] = [State.STOPPED]
        self.reasons: list[str] = []
        self.health = Health.REFUSED
        self.ours = True
        self.warm_s = 0.0
        self.terms_needed: int | None = 1
        self.end_s = 0.1
        self.can_spawn = True
        self.stop_asked = False
        self.releases = 0
        self.max_restarts = 0
        self.served_s: list[float] = []
        self.backoffs: list[float] = []
        self.error: BaseException | None = None
        self.finished = False
        self.cancelled = False

    @initialize(
        max_restarts=st.integers(0, 3),
        begin=st.sampled_from(["ready", "ready", "ready", "warming", "loading", "stranger", "no binary", "stopped"]),
    )
    def start(self, max_restarts: int, begin: str) -> None:
        """Begin to run, in one of several places: else most lives would end before the first ready."""
        self.max_restarts = max_restarts
        self.can_spawn = begin != "no binary"
        self.ours = begin != "stranger"
        self.warm_s = 10.0 if begin == "warming" else 0.0
        self.health = Health.OK if begin in {"ready", "warming", "stranger"} else Health.REFUSED
        launch = Launch(("llama-server",), ("llama-server",), {}, "127.0.0.1", 1, max_restarts, 600.0, 10.0)
        hooks = Hooks(
            publish=self.publish,
            output=lambda data, run: None,
            health=self.ask_health,
            verify=self.verify,
            warm=self.warm,
            release_upstream=self.release,
            spawned=lambda identity: None,
        )

        async def make() -> Supervisor:
            return Supervisor(
                launch,
                hooks,
                Nowhere(),
                clock=self.clock,
                wall_clock=self.clock,
                sleep=self.clock.sleep,
                spawn=self.spawn,
            )

        self.supervisor = self.loop.run_until_complete(make())
        if begin == "stopped":
            self.stop_asked = True
            self.supervisor.stop("before the start")
        self.task = self.loop.create_task(self.life())
        self.settle()

    # The world that the supervisor sees

    def spawn(self, launch: Launch, run: int) -> FakeChild:
        del launch
        assert not any(child.alive for child in self.children), "a second child beside a live one"
        assert all(child.closed for child in self.children), "a new child before the last one was tidied up"
        assert run == len(self.children) + 1 or not self.can_spawn
        if not self.can_spawn:
            self.children.append(self.ended_child())
            raise OSError(2, "No such file or directory")
        child = FakeChild(len(self.children) + 1, self.clock, self.terms_needed, self.end_s)
        self.children.append(child)
        return child

    def ended_child(self) -> FakeChild:
        child = FakeChild(len(self.children) + 1, self.clock, 1, 0.0)
        child.die(127)
        child.closed = True
        return child

    def publish(self, event: Event) -> None:
        if isinstance(event, StateChanged):
            assert may_go(self.history[-1], event.state), f"{self.history[-1]} -> {event.state}"
            assert event.reason
            if self.history[-1] is State.READY:
                self.served_s.append(self.clock.now_s - self.ready_at_s)
            if event.state is State.READY:
                self.ready_at_s = self.clock.now_s
            if event.state in CHILDLESS:
                assert not any(child.alive for child in self.children), f"a live child in {event.state}"
            if event.state in {State.WARMING, State.READY}:
                assert self.health is Health.OK
                assert self.ours
            SEEN.add((self.history[-1], event.state))
            self.history.append(event.state)
            self.reasons.append(event.reason)
        if isinstance(event, ServerSpawned):
            assert self.history[-1] is State.STARTING

    async def ask_health(self) -> Health:
        return self.health if self.children and self.children[-1].alive else Health.REFUSED

    async def verify(self, pid: int) -> None:
        assert pid == self.children[-1].pid
        if not self.ours:
            raise StartFailed("A foreign server answers", "", "")

    async def warm(self) -> None:
        await self.clock.sleep(self.warm_s)

    async def release(self) -> bool:
        self.releases += 1
        return self.releases % 2 == 0

    async def life(self) -> None:
        try:
            await self.supervisor.run()
        except (KvstackError, asyncio.CancelledError) as error:
            self.error = error
        self.finished = True

    # Time

    def settle(self) -> None:
        """Let the loop run until nothing is ready any more."""
        self.loop.run_forever()
        if self.task.done():
            self.task.result()

    def pass_time(self, wait_s: float) -> None:
        until_s = self.clock.now_s + wait_s
        while (next_s := self.clock.next_s()) is not None and next_s <= until_s:
            self.clock.wake()
            self.settle()
        self.clock.now_s = until_s

    # What may happen

    @rule(wait_s=st.sampled_from([0.05, 0.3, 1.5, 5.0, 30.0]))
    def time_passes(self, wait_s: float) -> None:
        """Some time."""
        self.pass_time(wait_s)

    @rule()
    def long_time_passes(self) -> None:
        """Longer than a stall may last, and than a healthy run must."""
        self.pass_time(HEALTHY_RUN_S + 50)

    @precondition(lambda self: self.supervisor.state is State.LOADING)
    @rule()
    def comes_up(self) -> None:
        """The server becomes healthy."""
        self.health = Health.OK
        self.pass_time(1.1)

    @rule(health=st.sampled_from(Health))
    def health_changes(self, health: Health) -> None:
        """The server becomes healthy, or no longer is."""
        if self.supervisor.state in {State.LOADING, State.STARTING, State.BACKOFF}:
            self.health = health
            self.settle()

    @rule(
        ours=st.booleans(),
        warm_s=st.sampled_from([0.0, 3.0, 10_000.0]),
        terms_needed=st.sampled_from([1, 2, None]),
        end_s=st.sampled_from([0.0, 0.2, 9.9, 10.1, 100.0]),
        can_spawn=st.booleans(),
    )
    def next_child_differs(
        self, ours: bool, warm_s: float, terms_needed: int | None, end_s: float, can_spawn: bool
    ) -> None:
        """The next child has another character."""
        if self.supervisor.state is State.BACKOFF:
            self.ours = ours
            self.can_spawn = can_spawn
        self.warm_s, self.terms_needed, self.end_s = warm_s, terms_needed, end_s

    @precondition(lambda self: self.children and self.children[-1].alive)
    @rule(returncode=st.sampled_from([0, 1, -9, -11, 137]), wait_s=st.sampled_from([0.0, 1.2, 70.0]))
    def child_dies(self, returncode: int, wait_s: float) -> None:
        """The child ends by itself, and some time passes."""
        self.children[-1].die(returncode)
        self.settle()
        self.pass_time(wait_s)

    @precondition(lambda self: self.children and self.children[-1].alive)
    @rule()
    def child_talks(self) -> None:
        """The log grows."""
        self.children[-1].log_bytes += 100

    @rule(patience=st.integers(0, 9))
    def stop(self, patience: int) -> None:
        """Ctrl-C, seldom."""
        if patience == 9:
            nothing_lives = self.supervisor.state is State.BACKOFF
            self.stop_asked = True
            self.supervisor.stop("asked")
            self.settle()
            assert self.finished or not nothing_lives, "a stop waited for a start"

    @rule(patience=st.integers(0, 9))
    def kill(self, patience: int) -> None:
        """Ctrl-C twice, seldom."""
        if patience == 9 or (self.stop_asked and patience > 4):
            self.stop_asked = True
            self.supervisor.kill()
            self.settle()

    @rule(patience=st.integers(0, 9))
    def cancel(self, patience: int) -> None:
        """Another part of kvstack fails, seldom: the supervisor is cancelled, wherever it is."""
        if (patience == 9 or (self.stop_asked and patience > 4)) and not self.finished:
            was_stopping = self.history[-1] is State.STOPPING
            self.cancelled = True
            self.task.cancel()
            self.settle()
            assert self.finished, f"still {self.supervisor.state} after it was cancelled"
            assert self.history[-1] is (State.STOPPED if was_stopping else State.FAILED)

    # What must hold

    @invariant()
    def childless_states(self) -> None:
        """No child lives where none may."""
        if self.history[-1] in CHILDLESS:
            assert not any(child.alive for child in self.children)

    @invariant()
    def one_child(self) -> None:
        """There are never two."""
        assert sum(child.alive for child in self.children) <= 1

    @invariant()
    def outcome(self) -> None:
        """The way it ended fits what happened."""
        if not self.finished:
            assert self.history[-1] is not State.FAILED
            assert self.history[-1] is not State.STOPPED or not self.reasons
            return
        assert all(child.closed for child in self.children)
        was_ready = State.READY in self.history
        if self.cancelled:
            assert isinstance(self.error, asyncio.CancelledError)
        elif self.error is None:
            assert self.stop_asked
            assert self.history[-1] is State.STOPPED
        else:
            assert self.history[-1] is State.FAILED
            assert isinstance(self.error, ChildLost if was_ready else StartFailed)

    @invariant()
    def budget(self) -> None:
        """No more restarts than the budget and the healthy runs allow, and none before the first ready."""
        restarts = self.history.count(State.BACKOFF)
        healthy = sum(served_s >= HEALTHY_RUN_S for served_s in self.served_s)
        assert restarts <= self.max_restarts * (1 + healthy)
        if State.BACKOFF in self.history:
            assert State.READY in self.history[: self.history.index(State.BACKOFF)]

    def teardown(self) -> None:
        """Whatever it was doing: a stop ends it in bounded time, and leaves nothing."""
        if hasattr(self, "supervisor"):
            self.supervisor.stop("teardown")
            self.stop_asked = True
            self.settle()
            self.pass_time(60.0)
            assert self.finished, f"still {self.supervisor.state} a minute after it was asked to stop"
            self.outcome()
            assert not any(child.alive for child in self.children)
            leftovers = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
            assert not leftovers, leftovers
        self.loop.close()


def test_supervisor() -> None:
    """Arbitrary lives keep the promises, and they are not all cut short: the ways that matter most are gone."""
    SEEN.clear()
    run_state_machine_as_test(Machine, settings=settings(max_examples=500, stateful_step_count=30, deadline=None))
    main_road = [State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF, State.STARTING]
    assert set(pairwise(main_road)) <= SEEN
    assert {(State.READY, State.STOPPING), (State.READY, State.FAILED), (State.LOADING, State.FAILED)} <= SEEN
