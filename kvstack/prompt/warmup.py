"""
Which prefix to warm, and the request that evaluates it: the chat form.

The warm-up request is a client's request cut down to what all its conversations share: the system texts and tools,
then one short user text, and an answer of one token.  Everything that changes the rendering (tools, `tool_choice`,
`chat_template_kwargs`, `reasoning_effort`, ...) stays as the client sends it; without its tools an agent's prefix is
not warm.  The rules are applied by the caller, the same ones that traffic goes through.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvstack.errors import Problem
from kvstack.prompt.dialects import Api, api_of

__all__ = ["WarmupRequest", "from_recording", "from_system_prompt", "with_user_text"]

USER_TEXT = "Hi"

_DEFAULT_PATHS = {
    Api.CHAT: "/v1/chat/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.COMPLETION: "/completion",
}
_LEADING = frozenset({"system", "developer"})
# Keys that bind the answer, not the prompt; `n` would ask for several answers.
_ANSWER_KEYS = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n_predict",
        "n",
        "return_progress",
        "previous_response_id",
        "background",
    }
)


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """
    A request to send.

    Attributes:
        path: Endpoint, with its query.
        body: JSON.
        headers: Header pairs of the recording that tell which client it is.
    """

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def from_system_prompt(system_prompt: str, user_text: str = USER_TEXT) -> WarmupRequest:
    """
    Warm a bare system prompt, without tools.

    Args:
        system_prompt: The text, as clients send it.
        user_text: What stands behind it; a hybrid model keeps its best checkpoint behind a long one.
    """
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": user_text}]
    body = {"messages": messages, "max_tokens": 1, "stream": False}
    return WarmupRequest(_DEFAULT_PATHS[Api.CHAT], json.dumps(body).encode())


def with_user_text(request: WarmupRequest, user_text: str) -> WarmupRequest:
    """
    The same request with another user text behind the prefix; a raw prompt has none and stays as it is.
    """
    body: dict[str, Any] = json.loads(request.body)
    for key in ("messages", "input"):
        if isinstance(body.get(key), list):
            body[key] = [*body[key][:-1], {"role": "user", "content": user_text}]
            return replace(request, body=_encoded(body))
    return request


def from_recording(text: str, path: str | None = None, user_text: str = USER_TEXT) -> WarmupRequest | Problem:
    """
    Warm what a recorded request shares with all others of its client.

    Args:
        text: The request's JSON body; or a recording of it as an object with `path` and `body`; or such recordings as
            JSON Lines, of which the first normal model request counts.
        path: Endpoint that the request was sent to; None to take the recording's, or to tell by the body's shape.
        user_text: Replaces everything that the user and the model said.

    Returns:
        The request, or what is wrong with the recording.
    """
    record = _record(text)
    if isinstance(record, Problem):
        return record
    found_path, body, headers = record
    target = path or found_path or _path_of(body)
    if target is None:
        return Problem("warmup.request_file", "holds no messages, input or prompt, so it is no model request")
    api = api_of(target)
    if api is None:
        return Problem("warmup.path", f"{target!r} is no endpoint that evaluates a prompt")
    cut = _cut(api, body, user_text)
    if isinstance(cut, Problem):
        return cut
    return WarmupRequest(target, _encoded(cut), headers)


def _encoded(body: dict[str, Any]) -> bytes:
    # ASCII: a lone surrogate must survive as an escape, and the server reads both spellings alike.
    return json.dumps(body).encode()


_Record = tuple[str | None, dict[str, Any], tuple[tuple[str, str], ...]]


def _record(text: str) -> _Record | Problem:
    try:
        values: list[Any] = [json.loads(text)]
    except ValueError:
        try:
            # At line ends alone: other characters that Python ends lines at may stand in a text of a body.
            values = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            return Problem("warmup.request_file", f"holds no JSON: {error}")
    records = [record for value in values if (record := _as_record(value)) is not None]
    if not records:
        return Problem("warmup.request_file", "holds no model request (a JSON object with messages, input or prompt)")
    return records[0]


def _as_record(value: object) -> _Record | None:
    if not isinstance(value, dict):
        return None
    body = value.get("body")
    if not isinstance(body, dict):
        return (None, value, ()) if _path_of(value) else None
    if value.get("kind") in {"side", "probe"} or _path_of(body) is None:
        return None
    path = value.get("path")
    headers = value.get("headers")
    pairs = (
        tuple((name, held) for name, held in headers.items() if isinstance(held, str))
        if isinstance(headers, dict)
        else ()
    )
    return (path if isinstance(path, str) else None, body, pairs)


def _path_of(body: dict[str, Any]) -> str | None:
    """Tell the endpoint by the body's shape."""
    if "input" in body:
        return _DEFAULT_PATHS[Api.RESPONSES]
    if "messages" in body:
        tools = body.get("tools")
        anthropic_tools = isinstance(tools, list) and any(
            isinstance(tool, dict) and "input_schema" in tool for tool in tools
        )
        return _DEFAULT_PATHS[Api.MESSAGES if "system" in body or anthropic_tools else Api.CHAT]
    return _DEFAULT_PATHS[Api.COMPLETION] if "prompt" in body else None


def _cut(api: Api, body: dict[str, Any], user_text: str) -> dict[str, Any] | Problem:
    kept = {key: value for key, value in body.items() if key not in _ANSWER_KEYS}
    match api:
        case Api.CHAT | Api.MESSAGES:
            messages = body.get("messages")
            if not isinstance(messages, list):
                return Problem("warmup.request_file", "its messages are no list")
            kept["messages"] = [*_leading(messages), {"role": "user", "content": user_text}]
            kept |= {"max_tokens": 1, "stream": False}
        case Api.RESPONSES:
            items = body.get("input")
            leading = _leading(items) if isinstance(items, list) else []
            kept["input"] = [*leading, {"role": "user", "content": user_text}]
            kept |= {"max_output_tokens": 1, "stream": False}
        case Api.COMPLETION:
            # A raw prompt shows no border between what is shared and what is not; all of it is evaluated.
            kept |= {"n_predict": 0, "max_tokens": 1, "stream": False, "cache_prompt": True}
    return kept


def _leading(items: list[Any]) -> list[Any]:
    """The items before everything that a user or a model said."""
    leading: list[Any] = []
    for item in items:
        if not isinstance(item, dict) or item.get("role") not in _LEADING:
            break
        leading.append(item)
    return leading
