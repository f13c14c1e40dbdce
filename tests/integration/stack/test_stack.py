"""The composition root, on a stub upstream that is attached to."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.errors import ExitCode, PortTaken, StartFailed
from kvstack.rundir import EndFile, RunDir, RunFile, last_used, names
from kvstack.stack.plan import make_plan
from kvstack.stack.stack import Stack
from kvstack.state.events import StateChanged
from kvstack.state.lifecycle import State
from tests.integration.proxy.proxy_rig import BODY, CHAT, answer, closed_port, exchange, http
from tests.integration.stub_upstream import Received, StubUpstream, run_stub


def make_stack(port: int, proxy_port: int, *overrides: str) -> Stack:
    """A stack that attaches to a port."""
    text = f'name = "t"\n[server]\nurl = "http://127.0.0.1:{port}"\n[proxy]\nport = {proxy_port}\n'
    config = parse_config(text, Path("/t.toml"), Path("/home/ann"), overrides)
    return Stack(make_plan(config, Path("/t.toml"), {}))


@asynccontextmanager
async def running(stub: StubUpstream, proxy_port: int, *overrides: str) -> AsyncIterator[Stack]:
    """A stack that is ready; stopped on the way out."""
    stack = make_stack(stub.port, proxy_port, *overrides)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stack.run())
        assert await asyncio.wait_for(stack._wait_ready(10), 15)
        try:
            yield stack
        finally:
            stack.request_stop("test over")
            await asyncio.wait_for(task, 20)


async def test_nothing_is_left_after_an_orderly_stop() -> None:
    """Run file, port and states: all as before, in the legal order."""
    port = closed_port()
    async with run_stub(answer(b"{}")) as stub, running(stub, port) as stack:
        assert names() == ["t"]
        seen = stack.subscribe()
    assert names() == []
    assert stack.stack_state().state is State.STOPPED
    states = [event.state for event in seen._events if isinstance(event, StateChanged)]
    assert states == [State.STOPPING, State.STOPPED]
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_is_ended_to_be_restarted_does_not_take_the_proxy_along() -> None:
    """Closing the upstream's connections belongs to the stop of the stack, not to that of a hung server."""
    port = closed_port()
    async with run_stub(answer(b"{}")) as stub, running(stub, port) as stack:
        await stack._release_upstream()
        await asyncio.sleep(0.3)  # uvicorn looks ten times a second whether it shall stop
        status, _, _ = await exchange(port, http("POST", CHAT, BODY))
        assert status == 200


async def test_a_stop_lets_a_stream_end_by_itself() -> None:
    """What was asked for before the stop is answered whole, within stop_timeout_s."""
    begun = asyncio.Event()

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        body = b"{}"
        if request.request_line.startswith("POST"):
            begun.set()
            await asyncio.sleep(0.5)
            body = b'{"whole": true}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()

    port = closed_port()
    async with run_stub(slow) as stub, running(stub, port) as stack:
        asking = asyncio.ensure_future(exchange(port, http("POST", CHAT, BODY)))
        await asyncio.wait_for(begun.wait(), 5)
        stack.request_stop("test")
        status, _, body = await asyncio.wait_for(asking, 5)
        assert (status, body) == (200, b'{"whole": true}')


async def test_a_stop_cuts_a_stream_that_goes_on() -> None:
    """After stop_timeout_s the upstream's connection is closed: a server would wait for it for ever."""
    begun = asyncio.Event()

    async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
        if not request.request_line.startswith("POST"):
            await answer(b"{}")(request, writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        begun.set()
        await asyncio.sleep(60)

    port = closed_port()
    async with run_stub(endless) as stub, running(stub, port, "server.stop_timeout_s=0.3") as stack:
        asking = asyncio.ensure_future(exchange_raw(port))
        await asyncio.wait_for(begun.wait(), 5)
        stack.request_stop("test")
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)
        assert not (await asyncio.wait_for(asking, 5)).endswith(b"0\r\n\r\n")


async def test_the_proxy_knows_that_the_stack_stops() -> None:
    """A request that comes then is told so, and not to try again later."""
    async with run_stub(answer(b"{}")) as stub, running(stub, closed_port()) as stack:
        assert not stack._forward._is_stopping()
    assert stack._forward._is_stopping()


