"""
The supervisor over real processes: every way in which a llama-server starts, hangs, dies and is started again.

Tests that take `llama_server` run on each real server; the fake one serves where the real one cannot show the fault.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstack.errors import ChildLost, ExitCode, StartFailed
from kvstack.process.watchdog import IDLE
from kvstack.state.events import MemorySampled
from kvstack.state.lifecycle import State, may_go
from kvstack.upstream import Health
from tests.integration.process.process_rig import Rig, fake_argv, lives, port_is_free, real_argv, threads_left, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and groups of POSIX")

WHOLE_LIFE = [State.STARTING, State.LOADING, State.WARMING, State.READY, State.STOPPING, State.STOPPED]


# Start and stop


@pytest.mark.real
async def test_whole_life(llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path) -> None:
    """A real server is loaded, warmed, ready, and leaves nothing behind when it is stopped."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        pid = rig.pid
        assert psutil.Process(pid).ppid() == os.getpid()
        assert os.getsid(pid) == pid != os.getsid(0)
        began_s = time.monotonic()
        rig.supervisor.stop("asked")
        await task
        took_s = time.monotonic() - began_s
    assert rig.states == WHOLE_LIFE
    assert took_s < 2
    assert not lives(pid)
    assert port_is_free(free_port)
    assert rig.released == 1
    assert b"listening on http://127.0.0.1" in rig.output()
    assert rig.raw_log.path.read_bytes() == rig.output()
    assert threads_left() == []


@pytest.mark.real
async def test_stop_while_loading(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A stop that comes right after the spawn ends the child before it has loaded."""
    rig = Rig(real_argv(llama_server, model_path["hybrid"], free_port), free_port, tmp_path)
    async with rig.running() as task:
        await until(lambda: rig.supervisor.state is State.LOADING)
        rig.supervisor.stop("asked")
        await task
    assert rig.states == [State.STARTING, State.LOADING, State.STOPPING, State.STOPPED]
    assert not lives(rig.pid)


@pytest.mark.real
async def test_stop_while_warming(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A stop during the warm-up does not wait for it."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
    rig.warm = lambda: asyncio.sleep(3600)
    async with rig.running() as task:
        await until(lambda: rig.supervisor.state is State.WARMING)
        assert not await rig.supervisor.wait_ready(0.05)
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 5)
    assert rig.states == [State.STARTING, State.LOADING, State.WARMING, State.STOPPING, State.STOPPED]
    assert not lives(rig.pid)


@pytest.mark.real
async def test_cancelled(llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path) -> None:
    """When a part of the stack beside it fails, the supervisor is cancelled and its child ends with it."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lives(rig.pid)
    assert rig.supervisor.state is State.FAILED
    assert port_is_free(free_port)


@pytest.mark.real
async def test_memory_is_sampled(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """The child's resident memory is published, and is what the system says."""
    argv = real_argv(llama_server, model_path["dense"], free_port)
    rig = Rig(argv, free_port, tmp_path, stall_timeout_s=1.0)
    async with rig.running():
        assert await rig.supervisor.wait_ready(30)
        await until(lambda: any(isinstance(event, MemorySampled) for event in rig.events))
        seen = next(event for event in rig.events if isinstance(event, MemorySampled))
        rss = psutil.Process(rig.pid).memory_info().rss
        assert abs(seen.rss_bytes - rss) < 0.5 * rss


async def test_ready_is_health_only(free_port: int, tmp_path: Path) -> None:
    """FR-46, FR-47: a 200 from /v1/models is no readiness; loading that goes on is no stall, however long it takes."""
    rig = Rig(fake_argv(free_port, "load_s=2"), free_port, tmp_path, stall_timeout_s=0.8)
    async with rig.running():
        began_s = time.monotonic()
        assert await rig.supervisor.wait_ready(15)
        assert time.monotonic() - began_s > 2
    assert rig.output().count(b"fake: loading\n") >= 15


async def test_silence_is_a_stall(free_port: int, tmp_path: Path) -> None:
    """FR-46, FR-50: a server that spins without a word is given up with a description of its silence."""
    rig = Rig(fake_argv(free_port, "silent"), free_port, tmp_path, stall_timeout_s=1.5)
    async with rig.running() as task:
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 20)
    assert "stalled" in caught.value.what
    assert "no output for 2 s" in caught.value.fact or "no output for 1 s" in caught.value.fact
    # How much of a core it gets is the machine's affair; that it is busy is the fact.
    assert re.search(r"(one core|[\d.]+ cores) busy$", caught.value.fact)
    assert caught.value.exit_code is ExitCode.START_FAILED
    assert rig.states[-1] is State.FAILED
    assert not lives(rig.pid)


async def test_suspended_child_is_a_stall(free_port: int, tmp_path: Path) -> None:
    """A child that is stopped by SIGSTOP while it loads is named as such, and ended."""
    rig = Rig(fake_argv(free_port, "load_s=60"), free_port, tmp_path, stall_timeout_s=1.0)
    async with rig.running() as task:
        await until(lambda: b"loading" in rig.output())
        os.kill(rig.pid, signal.SIGSTOP)
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 20)
    assert "SIGSTOP" in caught.value.fact
    assert not lives(rig.pid)


