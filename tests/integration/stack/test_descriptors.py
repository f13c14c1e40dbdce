"""Out of file descriptors: the stack lives on, and serves again when there are some."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvstack.errors import out_of_descriptors
from kvstack.process.attach import Attachment
from kvstack.process.descriptors import limit, raise_limit
from kvstack.upstream import Health, Upstream
from tests.integration.proxy.proxy_rig import answer as reply
from tests.integration.stub_upstream import run_stub
from tests.real.stacks import RunningStack, get, run_stack

if sys.platform != "win32":
    import resource

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="needs to limit another process's files"),
]
MODEL = Path(__file__).parents[2] / "models" / "tiny-dense.gguf"
FREE = 12
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def leave_free(pid: int, free: int) -> int:
    """Let a process open only so many files more; gives what it may have in all."""
    time.sleep(0.5)  # connections of what was asked a moment ago are closed
    allowed = len(list(Path(f"/proc/{pid}/fd").iterdir())) + free
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (allowed, allowed))
    return allowed


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections on which nothing is said."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(count)]


def ask(client: socket.socket, path: str) -> None:
    """Send a model request."""
    body = json.dumps(BODIES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)


def answer(client: socket.socket) -> tuple[bytes, dict[str, object]]:
    """The head, and the body as JSON, of an answer that ends with its connection."""
    data = b""
    while piece := client.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return head, json.loads(body)


def identity(stack: RunningStack) -> tuple[object, object, object]:
    """State, restarts, and the llama-server's pid."""
    status = stack.status()
    return status["state"], status["restarts"], status["server"]["pid"]


def notices(stack: RunningStack) -> list[str]:
    """What the stack has told about descriptors."""
    return [notice["text"] for notice in stack.status()["notices"] if "descriptor" in notice["text"]]


def test_stack_lives_on_without_descriptors(llama_server: Path, tmp_path: Path) -> None:
    """Clients get 503 in their dialect, the server is not touched, one notice tells, and all is served afterwards."""
    server = {"binary": str(llama_server), "model": str(MODEL), "device": "none", "ctx_size": 512, "watchdog": True}
    with run_stack(tmp_path, server) as stack:
        assert stack.process.stderr is not None
        before = identity(stack)
        allowed = leave_free(stack.process.pid, FREE)
        with connections(stack.proxy_port, FREE - 1):
            time.sleep(0.3)
            for path in BODIES:  # one after the other: each takes the last descriptor, and gives it back
                with socket.create_connection(("127.0.0.1", stack.proxy_port), 20) as client:
                    ask(client, path)
                    head, told = answer(client)
                assert head.startswith(b"HTTP/1.1 503 "), head
                assert b"\r\nretry-after: " in head
                error = told["error"]
                assert isinstance(error, dict)
                assert "kvstack is out of file descriptors" in str(error["message"])
                assert (told.get("type") == "error") == (path == "/v1/messages")
            with connections(stack.proxy_port, 60) as waiting:
                for client in waiting:
                    ask(client, "/v1/chat/completions")
                time.sleep(6)  # three looks at the child, and six at the connections that wait
                assert stack.process.poll() is None
        stack.wait_for("ready", 10)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            response = httpx.post(
                f"http://127.0.0.1:{stack.proxy_port}/v1/chat/completions",
                json=BODIES["/v1/chat/completions"],
                timeout=20,
            )
            if response.status_code == 200:
                break
            time.sleep(0.2)
        assert response.status_code == 200
        assert identity(stack) == before
        told_notices = notices(stack)
        assert len(told_notices) == 1
        assert f"(limit {allowed})" in told_notices[0]
        stack.stop()
        output = stack.output()
    assert "Traceback" not in output
    assert "out of system resource" not in output
    assert output.count(told_notices[0]) == 1  # a failed request says so on its own line, as ever


def test_server_that_died_comes_back_when_there_are_descriptors(llama_server: Path, tmp_path: Path) -> None:
    """A restart that finds no descriptor waits for one, and takes nothing from the budget for that."""
    server = {"binary": str(llama_server), "model": str(MODEL), "device": "none", "ctx_size": 512, "max_restarts": 1}
    with run_stack(tmp_path, server) as stack:
        pid = stack.status()["server"]["pid"]
        leave_free(stack.process.pid, FREE)
        with connections(stack.proxy_port, FREE + 6):
            time.sleep(0.3)
            os.kill(pid, 9)
            time.sleep(5)
            assert stack.process.poll() is None
        status = stack.wait_for("ready", 30)
        assert status["restarts"] == 1
        assert any("cannot be started before" in text for text in notices(stack))
        assert get(stack.proxy_port, "/health")[0] == 200


def test_stack_takes_what_the_hard_limit_allows(llama_server: Path, tmp_path: Path) -> None:
    """The soft limit that a shell gives, which is made for programs that use select(), is raised at the start."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 500))

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        server = {"binary": str(llama_server), "model": str(MODEL), "device": "none", "ctx_size": 512}
        with run_stack(tmp_path, server) as stack:
            soft, hard = resource.prlimit(stack.process.pid, resource.RLIMIT_NOFILE)
            assert soft == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    code = "from kvstack.process.descriptors import *; raise_limit(); print(limit())"
    said = subprocess.run([sys.executable, "-c", code], preexec_fn=few, capture_output=True, text=True, check=True)
    assert said.stdout == "500\n"


def test_limits_that_cannot_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard limit without end is not tried, and what the system refuses is asked for smaller."""
    asked: list[tuple[int, int]] = []

    def refuse(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        if limits[0] > 20_000:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_limit()
    assert [soft for soft, _ in asked] == [65_536, 10_240]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    raise_limit()
    assert len(asked) == 2
    assert limit() is None


def test_what_it_was_raised_from_counts() -> None:
    """Libraries wrap the error, asyncio puts several into a group."""
    assert out_of_descriptors(OSError(errno.EMFILE, "x"))
    assert not out_of_descriptors(OSError(errno.ECONNREFUSED, "x"))
    group = OSError("All connection attempts failed")
    group.__cause__ = ExceptionGroup("several", [OSError(errno.ECONNREFUSED, "x"), OSError(errno.ENFILE, "x")])
    wrapped = RuntimeError()
    wrapped.__context__ = group
    assert out_of_descriptors(wrapped)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_server_that_cannot_be_asked_is_not_missed(host: str) -> None:
    """That kvstack cannot open a socket says nothing of the server, whichever way its address is written."""
    async with run_stub(reply(b"{}")) as stub:
        upstream = Upstream(f"http://{host}:{stub.port}")
        assert await upstream.health() is Health.OK
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            told = await upstream.health()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert told is Health.UNASKED
        assert await upstream.health() is Health.OK
        await upstream.close()


async def test_attached_server_is_missed_only_when_it_was_asked() -> None:
    """Any number of questions that could not be put are no miss, those that were refused are."""
    answers = [*[Health.UNASKED] * 50, *[Health.REFUSED] * 20]

    async def health() -> Health:
        return answers.pop(0)

    async def sleep(_: float) -> None:
        pass

    await Attachment(health, time.monotonic, sleep).until_missed()
    assert 0 < len(answers) < 20
