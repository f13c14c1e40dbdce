"""
kvstack's own errors, in the words of the client's API.

Sources: OpenAI's error object (`{"error": {"message", "type", "code", "param"}}`), which llama-server and the Responses
API use too, and Anthropic's (`{"type": "error", "error": {"type", "message"}}`) for `/v1/messages`.
"""

from __future__ import annotations

import json

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    502: "server_error",
    503: "unavailable_error",
}


def error_body(api: str | None, status: int, message: str) -> bytes:
    """
    The JSON body of an error that kvstack itself reports.

    Args:
        api: The dialect (`messages`, or anything else for OpenAI's form).
        status: HTTP status that goes with it.
        message: What happened; it is marked as coming from kvstack.
    """
    text = f"kvstack: {message}"
    if api == "messages":
        error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": text}
        return json.dumps({"type": "error", "error": error}).encode()
    kind = _OPENAI_TYPES.get(status, "server_error")
    return json.dumps({"error": {"message": text, "type": kind, "code": status, "param": None}}).encode()
