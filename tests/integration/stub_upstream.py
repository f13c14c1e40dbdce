"""An upstream on a real socket that answers as a test says, byte for byte, and records what it got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

__all__ = ["Received", "StubUpstream", "run_stub"]


@dataclass
class Received:
    """One request as it came over the wire."""

    head: bytes
    body: bytes

    @property
    def request_line(self) -> str:
        """Method, target and version."""
        return self.head.split(b"\r\n", 1)[0].decode()

    def headers(self) -> list[tuple[str, str]]:
        """Header pairs, names in lower case."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers() if key == name), None)


Handler = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class StubUpstream:
    """A server with one behaviour."""

    handler: Handler
    port: int = 0
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    closed_by_peer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a peer closes its connection before our answer is complete."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request, answer it, close."""
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            request = Received(head[:-4], b"")
            length = request.header("content-length")
            if length:
                request.body = await reader.readexactly(int(length))
            self.received.append(request)
            answering = asyncio.ensure_future(self.handler(request, writer))
            watching = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.closed_by_peer.set()
                answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed_by_peer.set()
        finally:
            writer.close()


@asynccontextmanager
async def run_stub(handler: Handler, port: int = 0) -> AsyncIterator[StubUpstream]:
    """Run a stub on a loopback port, a free one by default."""
    stub = StubUpstream(handler)
    server = await asyncio.start_server(stub.serve, "127.0.0.1", port)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()
        await server.wait_closed()
