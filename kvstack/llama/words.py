"""
What an answer says: its text and its tool calls, read from the objects of a body or of a stream.

| dialect | text | calls |
| --- | --- | --- |
| chat | `choices[0].delta.content` or `.message.content` | `tool_calls`, in a stream by `index`, arguments in pieces |
| responses | `response.output_text.delta`, or `output` items of `response.completed` | `function_call` items |
| messages | `content_block_delta` with `text_delta`, or `content` blocks | `tool_use` blocks, `input_json_delta` |
| completion | `content`, or `choices[0].text` | none |

Thinking that the server tells apart is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_TEXT_CHARS = 1 << 16
_ARGUMENTS_CHARS = 1 << 18
_MAX_CALLS = 64
"""What is kept: so much text, so much of the arguments of all calls, so many calls."""


@dataclass(slots=True)
class _Call:
    """A tool call: its arguments as a value, or as JSON text in pieces."""

    name: str = ""
    value: Any = None
    pieces: list[str] = field(default_factory=list)


class Words:
    """
    Collects what one answer says.  It never raises, and its memory is bounded.

    Attributes:
        lost: Something that the client may take for the answer was not understood.
        cut: It is longer than what is kept.
    """

    def __init__(self) -> None:
        self.lost = False
        self.cut = False
        self._seen = False
        self._text: list[str] = []
        self._text_room = _TEXT_CHARS
        self._calls: dict[object, _Call] = {}
        self._arguments_room = _ARGUMENTS_CHARS

    @property
    def whole(self) -> bool:
        """Whether this is what the client may take for the answer, as far as it came and is kept."""
        return self._seen and not self.lost

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names and arguments of the first tool calls so far, as JSON text or values."""
        calls = self._calls.values()
        return [(call.name, "".join(call.pieces) if call.value is None else call.value) for call in calls]

    def take(self, value: dict[str, Any]) -> None:
        """Take the next object."""
        kind = value.get("type")
        choices = value.get("choices")
        if isinstance(choices, list):
            self._seen = True
            self._take_choices(choices)
        elif value.get("object") == "response" or kind == "message":
            self._seen = True
            self._take_items(value.get("output") or value.get("content"))
        elif isinstance(kind, str):
            self._seen = True
            self._take_event(kind, value)
        elif value.get("index") in (0, None):
            self._seen = self._seen or "content" in value or "error" in value
            self._say(value.get("content"))
        else:
            self.lost = True  # one of several prompts

    def _take_choices(self, choices: list[Any]) -> None:
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            if choice.get("index") not in (0, None):
                self.lost = True  # only the client knows which one it takes
                continue
            self._say(choice.get("text"))
            for key in ("delta", "message"):
                said = choice.get(key)
                if isinstance(said, dict):
                    self._say(said.get("content"))
                    calls = said.get("tool_calls")
                    for n, call in enumerate(calls if isinstance(calls, list) else ()):
                        if isinstance(call, dict):
                            self._take_call(call.get("index", n), call.get("function"))

    def _take_event(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "content_block_start":
            self._take_item(value.get("index"), value.get("content_block"))
        elif kind == "content_block_delta":
            delta = value.get("delta")
            if isinstance(delta, dict):
                self._say(delta.get("text"))
                self._take_call(value.get("index"), {"arguments": delta.get("partial_json")})
        elif kind == "response.output_text.delta":
            self._say(value.get("delta"))
        elif kind == "response.output_item.done":
            item = value.get("item")
            if isinstance(item, dict) and item.get("type") == "function_call":
                self._take_call(item.get("id") or len(self._calls), item)
        elif kind == "response.completed":
            response = value.get("response")
            if isinstance(response, dict) and response.get("output"):
                self._text, self._text_room = [], _TEXT_CHARS
                self._calls, self._arguments_room = {}, _ARGUMENTS_CHARS
                self._take_items(response["output"])

    def _take_items(self, items: Any) -> None:
        for n, item in enumerate(items if isinstance(items, list) else ()):
            self._take_item(n, item)

    def _take_item(self, index: object, item: Any) -> None:
        if not isinstance(item, dict):
            return
        match item.get("type"):
            case "text" | "output_text":
                self._say(item.get("text"))
            case "message":
                self._take_items(item.get("content"))
            case "function_call":
                self._take_call(index, item)
            case "tool_use":
                self._take_call(index, {"name": item.get("name"), "value": item.get("input") or None})

    def _take_call(self, index: Any, function: Any) -> None:
        if not isinstance(function, dict):
            return
        arguments = function.get("arguments")
        index = index if isinstance(index, int | str) else None
        call = self._calls.get(index)
        if call is None:
            if not (function.get("name") or arguments):
                return
            if len(self._calls) >= _MAX_CALLS:
                self.cut = True
                return
            call = self._calls[index] = _Call(value=function.get("value"))
        call.name = call.name or str(function.get("name") or "")
        if isinstance(arguments, str) and arguments:
            self._arguments_room -= len(arguments)
            if self._arguments_room < 0:
                self.cut = True
            else:
                call.pieces.append(arguments)

    def _say(self, text: Any) -> None:
        if isinstance(text, str) and text:
            self._text_room -= len(text)
            if self._text_room < 0:
                self.cut = True
            else:
                self._text.append(text)
