"""Clients' requests wait while a warm-up fills the slot."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

from kvstack.bus import Bus
from kvstack.prompt.warmup_request import head_digest
from kvstack.state.events import RequestEnded, RequestForwarded, RequestReceived, ServerSpawned, StateChanged
from kvstack.state.lifecycle import State
from kvstack.state.stack_state import StackState
from kvstack.warmup import pause as gate_module
from kvstack.warmup.pause import Pause
from tests.unit.state.story import Story


def received(number: int, conversation: str | None = None) -> RequestReceived:
    """A chat request."""
    chat = "/v1/chat/completions"
    return RequestReceived(1.0, number, "POST", chat, "chat", None, conversation, 1, False, 0, 0, 0)


@pytest.fixture
def bus() -> Bus:
    """A stack that serves."""
    bus = Bus(StackState("t", "http://127.0.0.1:1"))
    bus.publish(ServerSpawned(0.0, 1, ("llama-server",)))
    bus.publish(StateChanged(0.0, State.READY, ""))
    return bus


async def test_requests_wait_while_the_slot_is_filled(bus: Bus) -> None:
    """And not longer than they may."""
    gate = Pause(bus)
    async with gate.quiet() as quiet:
        assert quiet
        assert not gate.is_open
        assert not await gate.wait_open(0.01)
        waiting = asyncio.ensure_future(gate.wait_open(5.0))
    assert await waiting
    assert gate.is_open


async def test_a_request_that_is_being_served_gets_a_moment(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends is waited for; one that goes on is not disturbed."""
    monkeypatch.setattr(gate_module, "QUIET_S", 0.2)
    gate = Pause(bus)
    bus.publish(received(1))
    async with gate.quiet() as quiet:
        assert quiet  # it waits for the gate itself
    assert not gate.is_taken()
    bus.publish(RequestForwarded(1.0, 1))
    assert gate.is_taken()
    async with gate.quiet() as quiet:
        assert not quiet
    asyncio.get_running_loop().call_later(0.05, bus.publish, RequestEnded(2.0, 1, 200, "done"))
    async with gate.quiet() as quiet:
        assert quiet
    assert gate.is_taken()
    bus.publish(ServerSpawned(3.0, 2, ("llama-server",)))
    assert not gate.is_taken()


async def test_before_anybody_is_served_there_is_nothing_to_hold_back(bus: Bus) -> None:
    """At the start the proxy waits for the state anyway."""
    bus.publish(StateChanged(1.0, State.WARMING, ""))
    gate = Pause(bus)
    async with gate.quiet() as quiet:
        assert quiet
        assert gate.is_open


CHAT = "/v1/chat/completions"


def body(system: str, user: str) -> bytes:
    """A chat request."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return json.dumps({"messages": messages}).encode()


async def test_the_conversations_are_remembered_by_what_their_prompts_begin_with(bus: Bus) -> None:
    """Newest first, bounded, of this run alone."""
    gate = Pause(bus)
    for number in range(1, 40):
        bus.publish(received(number, f"c{number % 30}"))
        gate.sent(number, CHAT, body("S", str(number)))
    kept = gate.conversations()
    assert [conversation.request for conversation in kept] == list(range(39, 23, -1))
    assert {conversation.head for conversation in kept} == {head_digest(body("S", "Hi"))}
    gate.sent(40, CHAT, body("other", "Hi"))
    assert gate.conversations()[0].head not in {None, kept[0].head}
    gate.sent(41, "/v1/responses", body("S", "Hi"))
    assert gate.conversations()[0].head is None
    gate.sent(42, CHAT, body("S", "x" * gate_module.HEAD_BYTES))
    assert gate.conversations()[0].head is None
    bus.publish(ServerSpawned(3.0, 2, ("llama-server",)))
    assert gate.conversations() == []


async def test_a_conversation_that_lost_its_slot_is_not_there_any_more() -> None:
    """Whether the host prompt cache still has it, nobody knows: who asks for a warm-up shall have one."""
    story = Story()
    gate = Pause(story)  # type: ignore[arg-type] - all that it asks for is the Snapshot
    for conversation in ("c1", "c2"):
        story.turn(900, 0, conversation=conversation)
        gate.sent(story.numbers, CHAT, body(conversation, "Hi"))
        assert [known.request for known in gate.conversations()] == [story.numbers]


async def test_nothing_that_was_said_is_kept(bus: Bus) -> None:
    """`proxy.keep_bodies` is none by default; where nobody will ask, not even digests are."""
    gate, forgetful = Pause(bus), Pause(bus, remembers=False)
    for one in (gate, forgetful):
        one.sent(1, CHAT, body("the system text", "the secret"))
    kept = pickle.dumps(gate.conversations())
    assert b"secret" not in kept
    assert b"system text" not in kept
    assert len(gate.conversations()) == 1
    assert forgetful.conversations() == []
