"""
A request body, read: items in prompt order, each with a role and its texts, and where everything stands.

Everything above this module sees a request as a `Document`, whatever its API (`apis` says how each is read).
A string and a list with one part of the same text are the same text; ids and `cache_control` are no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstack.prompt.rawjson.scan import (
    Array,
    JsonPath,
    NotJson,
    find_member,
    skip_space,
    walk_array,
    walk_object,
)
from kvstack.prompt.request.apis import REQUEST_FORMATS, Api, RequestFormat
from kvstack.prompt.request.chat_template import ROLES, Role, TurnMarkers, split_prompt
from kvstack.prompt.request.message import TEXT_PARTS, Item, Text, read_texts
from kvstack.prompt.request.tools import tool_names


def spell_path(path: Sequence[str | int]) -> str:
    """Spell a JSON path: `messages[0].content`."""
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out


@dataclass(slots=True)
class Document:
    """
    A request body, read.

    Attributes:
        text: The body, decoded.
        api: Its API.
        items: System texts, messages, input items or turns, in prompt order.
        top: Top-level values; the item list is in `items` only.
        array: The item list; None if there is none.
        count: Number of messages or input items.
        split: False if a raw prompt could not be split into turns.
        tool_names: The names of its tools.
    """

    text: str
    api: Api
    items: list[Item]
    top: dict[str, Any]
    array: Array | None = None
    count: int = 0
    split: bool = True
    tool_names: frozenset[str] = frozenset()
    _spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    _places: dict[JsonPath, tuple[int, int]] = field(default_factory=dict)
    _arrays: dict[JsonPath, Array] = field(default_factory=dict)

    @property
    def format(self) -> RequestFormat:
        """How requests of its API are built."""
        return REQUEST_FORMATS[self.api]

    @property
    def before_list(self) -> int:
        """How many items stand before the item list: top-level system texts."""
        return len(self.items) - (len(self.array.values) if self.array is not None else 0)

    def locate(self, path: JsonPath) -> tuple[int, int]:
        """
        Find a value in the body text: its first offset, and the one behind its last.

        By its path and never by what it looks like: the same text may stand in a tool's result too, in another
        spelling, and that one is not ours to touch.

        Args:
            path: Its path from the top of the body.

        Raises:
            KeyError: There is no such value.
        """
        place = self._places.get(path)
        if place is None:
            self._places[path] = place = self._find(path)
        return place

    def _find(self, path: JsonPath) -> tuple[int, int]:
        holder, step = path[:-1], path[-1]
        if isinstance(step, str):
            place = find_member(self.text, self.locate(holder)[0], step) if holder else self._spans.get(step)
            if place is None:
                raise KeyError(path)
            return place
        array = self.array if holder == (self.format.items_key,) else self._arrays.get(holder)
        if array is None:
            self._arrays[holder] = array = walk_array(self.text, self.locate(holder)[0])
        return array.starts[step], array.ends[step]


def read_document(text: str, api: Api, markers: TurnMarkers | None = None) -> Document:
    """
    Read a body.

    Args:
        text: The body, decoded.
        api: Its API.
        markers: Role markers of the model's chat template, to split a raw prompt into turns.

    Raises:
        NotJson: It is not one JSON object.
    """
    its = REQUEST_FORMATS[api]
    start = skip_space(text, 0)
    if not text.startswith("{", start):
        raise NotJson("a body is an object")
    deep = (its.items_key,) if its.items_key else ()
    members, top, end = walk_object(text, start, deep=deep)
    if skip_space(text, end) != len(text):
        raise NotJson("text behind the body")
    spans = {member.key: (member.start, member.end) for member in members}
    document = Document(text, api, [], top, tool_names=tool_names(top.get("tools")), _spans=spans)
    if its.items_key is None:
        _read_prompt(document, markers)
        return document
    for key in its.system_keys:
        value = top.get(key)
        texts = read_texts(value, (key,))
        if texts:
            document.items.append(Item(key, -1, "system", texts, value, leading=True))
    listed = top.get(its.items_key)
    if isinstance(listed, str) and its.items_may_be_text:
        document.count = 1
        document.items.append(Item(its.items_key, -1, "user", [Text((its.items_key,), listed)], listed))
    elif isinstance(listed, Array):
        document.array = listed
        document.count = len(listed.values)
        _read_items(document, its.items_key, listed.values)
    return document


def _read_items(document: Document, key: str, values: Sequence[Any]) -> None:
    """Make the items of the item list."""
    leading = True
    item_roles = document.format.item_roles
    append = document.items.append
    for index, value in enumerate(values):
        role: Role = "other"
        if type(value) is dict:
            said = value.get("role")
            if type(said) is str:
                role = ROLES.get(said, "other")
                if role == "user" and _holds_results(value.get("content")):
                    role = "tool"
            elif type(value.get("type")) is str:
                role = item_roles.get(value["type"], "other")
        leading = leading and role == "system"
        append(Item(key, index, role, None, value, leading, True))


def _holds_results(content: Any) -> bool:
    """Whether content consists of tool results, which one API sends in the user's name."""
    if type(content) is not list:
        return False
    kinds = {part.get("type", "text") for part in content if isinstance(part, dict) and type(part.get("type")) is str}
    return "tool_result" in kinds and kinds.isdisjoint(TEXT_PARTS)


def _read_prompt(document: Document, markers: TurnMarkers | None) -> None:
    """Split a raw prompt into turns at the role markers of the chat template."""
    key = next((key for key in document.format.prompt_keys if key in document.top), None)
    prompt = document.top.get(key) if key else None
    document.count = 1
    document.split = False
    if key is None or markers is None or type(prompt) is not str:
        return
    leading = True
    for role, begin, end in split_prompt(prompt, markers):
        document.split = True
        if role == "assistant" and end == len(prompt):
            break  # the model has not said this: it is asked to go on from here
        leading = leading and role == "system"
        text = Text((key,), prompt[begin:end], base=begin, whole=prompt)
        document.items.append(Item(key, -1, role, [text], None, leading=leading))
