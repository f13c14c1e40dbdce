"""
One table: where each API keeps the texts of a prompt.

Everything above this module sees a request as a `Document`: items in prompt order, each with a role and its texts.
A string and a list with one part of the same text are the same text; ids and `cache_control` are no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstack.prompt.roles import ROLES, Role, TurnMarkers, split_prompt
from kvstack.prompt.splice import (
    Array,
    JsonPath,
    NotJson,
    read_value,
    skip_space,
    walk_array,
    walk_object,
)

__all__ = [
    "Api",
    "Document",
    "Item",
    "Text",
    "api_of",
    "read_document",
    "spell_path",
]


class Api(StrEnum):
    """
    A dialect that a client may speak.
    """

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class _Dialect:
    """
    Attributes:
        items: The key that holds the list of items.
        system: Top-level keys that hold system texts.
        prompt: Keys that hold a raw prompt, first one present counts.
    """

    items: str | None
    system: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()


_DIALECTS = {
    Api.CHAT: _Dialect("messages"),
    Api.RESPONSES: _Dialect("input", system=("instructions",)),
    Api.MESSAGES: _Dialect("messages", system=("system",)),
    Api.COMPLETION: _Dialect(None, prompt=("prompt", "content")),
}

# llama-server serves most routes with and without /v1; the side routes must see the same text as the main ones.
_PATHS = {
    "/chat/completions": Api.CHAT,
    "/apply-template": Api.CHAT,
    "/responses": Api.RESPONSES,
    "/responses/input_tokens": Api.RESPONSES,
    "/messages": Api.MESSAGES,
    "/messages/count_tokens": Api.MESSAGES,
    "/completion": Api.COMPLETION,
    "/completions": Api.COMPLETION,
    "/tokenize": Api.COMPLETION,
}

_ITEM_ROLES: dict[str, Role] = {
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "reasoning": "reasoning",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}
# A tuple: a part may claim to be of any type, also of one that cannot be hashed.
_TEXT_PARTS = ("text", "input_text", "output_text")


def api_of(path: str) -> Api | None:
    """
    Tell which dialect a request path speaks; None for everything that carries no prompt.

    >>> api_of("/v1/messages?beta=true")
    <Api.MESSAGES: 'messages'>
    """
    path = path.partition("?")[0].rstrip("/")
    return _PATHS.get(path.removeprefix("/api").removeprefix("/v1"))


def spell_path(path: Sequence[str | int]) -> str:
    """
    Spell a JSON path: `messages[0].content`.
    """
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out


@dataclass(slots=True)
class Text:
    """
    One text of a prompt.

    Attributes:
        path: JSON path of its string literal, from the top of the body.
        value: The decoded text.
        base: Offset of this text inside the decoded literal; 0 unless a raw prompt was split into turns.
        whole: The decoded literal, where this text is only a part of it.
        part: Index of the content part that holds it, or None if the content is one string.
    """

    path: JsonPath
    value: str
    base: int = 0
    part: int | None = None
    whole: str | None = None


class Item:
    """
    One message, input item, or top-level system text.

    Attributes:
        key: The top-level key that holds it.
        index: Its index in the list under that key; -1 for the value itself.
        role: Who speaks.
        value: The decoded item; None for a turn of a raw prompt.
        start: Offset of the item in the body text; -1 if it is no element of the item list.
        end: Offset behind it.
        leading: It stands before everything that a user or model said.
    """

    __slots__ = ("_texts", "end", "index", "key", "leading", "role", "start", "value")

    def __init__(
        self,
        key: str,
        index: int,
        role: Role,
        texts: list[Text] | None,
        value: Any,
        start: int = -1,
        end: int = -1,
        leading: bool = False,
    ) -> None:
        self.key = key
        self.index = index
        self.role = role
        self.value = value
        self.start = start
        self.end = end
        self.leading = leading
        self._texts = texts

    @property
    def path(self) -> JsonPath:
        """
        Its JSON path from the top of the body.
        """
        return (self.key, self.index) if self.index >= 0 else (self.key,)

    @property
    def texts(self) -> list[Text]:
        """
        Its texts, in order.
        """
        if self._texts is None:
            self._texts = []
            if type(self.value) is dict:
                content = self.value.get("content")
                if content is not None:
                    self._texts = _texts(content, (*self.path, "content"))
                elif self.role == "tool":
                    self._texts = _texts(self.value.get("output"), (*self.path, "output"))
        return self._texts


@dataclass(slots=True)
class Document:
    """
    A request body, read.

    Attributes:
        text: The body, decoded.
        api: Its dialect.
        items: System texts, messages, input items or turns, in prompt order.
        top: Top-level values; the item list is in `items` only.
        array: The item list; None if there is none.
        count: Number of messages or input items.
        split: False if a raw prompt could not be split into turns.
    """

    text: str
    api: Api
    items: list[Item]
    top: dict[str, Any]
    array: Array | None = None
    count: int = 0
    split: bool = True
    _starts: dict[str, int] = field(default_factory=dict)
    _places: dict[JsonPath, tuple[int, int]] = field(default_factory=dict)

    @property
    def items_key(self) -> str | None:
        """
        The key of the item list.
        """
        return _DIALECTS[self.api].items

    def locate(self, path: JsonPath) -> tuple[int, int]:
        """
        Find a value in the body text: its first offset, and the one behind its last.

        By its path and never by what it looks like: the same text may stand in a tool's result too, in another
        spelling, and that one is not ours to touch.

        Args:
            path: Its path from the top of the body.
        """
        return self._place(path)

    def _place(self, path: JsonPath) -> tuple[int, int]:
        """
        Find a value, keeping every place on the way: of many values in one array each is found in one step.
        """
        known = self._places.get(path)
        if known is not None:
            return known
        step = path[-1]
        if len(path) == 1:
            assert isinstance(step, str)
            start = self._starts[step]
            self._places[path] = (start, read_value(self.text, start)[1])
            return self._places[path]
        if isinstance(step, int) and self.array is not None and len(path) == 2 and path[0] == self.items_key:
            return self.array.starts[step], self.array.ends[step]
        start, _ = self._place(path[:-1])
        if isinstance(step, str):
            for member in walk_object(self.text, start)[0]:
                self._places[*path[:-1], member.key] = (member.start, member.end)
        else:
            for index, place in enumerate(walk_array(self.text, start).spans()):
                self._places[*path[:-1], index] = place
        return self._places[path]


def read_document(text: str, api: Api, markers: TurnMarkers | None = None) -> Document:
    """
    Read a body.

    Args:
        text: The body, decoded.
        api: Its dialect.
        markers: Role markers of the model's chat template, to split a raw prompt into turns.

    Raises:
        NotJson: It is not one JSON object.
    """
    dialect = _DIALECTS[api]
    start = skip_space(text, 0)
    if not text.startswith("{", start):
        raise NotJson("a body is an object")
    members, top, end = walk_object(text, start, deep=(dialect.items,) if dialect.items else ())
    if skip_space(text, end) != len(text):
        raise NotJson("text behind the body")
    document = Document(text, api, [], top, _starts={member.key: member.start for member in members})
    if dialect.items is None:
        _read_prompt(document, dialect, markers)
        return document
    for key in dialect.system:
        value = top.get(key)
        texts = _texts(value, (key,))
        if texts:
            document.items.append(Item(key, -1, "system", texts, value, leading=True))
    listed = top.get(dialect.items)
    if isinstance(listed, str):
        document.count = 1
        document.items.append(Item(dialect.items, -1, "user", [Text((dialect.items,), listed)], listed))
    elif isinstance(listed, Array):
        document.array = listed
        document.count = len(listed.values)
        _read_items(document, dialect.items)
    return document


def _read_items(document: Document, key: str) -> None:
    leading = True
    array = document.array
    assert array is not None
    append = document.items.append
    for index, value in enumerate(array.values):
        role: Role = "other"
        if type(value) is dict:
            said = value.get("role")
            if type(said) is str:
                role = ROLES.get(said, "other")
                if role == "user" and _holds_results(value.get("content")):
                    role = "tool"
            elif type(value.get("type")) is str:
                role = _ITEM_ROLES.get(value["type"], "other")
        leading = leading and role == "system"
        append(Item(key, index, role, None, value, array.starts[index], array.ends[index], leading))


def _holds_results(content: Any) -> bool:
    """
    Tell whether content is nothing but results of tools, which one dialect sends in the user's name.
    """
    if type(content) is not list:
        return False
    kinds = {part.get("type", "text") for part in content if isinstance(part, dict) and type(part.get("type")) is str}
    return "tool_result" in kinds and kinds.isdisjoint(_TEXT_PARTS)


def _texts(content: Any, path: JsonPath) -> list[Text]:
    """
    Read the texts of a content value: a string, or a list of parts.
    """
    if type(content) is str:
        return [Text(path, content)]
    if type(content) is not list:
        return []
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS:
            value = part.get("text")
            if type(value) is str:
                texts.append(Text((*path, index, "text"), value, part=index))
    return texts


def _read_prompt(document: Document, dialect: _Dialect, markers: TurnMarkers | None) -> None:
    """
    Split a raw prompt into turns at the role markers of the chat template.
    """
    key = next((key for key in dialect.prompt if key in document.top), None)
    prompt = document.top.get(key) if key else None
    document.count = 1
    document.split = False
    if key is None or markers is None or type(prompt) is not str:
        return
    leading = True
    for role, begin, end in split_prompt(prompt, markers):
        leading = leading and role == "system"
        text = Text((key,), prompt[begin:end], base=begin, whole=prompt)
        document.items.append(Item(key, -1, role, [text], None, leading=leading))
        document.split = True
