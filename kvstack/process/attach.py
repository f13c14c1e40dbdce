"""A server that somebody else started: wait until it is there, until it is missed, until it is back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvstack.errors import StartFailed
from kvstack.upstream import Health

ATTACH_PATIENCE_S = 10.0
ATTACH_WATCH_S = 2.0
ATTACH_MISSES = 3


class Attachment:
    """
    Looks after a server that is not ours.

    Args:
        health: Asks it how it is.
        clock: Monotonic seconds.
        sleep: Waits some seconds of *clock*.
    """

    def __init__(
        self,
        health: Callable[[], Awaitable[Health]],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._health = health
        self._clock = clock
        self._sleep = sleep

    async def until_there(self, say: Callable[[str], None], patience_s: float | None) -> None:
        """
        Wait until it serves.

        Args:
            say: Tells what it does instead.
            patience_s: How long it may be away, in seconds; None for ever.  While it loads it is not away.

        Raises:
            StartFailed: It was away for too long.
        """
        began_s = self._clock()
        seen: Health | None = None
        while (health := await self._health()) is not Health.OK:
            is_away = health not in {Health.LOADING, Health.UNASKED}
            if health is not seen:
                seen = health
                end = f", trying for up to {patience_s:g} s" if is_away and patience_s is not None else ""
                say(_missed(health) + end)
            waited_s = self._clock() - began_s
            if is_away and patience_s is not None and waited_s >= patience_s:
                raise StartFailed(
                    "The server to attach to does not answer",
                    f"/health was asked for {waited_s:.0f} s: {_missed(health)}",
                    "Start that server, or correct server.url.",
                )
            await self._sleep(0.5)

    async def until_missed(self) -> None:
        """Wait until it does not answer any more."""
        misses = 0
        while misses < ATTACH_MISSES:
            await self._sleep(ATTACH_WATCH_S)
            # A server at work answers /health all the same: it has threads for that.
            misses = 0 if await self._health() in {Health.OK, Health.UNASKED} else misses + 1

    async def until_back(self) -> None:
        """Wait until something answers again."""
        while await self._health() in {Health.REFUSED, Health.ERROR, Health.UNASKED}:
            await self._sleep(ATTACH_WATCH_S)


def _missed(health: Health) -> str:
    """What it does instead of serving, in a few words."""
    match health:
        case Health.REFUSED:
            return "nothing answers (connection refused)"
        case Health.LOADING:
            return "it is loading its model"
        case Health.UNASKED:
            return "kvstack is out of file descriptors"
        case _:
            return "the answer is not a llama-server's"
