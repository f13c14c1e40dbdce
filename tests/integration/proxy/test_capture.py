"""Capturing over real sockets: the route, and the verb in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay import captured
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.warmup_request import WarmupRequest, from_recording
from kvstack.state.events import RequestReceived
from tests.golden.rules.corpus import load
from tests.integration.proxy.proxy_rig import BODY, CHAT, answer, chunks, exchange, http, openclaw_strip, proxy
from tests.integration.stub_upstream import run_stub
from tests.real.stacks import RunningStack, post, run_stack

pytestmark = pytest.mark.timeout(120)
TOKEN = "Authorization: Bearer t0ken"
ODD = (
    b'{\r\n "messages": [{"role": "user", "content": '
    b'"[Wed 2026-02-18 20:48 UTC] a\\u00e9\\ud800 \xe2\x80\xa8 \xc2\x85"}],\n '
    b'"n": 123456789012345678901, "z": 2.50e1, "z": 2.5\n}\n'
)
ODD_LINE = ODD.strip().replace(b"\r", b" ").replace(b"\n", b" ")


async def begin(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin to listen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http("GET", "/kvstack/capture", b"", TOKEN))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: application/jsonl" in head
    return reader, writer


async def to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
    """The lines of a stack that stops."""
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return [line for line in b"".join(chunks(raw)).splitlines() if line]


async def test_a_capture_needs_the_token() -> None:
    """It is all prompts."""
    async with proxy(None) as running:
        for header in ((), ("Authorization: Bearer wrong",)):
            status, _, body = await exchange(running.port, http("GET", "/kvstack/capture", b"", *header))
            assert status == 401
            assert "token" in json.loads(body)["message"]
        assert running.forward.captures.listeners == 0


async def test_a_capture_is_what_the_client_sent() -> None:
    """Before the rules and decoded; model requests alone, from the beginning of the capture to the stack's end."""
    async with run_stub(answer(b"{}")) as stub:
        async with proxy(stub, strip=openclaw_strip) as running:
            await exchange(running.port, http("POST", CHAT, BODY))
            listener = await begin(running.port)
            await exchange(running.port, http("POST", CHAT, gzip.compress(ODD), "Content-Encoding: gzip"))
            await exchange(running.port, http("GET", "/v1/models"))
            await exchange(running.port, http("POST", "/tokenize", b'{"content": "x"}'))
            await exchange(running.port, http("POST", "/v1/responses", b"{nonsense"))
            received = running.of(RequestReceived)
        lines = await to_the_end(*listener)
    odd, nonsense = lines
    assert odd.endswith(b', "body": ' + ODD_LINE + b"}")
    assert stub.received[1].body != ODD, "the rules had something to do"
    rows = [json.loads(line) for line in lines]
    assert [row["path"] for row in rows] == [CHAT, "/v1/responses"]
    assert rows[0]["conversation"] == getattr(received[1], "conversation", None) is not None
    assert "content-encoding" not in rows[0]["headers"]
    assert nonsense.endswith(b', "body": null}')
    assert "not JSON" in rows[1]["note"]


async def test_credentials_are_not_captured() -> None:
    """Wherever a client puts them beside its body; the upstream gets them as ever."""
    secret = "hush-0123456789"
    request = http(
        "POST", f"{CHAT}?key={secret}&beta=true&{secret}", BODY,
        f"Authorization: Bearer {secret}", f"Proxy-Authorization: Basic {secret}", f"Cookie: session={secret}",
        f"X-Api-Key: {secret}", f"X-Session-Token: {secret}", f"X-Session-Id: Bearer {secret}", f"X-Own: {secret}",
        "X-Session-Affinity: s1", "User-Agent: opencode/1.2.3",
    )  # fmt: skip
    async with run_stub(answer(b"{}")) as stub:
        async with proxy(stub) as running:
            listener = await begin(running.port)
            await exchange(running.port, request)
        (line,) = await to_the_end(*listener)
    assert secret.encode() not in line
    row = json.loads(line)
    assert row["headers"] == {"x-session-affinity": "s1", "user-agent": "opencode/1.2.3"}
    assert row["path"] == f"{CHAT}?beta=true"
    assert row["note"] == "2 query parameters left out"
    assert stub.received[0].head.decode().count(secret) == 8, "all but the one that is for the proxy"