async def exchange_raw(port: int) -> bytes:
    """Everything that comes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http("POST", CHAT, BODY))
    raw = await reader.read()
    writer.close()
    return raw


async def test_a_server_that_is_not_there_ends_the_start() -> None:
    """One error of ours comes out, not a group of them; the run file and the lock are gone."""
    stack = make_stack(closed_port(), closed_port())
    stack._supervisor._attach_patience_s = 0.3
    with pytest.raises(StartFailed) as caught:
        await asyncio.wait_for(stack.run(), 10)
    assert caught.value.exit_code is ExitCode.START_FAILED
    assert names() == []
    end = RunDir("t").read_end()
    assert end is not None
    assert (end.what, end.fact, end.next_step) == (caught.value.what, caught.value.fact, caught.value.next_step)
    assert (end.pid, end.config_path) == (os.getpid(), str(Path("/t.toml")))
    assert time.time() - 20 < end.begun_s < end.ended_s <= time.time()
    again = make_stack(closed_port(), closed_port())
    again._run_dir.lock()
    again._run_dir.unlock()
    await again._upstream.close()


async def test_word_of_an_end_is_left_for_errors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own leaves word too; the next start takes it away, and an orderly stop leaves none."""
    port = closed_port()
    async with run_stub(answer(b"{}")) as stub:
        broken = make_stack(stub.port, port)

        async def fault() -> None:
            raise ValueError("odd")

        monkeypatch.setattr(broken._supervisor, "run", fault)
        with pytest.raises(ValueError, match="odd"):
            await asyncio.wait_for(broken.run(), 10)
        end = RunDir("t").read_end()
        assert end is not None
        assert (end.what, end.fact) == ("Internal error in kvstack", "ValueError: odd")
        async with running(stub, port):
            assert RunDir("t").read_end() is None
        assert RunDir("t").read_end() is None


@pytest.mark.parametrize("name", ["t", "other"])
async def test_a_start_that_is_refused_leaves_the_record_of_the_last_run_alone(name: str) -> None:
    """Somebody has the port: what is told of later is still the stack that ran last, and how it ended."""
    directory = RunDir("t")
    directory.path.mkdir(parents=True)
    end = EndFile("t", 1, 1.0, 2.0, "/t.toml", "It was lost", "exit status 1", "Look at its log.")
    killed = RunFile("t", 2**22 + 1, 1.0, "http://127.0.0.1:1", "token", "/t.toml", "/t.log", "1")
    directory.write_end(end)
    directory.write(killed)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = make_stack(closed_port(), taken.getsockname()[1], f"name={name}")
        with pytest.raises(PortTaken):
            await refused.run()
    assert (directory.read_end(), directory.read()) == (end, killed)
    assert RunDir("other").read_end() is None
    assert last_used() == "t"
    async with run_stub(answer(b"{}")) as stub, running(stub, closed_port()):
        assert directory.read_end() is None


async def test_a_warm_up_that_is_off_at_the_start_can_be_asked_for() -> None:
    """`warmup.enabled = false` means not by itself."""

    def asked(stub: StubUpstream) -> list[str]:
        return [one.request_line for one in stub.received if one.request_line.startswith("POST /v1/")]

    switches = ("warmup.enabled=false", "warmup.system_prompt=You help.")
    async with run_stub(answer(b"{}")) as stub, running(stub, closed_port(), *switches) as stack:
        assert asked(stub) == []
        assert stack.stack_state().warmup.outcome == "off"
        assert (await stack.warm_up()).outcome == "done"
        assert asked(stub) == [f"POST {CHAT} HTTP/1.1"]
    async with run_stub(answer(b"{}")) as stub, running(stub, closed_port(), "warmup.enabled=false") as stack:
        assert (await stack.warm_up()).outcome == "no prefix known"


async def test_the_stack_knows_whose_prefix_is_warm() -> None:
    """A request is laid beside what was warmed up: system texts and tools, whatever else is in the two."""
    port = closed_port()
    async with run_stub(answer(b"{}")) as stub, running(stub, port, "warmup.system_prompt=You help.") as stack:
        for text in ("You help.", "You do not."):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": "What is it?"}]
            await exchange(port, http("POST", CHAT, json.dumps({"messages": messages, "temperature": 0.5}).encode()))
        assert [row.has_warmed_head for row in stack.stack_state().requests] == [True, False]
