"""
Which prefix to warm, where it ends, and the request that evaluates it.

The warm-up request is a client's request cut down to what all its conversations share: the system texts and tools,
then one short user text, and an answer of one token.  Everything that changes the rendering (tools, `tool_choice`,
`chat_template_kwargs`, `reasoning_effort`, ...) stays as the client sends it; without its tools an agent's prefix is
not warm.  The rules are applied by the caller, the same ones that traffic goes through.

Where the server can save what it has evaluated, the prefix alone is evaluated instead.  It has to end where the user's
turn begins: `boundary` finds that place in the tokens of two renderings that differ in the user text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstack.errors import Problem
from kvstack.prompt.recording import Recorded, RecordingError, read_recording
from kvstack.prompt.request.apis import REQUEST_FORMATS, Api, api_of

USER_TEXT = "Hi"

HEADER_TOKENS = 16
"""The words that begin a user's turn are no longer than that in any template."""

_USER_ROLES = frozenset({"user", "human"})

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
# Nor do these change how the prompt is rendered; of what is not known it is taken that it does.
_SAMPLING_KEYS = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "frequency_penalty",
        "presence_penalty",
        "repeat_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "safety_identifier",
        "cache_prompt",
    }
)

# Of a body, then of a message or input item.
_SAYING_KEYS = ("system", "instructions", "tools", "content", "tool_calls", "arguments", "output", "summary")

_NO_PROMPT = Problem("warmup.request_file", "holds a request without a prompt: no text in it, and no tools")


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
    return WarmupRequest("/v1/chat/completions", json.dumps(body).encode())


def with_user_text(request: WarmupRequest, user_text: str) -> WarmupRequest:
    """The same request with another user text behind the prefix; a raw prompt has none and stays as it is."""
    body: dict[str, Any] = json.loads(request.body)
    key = _items_key(request.path)
    if key is None or not isinstance(body.get(key), list):
        return request
    body[key] = [*body[key][:-1], {"role": "user", "content": user_text}]
    return replace(request, body=_encoded(body))


def _items_key(path: str) -> str | None:
    api = api_of(path)
    return REQUEST_FORMATS[api].items_key if api is not None else None


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
    try:
        recorded = read_recording(text)
    except RecordingError as error:
        return Problem("warmup.request_file", f"is no recorded request: {error}")
    normal = [one for one in recorded if one.is_model_request]
    if not normal:
        return Problem("warmup.request_file", "holds no model request (a JSON object with messages, input or prompt)")
    made = [_from_recorded(one, path, user_text) for one in normal]
    return next((one for one in made if isinstance(one, WarmupRequest)), made[0])


def _from_recorded(recorded: Recorded, path: str | None, user_text: str) -> WarmupRequest | Problem:
    target = path or recorded.endpoint
    api = api_of(target)
    if api is None:
        return Problem("warmup.path", f"{target!r} is no endpoint that evaluates a prompt")
    cut = _cut(api, recorded.value, user_text)
    if isinstance(cut, Problem):
        return cut
    return WarmupRequest(target, _encoded(cut), recorded.headers)


def shares_nothing(request: WarmupRequest) -> bool:
    """Whether a request has neither system text nor tools: all that it warms is how the chat template begins."""
    key = _items_key(request.path)
    if key is None:
        return False  # a raw prompt is taken whole
    body: dict[str, Any] = json.loads(request.body)
    leading = _leading(body[key])
    return not (any(map(_says_something, leading)) or _says_something(body))


def rendering_keys(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a body says beside the answer that it wants: of what is not known it is taken that it is rendered."""
    return {key: value for key, value in body.items() if key not in _ANSWER_KEYS | _SAMPLING_KEYS}


@dataclass(frozen=True, slots=True)
class Token:
    """
    One token of a rendered prompt.

    Attributes:
        id: Its number.
        text: What it stands for; None if that is no text by itself (a part of a character).
    """

    id: int
    text: str | None


def shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two renderings have in common at their start, by their ids."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def before_boundary(tokens: Sequence[Token], shared: int) -> list[Token]:
    """
    Tokens of the place where the user's turn begins that may be special ones; the server's tokenizer knows which are.

    Args:
        tokens: A rendering.
        shared: How many of them other renderings begin with too.
    """
    place = tokens[max(0, shared - HEADER_TOKENS) : shared]
    # A special token is spelled as no word is.
    return [token for token in place if token.text and token.text.strip() and not token.text.strip().isalnum()]


def boundary(tokens: Sequence[Token], shared: int, special: Collection[int], *, exact: bool) -> int | None:
    """
    How many tokens the prefix has.

    It ends before the special token that begins the user's turn (`<|im_start|>user`): no text can merge with what
    stands before a special token, and a server makes its checkpoints exactly there.

    Args:
        tokens: A rendering.
        shared: How many of them a rendering with another user text begins with too.
        special: The ids of special tokens.
        exact: Whether the model can go back to checkpoints only.  Others are cut anywhere: a template that marks the
            user's turn with plain words, or puts the system text into it, loses one token, which might have merged.

    Returns:
        None if there is no such place.
    """
    begins = [index for index in range(max(0, shared - HEADER_TOKENS), shared) if tokens[index].id in special]
    if not begins:
        return shared - 1 if shared > 1 and not exact else None
    end = begins[-1]
    if len(begins) > 1:
        # <|start_header_id|>user<|end_header_id|>: the role stands between two of them.
        between = "".join(token.text or "" for token in tokens[begins[-2] + 1 : end])
        if between.strip().casefold() in _USER_ROLES:
            end = begins[-2]
    return end or None


def _encoded(body: dict[str, Any]) -> bytes:
    # ASCII: a lone surrogate must survive as an escape, and the server reads both spellings alike.
    return json.dumps(body).encode()


def _cut(api: Api, body: dict[str, Any], user_text: str) -> dict[str, Any] | Problem:
    """Cut a client's body down to what its conversations share."""
    its = REQUEST_FORMATS[api]
    kept = {key: value for key, value in body.items() if key not in _ANSWER_KEYS}
    kept |= its.shortest_answer
    if its.items_key is None:
        prompt = next((body[key] for key in its.prompt_keys if key in body), None)
        return kept if prompt and isinstance(prompt, str | list | dict) else _NO_PROMPT
    items = body.get(its.items_key)
    if not isinstance(items, list):
        if not its.items_may_be_text:
            return Problem("warmup.request_file", f"its {its.items_key} are no list")
        items = [{"content": items}]
    if not _has_prompt(body, items):
        return _NO_PROMPT
    kept[its.items_key] = [*_leading(items), {"role": "user", "content": user_text}]
    return kept


def _has_prompt(body: dict[str, Any], items: list[Any]) -> bool:
    return _says_something(body) or any(isinstance(item, dict) and _says_something(item) for item in items)


def _says_something(value: dict[str, Any]) -> bool:
    """Whether a message, or what a body has beside its messages, reaches the prompt."""
    return any(value.get(key) for key in _SAYING_KEYS)


def _leading(items: list[Any]) -> list[Any]:
    """The items before everything that a user or a model said."""
    leading: list[Any] = []
    for item in items:
        if not isinstance(item, dict) or item.get("role") not in _LEADING:
            break
        leading.append(item)
    return leading
