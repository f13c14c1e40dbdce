"""
A request as one line of text, in the order in which most templates render it: tools, system, messages.

No template is applied, so this is an estimate of the prompt, good enough to compare two requests: what differs in the
body differs in the prompt, and what never reaches the prompt (ids, `cache_control`, the form of content) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvstack.prompt.rawjson.scan import NotJson
from kvstack.prompt.request.apis import api_of
from kvstack.prompt.request.document import Document, read_document, spell_path
from kvstack.prompt.request.message import Item

_NO_TEXT = frozenset({"cache_control", "id", "status", "annotations", "call_id", "tool_call_id", "tool_use_id", "name"})


@dataclass(frozen=True, slots=True)
class Segment:
    """
    One piece of a rendered request.

    Attributes:
        path: JSON path of what it comes from.
        role: `tools`, or who speaks.
        text: What it says.
        index: Index of its item in the list, or of the tool; -1 for top-level system texts.
    """

    path: str
    role: str
    text: str
    index: int = -1


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """
    How much of a request the next one shares.

    Attributes:
        shared: Characters that both begin with.
        previous: Characters of the earlier request.
        current: Characters of the later request.
    """

    shared: int
    previous: int
    current: int

    @property
    def kept_ratio(self) -> float:
        """Share of the earlier request that is still good, 0 to 1."""
        return self.shared / self.previous if self.previous else 1.0


def render(body: bytes, path: str) -> tuple[Segment, ...]:
    """Render a request body; empty if it holds no prompt that can be read."""
    api = api_of(path)
    if api is None:
        return ()
    try:
        return render_document(read_document(body.decode("utf-8"), api))
    except (NotJson, UnicodeDecodeError, RecursionError):
        return ()


def render_document(document: Document) -> tuple[Segment, ...]:
    """Render a request that was read; a raw prompt is one segment, however it splits into turns."""
    segments = _tools(document.top.get("tools"))
    prompt_key = next((key for key in document.format.prompt_keys if key in document.top), None)
    if prompt_key is not None:
        prompt = document.top[prompt_key]
        return (*segments, Segment("prompt", "prompt", prompt)) if isinstance(prompt, str) else tuple(segments)
    for item in document.items:
        segments += _item(item)
    return tuple(segments)


def _tools(tools: Any) -> list[Segment]:
    if not isinstance(tools, list):
        return []
    return [
        Segment(f"tools[{index}]", "tools", _spell({k: v for k, v in tool.items() if k != "cache_control"}), index)
        for index, tool in enumerate(tools)
        if isinstance(tool, dict)
    ]


def _item(item: Item) -> list[Segment]:
    index = item.index
    path = spell_path(item.path)
    if item.role == "reasoning":
        return []
    texts = [Segment(spell_path(text.path), item.role, text.value.strip(), index) for text in item.texts]
    value = item.value if isinstance(item.value, dict) else {}
    beside: list[str] = []
    calls = value.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            beside.append(f"{function.get('name')} {function.get('arguments')}")
    if "arguments" in value:
        beside.append(f"{value.get('name')} {value['arguments']}")
    content = value.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and not isinstance(part.get("text"), str) and "thinking" not in part:
            inner = part.get("content")
            if isinstance(inner, str):
                beside.append(inner)
            else:
                beside.append(_spell({key: part[key] for key in part if key not in _NO_TEXT}))
    found = [*texts, *(Segment(path, item.role, text, index) for text in beside)]
    return found or [Segment(path, item.role, "", index)]


def _spell(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def shared_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def extends(one: Segment, other: Segment) -> bool:
    """Whether a segment is a raw prompt that goes on where another one ended."""
    return one.role == other.role == "prompt" and other.text.startswith(one.text)


def common_prefix(previous: Sequence[Segment], current: Sequence[Segment]) -> CommonPrefix:
    """Compare two rendered requests."""
    shared = 0
    for one, other in zip_longest(previous, current):
        if one is None or other is None:
            break
        if one.role != other.role:
            break
        same = shared_length(one.text, other.text)
        shared += same + 1
        if same < max(len(one.text), len(other.text)):
            # A raw prompt is one text, so it grows inside it.
            shared -= not extends(one, other)
            break
    return CommonPrefix(shared, _length(previous), _length(current))


def _length(segments: Sequence[Segment]) -> int:
    return sum(len(segment.text) + 1 for segment in segments)
