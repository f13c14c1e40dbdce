"""A restore that is broken off, refused or lied about, on a server that does as a test says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstack.bus import Bus
from kvstack.config.parse import parse_config
from kvstack.stack.plan import make_plan
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from kvstack.upstream import Props, Upstream, UpstreamError
from kvstack.warmup.pause import Pause
from kvstack.warmup.prefix import NoSnapshot, Prefix
from kvstack.warmup.snapshots import PrefixSnapshots
from kvstack.warmup.store import SnapshotFiles
from tests.integration.stub_upstream import Received, StubUpstream, run_stub

PREFIX = Prefix("kvstack-prefix-0", (1, 2, 3))
GOOD = {"n_restored": 3, "n_read": 100}


class Server:
    """Answers to a restore."""

    def __init__(self) -> None:
        self.status = 200
        self.said: object = GOOD
        self.hangs = self.breaks = False
        self.asked = asyncio.Event()

    async def __call__(self, _: Received, writer: asyncio.StreamWriter) -> None:
        """Answer as told."""
        self.asked.set()
        if self.hangs:
            await asyncio.sleep(30)
        if self.breaks:
            return
        data = json.dumps(self.said).encode()
        head = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


class Rig:
    """Snapshots with one that is good."""

    def __init__(self, server: Server, stub: StubUpstream, directory: Path) -> None:
        text = f'name = "t"\n[server]\nurl = "http://127.0.0.1:{stub.port}"\n'
        plan = make_plan(parse_config(text, Path("/t.toml"), Path("/home/ann")), Path("/t.toml"), {})
        self.server = server
        self.stub = stub
        self.warned: list[str] = []
        self.upstream = Upstream(f"http://127.0.0.1:{stub.port}")
        gate = Pause(Bus(StackState("t", ProxyView("http://127.0.0.1:1"))))
        self.snapshots = PrefixSnapshots(
            replace(plan.warmup_context, snapshot_dir=directory), self.upstream, Props, gate, self.warned.append
        )
        self.files = SnapshotFiles(directory, 1000)
        draft = self.files.begin(PREFIX.name)
        (directory / draft).write_bytes(b"x" * 100)
        note = self.files.accept(draft, PREFIX.name, 3, 100)
        assert note is not None
        self.files.give_back(PREFIX.name, note)

    async def restore(self) -> bool:
        """Restore it."""
        return await self.snapshots._restore(self.files, PREFIX)

    @property
    def is_there(self) -> bool:
        """Whether the next start finds it."""
        return self.files.check(PREFIX.name, 3) is not None

    @property
    def left(self) -> list[str]:
        """All files that there are."""
        return sorted(path.name for path in self.files.directory.iterdir())

    @property
    def actions(self) -> list[str]:
        """What the server was asked for."""
        return [received.request_line.split()[1].partition("action=")[2] for received in self.stub.received]


def lost(made: Rig, why: str) -> str:
    """What a person is told."""
    path = made.files.directory / made.files.file_name(PREFIX.name)
    return f"The prefix snapshot {path} {why}. It was removed, and the prefix is evaluated again"


@asynccontextmanager
async def rig(directory: Path) -> AsyncIterator[Rig]:
    """A server and snapshots."""
    server = Server()
    async with run_stub(server) as stub:
        made = Rig(server, stub, directory)
        try:
            yield made
        finally:
            await made.upstream.close()


async def test_what_was_restored_stays(tmp_path: Path) -> None:
    """With its note; it is on trial from now on."""
    async with rig(tmp_path) as made:
        assert await made.restore()
        assert made.is_there
        assert made.warned == []
        assert made.snapshots.on_death() is not None
        assert not made.is_there


async def test_a_stop_in_the_middle_keeps_the_snapshot(tmp_path: Path) -> None:
    """Ctrl-C while half a gibibyte is read costs the next start nothing."""
    async with rig(tmp_path) as made:
        made.server.hangs = True
        restoring = asyncio.ensure_future(made.restore())
        await made.server.asked.wait()
        assert not made.is_there  # whoever dies now does not find it again
        restoring.cancel()
        await asyncio.wait({restoring})
        assert made.is_there


async def test_a_server_that_dies_in_the_middle_takes_the_snapshot_along(tmp_path: Path) -> None:
    """The connection breaks; what it died of is gone for good once its death is known."""
    async with rig(tmp_path) as made:
        made.server.breaks = True
        with pytest.raises(UpstreamError):
            await made.restore()
        assert not made.is_there
        assert made.snapshots.on_death() is not None
        assert made.left == []


async def test_a_server_that_is_loading_says_nothing_of_the_snapshot(tmp_path: Path) -> None:
    """It was started again by somebody in this moment."""
    async with rig(tmp_path) as made:
        made.server.status = 503
        with pytest.raises(NoSnapshot):
            await made.restore()
        assert made.is_there


async def test_what_the_server_refuses_is_removed(tmp_path: Path) -> None:
    """It has emptied the slot then."""
    async with rig(tmp_path) as made:
        made.server.status, made.server.said = 400, {"error": {"message": "no"}}
        assert not await made.restore()
        assert made.left == []
        assert made.actions == ["restore"]
        assert made.warned == [lost(made, "could not be used: the server does not restore it: no")]


@pytest.mark.parametrize("said", [{"n_restored": 2, "n_read": 100}, {"n_restored": 3, "n_read": 99}, {}])
async def test_what_was_restored_otherwise_is_removed_from_the_slot_too(said: object, tmp_path: Path) -> None:
    """Else the prefix would be evaluated upon something that nobody knows."""
    async with rig(tmp_path) as made:
        made.server.said = said
        assert not await made.restore()
        assert made.left == []
        assert made.actions == ["restore", "erase"]
        assert made.warned == [lost(made, "could not be used: the server read another one")]


async def test_a_damaged_file_is_told_of(tmp_path: Path) -> None:
    """Once: it is not even shown to the server, and gone."""
    async with rig(tmp_path) as made:
        path = tmp_path / made.files.file_name(PREFIX.name)
        status = path.stat()
        path.write_bytes(b"x" * 99 + b"y")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert not await made.restore()
        assert made.left == []
        assert made.actions == []
        assert not await made.restore()
        assert made.warned == [lost(made, "was damaged: its file does not match what was saved")]


async def test_that_there_is_none_yet_is_no_trouble(tmp_path: Path) -> None:
    """The first start has nothing to tell."""
    async with rig(tmp_path) as made:
        made.files.remove(PREFIX.name)
        assert not await made.restore()
        assert made.warned == []
