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

A child that dies before the stack was ready for the first time is not started again: a person is waiting, and what is
wrong (a bad model, a bad flag, a port in use) would be wrong again.  After that, each death takes one restart from the
budget `max_restarts`; a server that was ready for `HEALTHY_RUN_S` gives it back.  Neither holds for a death that may be
a prefix snapshot's fault: the next start is without it.

Attached to a server that is somebody else's, nothing is spawned or stopped and no budget counts: while it is away the
stack is in `backoff`, and when it comes back it is warmed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Literal, NoReturn

from kvstack.errors import ChildLost, KvstackError, StartFailed, out_of_descriptors
from kvstack.process.attach import ATTACH_PATIENCE_S, Attachment
from kvstack.process.cancellation import StopAsked, Waiting, cancel
from kvstack.process.child import Child, ExitInfo
from kvstack.process.contract import Hooks, Launch, Process
from kvstack.process.exit_report import Death, span_words, stalled
from kvstack.process.pipes import RawSink
from kvstack.process.shutdown import CLOSE_S, SECOND_TERM_S, drain, end_child, explain_end, hung, not_run, troubles
from kvstack.process.watchdog import HangWatch, Progress
from kvstack.state.events import MemorySampled, Notice, ServerSpawned, StateChanged
from kvstack.state.lifecycle import State, backoff_s, may_go
from kvstack.upstream import Health

HEALTHY_RUN_S = 600.0
"""How long a server must have been ready for its death to count as the first one again, in seconds."""