@pytest.mark.real
async def test_stop_of_a_suspended_child(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A real server that was stopped by SIGSTOP follows the orderly stop all the same."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        os.kill(rig.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        rig.supervisor.stop("asked")
        await task
        assert time.monotonic() - began_s < 3
    assert rig.states[-1] is State.STOPPED
    assert not lives(rig.pid)


@pytest.mark.parametrize("watchdog", [False, True])
@pytest.mark.real
async def test_hung_server(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path, watchdog: bool
) -> None:
    """A ready server that answers no more is told of; with the watchdog it is started again."""
    argv = real_argv(llama_server, model_path["dense"], free_port)
    rig = Rig(argv, free_port, tmp_path, watchdog=watchdog, hang_timeout_s=1.0, max_restarts=1, stop_timeout_s=1.0)

    async def health() -> Health:
        try:
            return await asyncio.wait_for(rig.upstream.health(), 0.5)
        except TimeoutError:
            return Health.ERROR

    rig.health = health
    async with rig.running():
        assert await rig.supervisor.wait_ready(30)
        hung = rig.pid
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: any("has not answered for" in text for text in rig.notices), 25)
        if watchdog:
            await until(lambda: rig.pid != hung, 15)
            assert await rig.supervisor.wait_ready(30)
            assert not lives(hung)
            assert rig.supervisor.restarts == 1
        else:
            assert rig.supervisor.state is State.READY
            assert lives(hung)


async def test_healthy_but_hung(free_port: int, tmp_path: Path) -> None:
    """FR-48: a server whose /health is fine while its slots stand still is told of, and stopped all the same."""
    rig = Rig(fake_argv(free_port, "deaf"), free_port, tmp_path, hang_timeout_s=1.0, watch_slots=True)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(15)
        await until(lambda: any("has not answered for" in text for text in rig.notices), 10)
        assert await rig.upstream.health() is Health.OK
        assert rig.supervisor.state is State.READY
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 10)
    assert not lives(rig.pid)


