"""
Recorded requests, as `kvstack capture` writes them: JSON Lines, one request a line.

A line is a JSON object with `path`, `headers` and `body`, or a bare request body.  The body is the client's own text
and is not spelled anew: key order, numbers, escapes and duplicate keys are what was sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvstack.prompt.rawjson.scan import NotJson, read_value, skip_space, walk_object
from kvstack.prompt.request.apis import REQUEST_FORMATS, Api, api_by_shape

_MAX_DIGITS = 4000


class RecordingError(ValueError):
    """The text is not a recording."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """
    One recorded request.

    Attributes:
        body: Its body, as it was sent.
        value: Its body, read.
        path: Request path, if the recording tells it.
        headers: Header pairs that the recording tells.
        kind: `side` or `probe` if it is no normal request.
        line: Where it stands, from 1.
    """

    body: str
    value: dict[str, Any]
    path: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    kind: str | None = None
    line: int = 1

    @property
    def endpoint(self) -> str:
        """Its path, or the one that the shape of its body tells."""
        return self.path or REQUEST_FORMATS[api_by_shape(self.value) or Api.CHAT].endpoint

    @property
    def is_model_request(self) -> bool:
        """Whether it is a client's normal request and carries a prompt."""
        return self.kind not in ("side", "probe") and api_by_shape(self.value) is not None


def read_recording(text: str) -> list[Recorded]:
    """
    Read one request body, one recorded request, or JSON Lines of either.

    Lines whose `body` is null (a health check, or what could not be kept) are passed over.

    Raises:
        RecordingError: It is none of these; the message names the line.
    """
    text = text.removeprefix("\ufeff")
    try:
        value, end = read_value(text, skip_space(text, 0))
    except NotJson:
        pass
    else:
        if skip_space(text, end) == len(text):
            return _record(text, value, 1)
    found: list[Recorded] = []
    # Not `splitlines`: JSON strings may hold line ends of Unicode's as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, parse_int=_integer)
        except (ValueError, RecursionError) as error:
            raise RecordingError(f"line {number}: {error}") from None
        found += _record(line, value, number)
    return found


def _record(text: str, value: Any, line: int) -> list[Recorded]:
    if not isinstance(value, dict):
        raise RecordingError(f"line {line}: a request is a JSON object")
    value = json.loads(text, parse_int=_integer)  # with numbers as numbers
    if "body" not in value:
        return [Recorded(text.strip(), value, line=line)]
    if value["body"] is None:
        return []
    if not isinstance(value["body"], dict):
        raise RecordingError(f"line {line}: its body is no JSON object")
    members, _, _ = walk_object(text, skip_space(text, 0))
    first, last = next((member.start, member.end) for member in reversed(members) if member.key == "body")
    path, kind = value.get("path"), value.get("kind")
    return [
        Recorded(
            text[first:last],
            value["body"],
            path if isinstance(path, str) else None,
            _pairs(value.get("headers")),
            kind if isinstance(kind, str) else None,
            line,
        )
    ]


def _integer(digits: str) -> int:
    # Python refuses to read more digits than this; nobody counts with them, and the body's text keeps them.
    return int(digits) if len(digits) <= _MAX_DIGITS else 0


def _pairs(headers: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(headers, dict):
        headers = list(headers.items())
    if not isinstance(headers, list):
        return ()
    pairs = [pair for pair in headers if isinstance(pair, list | tuple) and len(pair) == 2]
    return tuple((name, held) for name, held in pairs if isinstance(name, str) and isinstance(held, str))
