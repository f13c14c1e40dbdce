"""Waiting that ends when somebody asks to stop, when time is up, or when patience is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class StopAsked(Exception):
    """Somebody has asked to stop."""


class Waiting:
    """
    The two wishes that cut a wait short, to stop and to kill, and the waits that know them.

    Attributes:
        reason: Why the stop was asked for.
    """

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.reason = ""
        self._sleep = sleep
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def stop_asked(self) -> bool:
        """Whether somebody has asked to stop."""
        return self._stop.is_set()

    def kill_asked(self) -> bool:
        """Whether somebody has lost patience."""
        return self._kill.is_set()

    def ask_stop(self, reason: str) -> None:
        """Ask to stop; only the first reason counts."""
        if not self._stop.is_set():
            self.reason = reason
            self._stop.set()

    def ask_kill(self) -> None:
        """Ask not to wait for anybody's goodwill."""
        self._kill.set()

    def check_stop(self) -> None:
        """
        Go on only if nobody has asked to stop.

        Raises:
            StopAsked: Somebody has.
        """
        if self._stop.is_set():
            raise StopAsked

    async def nap(self, wait_s: float) -> None:
        """Sleep, on the clock that was given."""
        await self._sleep(wait_s)

    async def unless_stopped(self, work: Awaitable[None], *others: asyncio.Future[Any]) -> None:
        """
        Work until it is done, or one of *others* is: it is cancelled then, and what went wrong in it does not count.

        Raises:
            StopAsked: Somebody has asked to stop meanwhile.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            waited: set[asyncio.Future[Any]] = {task, stop, *others}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self.check_stop()
            if not any(other.done() for other in others):
                task.result()
        finally:
            await cancel(task)
            await cancel(stop)

    async def within(self, work: Awaitable[None], wait_s: float, *, killable: bool = True) -> bool:
        """
        Work for some seconds at most; it is cancelled then.

        Args:
            work: What to do.
            wait_s: How long it may take.
            killable: Whether lost patience cuts it short.

        Returns:
            Whether it was done.
        """
        task = asyncio.ensure_future(work)
        deadline = asyncio.ensure_future(self.nap(wait_s))
        kill = asyncio.ensure_future(self._kill.wait())
        try:
            waited: set[asyncio.Future[Any]] = {task, deadline, kill} if killable else {task, deadline}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            task.result()
            return True
        finally:
            for future in (task, deadline, kill):
                await cancel(future)


async def cancel(future: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end; what went wrong in it is of no interest any more."""
    if not future.done():
        future.cancel()
        await asyncio.wait({future})  # not `await future`: that could not be told from a cancellation of our own
    if not future.cancelled():
        future.exception()  # seen, so that nobody complains about it later
