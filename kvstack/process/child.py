"""One run of llama-server: spawned in its own group, drained for life, watched, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvstack.process.identity import (
    MARK_VARIABLE,
    ProcessIdentity,
    descendants,
    end_all,
    identify,
    is_alive,
    mark,
    marked,
)
from kvstack.process.pipes import Outbox, Pump, RawSink, Tail
from kvstack.process.watchdog import Sample

if sys.platform == "win32":
    from kvstack.process import _windows as system
else:
    from kvstack.process import _posix as system


GONE_POLL_S = 0.05
SIGKILL = 9

_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ExitInfo:
    """
    What is known of a child when it is over.

    Attributes:
        returncode: Exit status, or the negative number of the signal that ended it; None if it does not die.
        ended_by_us: Whether kvstack itself sent the last signal.
        out_of_memory: Whether the kernel ended it for want of memory; None if nobody tells.
        last_lines: The end of its output.
        error_lines: The lines of its output that tell of an error.
        left_behind: Pids of processes that it had started and that outlived it (they were ended then).
        survivors: Pids that could not be ended.
        dropped_bytes: Output that was not parsed because the event loop was too slow.
    """

    returncode: int | None
    ended_by_us: bool = False
    out_of_memory: bool | None = None
    last_lines: tuple[str, ...] = ()
    error_lines: tuple[str, ...] = ()
    left_behind: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    dropped_bytes: int = 0


class Child:
    """
    A llama-server process of ours, from spawn to the last of its descendants.

    To be made on the event loop's thread, and on the main thread for the child to die with kvstack (see `guard`).
    Signals go out synchronously; whatever has to look through the process table does so in a thread.

    Attributes:
        pid: Its process id.
        identity: Pid and start time.
        run: Number of this process in the stack's life, counted from 1.
        exited: Done when the process has ended, with its exit status (or the negative signal number).
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        run: int,
        raw_log: RawSink,
        output: Callable[[bytes, int], None],
        directory: Path | None = None,
    ) -> None:
        """
        Spawn.

        Args:
            argv: Program and arguments.
            env: Its environment; the mark of this kvstack is added.
            run: Number of this process in the stack's life.
            raw_log: Gets every byte of its output, from the pump threads.
            output: Gets whole lines on the loop's thread.
            directory: Where it runs; default: where kvstack does.

        Raises:
            OSError: The program cannot be started.
        """
        loop = asyncio.get_running_loop()
        owner = identify(os.getpid())
        if owner is None:  # it is there, so its entry could not be opened
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._owner = owner
        self._serial = next(_serials)
        self._oom_kills = system.oom_kill_count()
        self._group = system.Group(argv, {**env, MARK_VARIABLE: mark(owner, self._serial)}, directory)
        self.pid = self._group.pid
        # A program that has ended already has no identity; it needs none.
        self.identity = identify(self.pid) or ProcessIdentity(self.pid, 0.0)
        self.run = run
        self.exited: asyncio.Future[int] = loop.create_future()
        self._family: frozenset[ProcessIdentity] = frozenset()
        self._ended_by_us = False
        self._tail = Tail()
        self._outbox = Outbox(loop, lambda lines: output(lines, run))
        self._pipes_open = 2
        self._pipes_ended: asyncio.Future[None] = loop.create_future()
        self._pumps = [
            Pump(pipe, f"kvstack-{name}-{run}", raw_log, self._outbox, self._tail, self._pipe_ended)
            for pipe, name in ((self._group.stdout, "stdout"), (self._group.stderr, "stderr"))
        ]
        self._loop = loop
        try:
            for pump in self._pumps:
                pump.start()
            threading.Thread(target=self._wait, name=f"kvstack-wait-{run}", daemon=True).start()
        except RuntimeError as error:  # no more threads: a child that nobody drains or waits for must not live
            self._group.kill()
            self._group.wait()
            self._group.reap()
            raise OSError(str(error)) from error

    @property
    def log_bytes(self) -> int:
        """Output so far, in bytes."""
        return sum(pump.read_bytes for pump in self._pumps)

    @property
    def ended_by_us(self) -> bool:
        """Whether kvstack has asked it to end."""
        return self._ended_by_us

    async def sample(self) -> Sample | None:
        """Look at the child and its descendants; None if it is gone, or cannot be looked at."""
        sample = await asyncio.to_thread(_measure, self.pid)
        if sample is not None:
            self._family = sample.family
        return sample

    async def refresh(self) -> None:
        """Find all that it has started, in whatever session or under whatever parent that is now."""
        found: set[ProcessIdentity] = set()
        with contextlib.suppress(RuntimeError, OSError):  # no more threads or files: what is known already has to do
            found = await asyncio.to_thread(lambda: descendants(self.pid) | marked(self._owner, self._serial))
        self._family = frozenset(self._family | found) - {self.identity}

    def terminate(self) -> None:
        """Ask the group and all known descendants to end."""
        self._ended_by_us = True
        self._group.terminate()
        end_all(self._family, kill=False)

    def kill(self) -> None:
        """End the group and all known descendants."""
        self._ended_by_us = True
        self._group.kill()
        end_all(self._family, kill=True)

    async def gone(self) -> None:
        """Wait until the child and all known descendants have ended."""
        await asyncio.shield(self.exited)
        # Nobody tells of the end of a process that is no child.
        while any(is_alive(identity) for identity in self._family):  # noqa: ASYNC110
            await asyncio.sleep(GONE_POLL_S)

    async def close(self, timeout_s: float) -> ExitInfo:
        """
        Tidy up after the exit: end what was left behind, wait for the pipes' ends, collect the process.

        Args:
            timeout_s: How long to wait for what was left behind, and for the pipes, in seconds each.
        """
        await self.refresh()
        left = {identity for identity in self._family if is_alive(identity)}
        self._group.kill()
        end_all(left, kill=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.gone()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._pipes_ended)
        self._outbox.close()
        returncode = self.exited.result() if self.exited.done() else None
        survivors = [identity.pid for identity in left if is_alive(identity)]
        if returncode is None:
            survivors.append(self.pid)
        else:
            self._group.reap()
        return ExitInfo(
            returncode=returncode,
            ended_by_us=self._ended_by_us,
            out_of_memory=await asyncio.to_thread(self._out_of_memory, returncode),
            last_lines=self._tail.lines(),
            error_lines=self._tail.error_lines(),
            left_behind=tuple(sorted(identity.pid for identity in left)),
            survivors=tuple(sorted(survivors)),
            dropped_bytes=self._outbox.dropped_bytes,
        )

    def _out_of_memory(self, returncode: int | None) -> bool | None:
        if self._ended_by_us or returncode is None:
            return False
        if returncode not in {-SIGKILL, 128 + SIGKILL}:
            return False
        if system.oom_killed(self.pid):
            return True
        now = system.oom_kill_count()
        if now is not None and self._oom_kills is not None and now > self._oom_kills:
            return True
        return None

    def _wait(self) -> None:
        returncode = self._group.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._set_exited, returncode)

    def _set_exited(self, returncode: int) -> None:
        if not self.exited.done():
            self.exited.set_result(returncode)

    def _pipe_ended(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._count_pipe)

    def _count_pipe(self) -> None:
        self._pipes_open -= 1
        if self._pipes_open == 0 and not self._pipes_ended.done():
            self._pipes_ended.set_result(None)


def _measure(pid: int) -> Sample | None:
    try:
        process = psutil.Process(pid)
        suspended = process.status() == psutil.STATUS_STOPPED
        members = [process, *process.children(recursive=True)]
    except (psutil.Error, OSError):
        return None
    rss_bytes = 0
    read_bytes = 0
    cpu_s = 0.0
    family: set[ProcessIdentity] = set()
    for member in members:
        with contextlib.suppress(psutil.Error, OSError):
            rss_bytes += member.memory_info().rss
            times = member.cpu_times()
            cpu_s += times.user + times.system
            read_bytes += _read_bytes(member)
        if member.pid != pid and (identity := identify(member.pid)):
            family.add(identity)
    return Sample(rss_bytes, read_bytes, cpu_s, suspended, frozenset(family))


def _read_bytes(process: psutil.Process) -> int:
    # Not told on macOS.
    tell = getattr(process, "io_counters", None)
    if tell is None:
        return 0
    with contextlib.suppress(psutil.Error, OSError):
        counters = tell()
        # Both: a file that is read comes from the page cache or not, one that is mapped comes as disk reads only.
        return int(counters.read_bytes) + int(getattr(counters, "read_chars", 0))
    return 0
