"""
One model request as a line of JSON.

The body stands in it as the client wrote it; only line ends, which JSON allows between values and nowhere else, become
spaces.  Credentials stay out: of headers and query parameters those are taken that are known to describe the body, the
client or the session, and no others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.types import Scope

from kvstack.prompt.request.document import Document
from kvstack.state.events import RequestReceived

MAX_BODY_BYTES = 32 * 1024 * 1024
"""A larger body, many images, is left out of its line."""

# `content-length` and `content-encoding` would be untrue of the body as it is recorded.
_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "anthropic-beta",
        "anthropic-version",
        "content-type",
        "openai-beta",
        "originator",
        "traceparent",
        "user-agent",
        "x-app",
        "x-codex-turn-metadata",
        "x-session-affinity",
    }
)
_PREFIXES = ("x-stainless-",)
# `x-claude-code-session-id`, `thread-id`, `x-openwebui-chat-id`: names of something that goes on.
_SESSION_WORDS = frozenset({"chat", "conversation", "request", "session", "thread", "turn", "window"})
_CREDENTIAL = re.compile(
    r"auth|bearer|cert|cookie|credential|csrf|jwt|key|passw|private|proxy|secret|sign|token|xsrf", re.ASCII
)
# Whatever the name: a value with an authentication scheme, or in the form of a signed token, is none to keep.
_CREDENTIAL_VALUE = re.compile(
    r"\s*(?:basic|bearer|digest|negotiate|token)\s|\s*(?:sk-|eyJ)[\w-]{8}", re.ASCII | re.IGNORECASE
)
_NO_BODY = b"null"
_CONSTANTS = ("NaN", "Infinity")
"""The rules read a body with these, which is no JSON."""

_QUERY = frozenset({"api-version", "beta"})
_PRODUCT = re.compile(r"([A-Za-z][\w.-]*)/(\d[\w.+-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Recorded:
    """
    What a line is made of.

    Attributes:
        received: The request's facts.
        path: Its path, with what may be shown of its query.
        headers: Its headers that may be shown; names in lower case.
        body: The client's own bytes, decoded; None if they are too many.
        turn: The number of its user turns; None where that cannot be told.
        is_read: The body was read as JSON already.
        notes: What is missing, and why.
    """

    received: RequestReceived
    path: str
    headers: dict[str, str]
    body: bytes | None
    turn: int | None
    is_read: bool
    notes: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """What holding it costs."""
        return len(self.body or b"")


def record(
    received: RequestReceived,
    scope: Scope,
    body: bytes,
    document: Document | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Recorded:
    """
    Take from a request what may be recorded.

    Args:
        received: The request's facts.
        scope: The ASGI scope.
        body: The body as the client wrote it, decoded.
        document: What was read of it; None if that is no JSON object.
        max_body_bytes: A larger body is left out.
    """
    query, left_out = describing_query(scope["query_string"])
    path = received.path.partition("?")[0]  # an escaped question mark in a path hides no query from us
    notes = []
    if left_out:
        notes.append(f"{left_out} query parameter{'' if left_out == 1 else 's'} left out")
    kept: bytes | None = body
    if len(body) > max_body_bytes:
        notes.append(f"a body of {len(body):,} bytes is left out, it is larger than {max_body_bytes:,}")
        kept = None
    return Recorded(
        received,
        f"{path}?{query}" if query else path,
        describing_headers(scope["headers"]),
        kept,
        _turns(document),
        document is not None,
        tuple(notes),
    )


def describing_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that describe body, client or session; the values of a repeated one are joined."""
    kept: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if _describes(name) and not _CREDENTIAL_VALUE.match(value):
            kept[name] = f"{kept[name]}, {value}" if name in kept else value
    return kept


def _describes(name: str) -> bool:
    if name in _HEADERS:
        return True
    if _CREDENTIAL.search(name):
        return False
    if name.startswith(_PREFIXES):
        return True
    words = re.split(r"[-_]", name)
    return len(words) > 1 and words[-1] == "id" and words[-2] in _SESSION_WORDS


def describing_query(query: bytes) -> tuple[str, int]:
    """
    The query parameters that describe the API, as they were spelled, and how many others there were.

    >>> describing_query(b"beta=true&key=secret")
    ('beta=true', 1)
    """
    parameters = [parameter for parameter in query.decode("latin-1").split("&") if parameter]
    kept = [
        parameter
        for parameter in parameters
        if parameter.partition("=")[0] in _QUERY and len(parameter) < 64 and parameter.isascii()
    ]
    return "&".join(kept), len(parameters) - len(kept)


def to_line(recorded: Recorded) -> bytes:
    """The line: one JSON object and a line end.  `body` is its last key."""
    received = recorded.received
    body, notes = _embed(recorded)
    turn = recorded.turn if body != _NO_BODY else None
    fields: dict[str, Any] = {"client": received.client}
    version = _version(received.client, recorded.headers.get("user-agent", ""))
    if version is not None:
        fields["version"] = version
    fields |= {
        "conversation": received.conversation,
        "turn": turn,
        "method": received.method,
        "path": recorded.path,
        "headers": recorded.headers,
    }
    if received.side is not None:
        fields["kind"] = "side"
        notes.append(f"side request: {received.side}")
    if notes:
        fields["note"] = "; ".join(notes)
    fields["time_s"] = round(received.time_s, 3)
    return json.dumps(fields).encode().removesuffix(b"}") + b', "body": ' + body + b"}\n"


def _embed(recorded: Recorded) -> tuple[bytes, list[str]]:
    """The body on one line, and the notes."""
    notes = list(recorded.notes)
    if recorded.body is None:
        return _NO_BODY, notes
    try:
        text = recorded.body.decode("utf-8-sig")
        if not recorded.is_read or any(constant in text for constant in _CONSTANTS):
            # Strict: whatever is put into the line must be one value, and holds line ends between its tokens only.
            json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        notes.append(f"a body of {len(recorded.body):,} bytes is left out, it is not JSON: {why}")
        return _NO_BODY, notes
    line = text.strip().replace("\r", " ").replace("\n", " ").encode()
    return line, notes


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _turns(document: Document | None) -> int | None:
    """
    The number of user turns; None where a raw prompt does not show them.

    What a client sends beside the user's words, in the same turn, in messages of its own, is no turn.
    """
    if document is None or not document.split:
        return None
    roles = [item.role for item in document.items]
    return sum(role == "user" and before != "user" for before, role in zip([None, *roles], roles, strict=False))


def _version(client: str | None, user_agent: str) -> str | None:
    """The client's release, if its User-Agent is its own and not that of the library which it uses."""
    product = _PRODUCT.match(user_agent)
    if client is None or product is None:
        return None
    ours, theirs = _words(client), _words(product[1])
    return product[2] if ours[0] == theirs[0] or "".join(ours) == "".join(theirs) else None


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())
