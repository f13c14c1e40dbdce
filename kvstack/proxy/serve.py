"""uvicorn, embedded: our socket, our signals, no log lines and no headers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvstack.errors import KvstackError, PortTaken, out_of_descriptors

KEEP_ALIVE_S = 75
QUEUE = 1024
"""Connections that the system holds until they are accepted."""


def bind(host: str, port: int, section: str = "proxy") -> socket.socket:
    """
    Take a port now, so that a busy one fails in milliseconds instead of after the model's load.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        section: Whose port it is, `proxy` or `server`, as the config names it.

    Raises:
        PortTaken: Somebody listens there already.
        KvstackError: The address is none of this machine's, or the port needs rights that we lack.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise KvstackError(
            f"The {section}'s address cannot be used",
            f"{section}.host = {host!r}: {error}",
            f"Set {section}.host to 127.0.0.1.",
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # On Windows this option would let two programs share the port.
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(QUEUE)
    except OSError as error:
        listener.close()
        if error.errno in {errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", errno.EADDRINUSE)}:
            raise PortTaken(
                f"The {section}'s port {port} is used by another program",
                f"{host}:{port}: {error.strerror}",
                f"Stop that program, or choose another port: `--set {section}.port=...`.",
            ) from None
        raise KvstackError(
            f"The {section}'s port cannot be opened",
            f"{host}:{port}: {error.strerror}",
            f"Set {section}.host to an address of this machine, and {section}.port to one above 1023.",
        ) from None
    return listener


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the composition root's: they stop the whole stack in order, not the HTTP server alone.
        yield


class ProxyServer:
    """
    Serves an application on a bound socket until told to stop.

    Args:
        app: The application.
        listener: A listening socket.
        grace_s: How long answers may take to end after `stop`, in seconds; they are cut off then.
        on_out_of_descriptors: Called when no file descriptor is left to accept a connection; accepting goes on.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        grace_s: float,
        on_out_of_descriptors: Callable[[], None] = lambda: None,
    ) -> None:
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
            logger = logging.getLogger(name)
            logger.propagate = False
            if not logger.handlers:
                logger.addHandler(logging.NullHandler())
        logging.getLogger("asyncio").addFilter(_is_news)
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            # asyncio accepts so many in one turn, and where no file descriptor is left, it fails and starts a timer as
            # often, each of which fails as often again a second later.  How many may wait is set after the start.
            backlog=1,
            timeout_graceful_shutdown=math.ceil(grace_s) + 1,
        )
        self._server = _Server(config)
        self._listener = listener
        self._on_out_of_descriptors = on_out_of_descriptors

    async def run(self) -> None:
        """Serve until `stop` is called."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(self._on_exception)
        try:
            await self._server.serve([self._listener])
        finally:
            loop.set_exception_handler(before)

    async def started(self) -> None:
        """Wait until connections are accepted."""
        await self._server.listening.wait()

    def stop(self) -> None:
        """Accept no more, close idle connections, let answers end."""
        self._server.should_exit = True

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # With a socket: asyncio's own accept, which goes on by itself after a second.
        if "socket" in context and out_of_descriptors(context.get("exception")):
            self._on_out_of_descriptors()
        else:
            loop.default_exception_handler(context)


def _is_news(record: logging.LogRecord) -> bool:
    """That a client leaves while its answer is on the way is told with its request."""
    return record.msg != "socket.send() raised exception."
