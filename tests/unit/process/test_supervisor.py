"""The supervisor alone, with time and children that do as they are told: one life per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from kvstack.errors import ChildLost, KvstackError, StartFailed
from kvstack.process.contract import Hooks, Launch
from kvstack.process.identity import ProcessIdentity
from kvstack.process.supervisor import HEALTHY_RUN_S, Supervisor
from kvstack.process.watchdog import IDLE, Sample
from kvstack.state.events import Event, MemorySampled, Notice, StateChanged
from kvstack.state.lifecycle import State
from kvstack.upstream import Health
from tests.fakes.fake_child import Clock, FakeChild, Nowhere

ATTACHED = None
LAUNCH = Launch(
    ("llama-server", "--api-key", "x"), ("llama-server", "--api-key", "***"), {}, "127.0.0.1", 1, 3, 600, 10
)


class World:
    """What the supervisor sees, and what it did."""

    def __init__(self, launch: Launch | None = LAUNCH) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.children: list[FakeChild] = []
        self.health = Health.OK
        self.warm_s = 0.0
        self.warmed = 0
        self.verify_error: StartFailed | None = None
        self.spawn_error: OSError | None = None
        self.run_file_error: OSError | None = None
        self.slots: Hashable | None = IDLE
        self.log: list[str] = []
        self.terms_needed: int | None = 1
        self.cuts_off = False
        self.blames: list[str] = []
        hooks = Hooks(
            publish=self.events.append,
            output=lambda data, run: None,
            health=self._health,
            verify=self._verify,
            warm=self._warm,
            release_upstream=self._release,
            spawned=self._spawned,
            busy=self._busy,
            on_death=lambda: self.blames.pop() if self.blames else None,
        )
        self.raw_log = Nowhere()
        self.supervisor = Supervisor(
            launch,
            hooks,
            self.raw_log,
            clock=self.clock,
            wall_clock=self.clock,
            sleep=self.clock.sleep,
            spawn=self._spawn,
        )

    @property
    def states(self) -> list[State]:
        """All states in their order."""
        return [event.state for event in self.events if isinstance(event, StateChanged)]

    @property
    def reason(self) -> str:
        """The last state's reason."""
        return [event.reason for event in self.events if isinstance(event, StateChanged)][-1]

    @property
    def notices(self) -> list[str]:
        """All notices in their order."""
        return [event.text for event in self.events if isinstance(event, Notice)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the supervisor."""
        task = asyncio.create_task(self.supervisor.run())
        try:
            await self.settle()
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, KvstackError):
                await task
            assert not any(child.alive for child in self.children)

    async def settle(self) -> None:
        """Let the loop run until nothing is ready any more."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def wait(self, wait_s: float) -> None:
        """Let time pass."""
        await self.settle()
        until_s = self.clock.now_s + wait_s
        while (next_s := self.clock.next_s()) is not None and next_s <= until_s:
            self.clock.wake()
            await self.settle()
        self.clock.now_s = until_s

    def _spawn(self, launch: Launch, run: int) -> FakeChild:
        assert run == len(self.children) + 1
        if self.spawn_error is not None:
            raise self.spawn_error
        self.children.append(FakeChild(run, self.clock, self.terms_needed, 0.1))
        self.log.append("spawn")
        return self.children[-1]

    async def _health(self) -> Health:
        return self.health

    async def _verify(self, pid: int) -> None:
        self.log.append(f"verify {pid}")
        if self.verify_error is not None:
            raise self.verify_error

    async def _warm(self) -> None:
        self.warmed += 1
        await self.clock.sleep(self.warm_s)

    async def _release(self) -> bool:
        self.log.append(f"release after {self.children[-1].terms if self.children else 0} signals")
        return self.cuts_off

    async def _busy(self) -> Hashable | None:
        return self.slots

    def _spawned(self, identity: ProcessIdentity) -> None:
        self.log.append(f"spawned {identity.pid}")
        if self.run_file_error is not None:
            raise self.run_file_error


async def test_order_of_a_life() -> None:
    """Spawn, note it, verify, warm, serve; at the stop the connections are closed before the first signal."""
    world = World()
    async with world.running() as task:
        await world.wait(1)
        assert world.supervisor.state is State.READY
        world.supervisor.stop("asked by a test")
        world.supervisor.stop("asked again")
        await world.wait(1)
        assert task.done()
    assert world.log == ["spawn", "spawned 1", "verify 1", "release after 0 signals"]
    assert world.warmed == 1
    assert world.states[-2:] == [State.STOPPING, State.STOPPED]
    assert world.reason == "asked by a test"
    assert world.children[0].terms == 1


async def test_stop_before_the_start() -> None:
    """A stop that was asked for before anything ran spawns nothing."""
    world = World()
    world.supervisor.stop("asked")
    async with world.running() as task:
        assert task.done()
    assert world.states == [State.STARTING, State.STOPPING, State.STOPPED]
    assert world.children == []


async def test_loading_has_no_total_limit() -> None:
    """An hour of loading is no stall while the log grows; ten silent minutes are."""
    world = World()
    world.health = Health.LOADING
    async with world.running() as task:
        for _ in range(60):
            world.children[0].log_bytes += 1
            await world.wait(60)
        assert world.supervisor.state is State.LOADING
        await world.wait(535)
        assert not task.done()
        await world.wait(10)
        with pytest.raises(StartFailed, match="stalled"):
            await task
    assert any("waiting up to 600 s" in text for text in world.notices)


@pytest.mark.parametrize("what", ["memory", "disk"])
async def test_memory_and_disk_are_progress(what: str) -> None:
    """A silent load goes on while memory grows or files are read."""
    world = World()
    world.health = Health.REFUSED
    async with world.running() as task:
        for step in range(1, 6):
            grown = step * 10_000_000
            world.children[0].sampled = Sample(grown, 0) if what == "memory" else Sample(0, grown)
            await world.wait(500)
        assert not task.done()


async def test_first_start_is_not_repeated() -> None:
    """A death before the first ready is a failed start, whatever the budget."""
    world = World()
    world.health = Health.LOADING
    async with world.running() as task:
        world.children[0].die(1)
        await world.settle()
        with pytest.raises(StartFailed, match="exited with an error"):
            await task
    assert world.states == [State.STARTING, State.LOADING, State.FAILED]


async def test_death_while_warming() -> None:
    """A death during the first warm-up is a failed start as well: nobody has been served."""
    world = World()
    world.warm_s = 100
    async with world.running() as task:
        await world.wait(1)
        assert world.supervisor.state is State.WARMING
        world.children[0].die(-11)
        await world.settle()
        with pytest.raises(StartFailed, match="crashed"):
            await task
    assert world.states[-2:] == [State.WARMING, State.FAILED]


@pytest.mark.parametrize("state", [State.WARMING, State.READY])
async def test_a_death_that_was_something_elses_fault_does_not_count(state: State) -> None:
    """The next start is another one: the first has not failed, and no restart is used up; the next death counts."""
    world = World()
    world.warm_s = 100 if state is State.WARMING else 0
    async with world.running() as task:
        await world.wait(1)
        assert world.supervisor.state is state
        world.blames = ["it died of a snapshot"]
        world.children[0].die(-11)
        await world.settle()
        assert world.supervisor.state is State.BACKOFF
        assert "it died of a snapshot" in world.notices[-1]
        world.warm_s = 0
        await world.wait(1.5)
        assert world.supervisor.state is State.READY
        assert world.supervisor.restarts == 1
        world.children[1].die(-11)
        await world.settle()
        assert "restart 1 of 3" in world.reason
        assert not task.done()


async def test_a_stop_is_not_somebodys_fault() -> None:
    """Nobody is blamed for a server that ends because it was asked to."""
    world = World()
    world.blames = ["x"]
    async with world.running() as task:
        await world.wait(1)
        world.supervisor.stop("asked")
        await world.wait(1)
        assert task.done()
    assert world.blames == ["x"]


async def test_a_server_that_died_of_its_warm_up_was_never_ready() -> None:
    """The warm-up's connection breaks before the child's end is seen: no moment of service in between."""
    world = World()
    world.warm_s = 5
    async with world.running() as task:
        await world.wait(1)
        world.health = Health.REFUSED
        await world.wait(5)
        assert world.supervisor.state is State.WARMING
        world.children[0].die(-6)
        await world.settle()
        with pytest.raises(StartFailed):
            await task
    assert State.READY not in world.states


async def test_budget_is_used_up() -> None:
    """Three restarts with growing waits, each warmed again; the fourth death ends the stack."""
    world = World()
    async with world.running() as task:
        for used, wait_s in enumerate([1, 2, 4], start=1):
            await world.wait(0.5)
            assert world.supervisor.state is State.READY
            world.children[-1].die(-9)
            await world.settle()
            assert world.supervisor.state is State.BACKOFF
            assert f"restart {used} of 3 in {wait_s} s" in world.reason
            await world.wait(wait_s - 0.1)
            assert len(world.children) == used
            await world.wait(0.2)
            assert len(world.children) == used + 1
        await world.wait(0.5)
        world.children[-1].die(-9)
        await world.settle()
        with pytest.raises(ChildLost) as caught:
            await task
    assert "all 3 restarts are used up; SIGKILL" in caught.value.fact
    assert world.warmed == 4
    assert world.supervisor.restarts == 3
    assert [event.restarts for event in world.events if isinstance(event, StateChanged)][-1] == 3


async def test_long_service_gives_the_budget_back() -> None:
    """A server that died after long service has not exited too quickly: full budget, short wait."""
    world = World()
    async with world.running():
        for _ in range(6):
            await world.wait(HEALTHY_RUN_S + 5)
            assert world.supervisor.state is State.READY
            world.children[-1].die(1)
            await world.settle()
            assert "restart 1 of 3 in 1 s" in world.reason
            assert "after 10 min of service" in world.reason
            await world.wait(1.5)


async def test_no_restart_allowed() -> None:
    """With a budget of 0 the first death is the end."""
    world = World(replace(LAUNCH, max_restarts=0))
    async with world.running() as task:
        await world.wait(1)
        world.children[0].die(139)
        await world.settle()
        with pytest.raises(ChildLost) as caught:
            await task
    assert world.states[-2:] == [State.READY, State.FAILED]
    assert caught.value.fact.startswith("server.max_restarts is 0; exit status 139 (SIGSEGV)")


async def test_restart_that_cannot_be_spawned() -> None:
    """A binary that is gone at a restart takes from the budget, and may be back at the next one."""
    world = World()
    async with world.running():
        await world.wait(1)
        world.spawn_error = FileNotFoundError(2, "No such file or directory")
        world.children[0].die(1)
        await world.wait(1.2)
        assert world.states[-3:] == [State.BACKOFF, State.STARTING, State.BACKOFF]
        assert "could not be started, before it was ready again: restart 2 of 3" in world.reason
        world.spawn_error = None
        world.children.append(FakeChild(2, world.clock, 1, 0))  # the number of the run that could not be
        world.children[-1].die(1)
        await world.wait(3)
        assert world.supervisor.state is State.READY
        assert world.supervisor.restarts == 2


async def test_first_spawn_fails() -> None:
    """A binary that cannot be run at all is a failed start without a child."""
    world = World()
    world.spawn_error = PermissionError(13, "Permission denied")
    async with world.running() as task:
        with pytest.raises(StartFailed) as caught:
            await task
    assert caught.value.fact == "llama-server: Permission denied"
    assert world.states == [State.STARTING, State.FAILED]


async def test_stranger_on_the_port() -> None:
    """If the server that answers is not ours, our child is ended and the reason is the hook's."""
    world = World()
    world.verify_error = StartFailed("Another server answers", "pid 7", "End it.")
    async with world.running() as task:
        await world.wait(2)
        with pytest.raises(StartFailed, match="Another server answers"):
            await task
    assert State.WARMING not in world.states


async def test_stall_while_warming() -> None:
    """A warm-up in which nothing moves is a stall like any other."""
    world = World()
    world.warm_s = 100_000
    async with world.running() as task:
        await world.wait(620)
        with pytest.raises(StartFailed, match="stalled"):
            await task


async def test_full_disk_does_not_end_it() -> None:
    """A run file that cannot be written is told, and the server goes on."""
    world = World()
    world.run_file_error = OSError(28, "No space left on device")
    async with world.running():
        await world.wait(1)
        assert world.supervisor.state is State.READY
    assert any("No space left on device" in text for text in world.notices)


async def test_lossy_raw_log_is_told_once() -> None:
    """A raw log that cannot be written is told, once, and the server goes on."""
    world = World()
    async with world.running():
        await world.wait(10)
        assert not [text for text in world.notices if "raw log" in text]
        for lost_bytes in (100, 5000):
            world.raw_log.lost_bytes = lost_bytes
            await world.wait(10)
        assert world.supervisor.state is State.READY
    assert len([text for text in world.notices if "raw log cannot be written" in text]) == 1


async def test_hang_is_told_once() -> None:
    """A busy slot that stands still is told once; when it moves again, the next hang is told anew."""
    world = World()
    async with world.running():
        await world.wait(1)
        for _ in range(2):
            world.slots = ("task 7", 100)
            await world.wait(400)
            world.slots = ("task 7", 101)
            await world.wait(30)
        assert world.supervisor.state is State.READY
    told = [text for text in world.notices if "made no progress" in text]
    assert len(told) == 2
    assert "server.watchdog = true" in told[0]


@pytest.mark.parametrize("slots", [("task 7", 100), None])
async def test_watchdog_restarts(slots: Hashable | None) -> None:
    """With the watchdog a hang ends the child and takes a restart."""
    world = World(replace(LAUNCH, watchdog=True))
    async with world.running():
        await world.wait(1)
        world.slots = slots
        await world.wait(170)
        assert len(world.children) == 1
        await world.wait(60)
        world.slots = IDLE
        assert len(world.children) == 2
        assert world.supervisor.state is State.READY
        assert not world.children[0].alive
        assert world.children[0].terms == 1  # asked, not shot
        assert "release after 0 signals" in world.log


async def test_stop_during_backoff() -> None:
    """A stop that comes while the next start waits does not wait for it."""
    world = World()
    async with world.running() as task:
        await world.wait(1)
        world.children[0].die(1)
        await world.wait(0.1)
        assert world.supervisor.state is State.BACKOFF
        world.supervisor.stop("asked")
        await world.settle()
        assert task.done()
    assert world.states[-3:] == [State.BACKOFF, State.STOPPING, State.STOPPED]
    assert len(world.children) == 1


async def test_work_is_no_hang() -> None:
    """A slot that gets on, however slowly, and one that is idle for hours, are well."""
    world = World(replace(LAUNCH, watchdog=True))
    async with world.running():
        for step in range(20):
            world.slots = ("task 7", step)
            await world.wait(120)
        world.slots = IDLE
        await world.wait(5_000)
        assert len(world.children) == 1
        assert not [text for text in world.notices if "progress" in text]


@pytest.mark.parametrize(("terms_needed", "signals", "took_s"), [(1, 1, 0.1), (2, 2, 10.1), (None, 2, 12.0)])
async def test_stop_ladder(terms_needed: int | None, signals: int, took_s: float) -> None:
    """SIGTERM, after stop_timeout_s another one, two seconds later SIGKILL; never longer than needed."""
    world = World()
    world.terms_needed = terms_needed
    async with world.running() as task:
        await world.wait(1)
        began_s = world.clock.now_s
        world.supervisor.stop("asked")
        while not task.done():
            await world.wait(0.05)
        assert world.clock.now_s - began_s == pytest.approx(took_s, abs=0.15)
    assert world.children[0].terms == signals
    assert not world.children[0].alive


async def test_server_notices_before_the_signal() -> None:
    """After requests were cut off the server gets a good second to notice that, before it is asked to end."""
    world = World()
    world.cuts_off = True
    async with world.running() as task:
        await world.wait(1)
        world.supervisor.stop("asked")
        await world.wait(1.1)
        assert world.children[0].terms == 0
        await world.wait(0.2)
        assert world.children[0].terms == 1
        await world.wait(0.2)
        assert task.done()


async def test_memory_events() -> None:
    """Memory is published every two seconds for as long as the child lives."""
    world = World()
    async with world.running():
        world.children[0].sampled = Sample(rss_bytes=123)
        await world.wait(20.5)
    sampled = [event for event in world.events if isinstance(event, MemorySampled)]
    assert [event.rss_bytes for event in sampled] == [123] * 10
    assert sampled[1].time_s - sampled[0].time_s == pytest.approx(2.0)


async def test_cancelled_from_outside() -> None:
    """A cancelled supervisor leaves no child and no state that claims one."""
    world = World()
    async with world.running() as task:
        await world.wait(1)
        task.cancel()
        await world.settle()
        assert task.cancelled()
        assert not world.children[0].alive
    assert world.states[-1] is State.FAILED


async def test_cancelled_while_stopping() -> None:
    """A cancellation in the middle of an orderly stop ends the child at once, and the stack is stopped."""
    world = World()
    world.terms_needed = None
    async with world.running() as task:
        await world.wait(1)
        world.supervisor.stop("asked")
        await world.wait(1)
        assert world.supervisor.state is State.STOPPING
        assert world.children[0].alive
        task.cancel()
        await world.settle()
        assert task.cancelled()
        assert not world.children[0].alive
    assert world.states[-1] is State.STOPPED


async def test_wait_ready() -> None:
    """Who waits for ready gets it, or is sent away in time, or at once where it will not come any more."""
    world = World()
    world.health = Health.LOADING
    async with world.running():
        patient = asyncio.create_task(world.supervisor.wait_ready(100))
        hasty = asyncio.create_task(world.supervisor.wait_ready(1))
        await world.wait(2)
        assert hasty.done()
        assert not hasty.result()
        world.health = Health.OK
        await world.wait(2)
        assert patient.done()
        assert patient.result()
        assert await world.supervisor.wait_ready(0)
        world.supervisor.stop("asked")
        await world.settle()
        assert not await world.supervisor.wait_ready(100)
        await world.wait(5)
        assert not await world.supervisor.wait_ready(100)


async def test_attached_life() -> None:
    """Attached, nothing is spawned; a server that goes away is waited for and warmed again."""
    world = World(ATTACHED)
    async with world.running() as task:
        await world.wait(1)
        assert world.supervisor.state is State.READY
        world.health = Health.REFUSED
        await world.wait(10)
        assert world.supervisor.state is State.BACKOFF
        await world.wait(1000)
        assert world.supervisor.state is State.BACKOFF
        world.health = Health.LOADING
        await world.wait(3)
        assert world.supervisor.state is State.LOADING
        world.health = Health.OK
        await world.wait(3)
        assert world.supervisor.state is State.READY
        assert world.warmed == 2
        world.supervisor.stop("asked")
        await world.wait(1)
        assert task.done()
    assert world.children == []
    assert world.log == ["verify 0", "verify 0", "release after 0 signals"]
    assert world.states[-2:] == [State.STOPPING, State.STOPPED]


@pytest.mark.parametrize(
    ("health", "fact"), [(Health.REFUSED, "connection refused"), (Health.ERROR, "not a llama-server's")]
)
async def test_nothing_to_attach_to(health: Health, fact: str) -> None:
    """A server to attach to that is not there is a failed start after some seconds."""
    world = World(ATTACHED)
    world.health = health
    async with world.running() as task:
        await world.wait(9)
        assert not task.done()
        await world.wait(2)
        with pytest.raises(StartFailed) as caught:
            await task
    assert fact in caught.value.fact


async def test_attached_server_may_load() -> None:
    """A server to attach to that still loads its model is waited for."""
    world = World(ATTACHED)
    world.health = Health.LOADING
    async with world.running() as task:
        await world.wait(1000)
        assert not task.done()
        assert world.supervisor.state is State.LOADING


async def test_what_an_attached_server_does_is_told() -> None:
    """Waiting for a server that refuses is not called loading; each change of what it does is told once."""
    world = World(ATTACHED)
    world.health = Health.REFUSED
    async with world.running():
        await world.wait(3)
        assert world.reason == "nothing answers (connection refused), trying for up to 10 s"
        world.health = Health.LOADING
        await world.wait(3)
        assert world.reason == "it is loading its model"
        assert world.states == [State.STARTING, State.LOADING, State.LOADING, State.LOADING]
        world.health = Health.OK
        await world.wait(3)
        assert world.supervisor.state is State.READY
        # It was there once: from now on it is waited for without an end.
        world.health = Health.REFUSED
        await world.wait(10)
        assert world.supervisor.state is State.BACKOFF
        assert world.reason == "the server does not answer"


async def test_one_missed_answer_is_no_loss() -> None:
    """An attached server that misses one or two questions stays ready."""
    world = World(ATTACHED)
    async with world.running():
        await world.wait(1)
        for _ in range(5):
            world.health = Health.ERROR
            await world.wait(4)
            world.health = Health.OK
            await world.wait(4)
        assert world.supervisor.state is State.READY
        assert State.BACKOFF not in world.states
