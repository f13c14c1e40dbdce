"""The items of a prompt and their texts, as every dialect has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstack.prompt.rawjson.scan import JsonPath
from kvstack.prompt.request.chat_template import Role

# A tuple: a part may claim to be of any type, also of one that cannot be hashed.
TEXT_PARTS = ("text", "input_text", "output_text")


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
        absent: There is no such part yet: it is to be added behind the others.
    """

    path: JsonPath
    value: str
    base: int = 0
    part: int | None = None
    whole: str | None = None
    absent: bool = False


class Item:
    """
    One message, input item, or top-level system text.

    Attributes:
        key: The top-level key that holds it.
        index: Its index in the list under that key; -1 for the value itself.
        role: Who speaks.
        value: The decoded item; None for a turn of a raw prompt.
        listed: It is an element of the item list.
        leading: It stands before everything that a user or model said.
    """

    __slots__ = ("_texts", "index", "key", "leading", "listed", "role", "value")

    def __init__(
        self,
        key: str,
        index: int,
        role: Role,
        texts: list[Text] | None,
        value: Any,
        leading: bool = False,
        listed: bool = False,
    ) -> None:
        self.key = key
        self.index = index
        self.role = role
        self.value = value
        self.leading = leading
        self.listed = listed
        self._texts = texts

    @property
    def path(self) -> JsonPath:
        """Its JSON path from the top of the body."""
        return (self.key, self.index) if self.index >= 0 else (self.key,)

    @property
    def texts(self) -> list[Text]:
        """Its texts, in order."""
        if self._texts is None:
            self._texts = []
            if type(self.value) is dict:
                content = self.value.get("content")
                if content is not None:
                    self._texts = read_texts(content, (*self.path, "content"))
                elif self.role == "tool":
                    self._texts = read_texts(self.value.get("output"), (*self.path, "output"))
        return self._texts

    @property
    def last_text(self) -> Text | None:
        """
        Its last text, or the one that could be added to the parts of its content (an image alone has none); None if
        it can have no text.
        """
        return self.texts[-1] if self.texts else self.added_text

    @property
    def holds_more(self) -> bool:
        """Whether it has content beside texts: an image says something too."""
        content = self.value.get("content") if type(self.value) is dict else None
        return type(content) is list and len(content) > len(self.texts)

    @property
    def added_text(self) -> Text | None:
        """A text part that could be added; None where it has texts alone, or no parts."""
        content = self.value.get("content") if self.listed and type(self.value) is dict else None
        if type(content) is not list or (self.texts and not self.holds_more):
            return None
        return Text((*self.path, "content", len(content), "text"), "", part=len(content), absent=True)

    @property
    def words(self) -> list[str]:
        """What its texts say, in order; most items never need more."""
        if self._texts is None and type(self.value) is dict:
            content = self.value.get("content")
            if type(content) is str:
                return [content]
        return [text.value for text in self.texts]


def read_texts(content: Any, path: JsonPath) -> list[Text]:
    """Read the texts of a content value: a string, or a list of parts."""
    if type(content) is str:
        return [Text(path, content)]
    if type(content) is not list:
        return []
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
            value = part.get("text")
            if type(value) is str:
                texts.append(Text((*path, index, "text"), value, part=index))
    return texts
