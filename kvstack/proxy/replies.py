"""kvstack's own answers, errors in the client's dialect, and the CORS headers of all answers."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope, Send

from kvstack.proxy.error_bodies import error_body
from kvstack.proxy.headers import header

RETRY_AFTER_S = 5

_STATUS_HEADERS = {
    401: ((b"www-authenticate", b"Bearer"),),
    503: ((b"retry-after", str(RETRY_AFTER_S).encode()),),
}


class Replies:
    """
    Sends answers of the proxy's own.

    Args:
        cors_origins: Browser origins that may read them; `*` for all.
    """

    def __init__(self, cors_origins: Iterable[str] = ()) -> None:
        self._cors_origins = frozenset(cors_origins)

    async def error(
        self, scope: Scope, send: Send, api: str | None, status: int, message: str, *, close: bool = False
    ) -> None:
        """
        Send an error.

        Args:
            scope: The request.
            send: Sends to its client.
            api: The client's dialect.
            status: HTTP status.
            message: What happened.
            close: Close the connection, which frees its file descriptor.
        """
        extra = [*_STATUS_HEADERS.get(status, ()), *([(b"connection", b"close")] if close else ())]
        await self._send(scope, send, status, error_body(api, status, message), "application/json", extra)

    async def probe(self, scope: Scope, send: Send) -> None:
        """Answer a `HEAD` that asks whether somebody is there."""
        await self._send(scope, send, 200, b"", "text/plain; charset=utf-8")

    async def preflight(self, scope: Scope, send: Send) -> None:
        """Answer a browser's question whether a page may use the proxy."""
        allowed: list[tuple[bytes, bytes]] = []
        if self.cors(scope):
            wanted = header(scope, b"access-control-request-headers") or "*"
            allowed = [
                (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"),
                (b"access-control-allow-headers", wanted.encode("latin-1")),
                (b"access-control-max-age", b"600"),
            ]
        await self._send(scope, send, 204, b"", None, allowed)

    def cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers that let the asking page read an answer; none if it may not."""
        origin = header(scope, b"origin")
        if not origin or not ({origin, "*"} & self._cors_origins):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    async def _send(
        self,
        scope: Scope,
        send: Send,
        status: int,
        body: bytes,
        content_type: str | None,
        extra: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        headers = [*extra, *self.cors(scope)]
        if status != 204:
            headers.append((b"content-length", str(len(body)).encode()))
        if content_type is not None:
            headers.append((b"content-type", content_type.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
