"""
kvstack's own errors, in the shape of the client's API.

Sources: OpenAI's error object (`{"error": {"message", "type", "code", "param"}}`), which llama-server and the Responses
API use too, and Anthropic's (`{"type": "error", "error": {"type", "message"}}`) for `/v1/messages`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """
    How one API spells an error.

    Attributes:
        types: Its error types, by HTTP status.
        other: The type for any other status.
        body: Makes the body: type, status, message.
    """

    types: Mapping[int, str]
    other: str
    body: Callable[[str, int, str], dict[str, Any]]


_OPENAI = ErrorShape(
    types={
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "invalid_request_error",
        415: "invalid_request_error",
        502: "server_error",
        503: "unavailable_error",
    },
    other="server_error",
    body=lambda kind, status, text: {"error": {"message": text, "type": kind, "code": status, "param": None}},
)
_SHAPES = {
    "messages": ErrorShape(
        types={
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            415: "invalid_request_error",
            503: "overloaded_error",
        },
        other="api_error",
        body=lambda kind, _, text: {"type": "error", "error": {"type": kind, "message": text}},
    ),
}
"""The APIs that do not use OpenAI's shape."""


def error_body(api: str | None, status: int, message: str) -> bytes:
    """
    The JSON body of an error that kvstack itself reports.

    Args:
        api: The client's API; None for OpenAI's shape.
        status: HTTP status that goes with it.
        message: What happened; it is marked as coming from kvstack.
    """
    shape = _SHAPES.get(api or "", _OPENAI)
    return json.dumps(shape.body(shape.types.get(status, shape.other), status, f"kvstack: {message}")).encode()
