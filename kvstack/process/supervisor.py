"""
The life of the llama-server: started, loaded, warmed, watched, started again, stopped.

`Supervisor` is the one writer of the stack's state.  What it promises, per state:

```
starting   no child yet, or one that was spawned in this moment
loading    a child lives; /health is asked until it says 200, as long as anything of the child moves
warming    the server is healthy and is our own child; no client's request goes to it yet
ready      requests are served; the child's exit, and a slot that hangs, are watched for
backoff    no child lives; the next start waits
stopping   the child is asked to end, asked again, ended
stopped    no child lives, nor anything that it started
failed     the same, and there will be no other
```

A child that dies before the stack was ready for the first time is not started again: nobody has been served yet, a
person is waiting, and what is wrong (a bad model, a bad flag, a port in use) would be wrong again.  After that, each
death takes one restart from the budget `max_restarts`; a server that was ready for `HEALTHY_RUN_S` gives it back.

Attached to a server that is somebody else's, nothing is spawned or stopped and no budget counts: while it is away the
stack is in `backoff`, and when it comes back it is warmed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from kvstack.core.events import Event, MemorySampled, Notice, ServerSpawned, StateChanged
from kvstack.core.lifecycle import State, backoff_s, may_go
from kvstack.errors import ChildLost, KvstackError, StartFailed
from kvstack.process.child import Child, Remains
from kvstack.process.death import Death, explain, is_telling
from kvstack.process.identity import ProcessIdentity
from kvstack.process.pipes import RawSink
from kvstack.process.watch import HangWatch, Progress, Sample
from kvstack.upstream import Health

__all__ = ["HEALTHY_RUN_S", "Hooks", "Launch", "Process", "Supervisor"]

HEALTHY_RUN_S = 600.0
"""How long a server must have been ready for its death to count as the first one again, in seconds."""

SAMPLE_S = 2.0
WATCH_S = 10.0
ATTACH_WATCH_S = 2.0
ATTACH_PATIENCE_S = 10.0
ATTACH_MISSES = 3
SECOND_TERM_S = 2.0
KILL_S = 5.0
CLOSE_S = 2.0
RELEASE_S = 6.0
ATTACH_RELEASE_S = 60.0
SAY_SILENT_S = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """
    What to start, and how patiently.

    Attributes:
        argv: Program and arguments.
        display: The same with secrets masked.
        env: The child's whole environment.
        host: Address that it will listen on.
        port: Port that it will listen on.
        max_restarts: Budget of restarts.
        stall_timeout_s: How long a start may show no progress, in seconds.
        stop_timeout_s: How long the child gets to end by itself, in seconds.
        watchdog: Whether a server that hangs is started again.
        hang_timeout_s: How long a busy slot may make no progress, in seconds.
    """

    argv: tuple[str, ...]
    display: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    max_restarts: int
    stall_timeout_s: float
    stop_timeout_s: float
    watchdog: bool = False
    hang_timeout_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """
    What the supervisor asks of the rest of the stack.

    Attributes:
        publish: Takes an event.
        output: Takes whole lines of the child's output, and the run's number.
        health: Asks `/health`.
        verify: Gets the child's pid (0 where attached); raises StartFailed if the server that answers is not ours, or
            is not what the config asks for.
        warm: Warms up; a failed warm-up is the hook's to report.
        release_upstream: Closes the connections to the server: with a request in flight it would not follow a SIGTERM.
            May let them end by themselves for `stop_timeout_s` first.
        spawned: Takes the new child's identity.
        busy: Tells of the slots, see `kvstack.process.watch.HangWatch.observe`; None if nobody can.
    """

    publish: Callable[[Event], None]
    output: Callable[[bytes, int], None]
    health: Callable[[], Awaitable[Health]]
    verify: Callable[[int], Awaitable[None]]
    warm: Callable[[], Awaitable[None]]
    release_upstream: Callable[[], Awaitable[None]]
    spawned: Callable[[ProcessIdentity], None]
    busy: Callable[[], Awaitable[Hashable | None]] | None = None


class Process(Protocol):
    """
    What the supervisor needs of a child; `kvstack.process.child.Child` is one.
    """

    pid: int
    identity: ProcessIdentity
    exited: asyncio.Future[int]

    @property
    def log_bytes(self) -> int:
        """
        Output so far, in bytes.
        """

    async def sample(self) -> Sample | None:
        """
        Look at it.
        """

    async def refresh(self) -> None:
        """
        Find all that it has started.
        """

    def terminate(self) -> None:
        """
        Ask it to end.
        """

    def kill(self) -> None:
        """
        End it.
        """

    async def gone(self) -> None:
        """
        Wait until it and all that it started have ended.
        """

    async def close(self, timeout_s: float) -> Remains:
        """
        Tidy up after it.
        """


class _StopAsked(Exception):
    """Somebody called `stop`."""


class _Exited(Exception):
    """The child has ended."""


class _Unwell(Exception):
    """The child lives, but must not go on."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.what)
        self.death = death


