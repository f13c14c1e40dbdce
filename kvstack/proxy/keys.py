"""Who may use the proxy, and with which key its requests go on to the llama-server."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from starlette.types import Scope

Headers = list[tuple[bytes, bytes]]

_PUBLIC = frozenset({"/", "/health", "/v1/health"})
"""What llama-server, too, gives without its key; of its other public routes each build has its own."""
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class Keys:
    """
    The key that the proxy asks for, if it asks for one, and the one that the server asks for.

    Args:
        proxy: `proxy.api_key`; without it everybody is let in, and headers go on as they came.
        server: `server.api_key`.
    """

    def __init__(self, proxy: str | None = None, server: str | None = None) -> None:
        self._proxy = proxy
        self._server = server

    def admit(self, scope: Scope, token: str | None = None) -> bool:
        """
        Whether a request may go on.

        Args:
            scope: The request.
            token: What counts as well as the key, if anything does.
        """
        if self._proxy is None or scope["method"] == "OPTIONS":  # browsers ask that without a key, and we answer it
            return True
        if scope["path"] in _PUBLIC and scope["method"] in {"GET", "HEAD"}:
            return True
        wanted = [secret for secret in (self._proxy, token) if secret is not None]
        # Each is compared, whatever the others gave: the time tells nothing.
        found = [_same(given, secret) for _, given in _given(scope["headers"]) for secret in wanted]
        return any(found)

    def for_upstream(self, headers: Headers) -> Headers:
        """The headers with the server's key in place of the proxy's, or without it if the server has none."""
        if self._proxy is None:
            return headers
        ours = {pair for pair, given in _given(headers) if _same(given, self._proxy)}
        if not ours:  # let in without a key
            return headers
        if self._server is None:
            return [pair for pair in headers if pair not in ours]
        kept = [(name, value) for name, value in headers if name.lower() not in _CREDENTIALS]
        return [*kept, (b"authorization", b"Bearer " + self._server.encode())]


def _given(headers: Headers) -> Iterator[tuple[tuple[bytes, bytes], bytes]]:
    """Each header that may hold a key, and what it holds."""
    for name, value in headers:
        if name.lower() == b"x-api-key":
            yield (name, value), value.strip()
        elif name.lower() == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield (name, value), credentials.strip()


def _same(given: bytes, secret: str) -> bool:
    return hmac.compare_digest(given, secret.encode())
