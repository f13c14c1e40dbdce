"""
Clients' requests wait while a warm-up fills the slot.
"""

from __future__ import annotations

import asyncio

import pytest

from kvstack import gate as gate_module
from kvstack.bus import Bus
from kvstack.core.events import RequestEnded, RequestForwarded, RequestReceived, ServerSpawned, StateChanged
from kvstack.core.lifecycle import State
from kvstack.core.snapshot import Snapshot
from kvstack.gate import Gate


def received(number: int, conversation: str | None = None) -> RequestReceived:
    """A chat request."""
    chat = "/v1/chat/completions"
    return RequestReceived(1.0, number, "POST", chat, "chat", None, conversation, 1, False, 0, 0, 0)


@pytest.fixture
def bus() -> Bus:
    """A stack that serves."""
    bus = Bus(Snapshot("t", "http://127.0.0.1:1"))
    bus.publish(ServerSpawned(0.0, 1, ("llama-server",)))
    bus.publish(StateChanged(0.0, State.READY, ""))
    return bus


async def test_requests_wait_while_the_slot_is_filled(bus: Bus) -> None:
    """And not longer than they may."""
    gate = Gate(bus)
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
    gate = Gate(bus)
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
    gate = Gate(bus)
    async with gate.quiet() as quiet:
        assert quiet
        assert gate.is_open


async def test_the_newest_request_of_each_conversation_is_kept(bus: Bus) -> None:
    """Newest first, bounded, of this run alone."""
    gate = Gate(bus)
    for number in range(1, 40):
        bus.publish(received(number, f"c{number % 30}"))
        gate.sent(number, "/v1/chat/completions", str(number).encode())
    kept = gate.conversations()
    assert [number for number, _ in kept] == list(range(39, 23, -1))
    assert kept[0][1].body == b"39"
    gate.sent(40, "/v1/chat/completions", b"x" * (gate_module.BODY_BYTES_KEPT + 1))
    assert gate.conversations()[0][0] == 39
    bus.publish(ServerSpawned(3.0, 2, ("llama-server",)))
    assert gate.conversations() == []
