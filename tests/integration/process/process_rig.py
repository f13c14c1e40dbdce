"""A supervisor over a real child, with everything that it said and did recorded."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from kvstack.errors import StartFailed
from kvstack.process.contract import Hooks, Launch
from kvstack.process.identity import ProcessIdentity, holds_port, port_owners
from kvstack.process.supervisor import Supervisor
from kvstack.process.watchdog import slots_mark
from kvstack.rundir import RawLog
from kvstack.state.events import Event, Notice, ServerSpawned, StateChanged
from kvstack.state.lifecycle import State
from kvstack.upstream import Health, Upstream, UpstreamError

FAKE = Path(__file__).parents[2] / "fakes" / "fake_llama_server.py"


def fake_argv(port: int, *faults: str) -> tuple[str, ...]:
    """The fake server's command."""
    return (sys.executable, str(FAKE), "--port", str(port), *(part for fault in faults for part in ("--fault", fault)))


def real_argv(binary: Path, model: Path, port: int, *extra: str) -> tuple[str, ...]:
    """A real server's command, on one thread and with a small context."""
    where = ("--host", "127.0.0.1", "--port", str(port))
    return (str(binary), "-m", str(model), "-c", "4096", "-np", "1", "-t", "1", "-ngl", "0", *where, *extra)


class Rig:
    """
    A supervisor and its recorded life.

    Attributes:
        events: All that was published.
        lines: All output that was handed over, per run.
        identities: Every child that was spawned.
    """

    def __init__(self, argv: tuple[str, ...], port: int, directory: Path, **settings: object) -> None:
        values: dict[str, object] = {
            "env": dict(os.environ),
            "max_restarts": 0,
            "stall_timeout_s": 30.0,
            "stop_timeout_s": 5.0,
        }
        sleep = settings.pop("sleep", asyncio.sleep)
        watch_slots = settings.pop("watch_slots", False)
        values |= settings
        self.events: list[Event] = []
        self.lines: dict[int, list[bytes]] = {}
        self.identities: list[ProcessIdentity] = []
        self.released = 0
        self.warm: Callable[[], Awaitable[None]] = self._nothing
        self.release: Callable[[], Awaitable[bool]] = self._none_cut_off
        self.port = port
        self.upstream = Upstream(f"http://127.0.0.1:{port}")
        self.health: Callable[[], Awaitable[Health]] = self.upstream.health
        self.raw_log = RawLog(directory / "server.log")
        launch = Launch(argv=argv, display=argv, host="127.0.0.1", port=port, **values)  # type: ignore[arg-type]
        hooks = Hooks(
            publish=self.events.append,
            output=lambda data, run: self.lines.setdefault(run, []).append(data),
            health=lambda: self.health(),  # noqa: PLW0108 - a test may replace it
            verify=self._verify,
            warm=lambda: self.warm(),  # noqa: PLW0108 - a test may replace it
            release_upstream=self._release,
            spawned=self.identities.append,
            busy=(lambda: self.busy()) if watch_slots else None,  # noqa: PLW0108 - a test may replace it
        )
        self.supervisor = Supervisor(launch, hooks, self.raw_log, sleep=sleep)  # type: ignore[arg-type]

    @property
    def states(self) -> list[State]:
        """All states in their order."""
        return [event.state for event in self.events if isinstance(event, StateChanged)]

    @property
    def notices(self) -> list[str]:
        """All notices in their order."""
        return [event.text for event in self.events if isinstance(event, Notice)]

    @property
    def pid(self) -> int:
        """The pid of the newest child."""
        return [event.pid for event in self.events if isinstance(event, ServerSpawned)][-1]

    def output(self, run: int = 1) -> bytes:
        """What one run's child said, as it was handed over."""
        return b"".join(self.lines.get(run, []))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the supervisor; whatever happens, nothing outlives the block."""
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield task
        finally:
            if not task.done():
                self.supervisor.kill()
                await asyncio.wait({task}, timeout=20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.upstream.close()
            self.raw_log.close()

    async def busy(self) -> Hashable | None:
        """What the slots show."""
        try:
            answer = await self.upstream.request("GET", "/slots", timeout_s=0.5)
        except UpstreamError:
            return None
        return slots_mark(answer.status, answer.body)

    async def _verify(self, pid: int) -> None:
        if await asyncio.to_thread(holds_port, pid, self.port) is False:
            raise StartFailed("Another server answers on the port", f"pid {port_owners(self.port)}", "End it.")

    async def _release(self) -> bool:
        self.released += 1
        return await self.release()

    async def _none_cut_off(self) -> bool:
        return False

    async def _nothing(self) -> None:
        pass


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def port_is_free(port: int) -> bool:
    """Whether nobody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def threads_left() -> list[str]:
    """Names of the pump and wait threads that still run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstack-")]