SAMPLE_S = 2.0
WATCH_S = 10.0
RELEASE_S = 6.0
ATTACH_RELEASE_S = 60.0
SAY_SILENT_S = 30.0
SPAWN_RETRY_S = 1.0


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
        self._waiting = Waiting(sleep)
        self._was_ready = False
        self._lost_told = False
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
        except StopAsked:
            if self.state is not State.STOPPING:
                self._transition(State.STOPPING, self._waiting.reason)
                await drain(self._waiting, self._hooks.release_upstream, self._release_timeout_s)
            self._transition(State.STOPPED, self._waiting.reason)
        except KvstackError as error:
            self._transition(State.FAILED, error.what)
            raise
        except BaseException:  # cancelled, or a fault of our own; no child lives any more
            if self.state is State.STOPPING:
                self._transition(State.STOPPED, self._waiting.reason)
            else:
                self._transition(State.FAILED, "another part of kvstack failed")
            raise

    async def wait_ready(self, timeout_s: float) -> bool:
        """
        Wait until requests are served.

        Args:
            timeout_s: How long to wait, in seconds.

        Returns:
            False if that took too long, or if it will not happen any more.
        """
        deadline = asyncio.ensure_future(self._waiting.nap(timeout_s))
        try:
            while self.state is not State.READY:
                if deadline.done() or self.state in {State.STOPPING, State.FAILED} or self._over():
                    return False
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({changed, deadline}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancel(changed)
            return True
        finally:
            await cancel(deadline)

    def stop(self, reason: str) -> None:
        """
        Begin the orderly stop; later calls change nothing.

        Args:
            reason: Why, in a few words.
        """
        self._waiting.ask_stop(reason)

    def kill(self) -> None:
        """End the child now, without asking it."""
        self._waiting.ask_stop("killed")
        self._waiting.ask_kill()

    # The states

    async def _supervised(self, launch: Launch) -> NoReturn:
        reason, used, run = "start", 0, 0
        while True:
            run += 1
            self._ready_at_s = None
            self._transition(State.STARTING, reason)
            death = await self._one_child(launch, run)
            self._waiting.check_stop()
            if (blamed := self._hooks.on_death()) is not None:
                self._notice("warning", f"{blamed}: started again without it ({death.brief})")
                await self._back_off(f"{blamed}: started again without it", backoff_s(1))
                continue
            if not self._was_ready:
                raise StartFailed(death.what, death.fact, death.next_step)
            ready_s = self._ready_for_s()
            if ready_s is not None and ready_s >= HEALTHY_RUN_S:
                used = 0
            if used >= launch.max_restarts:
                budget = f"all {used} restarts are used up" if used else "server.max_restarts is 0"
                raise ChildLost(death.what, "; ".join(filter(None, (budget, death.fact))), death.next_step)
            used += 1
            wait_s = backoff_s(used)
            after = "before it was ready again" if ready_s is None else f"after {span_words(ready_s)} of service"
            reason = f"{death.what}, {after}: restart {used} of {launch.max_restarts}"
            self._notice("error", f"{reason} ({death.brief})" if death.fact else reason)
            await self._back_off(reason, wait_s)

    async def _back_off(self, reason: str, wait_s: float) -> None:
        self._transition(State.BACKOFF, f"{reason} in {wait_s:g} s")
        await self._waiting.unless_stopped(self._waiting.nap(wait_s))
        self.restarts += 1

    async def _one_child(self, launch: Launch, run: int) -> Death:
        """From the spawn of one child to its end, which is described; no child lives afterwards."""
        self._waiting.check_stop()
        try:
            child = await self._spawned(launch, run)
        except OSError as error:
            return not_run(launch.argv[0], error)
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
            except StopAsked:
                self._transition(State.STOPPING, self._waiting.reason)
                await self._end(child, launch.stop_timeout_s)
                await self._tidy_up(child)
                closed = True
                raise
            except StartFailed as error:  # the server that answers is not ours, or not what the config asks for
                await self._end(child, launch.stop_timeout_s)
                death = Death(error.what, error.fact, error.next_step)
            exit_info = await self._tidy_up(child)
            closed = True
            return death or explain_end(exit_info, served=self._ready_at_s is not None)
        finally:
            if not closed:  # cancelled, or a fault of our own: whatever it is, no child stays behind
                child.kill()
                await child.close(CLOSE_S)

    async def _spawned(self, launch: Launch, run: int) -> Process:
        told = False
        while True:
            try:
                return self._spawn(launch, run)
            except OSError as error:
                # Clients that wait for the server hold them.  They leave, and this was no fault of the server's.
                if not (self._was_ready and out_of_descriptors(error)):
                    raise
            if not told:
                told = True
                self._notice("warning", "llama-server cannot be started before a file descriptor is free")
            await self._waiting.unless_stopped(self._waiting.nap(SPAWN_RETRY_S))

    async def _serve(self, launch: Launch, child: Process) -> NoReturn:
        progress = Progress(launch.stall_timeout_s, self._clock())
        observer = asyncio.ensure_future(self._observe(child, progress))
        try:
            self._transition(State.LOADING, "the model is being loaded")
            await self._during(child, observer, self._until_healthy())
            await self._during(child, observer, self._hooks.verify(child.pid))
            self._transition(State.WARMING, "the prefix is being evaluated")
            await self._during(child, observer, self._hooks.warm())
            await self._during(child, observer, self._until_healthy())  # one that died of it was never ready
            self._was_ready = True
            self._ready_at_s = self._clock()
            self._transition(State.READY, "serving")
            await self._during(child, observer, self._watch(launch))
            raise AssertionError("the watch over a ready server ends only with it")
        finally:
            await cancel(observer)

    async def _attached(self) -> NoReturn:
        other = Attachment(self._hooks.health, self._clock, self._sleep)
        reason = "attach"
        patience_s: float | None = self._attach_patience_s
        while True:
            self._transition(State.STARTING, reason)
            self._transition(State.LOADING, "looking for the server")
            await self._waiting.unless_stopped(other.until_there(self._say, patience_s))
            await self._waiting.unless_stopped(self._hooks.verify(0))
            self._transition(State.WARMING, "the prefix is being evaluated")
            await self._waiting.unless_stopped(self._hooks.warm())
            self._was_ready = True
            self._transition(State.READY, "serving")
            await self._waiting.unless_stopped(other.until_missed())
            self._notice("error", "The server no longer answers: waiting until it is back")
            self._transition(State.BACKOFF, "the server does not answer")
            await self._waiting.unless_stopped(other.until_back())
            self.restarts += 1
            # Once it has served there is no end to the patience.
            reason, patience_s = "the server is back", None

    # What happens within a state

    async def _until_healthy(self) -> None:
        began_s = self._clock()
        while await self._hooks.health() is not Health.OK:
            waited_s = self._clock() - began_s
            await self._sleep(0.05 if waited_s < 2 else 0.25 if waited_s < 30 else 1.0)

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
                raise _Unwell(hung(trouble))
            elif not told:
                told = True
                self._notice("error", f"{trouble} (set server.watchdog = true to have it restarted)")

    async def _alive_mark(self) -> Hashable | None:
        # Without a look at the slots: an answer of any kind is a sign of life, and a new one each time.
        return object() if await self._hooks.health() in {Health.OK, Health.UNASKED} else None

    async def _observe(self, child: Process, progress: Progress) -> None:
        told_s = progress.since_s
        pause_s = min(SAMPLE_S, progress.timeout_s / 4)
        while True:
            await self._sleep(pause_s)
            sample = await child.sample()
            now_s = self._clock()
            if self._raw_log.lost_bytes > 0 and not self._lost_told:
                self._lost_told = True
                self._notice("warning", "The raw log cannot be written (is the disk full?): lost bytes are counted")
            if sample is not None:
                self._hooks.publish(MemorySampled(self._wall_clock(), sample.rss_bytes))
            if self.state not in {State.LOADING, State.WARMING}:
                continue
            if progress.observe(now_s, child.log_bytes, sample):
                raise _Unwell(stalled(progress.describe(now_s)))
            told_s = max(told_s, progress.since_s)
            if now_s - told_s >= SAY_SILENT_S:
                told_s = now_s
                self._notice(
                    "warning",
                    f"{self.state.value}: {progress.describe(now_s)}; "
                    f"waiting up to {progress.timeout_s:g} s (shaders of a new build or driver take minutes)",
                )

    # The end of a child

    async def _end(self, child: Process, patience_s: float) -> None:
        await end_child(
            child,
            self._waiting,
            self._hooks.release_upstream,
            release_timeout_s=self._release_timeout_s,
            patience_s=patience_s,
        )

    async def _tidy_up(self, child: Process) -> ExitInfo:
        exit_info = await child.close(CLOSE_S)
        for level, text in troubles(child.pid, exit_info):
            self._notice(level, text)
        return exit_info

    async def _during(self, child: Process, observer: asyncio.Future[None], work: Awaitable[None]) -> None:
        """Do *work* as long as the child lives, moves, and nobody asks to stop."""
        await self._waiting.unless_stopped(work, child.exited, observer)
        if child.exited.done():
            raise _Exited
        if observer.done():
            observer.result()

    def _ready_for_s(self) -> float | None:
        return None if self._ready_at_s is None else self._clock() - self._ready_at_s

    def _over(self) -> bool:
        return self.state is State.STOPPED and self._waiting.stop_asked()

    # The one place where the state changes

    def _transition(self, state: State, reason: str) -> None:
        if not may_go(self.state, state):
            raise AssertionError(f"{self.state.value} -> {state.value} is not a legal transition")
        self.state = state
        self._hooks.publish(StateChanged(self._wall_clock(), state, reason, self.restarts))
        self._changed.set()
        self._changed = asyncio.Event()

    def _say(self, reason: str) -> None:
        """Tell more of a state that goes on."""
        self._hooks.publish(StateChanged(self._wall_clock(), self.state, reason, self.restarts))

    def _notice(self, level: Literal["warning", "error"], text: str) -> None:
        self._hooks.publish(Notice(self._wall_clock(), level, text))

    def _spawn_child(self, launch: Launch, run: int) -> Process:
        return Child(launch.argv, launch.env, run, self._raw_log, self._hooks.output, launch.directory)
