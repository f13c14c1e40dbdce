"""What is held for a listener: nothing without one, and never more than its bounds."""

from __future__ import annotations

import asyncio
import json

from kvstack.proxy.capture import Captures, Listener
from kvstack.state.events import RequestReceived

SCOPE = {"headers": [], "query_string": b""}


def add(captures: Captures, number: int, size_bytes: int = 10) -> None:
    """A request whose body has so many bytes."""
    received = RequestReceived(
        1.0, number, "POST", "/v1/chat/completions", "chat", str(number), None, 1, False, 0, 0, 0
    )
    captures.add(received, SCOPE, b'"' + b"x" * (size_bytes - 2) + b'"')


def listening(captures: Captures) -> Listener:
    """A listener, or the test fails."""
    listener = captures.listen()
    assert listener is not None
    return listener


async def all_of(listener: Listener) -> list[str]:
    """What comes until the end: clients of the requests, and what was lost."""
    rows = [json.loads(line) async for line in listener.lines()]
    return [row["client"] if "client" in row else f"lost {row['lost']}" for row in rows]


async def test_requests_come_in_order_until_the_end() -> None:
    """Those that waited when the stack stopped too."""
    captures = Captures()
    with listening(captures) as listener:
        for number in (1, 2, 3):
            add(captures, number)
        captures.close()
        assert await all_of(listener) == ["1", "2", "3"]
        assert listener.waiting_bytes == 0


async def test_a_reader_that_is_too_slow_loses_and_is_told() -> None:
    """By count; every listener for itself."""
    captures = Captures(max_waiting=2)
    with listening(captures) as slow:
        for number in (1, 2, 3, 4):
            add(captures, number)
        with listening(captures) as other:
            add(captures, 5)
            captures.close()
            assert await all_of(other) == ["5"]
        assert await all_of(slow) == ["lost 3", "1", "2"]


async def test_a_gap_is_told_again_when_it_grows() -> None:
    """The number is of all that were lost so far."""
    captures = Captures(max_waiting=1)
    with listening(captures) as listener:
        add(captures, 1)
        add(captures, 2)
        lines = listener.lines()
        assert json.loads(await anext(lines)) == {"lost": 1}
        assert json.loads(await anext(lines))["client"] == "1"
        for number in (3, 4, 5):
            add(captures, number)
        assert json.loads(await anext(lines)) == {"lost": 3}
        assert json.loads(await anext(lines))["client"] == "3"


async def test_what_waits_is_bounded_in_bytes() -> None:
    """Images are large; one that is larger than the bound is taken where nothing else waits."""
    captures = Captures(max_waiting_bytes=1000)
    with listening(captures) as listener:
        for number, size_bytes in enumerate((600, 600, 300), start=1):
            add(captures, number, size_bytes)
        assert listener.waiting_bytes == 900
        captures.close()
        assert await all_of(listener) == ["lost 1", "1", "3"]
    with listening(captures) as listener:
        add(captures, 4, 2000)
        assert await all_of(listener) == ["4"]


async def test_nothing_is_held_without_a_listener() -> None:
    """Nor for one that has left."""
    captures = Captures()
    add(captures, 1)
    with listening(captures) as listener:
        add(captures, 2)
    add(captures, 3)
    assert captures.listeners == 0
    assert (listener.waiting_bytes, listener.lost) == (0, 0)
    captures.close()
    with listening(captures) as late:
        assert await all_of(late) == []


async def test_few_listeners() -> None:
    """One more is refused, until one leaves."""
    captures = Captures(max_listeners=2)
    first, second = listening(captures), listening(captures)
    assert captures.listen() is None
    with first:
        pass
    assert captures.listen() is not None
    with second:
        pass


async def test_an_empty_line_shows_that_the_stack_lives() -> None:
    """Where no request comes."""
    captures = Captures()
    with listening(captures) as listener:
        lines = listener.lines(pause_s=0.01)
        assert await asyncio.wait_for(anext(lines), 5) == b"\n"
        add(captures, 1)
        assert json.loads(await asyncio.wait_for(anext(lines), 5))["client"] == "1"