@pytest.mark.real
async def test_slots_at_work(llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path) -> None:
    """The slots of a real server are idle, then show progress for as long as a request runs, then are idle again."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path, watch_slots=True)
    async with rig.running():
        assert await rig.supervisor.wait_ready(30)
        assert await rig.busy() == IDLE
        body = {"prompt": "a", "n_predict": 3000, "ignore_eos": True}
        request = asyncio.create_task(rig.upstream.request("POST", "/completion", body))
        await until(lambda: b"processing task" in rig.output())
        marks = []
        while not request.done():
            marks.append(await rig.busy())
            await asyncio.sleep(0.05)
        await request
        working = [mark for mark in marks if mark != IDLE]
        assert len(working) >= 3
        assert None not in working
        assert len(set(working)) >= len(working) - 1
        assert await rig.busy() == IDLE


# Deaths before ready


@pytest.mark.real
@pytest.mark.parametrize(
    ("case", "what", "line"),
    [
        ("missing", "The model file cannot be opened", "failed to open GGUF file"),
        ("truncated", "The model file is incomplete", "data is not within the file bounds"),
        ("no gguf", "The model file is not a GGUF file", "E "),
        ("flag", "does not know an argument", "error: invalid argument: --no-such-flag"),
        ("value", "rejects the value of an argument", 'error while handling argument "--cache-ram"'),
        ("device", "no device of that name", "invalid device: Vulkan7"),
    ],
)
async def test_start_that_cannot_be(
    llama_server: Path,
    model_path: dict[str, Path],
    free_port: int,
    tmp_path: Path,
    case: str,
    what: str,
    line: str,
) -> None:
    """What is wrong with a start is said in one sentence, with the exit status and the line that shows it, at once."""
    model = tmp_path / "model.gguf"
    extra: tuple[str, ...] = ()
    match case:
        case "truncated":
            model.write_bytes(model_path["dense"].read_bytes()[:200_000])
        case "no gguf":
            model.write_bytes(b"<html>this is no model</html>" * 100)
        case "flag" | "value" | "device":
            shutil.copy(model_path["dense"], model)
            extra = {
                "flag": ("--no-such-flag",),
                "value": ("--cache-ram", "much"),
                "device": ("--device", "Vulkan7"),
            }[case]
    argv = real_argv(llama_server, model, free_port, *extra)
    rig = Rig(argv, free_port, tmp_path, max_restarts=3)
    async with rig.running() as task:
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 30)
    assert what in caught.value.what
    assert caught.value.fact.startswith("exit status 1\n")
    assert line in caught.value.fact
    assert caught.value.next_step
    assert rig.states == [State.STARTING, State.LOADING, State.FAILED]
    assert not lives(rig.pid)


@pytest.mark.real
async def test_port_is_in_use(llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path) -> None:
    """A port that a stranger listens on is named as the cause."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", free_port))
        stranger.listen()
        rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
        async with rig.running() as task:
            with pytest.raises(StartFailed) as caught:
                await asyncio.wait_for(task, 30)
    assert "its port is in use" in caught.value.what
    assert str(free_port) in caught.value.fact


@pytest.mark.real
async def test_foreign_server_answers(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A foreign llama-server that answers /health on our port is never taken for ours."""
    foreign = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path / "foreign")
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path)
    async with foreign.running():
        assert await foreign.supervisor.wait_ready(30)
        async with rig.running() as task:
            with pytest.raises(StartFailed):
                await asyncio.wait_for(task, 30)
        assert State.WARMING not in rig.states
        assert foreign.supervisor.state is State.READY
        assert lives(foreign.pid)
        assert not lives(rig.pid)


@pytest.mark.parametrize("fault", ["missing", "not executable", "not a program"])
async def test_binary_that_cannot_run(free_port: int, tmp_path: Path, fault: str) -> None:
    """A binary that cannot be executed is a failed start, not a traceback."""
    binary = tmp_path / "llama-server"
    if fault != "missing":
        binary.write_bytes(b"\x7fELF nonsense")
        binary.chmod(0o644 if fault == "not executable" else 0o755)
    rig = Rig((str(binary), "--port", str(free_port)), free_port, tmp_path)
    async with rig.running() as task:
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 20)
    assert "could not be started" in caught.value.what
    assert str(binary) in caught.value.fact
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("fault", "what", "fact"),
    [
        ("die=137,fake: working", "llama-server was killed by another process", "exit status 137 (SIGKILL)"),
        (
            "abort=terminate called after throwing an instance of 'vk::DeviceLostError'",
            "The GPU was lost: its driver reset it",
            "SIGABRT",
        ),
        (
            "die=1,ggml_vulkan: Device memory allocation of size 4757131264 failed.|ggml_vulkan: Requested buffer size "
            "exceeds device memory allocation limit: ErrorOutOfDeviceMemory|main: error: unable to load model",
            "One buffer was larger than the GPU's driver allows",
            "exceeds device memory allocation limit",
        ),
    ],
)
async def test_deaths_of_the_fake(free_port: int, tmp_path: Path, fault: str, what: str, fact: str) -> None:
    """Deaths that need a GPU or an OOM killer are told from the status and the lines."""
    rig = Rig(fake_argv(free_port, fault), free_port, tmp_path)
    async with rig.running() as task:
        with pytest.raises(StartFailed) as caught:
            await asyncio.wait_for(task, 20)
    assert caught.value.what == what
    assert fact in caught.value.fact


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "killed by another process"),
        (signal.SIGSEGV, "crashed"),
        (signal.SIGILL, "an instruction that this processor does not have"),
        (signal.SIGTERM, "told to stop by another process"),
        (signal.SIGHUP, "told to stop by another process"),
    ],
)
async def test_death_by_signal(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path, number: int, words: str
) -> None:
    """With no restart allowed, a ready server's death ends the stack with status 5 and says what it was."""
    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path, max_restarts=0)
    async with rig.running() as task:
        assert await rig.supervisor.wait_ready(30)
        os.kill(rig.pid, number)
        with pytest.raises(ChildLost) as caught:
            await asyncio.wait_for(task, 10)
    assert words in caught.value.what
    assert caught.value.fact.startswith("server.max_restarts is 0; ")
    assert caught.value.exit_code is ExitCode.CHILD_LOST
    assert rig.states == [State.STARTING, State.LOADING, State.WARMING, State.READY, State.FAILED]
    assert port_is_free(free_port)


