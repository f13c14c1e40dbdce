"""Which headers cross the proxy: hop-by-hop ones do not, those that the proxy remakes are remade, all others stay."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

# RFC 9110, section 7.6.1, and the headers that HTTP libraries still treat alike.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REMADE_FOR_UPSTREAM = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}


def header(scope: Scope, wanted: bytes) -> str:
    """All values of a request's header, joined as one; empty if it is not there."""
    values: list[bytes] = [value for name, value in scope["headers"] if name.lower() == wanted]
    return b", ".join(values).decode("latin-1")


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Headers that a `Connection` header declares to be hop-by-hop too."""
    return {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }


def upstream_headers(scope: Scope, api: str | None) -> list[tuple[bytes, bytes]]:
    """What goes to the upstream; `host` and `content-length` are made there."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    dropped = _REMADE_FOR_UPSTREAM | _named_in_connection(headers)
    if api is not None:
        dropped |= {b"content-encoding"}  # the body was decoded
    kept = [(name, value) for name, value in headers if name.lower() not in dropped]
    if api is None:
        # Not ours to read: the server's own web page comes compressed and in no other form.
        return [*kept, *((name, value) for name, value in headers if name.lower() == b"accept-encoding")]
    # The answer must come as it is: a tap reads along, and a compressed stream arrives in bursts.
    return [*kept, (b"accept-encoding", b"identity")]


def client_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What goes to the client; the upstream's CORS headers do not: it lets every origin in."""
    dropped = _HOP_BY_HOP | _named_in_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in dropped and not name.lower().startswith(b"access-control-")
    ]
