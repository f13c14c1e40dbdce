"""
What a model answered, compared with the answer that the next request holds.

A client keeps an answer in its own way: without the thinking, in other parts, with arguments spelled anew, without tags
that meant something to it, cut off where its user stopped it.  So words are compared, whatever stands between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kvstack.prompt.items import Item
from kvstack.prompt.splice import Number

__all__ = ["Answer", "Call", "answer_after", "differs", "fits", "limit_tokens", "spoken"]

Call = tuple[str, Any]
"""A tool's name and its arguments: JSON text, or the value itself."""

# So many characters of the words of an answer's texts are compared, and so many of its calls.
_KEPT = 400
_READ = 8 * _KEPT

# Two that are the same: the shorter one has at least so much of the longer one's length, or so many characters, and at
# least so much of it stands there, in pieces of so many characters.
_LENGTH_RATIO = 0.5
_LENGTH = 96
_PIECES_RATIO = 0.75
_PIECE = 32

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")

_BETWEEN_WORDS = re.compile(r"[\W_]+")


class Answer:
    """
    What the model answered to one request.

    Who relays it says how far it is.  Of a request that never went to the model nothing is said, and nothing follows.

    Attributes:
        limit_tokens: The request wants no longer answer: one that is as long was cut off, and says little.
    """

    __slots__ = ("_said", "_stage", "limit_tokens")

    def __init__(self) -> None:
        self.limit_tokens: int | None = None
        self._stage: Literal["unsent", "due", "started", "over"] = "unsent"
        self._said: str | None = None

    @property
    def is_sent(self) -> bool:
        """
        Whether the request went to the model.
        """
        return self._stage != "unsent"

    @property
    def said(self) -> str | None:
        """
        Its words as `spoken` gives them; empty as long as the client has heard nothing.  None if they are not known.
        """
        return "" if self._stage == "due" else self._said

    @property
    def cost_bytes(self) -> int:
        """
        What it may take in memory, at most.
        """
        return 128 + 4 * _KEPT

    def expect(self) -> None:
        """
        The request goes to the model.
        """
        if self._stage == "unsent":
            self._stage = "due"

    def begin(self) -> None:
        """
        The client hears the first of it, and may know all of it before we do.
        """
        if self._stage == "due":
            self._stage = "started"

    def end(self, said: str | None = "", generated_tokens: int | None = None) -> None:
        """
        No more comes.

        Args:
            said: Its words, as `spoken` gives them; None if some were not read.
            generated_tokens: How many tokens it took, if that is known.
        """
        if self._stage in ("due", "started"):
            self._stage = "over"
            limit = self.limit_tokens
            cut_off = generated_tokens is not None and limit is not None and generated_tokens >= limit
            self._said = None if cut_off else said


def spoken(text: str, calls: Iterable[Call] = ()) -> str:
    """
    Return what is compared of an answer: the words of its text, then of its calls, with one space around each.

    Args:
        text: Its texts in order, with or without thinking in tags of its own.
        calls: Its tool calls in order.
    """
    _, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in rest:
        rest = ""
    called = ""
    for name, arguments in calls:
        if len(called) > _READ:
            break
        called += f"{name} {_spell(arguments)} "
    return _plain(rest) + _plain(called)


def limit_tokens(top: Mapping[str, Any]) -> int | None:
    """
    Return how long an answer a request wants at most, given the values under its top keys; None if it says nothing.
    """
    spelled = [top[key] for key in _LIMITS if isinstance(top.get(key), Number)]
    # Not -1, which is none, and nothing as long as to be none.
    return min((int(number) for number in spelled if number.isdigit() and len(number) < 10), default=None)


def answer_after(items: Sequence[Item], position: int) -> str:
    """
    Return the answer that a request holds behind an item, as `spoken` gives it; empty if none follows at once.
    """
    texts: list[str] = []
    calls: list[Call] = []
    for n in range(position + 1, len(items)):
        if items[n].role != "assistant":
            break
        texts += items[n].words
        calls += _calls(items[n].value)
    return spoken("".join(texts), calls)


def fits(answers: Iterable[Answer], held: str) -> bool:
    """
    Tell whether one of the answers is what a request holds.
    """
    return any(answer.said and _same(answer.said, held) for answer in answers)


def differs(answers: Iterable[Answer], held: str) -> bool:
    """
    Tell whether what a request holds is certainly none of the answers.
    """
    said = [answer.said for answer in answers if answer.is_sent]
    return bool(said) and all(words is not None and not _same(words, held) for words in said)


def _same(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    if len(shorter) < min(_LENGTH, _LENGTH_RATIO * len(longer)):
        return False
    if shorter in longer:
        return True
    pieces = [shorter[start : start + _PIECE] for start in range(0, len(shorter) - _PIECE + 1, _PIECE)]
    return bool(pieces) and sum(piece in longer for piece in pieces) >= _PIECES_RATIO * len(pieces)


def _plain(text: str) -> str:
    words = _BETWEEN_WORDS.sub(" ", text[:_READ].casefold()).strip()[:_KEPT]
    return f" {words} " if words else ""


def _spell(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


def _calls(value: Any) -> list[Call]:
    if type(value) is not dict:
        return []
    found: list[Call] = []
    calls = value.get("tool_calls")
    if type(calls) is list:
        functions = [call.get("function") for call in calls if isinstance(call, dict)]
        found += [(str(one.get("name")), one.get("arguments")) for one in functions if isinstance(one, dict)]
    if "arguments" in value:
        found.append((str(value.get("name")), value["arguments"]))
    content = value.get("content")
    if type(content) is list:
        uses = [part for part in content if isinstance(part, dict) and part.get("type") == "tool_use"]
        found += [(str(part.get("name")), part.get("input")) for part in uses]
    return found