# Restarts


@pytest.mark.real
async def test_restarts_within_the_budget(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """Each death takes one restart with a longer wait and a new warm-up; after the last the stack gives up."""
    naps: list[float] = []

    async def sleep(wait_s: float) -> None:
        naps.append(wait_s)
        await asyncio.sleep(min(wait_s, 0.2))

    rig = Rig(real_argv(llama_server, model_path["dense"], free_port), free_port, tmp_path, max_restarts=3, sleep=sleep)
    warmed: list[int] = []

    async def warm() -> None:
        warmed.append(rig.pid)

    rig.warm = warm
    pids: list[int] = []
    async with rig.running() as task:
        for _ in range(4):
            await until(lambda: rig.supervisor.state is State.READY and rig.pid not in pids)
            pids.append(rig.pid)
            os.kill(rig.pid, signal.SIGKILL)
        with pytest.raises(ChildLost) as caught:
            await asyncio.wait_for(task, 10)
    assert "all 3 restarts are used up" in caught.value.fact
    assert warmed == pids
    assert len(set(pids)) == 4
    assert [wait_s for wait_s in naps if wait_s in {1.0, 4.0}] == [1.0, 4.0]  # 2.0 is also the pace of the samples
    assert rig.supervisor.restarts == 3
    assert all(may_go(old, new) for old, new in zip(rig.states, rig.states[1:], strict=False))
    assert not any(lives(pid) for pid in pids)
    assert sorted(rig.lines) == [1, 2, 3, 4]


async def test_stop_during_backoff(free_port: int, tmp_path: Path) -> None:
    """A stop that comes while the next start waits ends the stack at once."""
    rig = Rig(fake_argv(free_port, "die_after_s=0.3"), free_port, tmp_path, max_restarts=3)
    async with rig.running() as task:
        await until(lambda: rig.supervisor.state is State.BACKOFF)
        rig.supervisor.stop("asked")
        await asyncio.wait_for(task, 2)
    assert rig.states[-3:] == [State.BACKOFF, State.STOPPING, State.STOPPED]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.real
async def test_hundred_restarts(
    llama_server: Path, model_path: dict[str, Path], free_port: int, tmp_path: Path
) -> None:
    """A hundred restarts in a row grow neither files nor threads nor memory."""

    async def sleep(wait_s: float) -> None:
        await asyncio.sleep(min(wait_s, 0.05))

    argv = real_argv(llama_server, model_path["dense"], free_port)
    rig = Rig(argv, free_port, tmp_path, max_restarts=100, sleep=sleep)
    me = psutil.Process()
    seen: list[tuple[int, int, int]] = []
    pids: set[int] = set()
    async with rig.running():
        for _ in range(101):
            await until(lambda: rig.supervisor.state is State.READY and rig.pid not in pids, 20)
            pids.add(rig.pid)
            seen.append((me.num_fds(), me.num_threads(), me.memory_info().rss))
            os.kill(rig.pid, signal.SIGKILL)
            await until(lambda: rig.supervisor.state is not State.READY)
    warm = 10  # the first rounds fill the pool of threads and the allocator
    files, threads, memory = zip(*seen[warm:], strict=True)
    assert max(files) <= files[0] + 1
    assert max(threads) <= max(item[1] for item in seen[: warm + 1]) + 2
    assert memory[-1] - memory[0] < 8 * 1024 * 1024
    assert threads_left() == []
    assert not any(lives(pid) for pid in pids)
