"""
The proxy tells the memory what was answered, over real sockets: a conversation that was never seen gets nothing of one
that began with the same words, whatever became of that one's request.
"""

from __future__ import annotations

import asyncio
import json
from importlib import resources

import pytest

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSettings
from kvstack.proxy.forward import Strip
from tests.integration.proxy.proxy_rig import CHAT, Running, answer, exchange, http, proxy
from tests.integration.stub_upstream import Handler, Received, StubUpstream, run_stub

OLD, NEW = "2026-11-29", "2026-11-30"
OWN, OTHER = "Hi! How can I help you today?", "What would you like to do?"

WHOLE = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": OWN}}]}).encode()
STREAM = b"".join(
    b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}).encode() + b"\n\n"
    for piece in (OWN[:9], OWN[9:])
)
ANSWERS: dict[str, Handler] = {
    "whole": answer(WHOLE),
    "stream": answer(STREAM + b"data: [DONE]\n\n", content_type="text/event-stream"),
}


def pi_strip() -> Strip:
    """The rule engine with Pi's pack and a memory of its own."""
    text = (resources.files("kvstack.packs") / "pi.toml").read_text(encoding="utf-8")
    rules, memory = compile_rules([parse_pack(text, "pi.toml")], RuleSettings()), ConversationMemory()
    return lambda body, path, headers: apply_rules(body, path, rules, memory, headers)


def request(day: str, held: str | None = None, path: str = CHAT) -> bytes:
    """A first turn, or the second one with the answer that it holds."""
    system = f"operating inside pi, a coding agent harness\nCurrent date: {day}\nCurrent working directory: /x"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    if held is not None:
        messages += [{"role": "assistant", "content": held}, {"role": "user", "content": "more"}]
    return http("POST", path, json.dumps({"messages": messages}).encode())


def parts(received: Received) -> tuple[list[dict[str, str]], str]:
    """Messages of a request upstream, and the date that it has there."""
    messages = json.loads(received.body)["messages"]
    return messages, messages[0]["content"].split("Current date: ")[1][:10]


async def second_turn_day(running: Running, stub: StubUpstream, held: str) -> str:
    """The date that the second turn has upstream."""
    before = len(stub.received)
    await exchange(running.port, request(NEW, held))
    return parts(stub.received[before])[1]


@pytest.mark.parametrize("kind", ANSWERS)
async def test_only_who_was_answered_goes_on(kind: str) -> None:
    """The answer of the first turn is read on its way, in one piece or in deltas."""
    async with run_stub(ANSWERS[kind]) as stub, proxy(stub, strip=pi_strip()) as running:
        await exchange(running.port, request(OLD))
        assert await second_turn_day(running, stub, OTHER) == NEW
        assert await second_turn_day(running, stub, OWN) == OLD


async def test_nobody_goes_on_from_an_error() -> None:
    """Who got an error has no answer."""
    async with (
        run_stub(answer(b'{"error": {"message": "no"}}', "500 Internal Server Error")) as stub,
        proxy(stub, strip=pi_strip()) as running,
    ):
        await exchange(running.port, request(OLD))
        assert await second_turn_day(running, stub, OWN) == NEW


class Pause:
    """An upstream that answers its first request when it may, and the others at once."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def handle(self, received: Received, writer: asyncio.StreamWriter) -> None:
        """Answer."""
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()
        await ANSWERS["whole"](received, writer)


async def test_nobody_goes_on_from_an_answer_that_is_due() -> None:
    """While the first turn is in its prefill, a second one is another conversation's; afterwards it may be its own."""
    gate = Pause()
    async with run_stub(gate.handle) as stub, proxy(stub, strip=pi_strip()) as running:
        async with asyncio.TaskGroup() as group:
            group.create_task(exchange(running.port, request(OLD)))
            await gate.reached.wait()
            assert await second_turn_day(running, stub, OTHER) == NEW
            gate.open.set()
        assert await second_turn_day(running, stub, OWN) == OLD


async def test_nobody_goes_on_from_a_request_that_waits_for_the_server() -> None:
    """After a restart many wait until it is ready, each with its own history."""
    ready, waiting = asyncio.Event(), asyncio.Queue[None]()

    async def wait_ready(_: float) -> bool:
        waiting.put_nowait(None)
        await ready.wait()
        return True

    async with (
        run_stub(ANSWERS["whole"]) as stub,
        proxy(stub, strip=pi_strip(), wait_ready=wait_ready, ready_timeout_s=20) as running,
        asyncio.TaskGroup() as group,
    ):
        for sent in (request(OLD), request(NEW, OTHER)):
            group.create_task(exchange(running.port, sent))
            await waiting.get()
        ready.set()
    days = {len(messages): day for messages, day in map(parts, stub.received)}
    assert days == {2: OLD, 4: NEW}


async def test_nobody_goes_on_from_a_request_that_was_refused() -> None:
    """A server that is not ready answered nothing."""
    ready: list[bool] = []

    async def wait_ready(_: float) -> bool:
        return bool(ready)

    async with run_stub(ANSWERS["whole"]) as stub, proxy(stub, strip=pi_strip(), wait_ready=wait_ready) as running:
        status, _, _ = await exchange(running.port, request(OLD))
        assert status == 503
        ready.append(True)
        assert await second_turn_day(running, stub, OTHER) == NEW


async def test_nobody_goes_on_from_a_request_that_was_given_up() -> None:
    """Its client left before the first word."""
    gate = Pause()
    async with run_stub(gate.handle) as stub, proxy(stub, strip=pi_strip()) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(request(OLD))
        await gate.reached.wait()
        writer.close()
        await stub.closed_by_peer.wait()
        assert await second_turn_day(running, stub, OWN) == NEW


async def test_the_answer_is_known_before_its_connection_is_closed() -> None:
    """A client may go on with the last event of a stream."""
    closing = asyncio.Event()

    async def handle(received: Received, writer: asyncio.StreamWriter) -> None:
        if len(stub.received) > 1:
            await ANSWERS["whole"](received, writer)
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        writer.write(head + STREAM + b"data: [DONE]\n\n")
        await closing.wait()

    async with run_stub(handle) as stub, proxy(stub, strip=pi_strip()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(request(OLD))
        await reader.readuntil(b"[DONE]")
        assert await second_turn_day(running, stub, OTHER) == NEW
        closing.set()
        writer.close()


async def test_what_counts_tokens_is_answered_nothing() -> None:
    """A client that has its prompt counted first goes on from the answer to the request itself."""
    async with run_stub(ANSWERS["whole"]) as stub, proxy(stub, strip=pi_strip()) as running:
        for path in (f"{CHAT}/input_tokens", CHAT, f"{CHAT}/input_tokens"):
            await exchange(running.port, request(OLD, path=path))
        assert await second_turn_day(running, stub, OTHER) == NEW
        assert await second_turn_day(running, stub, OWN) == OLD
