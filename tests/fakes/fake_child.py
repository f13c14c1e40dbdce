"""Time and children that do as they are told, for tests of the supervisor alone."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from kvstack.process.child import ExitInfo
from kvstack.process.identity import ProcessIdentity
from kvstack.process.watchdog import Sample


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, wait_s: float) -> None:
        """Sleep until somebody lets that much time pass."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + wait_s, next(self._numbers), future))
        await future

    def next_s(self) -> float | None:
        """When the next sleeper wakes."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def wake(self) -> None:
        """Go to the next sleeper's time and wake it."""
        when_s, _, future = heapq.heappop(self._sleepers)
        self.now_s = max(self.now_s, when_s)
        if not future.done():
            future.set_result(None)


class FakeChild:
    """A child that does as it is told."""

    def __init__(self, pid: int, clock: Clock, terms_needed: int | None, end_s: float) -> None:
        self.pid = pid
        self.identity = ProcessIdentity(pid, 1.0)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.log_bytes = 0
        self.sampled = Sample(rss_bytes=0)
        self.last_lines: tuple[str, ...] = ()
        self.closed = False
        self.terms = 0
        self._clock = clock
        self._terms_needed = terms_needed
        self._end_s = end_s
        self._ends: set[asyncio.Task[None]] = set()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self.exited.done()

    def die(self, returncode: int) -> None:
        """End by itself."""
        if self.alive:
            self.exited.set_result(returncode)

    def terminate(self) -> None:
        """Take note of a SIGTERM."""
        self.terms += 1
        if self._terms_needed is not None and self.terms >= self._terms_needed:
            self._ends.add(asyncio.ensure_future(self._end(-15 if self.terms == 1 else 1)))

    async def _end(self, returncode: int) -> None:
        await self._clock.sleep(self._end_s)
        self.die(returncode)

    def kill(self) -> None:
        """End at once."""
        self.die(-9)

    async def refresh(self) -> None:
        """It never starts anything."""

    async def gone(self) -> None:
        """Wait for the end."""
        await asyncio.shield(self.exited)

    async def sample(self) -> Sample | None:
        """What was prepared."""
        return self.sampled if self.alive else None

    async def close(self, timeout_s: float) -> ExitInfo:
        """Tidy up."""
        del timeout_s
        assert not self.alive, "it is ended first, and tidied up after that"
        self.closed = True
        for task in self._ends:
            task.cancel()
        return ExitInfo(self.exited.result(), last_lines=self.last_lines)


class Nowhere:
    """A raw log that keeps nothing."""

    lost_bytes = 0

    def write(self, data: bytes) -> None:
        """Take bytes."""
