"""
The supervisor over real processes: how children are ended, drained, and swept after our own death.

Tests that take `llama_server` run on each real server; the fake one serves where the real one cannot show the fault.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvstack.errors import ChildLost, StartFailed
from kvstack.process.identity import ProcessIdentity, identify, is_alive, sweep
from kvstack.state.lifecycle import State
from tests.integration.process.process_rig import (
    FAKE,
    Rig,
    fake_argv,
    lives,
    port_is_free,
    real_argv,
    threads_left,
    until,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and groups of POSIX")

# Stop, against resistance


@pytest.mark.real
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ours", [False, True])
async def test_stop_with_a_request_in_flight(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path, stream: bool, ours: bool
) -> None:
    """
    A request of our own is closed before the first signal, so the server ends at once; a stranger's may hold it until
    the second signal.
    """
    argv = real_argv(llama_server, model_path["dense"], free_port, "-c", "131072")  # else it is done in half a second
    rig = Rig(argv, free_port, tmp_path, stop_timeout_s=10.0 if ours else 1.0)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        body = b'{"prompt": "a", "n_predict": 100000, "ignore_eos": true, "stream": %s}' % (
            b"true" if stream else b"false"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", free_port)
        head = b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: b"processing task" in rig.output())

        async def release() -> bool:
            if ours:
                writer.close()
                await writer.wait_closed()
            return ours

        rig.release = release
        began_s = time.monotonic()
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 20)
        took_s = time.monotonic() - began_s
        writer.close()
        del reader
    # Ours is not asked before it had the time to notice; a stranger's client holds some builds and not others.
    assert (1.0 < took_s < 3.0) if ours else (took_s < 4.0)
    assert rig.states[-1] is State.STOPPED
    assert not lives(rig.pid)
    assert port_is_free(free_port)


@pytest.mark.parametrize(("fault", "least_s", "most_s"), [("term_twice", 0.5, 2.0), ("ignore_term", 2.5, 6.0)])
async def test_stop_of_the_unwilling(free_port: int, tmp_path: Path, fault: str, least_s: float, most_s: float) -> None:
    """FR-48: who does not follow the first SIGTERM gets a second one, and then is killed."""
    rig = Rig(fake_argv(free_port, fault), free_port, tmp_path, stop_timeout_s=0.5)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(15)
        began_s = time.monotonic()
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 15)
        took_s = time.monotonic() - began_s
    assert least_s <= took_s < most_s
    assert rig.states[-1] is State.STOPPED
    assert not lives(rig.pid)


async def test_second_stop_kills(free_port: int, tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for the child's goodwill."""
    rig = Rig(fake_argv(free_port, "ignore_term"), free_port, tmp_path, stop_timeout_s=60.0)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(15)
        rig.supervisor.stop("asked")
        await until(lambda: rig.supervisor.state is State.STOPPING)
        await asyncio.sleep(0.2)
        assert lives(rig.pid)
        began_s = time.monotonic()
        rig.supervisor.kill()
        await asyncio.wait_for(task, 15)
        assert time.monotonic() - began_s < 1.5
    assert not lives(rig.pid)


@pytest.mark.parametrize("end", ["stop", "death"])
async def test_grandchild_in_another_session(free_port: int, tmp_path: Path, end: str) -> None:
    """What the child has started is ended with it, in whatever session, and holds up neither the stop nor the pipes."""
    rig = Rig(fake_argv(free_port, "leave=300"), free_port, tmp_path, stop_timeout_s=0.5)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(15)
        left = int(rig.output().split(b"fake: left ")[1].split()[0])
        assert lives(left)
        assert os.getsid(left) != rig.pid
        if end == "stop":
            rig.supervisor.stop("asked")
            await asyncio.wait_for(task, 15)
        else:
            os.kill(rig.pid, signal.SIGKILL)
            with pytest.raises(ChildLost) as caught:
                await asyncio.wait_for(task, 15)
            assert f"it had started process {left}, now stopped" in caught.value.fact
    assert not lives(left)
    assert not lives(rig.pid)
    assert threads_left() == []


@pytest.mark.real
@pytest.mark.parametrize("how", ["exec", "child", "session"])
async def test_wrapper_script(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path, how: str
) -> None:
    """FR-49: a wrapper that becomes the server, has it as a child, or puts it into another session: nothing is left."""
    argv = real_argv(llama_server, model_path["dense"], free_port)
    start = {"exec": 'exec "$@"', "child": '"$@"; exit $?', "session": 'setsid "$@" & wait'}[how]
    script = tmp_path / "wrapper"
    script.write_text(f"#!/bin/sh\n{start}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    rig = Rig((str(script), *argv), free_port, tmp_path)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        family = [rig.pid, *(child.pid for child in psutil.Process(rig.pid).children(recursive=True))]
        assert len(family) == (1 if how == "exec" else 2)
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 15)
    assert not any(lives(pid) for pid in family)
    assert port_is_free(free_port)


