"""
The APIs that carry a prompt, one record each: where a body keeps its texts, and what differs from the other APIs.

Nothing else in `prompt` decides by the name of an API, so a new one is a member of `Api` and a record here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstack.prompt.request.chat_template import Role


class Api(StrEnum):
    """An API that a client may speak."""

    RESPONSES = "responses"
    MESSAGES = "messages"
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """
    How the requests of one API are built.

    Attributes:
        endpoint: The path to which its requests are sent if a recording names none.
        paths: Paths whose bodies have this format, without `/v1`.  Side routes (token counts, rendering) are among
            them: they must see the same text as the main ones.
        items_key: Key of the list of messages or input items; None if the API takes a raw prompt.
        items_may_be_text: Whether a string in place of the list is one user text.
        system_keys: Top-level keys that hold system texts.
        prompt_keys: Keys that may hold a raw prompt; the first one present counts.
        own_keys: Top-level keys that tell a body from that of another API with the same list.
        own_tool_keys: Keys of a tool that tell the same.
        item_roles: Roles of items that have a `type` and no `role`.
        text_part: Type of a text part that is added to a user's content.
        shortest_answer: Body keys with which the answer costs next to nothing.
        cache_prompt_forced: Whether `cache_prompt: false` is sent as true.
    """

    endpoint: str
    paths: tuple[str, ...]
    items_key: str | None = None
    items_may_be_text: bool = False
    system_keys: tuple[str, ...] = ()
    prompt_keys: tuple[str, ...] = ()
    own_keys: frozenset[str] = frozenset()
    own_tool_keys: frozenset[str] = frozenset()
    item_roles: Mapping[str, Role] = field(default_factory=dict)
    text_part: str = "text"
    shortest_answer: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 1, "stream": False})
    cache_prompt_forced: bool = False


# By shape, the first that fits counts.
REQUEST_FORMATS: dict[Api, RequestFormat] = {
    Api.RESPONSES: RequestFormat(
        endpoint="/v1/responses",
        paths=("/responses", "/responses/input_tokens"),
        items_key="input",
        items_may_be_text=True,
        system_keys=("instructions",),
        item_roles={
            "function_call": "assistant",
            "custom_tool_call": "assistant",
            "reasoning": "reasoning",
            "function_call_output": "tool",
            "custom_tool_call_output": "tool",
        },
        text_part="input_text",
        shortest_answer={"max_output_tokens": 1, "stream": False},
    ),
    Api.MESSAGES: RequestFormat(
        endpoint="/v1/messages",
        paths=("/messages", "/messages/count_tokens"),
        items_key="messages",
        system_keys=("system",),
        own_keys=frozenset({"system"}),
        own_tool_keys=frozenset({"input_schema"}),
    ),
    Api.CHAT: RequestFormat(
        endpoint="/v1/chat/completions",
        paths=("/chat/completions", "/chat/completions/input_tokens", "/apply-template"),
        items_key="messages",
    ),
    Api.COMPLETION: RequestFormat(
        endpoint="/completion",
        paths=("/completion", "/completions", "/tokenize"),
        prompt_keys=("prompt", "content"),
        # A raw prompt shows no border between what is shared and what is not: all of it is evaluated.
        shortest_answer={"n_predict": 0, "max_tokens": 1, "stream": False, "cache_prompt": True},
        cache_prompt_forced=True,
    ),
}

_BY_PATH = {path: api for api, its in REQUEST_FORMATS.items() for path in its.paths}


def api_of(path: str) -> Api | None:
    """
    Return the API of a request path; None for everything that carries no prompt.

    llama-server serves most routes with and without `/v1`.

    >>> api_of("/v1/messages?beta=true")
    <Api.MESSAGES: 'messages'>
    """
    path = path.partition("?")[0].rstrip("/")
    return _BY_PATH.get(path.removeprefix("/api").removeprefix("/v1"))


def can_be_rendered(path: str) -> bool:
    """Whether `/apply-template` takes the bodies of this path: only then the end of a prefix can be found."""
    api = api_of(path)
    return api is not None and "/apply-template" in REQUEST_FORMATS[api].paths


def api_by_shape(body: Mapping[str, Any]) -> Api | None:
    """Return the API of a body whose path is not known; None if it carries no prompt."""
    return next((api for api, its in REQUEST_FORMATS.items() if _fits(body, its)), None)


def _fits(body: Mapping[str, Any], its: RequestFormat) -> bool:
    if (its.items_key or its.prompt_keys[0]) not in body:
        return False
    if not (its.own_keys or its.own_tool_keys):
        return True
    tools = body.get("tools")
    return not its.own_keys.isdisjoint(body) or any(
        isinstance(tool, dict) and not its.own_tool_keys.isdisjoint(tool)
        for tool in (tools if isinstance(tools, list) else ())
    )
