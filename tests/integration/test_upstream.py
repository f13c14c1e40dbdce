"""The upstream's client over real sockets: health and props."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from kvstack.upstream import Health, Upstream, UpstreamError
from tests.integration.proxy.proxy_rig import answer, closed_port
from tests.integration.stub_upstream import run_stub


@pytest.mark.parametrize(
    ("status", "body", "health"),
    [
        ("200 OK", b'{"status":"ok"}', Health.OK),
        ("503 Service Unavailable", b'{"error":{"code":503,"message":"Loading model"}}', Health.LOADING),
        ("404 Not Found", b"", Health.ERROR),
        ("401 Unauthorized", b"", Health.ERROR),
    ],
)
async def test_health_is_what_the_status_says(status: str, body: bytes, health: Health) -> None:
    """FR-47: 200 alone is ready, 503 is loading and not down."""
    async with run_stub(answer(body, status)) as stub:
        upstream = Upstream(f"http://127.0.0.1:{stub.port}")
        assert await upstream.health() is health
        await upstream.close()
    assert stub.received[0].request_line == "GET /health HTTP/1.1"


async def test_nobody_there_is_refused() -> None:
    """The first 100 ms of each start."""
    upstream = Upstream(f"http://127.0.0.1:{closed_port()}")
    assert await upstream.health() is Health.REFUSED
    with pytest.raises(UpstreamError) as caught:
        await upstream.props()
    assert not caught.value.reached
    await upstream.close()


async def test_props_are_read_as_far_as_they_are_there() -> None:
    """Other builds say less; our own key is sent."""
    body = {
        "build_info": "b1-571d0d5",
        "total_slots": 4,
        "default_generation_settings": {"n_ctx": 32768},
        "model_path": 7,
    }
    async with run_stub(answer(json.dumps(body).encode())) as stub:
        upstream = Upstream(f"http://127.0.0.1:{stub.port}", "k3y")
        props = await upstream.props()
        await upstream.close()
    assert (props.build, props.slots, props.ctx_per_slot, props.model) == ("b1-571d0d5", 4, 32768, None)
    assert stub.received[0].header("authorization") == "Bearer k3y"


@pytest.mark.parametrize("body", [b"[]", b"not json", b"null"])
async def test_props_of_something_else_are_an_error(body: bytes) -> None:
    """Any web server may listen there."""
    async with run_stub(answer(body)) as stub:
        upstream = Upstream(f"http://127.0.0.1:{stub.port}")
        with pytest.raises(UpstreamError) as caught:
            await upstream.props()
        await upstream.close()
    assert caught.value.reached


@pytest.mark.parametrize("begun", [False, True])
async def test_a_connection_that_is_reset_is_told_in_words(begun: bool) -> None:
    """A server that dies resets its connections; the library's error has no words of its own then."""

    async def die(_: object, writer: asyncio.StreamWriter) -> None:
        if begun:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(0.05)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with run_stub(die) as stub:
        upstream = Upstream(f"http://127.0.0.1:{stub.port}")

        async def ask() -> None:
            async with upstream.open("POST", b"/v1/chat/completions", [], b"{}") as stream:
                assert begun
                assert [piece async for piece in stream.pieces()] == [b"half"]

        with pytest.raises(UpstreamError) as caught:
            await ask()
        await upstream.close()
    assert str(caught.value) == "the connection closed before the answer was complete"