class Supervisor:
    """
    The single writer of the stack's state.

    Attributes:
        state: Where the stack is.
        restarts: How often the server was started again.
    """

    def __init__(
        self,
        launch: Launch | None,
        hooks: Hooks,
        raw_log: RawSink,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spawn: Callable[[Launch, int], Process] | None = None,
        attach_patience_s: float = ATTACH_PATIENCE_S,
    ) -> None:
        """
        Nothing starts before `run`.

        Args:
            launch: What to start; None to attach to a server that runs already.
            hooks: The rest of the stack.
            raw_log: Gets every byte of the child's output.
            clock: Monotonic seconds.
            wall_clock: Seconds since the epoch, for events.
            sleep: Waits some seconds of *clock*.
            spawn: Starts a child; default: a real one.
            attach_patience_s: How long the server to attach to may be away at the start, in seconds.
        """
        self.state = State.STOPPED
        self.restarts = 0
        self._launch = launch
        self._hooks = hooks
        self._raw_log = raw_log
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._spawn = spawn or self._spawn_child
        self._attach_patience_s = attach_patience_s
        self._release_timeout_s = RELEASE_S + (launch.stop_timeout_s if launch is not None else ATTACH_RELEASE_S)
        self._changed = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._stop_reason = ""
        self._kill_asked = asyncio.Event()
        self._was_ready = False
        self._ready_at_s: float | None = None

    async def run(self) -> None:
        """
        Go from `starting` to `stopped`.

        Raises:
            StartFailed: The stack was never ready.
            ChildLost: The server died and the budget is used up.
        """
        try:
            await (self._attached() if self._launch is None else self._supervised(self._launch))
        except _StopAsked:
            if self.state is not State.STOPPING:
                self._go(State.STOPPING, self._stop_reason)
                await self._release()
            self._go(State.STOPPED, self._stop_reason)
        except KvstackError as error:
            self._go(State.FAILED, error.what)
            raise
        except BaseException:  # cancelled, or a fault of our own; no child lives any more
            self._go(State.FAILED, "another part of kvstack failed")
            raise

    async def wait_ready(self, timeout_s: float) -> bool:
        """
        Wait until requests are served.

        Args:
            timeout_s: How long to wait, in seconds.

        Returns:
            False if that took too long, or if it will not happen any more.
        """
        deadline = asyncio.ensure_future(self._nap(timeout_s))
        try:
            while self.state is not State.READY:
                if deadline.done() or self.state in {State.STOPPING, State.FAILED} or self._over():
                    return False
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({changed, deadline}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _cancel(changed)
            return True
        finally:
            await _cancel(deadline)

    def stop(self, reason: str) -> None:
        """
        Begin the orderly stop; later calls change nothing.

        Args:
            reason: Why, in a few words.
        """
        if not self._stop_asked.is_set():
            self._stop_reason = reason
            self._stop_asked.set()

    def kill(self) -> None:
        """
        End the child now, without asking it.
        """
        self.stop("killed")
        self._kill_asked.set()

    # The states

    async def _supervised(self, launch: Launch) -> NoReturn:
        reason = "start"
        used = 0
        run = 0
        while True:
            run += 1
            self._ready_at_s = None
            self._go(State.STARTING, reason)
            death = await self._one_child(launch, run)
            self._check_stop()
            if not self._was_ready:
                raise StartFailed(death.what, death.fact, death.next_step)
            ready_s = self._ready_for_s()
            if ready_s is not None and ready_s >= HEALTHY_RUN_S:
                used = 0
            if used >= launch.max_restarts:
                raise ChildLost(death.what, _with_budget(death.fact, launch.max_restarts), death.next_step)
            used += 1
            wait_s = backoff_s(used)
            after = "before it was ready again" if ready_s is None else f"after {_span(ready_s)} of service"
            reason = f"{death.what}, {after}: restart {used} of {launch.max_restarts}"
            self._notice("error", f"{reason} ({_one_line(death.fact)})" if death.fact else reason)
            self._go(State.BACKOFF, f"{reason} in {wait_s:g} s")
            await self._unless_stopped(self._nap(wait_s))
            self.restarts += 1

    async def _one_child(self, launch: Launch, run: int) -> Death:
        """From the spawn of one child to its end, which is described; no child lives afterwards."""
        self._check_stop()
        try:
            child = self._spawn(launch, run)
        except OSError as error:
            return Death(
                "llama-server could not be run",
                f"{launch.argv[0]}: {error.strerror or error}",
                "Check server.binary: it must be a program for this machine, with its executable bit set.",
            )
        closed = False
        try:
            self._hooks.publish(ServerSpawned(self._wall_clock(), child.pid, launch.display))
            try:
                self._hooks.spawned(child.identity)
            except OSError as error:  # a full disk must not end a server that runs
                self._notice("warning", f"The run file cannot be written: {error.strerror or error}")
            death: Death | None = None
            try:
                await self._serve(launch, child)
            except _Exited:
                pass
            except _Unwell as unwell:
                death = unwell.death
                await self._end(child, SECOND_TERM_S)
            except _StopAsked:
                self._go(State.STOPPING, self._stop_reason)
                await self._end(child, launch.stop_timeout_s)
                closed = True
                self._check_remains(await child.close(CLOSE_S))
                raise
            except StartFailed as error:  # the server that answers is not ours, or not what the config asks for
                await self._end(child, launch.stop_timeout_s)
                death = Death(error.what, error.fact, error.next_step)
            closed = True
            remains = await child.close(CLOSE_S)
            self._check_remains(remains)
            return death or self._explain(remains)
        finally:
            if not closed:  # cancelled, or a fault of our own: whatever it is, no child stays behind
                child.kill()
                await child.close(CLOSE_S)

    async def _serve(self, launch: Launch, child: Process) -> NoReturn:
        progress = Progress(launch.stall_timeout_s, self._clock())
        observer = asyncio.ensure_future(self._observe(child, progress))
        try:
            self._go(State.LOADING, "the model is being loaded")
            await self._during(child, observer, self._until_healthy())
            await self._during(child, observer, self._hooks.verify(child.pid))
            self._go(State.WARMING, "the prefix is being evaluated")
            await self._during(child, observer, self._hooks.warm())
            self._was_ready = True
            self._ready_at_s = self._clock()
            self._go(State.READY, "serving")
            await self._during(child, observer, self._watch(launch))
            raise AssertionError("the watch over a ready server ends only with it")
        finally:
            await _cancel(observer)

    async def _attached(self) -> NoReturn:
        reason = "attach"
        while True:
            self._go(State.STARTING, reason)
            self._go(State.LOADING, "waiting for the server")
            await self._unless_stopped(self._until_attached())
            await self._unless_stopped(self._hooks.verify(0))
            self._go(State.WARMING, "the prefix is being evaluated")
            await self._unless_stopped(self._hooks.warm())
            self._was_ready = True
            self._go(State.READY, "serving")
            await self._unless_stopped(self._until_missed())
            self._notice("error", "The server does not answer any more: waiting until it is back")
            self._go(State.BACKOFF, "the server does not answer")
            await self._unless_stopped(self._until_back())
            self.restarts += 1
            reason = "the server is back"

    # What happens within a state

    async def _until_healthy(self) -> None:
        began_s = self._clock()
        while await self._hooks.health() is not Health.OK:
            waited_s = self._clock() - began_s
            await self._sleep(0.05 if waited_s < 2 else 0.25 if waited_s < 30 else 1.0)

    async def _until_attached(self) -> None:
        began_s = self._clock()
        while (health := await self._hooks.health()) is not Health.OK:
            waited_s = self._clock() - began_s
            if not self._was_ready and health is not Health.LOADING and waited_s >= self._attach_patience_s:
                raise StartFailed(
                    "The server to attach to does not answer",
                    f"/health was asked for {waited_s:.0f} s: "
                    + ("nobody listens there" if health is Health.REFUSED else "no answer of a llama-server came"),
                    "Start that server, or correct server.url.",
                )
            await self._sleep(0.5)

    async def _until_missed(self) -> None:
        misses = 0
        while misses < ATTACH_MISSES:
            await self._sleep(ATTACH_WATCH_S)
            # A server at work answers /health all the same: it has threads for that.
            misses = 0 if await self._hooks.health() is Health.OK else misses + 1

    async def _until_back(self) -> None:
        while await self._hooks.health() in {Health.REFUSED, Health.ERROR}:
            await self._sleep(ATTACH_WATCH_S)

    async def _watch(self, launch: Launch) -> None:
        hang = HangWatch(launch.hang_timeout_s)
        told = False
        pause_s = min(WATCH_S, launch.hang_timeout_s / 4)
        while True:
            await self._sleep(pause_s)
            mark = await self._hooks.busy() if self._hooks.busy is not None else await self._alive_mark()
            trouble = hang.observe(self._clock(), mark)
            if trouble is None:
                told = False
            elif launch.watchdog:
                raise _Unwell(
                    Death(trouble, "", "If it happens again, look at `kvstack logs` and at the kernel's log.")
                )
            elif not told:
                told = True
                self._notice("error", f"{trouble} (set server.watchdog = true to have it restarted)")

    async def _alive_mark(self) -> Hashable | None:
        # Without a look at the slots: an answer of any kind is a sign of life, and a new one each time.
        return object() if await self._hooks.health() is Health.OK else None

    async def _observe(self, child: Process, progress: Progress) -> None:
        told_s = progress.since_s
        pause_s = min(SAMPLE_S, progress.timeout_s / 4)
        while True:
            await self._sleep(pause_s)
            sample = await child.sample()
            now_s = self._clock()
            if sample is not None:
                self._hooks.publish(MemorySampled(self._wall_clock(), sample.rss_bytes))
            if self.state not in {State.LOADING, State.WARMING}:
                continue
            if progress.observe(now_s, child.log_bytes, sample):
                raise _Unwell(_stall(progress, now_s))
            told_s = max(told_s, progress.since_s)
            if now_s - told_s >= SAY_SILENT_S:
                told_s = now_s
                self._notice(
                    "warning",
                    f"{self.state.value}: {progress.describe(now_s)}; "
                    f"given up after {progress.timeout_s:g} s (shaders of a new build or driver take minutes)",
                )

    # The end of a child

    async def _end(self, child: Process, patience_s: float) -> None:
        """Ask, ask again, end: returns when the child is gone, or when nothing more can be done."""
        await self._within(child.refresh(), CLOSE_S)
        if not self._kill_asked.is_set():
            # Before the first signal: a server that is asked to end waits for its clients.
            await self._release()
            for wait_s in (patience_s, SECOND_TERM_S):
                child.terminate()
                if await self._within(child.gone(), wait_s):
                    return
                if self._kill_asked.is_set():
                    break
        child.kill()
        if not await self._within(child.gone(), KILL_S, killable=False):
            self._notice(
                "error", f"llama-server (pid {child.pid}) does not end: the kernel holds it, perhaps in a driver"
            )

    async def _release(self) -> None:
        await self._within(self._hooks.release_upstream(), self._release_timeout_s)

    def _check_remains(self, remains: Remains) -> None:
        if remains.dropped_bytes:
            self._notice("warning", f"{remains.dropped_bytes} bytes of log came too fast to be shown: see the raw log")
        if remains.survivors:
            self._notice("error", f"These processes could not be ended: {', '.join(map(str, remains.survivors))}")

    def _explain(self, remains: Remains) -> Death:
        telling = remains.telling_lines
        if self._ready_at_s is not None:
            # What it complained about long ago is not what it died of.
            telling = tuple(line for line in remains.last_lines if is_telling(line))
        return explain(
            remains.returncode,
            remains.last_lines,
            telling,
            out_of_memory=remains.out_of_memory,
            left_behind=remains.left_behind,
        )

    # Waiting

    async def _during(self, child: Process, observer: asyncio.Future[None], work: Awaitable[None]) -> None:
        """Do *work* as long as the child lives, moves, and nobody asks to stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            waited: set[asyncio.Future[Any]] = {task, stop, observer, child.exited}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._check_stop()
            if child.exited.done():
                raise _Exited
            if observer.done():
                observer.result()
            task.result()
        finally:
            await _cancel(task)
            await _cancel(stop)

    async def _unless_stopped(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop_asked.wait())
        try:
            waited: set[asyncio.Future[Any]] = {task, stop}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._check_stop()
            task.result()
        finally:
            await _cancel(task)
            await _cancel(stop)

    async def _within(self, work: Awaitable[None], wait_s: float, *, killable: bool = True) -> bool:
        """Whether *work* was done in time, and before somebody lost patience."""
        task = asyncio.ensure_future(_awaited(work))
        deadline = asyncio.ensure_future(self._nap(wait_s))
        kill = asyncio.ensure_future(self._kill_asked.wait())
        try:
            waited: set[asyncio.Future[Any]] = {task, deadline, kill} if killable else {task, deadline}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for future in (task, deadline, kill):
                await _cancel(future)

    async def _nap(self, wait_s: float) -> None:
        await self._sleep(wait_s)

    def _check_stop(self) -> None:
        if self._stop_asked.is_set():
            raise _StopAsked

    def _ready_for_s(self) -> float | None:
        return None if self._ready_at_s is None else self._clock() - self._ready_at_s

    def _over(self) -> bool:
        return self.state is State.STOPPED and self._stop_asked.is_set()

    # The one place where the state changes

    def _go(self, state: State, reason: str) -> None:
        if not may_go(self.state, state):
            raise AssertionError(f"{self.state.value} -> {state.value} is no legal transition")
        self.state = state
        self._hooks.publish(StateChanged(self._wall_clock(), state, reason, self.restarts))
        self._changed.set()
        self._changed = asyncio.Event()

    def _notice(self, level: Literal["warning", "error"], text: str) -> None:
        self._hooks.publish(Notice(self._wall_clock(), level, text))

    def _spawn_child(self, launch: Launch, run: int) -> Process:
        return Child(launch.argv, launch.env, run, self._raw_log, self._hooks.output)


def _stall(progress: Progress, now_s: float) -> Death:
    return Death(
        "llama-server is stalled: its start makes no progress",
        progress.describe(now_s),
        "One busy core and silence is a shader compile that hangs: try another build or driver. Loading more than 20 "
        "GB with mmap can look like this too: set server.no_mmap = true. If it only needs longer, raise "
        "server.stall_timeout_s.",
    )


def _with_budget(fact: str, max_restarts: int) -> str:
    budget = f"all {max_restarts} restarts are used up" if max_restarts else "server.max_restarts is 0"
    return f"{budget}; {fact}" if fact else budget


def _one_line(fact: str) -> str:
    return "; ".join(line.strip() for line in fact.splitlines()[:2])


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _cancel(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await future
    elif not future.cancelled():
        future.exception()  # seen, so that nobody complains about it later
