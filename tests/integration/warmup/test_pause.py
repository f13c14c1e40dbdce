"""Clients' requests wait while a warm-up fills the slot."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

from kvstack.bus import Bus
from kvstack.proxy.request_log import RequestLog
from kvstack.state.events import RequestEnded, RequestForwarded, RequestReceived, ServerSpawned, StateChanged
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from kvstack.warmup import pause as pause_module
from kvstack.warmup.pause import Pause
from tests.integration.warmup.warmup_rig import Life, log_request


def received(number: int, conversation: str | None = None) -> RequestReceived:
    """A chat request."""
    chat = "/v1/chat/completions"
    return RequestReceived(1.0, number, "POST", chat, "chat", None, conversation, 1, False, 0, 0, 0)


@pytest.fixture
def bus() -> Bus:
    """A stack that serves."""
    bus = Bus(StackState("t", ProxyView("http://127.0.0.1:1")))
    bus.publish(ServerSpawned(0.0, 1, ("llama-server",)))
    bus.publish(StateChanged(0.0, State.READY, ""))
    return bus


async def test_requests_wait_while_the_slot_is_filled(bus: Bus) -> None:
    """And not longer than they may."""
    pause = Pause(bus)
    async with pause.quiet() as quiet:
        assert quiet
        assert not pause.is_open
        assert not await pause.wait_open(0.01)
        waiting = asyncio.ensure_future(pause.wait_open(5.0))
    assert await waiting
    assert pause.is_open


async def test_a_request_that_is_being_served_gets_a_moment(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends is waited for; one that goes on is not disturbed."""
    monkeypatch.setattr(pause_module, "QUIET_S", 0.2)
    pause = Pause(bus)
    bus.publish(received(1))
    async with pause.quiet() as quiet:
        assert quiet  # it waits for the pause itself
    assert not pause.is_taken()
    bus.publish(RequestForwarded(1.0, 1))
    assert pause.is_taken()
    async with pause.quiet() as quiet:
        assert not quiet
    asyncio.get_running_loop().call_later(0.05, bus.publish, RequestEnded(2.0, 1, 200, "done"))
    async with pause.quiet() as quiet:
        assert quiet
    assert pause.is_taken()
    bus.publish(ServerSpawned(3.0, 2, ("llama-server",)))
    assert not pause.is_taken()


async def test_before_anybody_is_served_there_is_nothing_to_hold_back(bus: Bus) -> None:
    """At the start the proxy waits for the state anyway."""
    bus.publish(StateChanged(1.0, State.WARMING, ""))
    pause = Pause(bus)
    async with pause.quiet() as quiet:
        assert quiet
        assert pause.is_open


CHAT = "/v1/chat/completions"


def body(system: str, user: str) -> bytes:
    """A chat request."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return json.dumps({"messages": messages}).encode()


def send(bus: Bus, log: RequestLog, number: int, path: str, content: bytes, conversation: str | None = None) -> None:
    """A request comes and goes on to the server."""
    log_request(log, number, path, content, conversation)
    bus.publish(received(number, conversation))
    bus.publish(RequestForwarded(1.0, number))


async def test_the_conversations_are_remembered_by_what_their_prompts_begin_with(bus: Bus) -> None:
    """Newest first, bounded, of this run alone."""
    log = RequestLog()
    pause = Pause(bus, log)
    for number in range(1, 40):
        send(bus, log, number, CHAT, body("S", str(number)), f"c{number % 30}")
    kept = pause.conversations()
    assert [conversation.request for conversation in kept] == list(range(39, 23, -1))
    assert len({conversation.head_fingerprint for conversation in kept}) == 1
    send(bus, log, 40, CHAT, body("other", "Hi"))
    assert pause.conversations()[0].head_fingerprint not in {None, kept[0].head_fingerprint}
    send(bus, log, 41, CHAT, b"no JSON")
    assert pause.conversations()[0].head_fingerprint is None
    bus.publish(ServerSpawned(3.0, 2, ("llama-server",)))
    assert pause.conversations() == []


async def test_a_conversation_that_lost_its_slot_is_not_there_any_more() -> None:
    """Whether the host prompt cache still has it, nobody knows: who asks for a warm-up shall have one."""
    life, log = Life(), RequestLog()
    pause = Pause(life.bus, log)
    for conversation in ("c1", "c2"):
        log_request(log, life.numbers + 1, CHAT, body(conversation, "Hi"), conversation)
        life.turn(900, 0, conversation=conversation)
        assert [known.request for known in pause.conversations()] == [life.numbers]


async def test_nothing_that_was_said_is_kept(bus: Bus) -> None:
    """`proxy.keep_bodies` is none by default; where nobody will ask, not even digests are."""
    log = RequestLog()
    pause, forgetful = Pause(bus, log), Pause(bus)
    send(bus, log, 1, CHAT, body("the system text", "the secret"))
    log.end(1)
    kept = pickle.dumps((pause.conversations(), log.get(1)))
    assert b"secret" not in kept
    assert b"system text" not in kept
    assert len(pause.conversations()) == 1
    assert forgetful.conversations() == []