async def test_the_side_requests_of_a_client_are_marked() -> None:
    """As its pack tells them."""

    def title(body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
        return RewriteResult(body, client="openclaw", side="title")

    async with run_stub(answer(b"{}")) as stub:
        async with proxy(stub, strip=title) as running:
            listener = await begin(running.port)
            await exchange(running.port, http("POST", CHAT, BODY))
        (line,) = await to_the_end(*listener)
    row = json.loads(line)
    assert (row["client"], row["kind"]) == ("openclaw", "side")


async def test_a_listener_that_never_reads_slows_no_client() -> None:
    """It loses requests, others do not; what is held for it stays in bounds, and is gone with it."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 400_000}]}).encode()
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        captures = running.forward.captures
        deaf = socket.create_connection(("127.0.0.1", running.port))
        with deaf:
            deaf.sendall(http("GET", "/kvstack/capture", b"", TOKEN))
            while captures.listeners == 0:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            (listener,) = captures._listeners
            reader, writer = await begin(running.port)
            reading = asyncio.ensure_future(whole(reader))
            count = 0
            while listener.lost < 3:
                count += 1
                status, _, _ = await asyncio.wait_for(exchange(running.port, http("POST", CHAT, body)), 5)
                assert status == 200
                assert listener.waiting_bytes <= 64 * 1024 * 1024
                assert count < 500
            assert count > 64
        writer.write_eof()
        writer.close()
        for _ in range(500):
            if captures.listeners == 0:
                break
            await asyncio.sleep(0.01)
        assert captures.listeners == 0
        assert len(stub.received) == count
        seen = await asyncio.wait_for(reading, 5)
        assert seen.count(b'"client": ') >= count - 1
        assert b'{"lost":' not in seen


async def whole(reader: asyncio.StreamReader) -> bytes:
    """Everything that comes until the connection is closed."""
    pieces = []
    with contextlib.suppress(OSError):
        while piece := await reader.read(1_000_000):
            pieces.append(piece)
    return b"".join(pieces)


async def test_a_listener_that_leaves_is_forgotten_at_once() -> None:
    """Without a request that would have to fail first."""
    async with proxy(None) as running:
        _, writer = await begin(running.port)
        assert running.forward.captures.listeners == 1
        writer.close()
        for _ in range(50):
            if running.forward.captures.listeners == 0:
                break
            await asyncio.sleep(0.01)
        assert running.forward.captures.listeners == 0


async def test_too_many_listeners_are_refused() -> None:
    """Each costs memory."""
    async with proxy(None) as running:
        listeners = [await begin(running.port) for _ in range(4)]
        status, _, body = await exchange(running.port, http("GET", "/kvstack/capture", b"", TOKEN))
        assert status == 429
        assert json.loads(body)["message"] == "4 captures are already running"
        for _, writer in listeners:
            writer.close()


# The verb


class _Answering(BaseHTTPRequestHandler):
    """A llama-server that is healthy and has nothing to say."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(b'{"status":"ok"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._say(b'{"choices": []}')

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[RunningStack]:
    """A stack in a process of its own, named box."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        settings = {"url": f"http://127.0.0.1:{server.server_port}"}
        with run_stack(tmp_path, settings, warmup={"enabled": False}) as running:
            yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@dataclass
class Capture:
    """A `kvstack capture` that runs."""

    process: subprocess.Popen[bytes]
    told: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        """Read stderr until it says so."""
        assert self.process.stderr is not None
        while not self.told or text not in self.told[-1]:
            line = self.process.stderr.readline()
            assert line, self.told
            self.told.append(line.decode())

    def end(self) -> int:
        """Wait for the end."""
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        self.told += self.process.stderr.read().decode().splitlines(keepends=True)
        self.process.stderr.close()
        return self.process.wait(20)

    def output(self) -> bytes:
        """The rest of stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.read()


@contextlib.contextmanager
def capture(*arguments: str) -> Iterator[Capture]:
    """Start the verb, and wait until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstack", "capture", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    running = Capture(process)
    try:
        running.wait_for("capturing the requests to box (http://127.0.0.1:")
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def kvstack(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvstack", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The requests in a file."""
    return [json.loads(line) for line in file.read_bytes().decode().split("\n") if line]


def test_what_was_captured_is_taken_by_all_who_read_captures(stack: RunningStack, tmp_path: Path) -> None:
    """A recorded client, with its headers, through the proxy into a file: rules, warm-up and replay know it again."""
    sent = [*load("claude-code-2.1.197-1")[:3], *load("openclaw-2026.2.17-1")[:3]]
    folder = tmp_path / "captures"
    folder.mkdir()
    file = folder / "c.jsonl"
    with capture(str(file), "--count", str(len(sent) + 1)) as running:
        for request in sent:
            assert post(stack.proxy_port, request.path, request.body, dict(request.headers))[0] == 200
        assert post(stack.proxy_port, CHAT, ODD)[0] == 200
        assert running.end() == 0
        assert running.output() == b""
    assert running.told[-1] == f"wrote {len(sent) + 1} requests to {file}\n"
    assert f"claude-code | POST {sent[0].path} | " in running.told[1]
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    rows = rows_of(file)
    assert [row["body"] for row in rows[:-1]] == [json.loads(request.body) for request in sent]
    assert file.read_bytes().endswith(b', "body": ' + ODD_LINE + b"}\n")
    assert [row["client"] for row in rows] == ["claude-code"] * 3 + ["openclaw"] * 3 + [None]
    assert rows[0]["version"] == "2.1.197"
    assert "version" not in rows[3]
    assert [row.get("kind") == "side" for row in rows[:-1]] == [request.side for request in sent]

    tried = kvstack("rules", "test", str(file), "--json")
    assert tried.returncode == 0, tried.stderr
    told = json.loads(tried.stdout)["data"]["requests"]
    assert [one["client"] for one in told] == [row["client"] for row in rows]
    assert [one["path"] for one in told] == [row["path"] for row in rows]
    assert sum(len(one["edits"]) for one in told[3:6]) > 0
    (edit,) = told[-1]["edits"]
    assert edit["removed"] == "[Wed 2026-02-18 20:48 UTC] "
    assert edit["start"] == ODD_LINE.decode().index("[Wed"), "an offset is one in the client's own bytes"

    warm = from_recording(file.read_text(encoding="utf-8"))
    assert isinstance(warm, WarmupRequest)
    first = next(row for row in rows if "kind" not in row)
    assert warm.path == first["path"]
    assert json.loads(warm.body)["tools"] == first["body"]["tools"]
    assert dict(warm.headers) == first["headers"]
    config = tmp_path / "warm.toml"
    config.write_text('[server]\nurl = "http://127.0.0.1:9"\n[warmup]\nrequest_file = "captures/c.jsonl"\n')
    checked = kvstack("check", str(config))
    assert checked.returncode == 0, checked.stderr

    (replayed,) = captured(folder).values()
    assert [(one.path, one.side) for one in replayed] == [(row["path"], row.get("kind") == "side") for row in rows]
    assert [json.loads(one.body) for one in replayed] == [row["body"] for row in rows]


def test_a_capture_of_one_request_without_a_body(stack: RunningStack, tmp_path: Path) -> None:
    """There is nothing to try and nothing to warm, and both say so."""
    file = tmp_path / "c.jsonl"
    with capture("box", str(file), "-n", "1") as running:
        post(stack.proxy_port, CHAT, b"nonsense")
        assert running.end() == 0
    assert [row["body"] for row in rows_of(file)] == [None]
    tried = kvstack("rules", "test", str(file))
    assert (tried.returncode, tried.stdout) == (2, "")
    assert "c.jsonl contains no request" in tried.stderr
    problem = from_recording(file.read_text(encoding="utf-8"))
    assert "holds no model request" in str(problem)


def test_ctrl_c_ends_a_capture(stack: RunningStack, tmp_path: Path) -> None:
    """What came is there; where nothing came nothing is left, and the same name can be used again."""
    file = tmp_path / "c.jsonl"
    with capture(str(tmp_path / "box.toml"), str(file)) as running:
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 130
        assert running.told[-1] == f"wrote 0 requests to {file}\n"
    assert not file.exists()
    with capture(str(file)) as running:
        post(stack.proxy_port, CHAT, BODY)
        running.wait_for("unknown client | POST /v1/chat/completions")
        assert [row["body"] for row in rows_of(file)] == [json.loads(BODY)], "it is there while the capture runs"
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 130
    assert running.told[-1] == f"wrote 1 request to {file}\n"


def test_a_file_is_never_overwritten(stack: RunningStack, tmp_path: Path) -> None:
    """It is added to where that is asked for, from a new line on, and closed to others."""
    file = tmp_path / "c.jsonl"
    file.write_text('{"half": "a line"}')
    file.chmod(0o644)
    refused = kvstack("capture", str(file))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {file} already exists\n")
    assert "--append" in refused.stderr
    for expected in (2, 3):
        with capture(str(file), "--append", "--count", "1") as running:
            post(stack.proxy_port, CHAT, BODY)
            assert running.end() == 0
        assert len(rows_of(file)) == expected
    assert rows_of(file)[0] == {"half": "a line"}
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    missing = kvstack("capture", str(tmp_path / "nowhere" / "c.jsonl"))
    assert missing.returncode == 1
    assert "cannot be written" in missing.stderr


def test_lines_on_stdout(stack: RunningStack) -> None:
    """Data there and talk on stderr, byte for byte."""
    with capture("-", "--count", "2") as running:
        post(stack.proxy_port, CHAT, ODD)
        post(stack.proxy_port, CHAT, BODY)
        assert running.end() == 0
        first, second, rest = running.output().split(b"\n")
    assert first.endswith(b', "body": ' + ODD_LINE + b"}")
    assert json.loads(second)["body"] == json.loads(BODY)
    assert rest == b""
    assert running.told[-1] == "wrote 2 requests to stdout\n"


@pytest.mark.parametrize("count", [None, 5])
def test_a_capture_ends_with_its_stack(stack: RunningStack, tmp_path: Path, count: int | None) -> None:
    """In order; it is an error only where more was asked for.  Nor does a capture hold up the stop."""
    file = tmp_path / "c.jsonl"
    more = () if count is None else ("--count", str(count))
    with capture(str(file), *more) as running:
        post(stack.proxy_port, CHAT, BODY)
        begun = time.monotonic()
        assert stack.stop() == 130
        assert time.monotonic() - begun < 5
        assert running.end() == (0 if count is None else 4)
    said = "".join(running.told)
    assert f"wrote 1 request to {file}\n" in said
    assert "box has ended" in said if count is None else "after 1 of 5 requests" in said
    assert len(rows_of(file)) == 1


def test_a_capture_of_a_stack_that_is_killed(stack: RunningStack, tmp_path: Path) -> None:
    """No half line is left of it."""
    file = tmp_path / "c.jsonl"
    with capture(str(file)) as running:
        post(stack.proxy_port, CHAT, BODY)
        running.wait_for("POST")
        stack.process.kill()
        stack.process.wait(10)
        assert running.end() == 0
    assert "box has ended\n" in running.told
    assert len(rows_of(file)) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full(stack: RunningStack) -> None:
    """Said as an error, with what was written so far; the stack goes on."""
    with capture("/dev/full", "--append") as running:
        assert post(stack.proxy_port, CHAT, BODY)[0] == 200
        assert running.end() == 1
    said = "".join(running.told)
    assert "error: /dev/full cannot be written\n" in said
    assert "wrote 0 requests" in said
    assert stack.status()["state"] == "ready"
