"""What the supervisor is given: the command, the rest of the stack, and what a child must be able to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstack.process.child import ExitInfo
from kvstack.process.identity import ProcessIdentity
from kvstack.process.watchdog import Sample
from kvstack.state.events import Event
from kvstack.upstream import Health


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
        directory: Where it runs, None for where kvstack does: llama-server loads what is called `libggml-*` there.
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
    directory: Path | None = None


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
            May let them end by themselves for `stop_timeout_s` first.  Tells whether any was cut off.
        spawned: Takes the new child's identity.
        on_death: Called when the child has died; returns what of ours it died of, which the next start leaves out, or
            None if the death counts.
        busy: Tells of the slots, see `kvstack.process.watchdog.HangWatch.observe`; None if nobody can.
    """

    publish: Callable[[Event], None]
    output: Callable[[bytes, int], None]
    health: Callable[[], Awaitable[Health]]
    verify: Callable[[int], Awaitable[None]]
    warm: Callable[[], Awaitable[None]]
    release_upstream: Callable[[], Awaitable[bool]]
    spawned: Callable[[ProcessIdentity], None]
    busy: Callable[[], Awaitable[Hashable | None]] | None = None
    on_death: Callable[[], str | None] = lambda: None


class Process(Protocol):
    """What the supervisor needs of a child; `kvstack.process.child.Child` is one."""

    pid: int
    identity: ProcessIdentity
    exited: asyncio.Future[int]

    @property
    def log_bytes(self) -> int:
        """Output so far, in bytes."""

    async def sample(self) -> Sample | None:
        """Look at it."""

    async def refresh(self) -> None:
        """Find all that it has started."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    async def gone(self) -> None:
        """Wait until it and all that it started have ended."""

    async def close(self, timeout_s: float) -> ExitInfo:
        """Tidy up after it."""