@pytest.mark.real
async def test_wrapper_that_leaves_its_server(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A wrapper that ends while its server goes on is a failed start that says so, and the server is ended."""
    argv = real_argv(llama_server, model_path["dense"], free_port)
    script = tmp_path / "wrapper"
    script.write_text('#!/bin/sh\nsetsid "$@" &\nsleep 0.2\n')
    script.chmod(0o755)
    rig = Rig((str(script), *argv), free_port, tmp_path)
    rig.warm = lambda: asyncio.sleep(3600)
    async with rig.running() as task:
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 15)
    assert "left the server it had started running" in caught.value.what
    assert "exec" in caught.value.next_step
    assert port_is_free(free_port)


# Pipes


async def test_odd_output(free_port: int, tmp_path: Path) -> None:
    """A line of 200 KB and a byte that is no text reach the raw log whole and stop nothing."""
    argv = fake_argv(free_port, "long_line=200000", "broken_byte")
    rig = Rig(argv, free_port, tmp_path)
    async with rig.running():
        assert await rig.supervisor.wait_ready(15)
    raw = rig.raw_log.path.read_bytes()
    assert b"x" * 200_000 + b"\n" in raw
    assert b"fake: broken \xff byte\n" in raw
    assert rig.output().replace(b"\n", b"") == raw.replace(b"\n", b"")  # cut into lines, but nothing lost


async def test_flood_while_the_loop_stands(free_port: int, tmp_path: Path) -> None:
    """Five megabytes of log while the event loop does something else: the child never waits, the raw log has all."""
    rig = Rig(fake_argv(free_port, "flood=5000000"), free_port, tmp_path)
    async with rig.running():
        await until(lambda: rig.supervisor.state is State.LOADING)
        pause_s = 0.0
        while b"listening" not in (rig.raw_log.path.read_bytes() if rig.raw_log.path.exists() else b""):
            time.sleep(0.05)  # noqa: ASYNC251 - the stalled reader is the point
            pause_s += 0.05
            assert pause_s < 20, "the child waits for the event loop"
        assert await rig.supervisor.wait_ready(15)
    raw = rig.raw_log.path.read_bytes()
    assert raw.count(b"\n") >= 50_000
    dropped = [text for text in rig.notices if "came too fast to be shown" in text]
    assert len(dropped) == 1
    assert int(dropped[0].split()[0]) + len(rig.output()) == len(raw)


# Our own death


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
async def test_child_dies_with_us(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """When kvstack is killed by SIGKILL, its llama-server goes at once."""
    argv = real_argv(llama_server, model_path["dense"], free_port)
    parent, server = await _parent(argv, free_port, tmp_path)
    try:
        assert is_alive(server)
        parent.kill()
        await parent.wait()
        await until(lambda: not is_alive(server), 3)
        await until(lambda: port_is_free(free_port), 3)
    finally:
        sweep(server, argv[0])


async def test_sweep_after_a_kill(free_port: int, tmp_path: Path) -> None:
    """What a killed kvstack leaves in other sessions is found by its mark and ended, but not while kvstack lives."""
    argv = fake_argv(free_port, "leave=300")
    parent, server = await _parent(argv, free_port, tmp_path)
    owner = identify(parent.pid)
    assert owner is not None
    left = identify(int((tmp_path / "server.log").read_bytes().split(b"fake: left ")[1].split()[0]))
    assert left is not None
    try:
        assert not sweep(server, argv[0], owner)
        assert is_alive(left)
        assert is_alive(server)
        parent.kill()
        await parent.wait()
        assert is_alive(left)
        assert await asyncio.to_thread(sweep, server, argv[0], owner, 0.5)
        assert not is_alive(left)
        assert not is_alive(server)
        assert not sweep(server, argv[0], owner)
    finally:
        sweep(left, sys.executable, timeout_s=0.2)


async def test_sweep_spares_strangers(free_port: int) -> None:
    """A process that only has the pid, or only the program, of our old server is left alone."""
    stranger = await asyncio.create_subprocess_exec(sys.executable, str(FAKE), "--port", str(free_port))
    try:
        now = identify(stranger.pid)
        assert now is not None
        earlier = ProcessIdentity(now.pid, now.started_s - 5)
        assert not sweep(earlier, sys.executable)
        assert not sweep(now, "/somewhere/else/llama-server")
        assert not sweep(None, None, ProcessIdentity(999_999_999, 1.0))
        assert is_alive(now)
    finally:
        stranger.kill()
        await stranger.wait()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the child is seen in /proc")
async def test_what_the_child_inherits(free_port: int, tmp_path: Path) -> None:
    """The child has the environment that it was given and the mark, ignores no signal, and reads nothing from us."""
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/nowhere", "LC_ALL": "C", "WORD": "a b=c"}
    files = ("/proc/self/environ", "/proc/self/status", "-")
    rig = Rig((shutil.which("cat") or "cat", *files), free_port, tmp_path, env=env)
    async with rig.running() as task:
        with pytest.raises(StartFailed):
            await asyncio.wait_for(task, 15)
    variables, _, status = rig.output().decode().partition("\0Name:")
    seen = dict(pair.split("=", 1) for pair in variables.split("\0"))
    assert seen.pop("KVSTACK_OWNER").startswith(f"{os.getpid()}-")
    assert seen == env
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    assert ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0


async def _parent(
    argv: tuple[str, ...], port: int, directory: Path
) -> tuple[asyncio.subprocess.Process, ProcessIdentity]:
    """A process that runs a supervisor as kvstack does; returned once its server is ready."""
    script = directory / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from tests.integration.process.process_rig import Rig

        async def main():
            rig = Rig({argv!r}, {port}, Path({str(directory)!r}))
            async with rig.running():
                assert await rig.supervisor.wait_ready(30)
                identity = rig.identities[0]
                print(identity.pid, identity.started_s, flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    try:
        line = await asyncio.wait_for(parent.stdout.readline(), 30)
        pid, started_s = line.split()
    except BaseException:
        parent.kill()
        raise
    return parent, ProcessIdentity(int(pid), float(started_s))
