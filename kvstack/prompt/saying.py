"""
What an answer says, so that the answer that went out can be compared with the one that a later request holds.

A client keeps an answer in its own way: without the thinking, in other parts, with arguments spelled anew, cut off
where its user stopped it.  So words are compared, and calls by name and values.  What could be the same with a change
that is not known tells nothing.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

from kvstack.prompt.rawjson.scan import Number
from kvstack.prompt.request.message import Item

Call = tuple[str, Any]
"""A tool's name and its arguments: JSON text, or the value itself."""

Likeness = Literal["same", "open", "other"]
"""The same answer; nobody can tell; another one."""

# No answer is known that is longer; of one that a request holds no more has to be read.
_READ_CHARS = 1 << 17

# The first words are kept as they are, and beyond them digests: of everything, and of the first blocks.
_KEPT_CHARS = 256
_BLOCK_CHARS = 256
_MAX_BLOCKS = 32
_DIGEST_BYTES = 8
_MAX_CALLS = 16

# Of an answer that a request holds so many items are read: a client adds one or two.
_MAX_ITEMS = 32

_BETWEEN_WORDS = re.compile(r"[\W_]+")

# To put combining marks in order takes quadratic time.
_SIGNS = re.compile(r"(\W{64})\W+")

_TAG_CHARS = 80


@dataclass(frozen=True, slots=True)
class Said:
    """
    The words of an answer and its calls, in a bounded form.

    Attributes:
        text: Its first words, one space between two of them.
        length: Number of characters of all its words.
        digest: Digest of all its words.
        core: Digest of its words behind tags at its beginning, which a client may take away; empty if none are left.
        blocks: Digests of the first blocks of its words, one behind the other.
        calls: Digests of its first calls, each once, in the order of their bytes.
    """

    text: str
    length: int
    digest: bytes
    core: bytes
    blocks: bytes
    calls: bytes

    def __bool__(self) -> bool:
        return self.length > 0 or bool(self.calls)


MAX_SAID_BYTES = 2048
"""The memory that a `Said` takes at most, with all that it holds."""


def say(text: str, calls: Iterable[Call] = ()) -> Said:
    """
    Return what is compared of an answer.

    Args:
        text: Its texts in order; thinking in tags at its beginning is left out.
        calls: Its tool calls.
    """
    text = text.rpartition("</think>")[2][:_READ_CHARS]
    words, core = _words(text), _words(_behind_tags(text))
    starts = range(0, min(len(words), _MAX_BLOCKS * _BLOCK_CHARS) - _BLOCK_CHARS + 1, _BLOCK_CHARS)
    blocks = b"".join(_digest(words[start : start + _BLOCK_CHARS]) for start in starts)
    made = b"".join(sorted({_digest(_spell_call(call)) for call in islice(calls, _MAX_CALLS)}))
    return Said(words[:_KEPT_CHARS], len(words), _digest(words), _digest(core) if core else b"", blocks, made)


def said_after(items: Sequence[Item], position: int) -> tuple[Said, ...]:
    """
    Return the answer that a request holds behind an item: the first item of it alone, for clients may add more, and
    all of it.  Empty if no answer follows at once.
    """
    answers: list[Item] = []
    for n in range(position + 1, len(items)):
        if items[n].role != "assistant":
            break
        answers.append(items[n])
        if len(answers) == _MAX_ITEMS:
            break
    readings = (answers[:1], answers) if len(answers) > 1 else (answers,)
    return tuple(_said_by(reading) for reading in readings if reading)


def _said_by(items: Sequence[Item]) -> Said:
    words = "".join(word for item in items for word in item.words)
    return say(words, [call for item in items for call in _calls(item.value)])


def compare(said: Said, held: Said, *, broken_off: bool = False) -> Likeness:
    """
    Compare what went out with what a request holds.

    Args:
        said: What went out.
        held: What the request holds.
        broken_off: The answer did not end by itself: a client may have heard less of it, or go on from there.
    """
    if not held:
        return "open"
    if not said:
        return "open" if broken_off else "other"
    found: list[Likeness] = []
    if said.length and held.length:
        found.append(_compare_texts(said, held, broken_off))
    if said.calls and held.calls and not broken_off:
        made, kept = _digests(said.calls), _digests(held.calls)
        found.append("same" if made <= kept or kept <= made else "other")
    if not found:
        return "open" if broken_off else "other"
    return "other" if "other" in found else "open" if "open" in found else "same"


def _compare_texts(said: Said, held: Said, broken_off: bool) -> Likeness:
    if said.digest == held.digest or (held.core and said.core == held.core):
        return "same"
    return "open" if broken_off and (_begins(said, held) or _begins(held, said)) else "other"


def _begins(whole: Said, start: Said) -> bool:
    """Tell whether one begins with the words of the other, as far as they are known."""
    return start.length <= whole.length and whole.text.startswith(start.text) and whole.blocks.startswith(start.blocks)


def _words(text: str) -> str:
    spelled = unicodedata.normalize("NFKC", _SIGNS.sub(r"\1", text)).casefold()
    # One that is all signs says something too.
    return _BETWEEN_WORDS.sub(" ", spelled).strip() or " ".join(spelled.split())


def _behind_tags(text: str) -> str:
    """Return a text without the tags at its beginning: `[[reply]]`, `<thinking>...</thinking>`."""
    text = text.lstrip()
    while text:
        if text.startswith("[["):
            opening, closing = "[[", "]]"
        elif text.startswith("<") and (end := text.find(">", 0, _TAG_CHARS)) > 1:
            opening, closing = text[: end + 1], f"</{text[1:end]}>"
        else:
            break
        end = text.find(closing, len(opening), None if opening != "[[" else _TAG_CHARS)
        if end < 0:
            break
        text = text[end + len(closing) :].lstrip()
    return text


def _digests(calls: bytes) -> set[bytes]:
    return {calls[start : start + _DIGEST_BYTES] for start in range(0, len(calls), _DIGEST_BYTES)}


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _spell_call(call: Call) -> str:
    name, arguments = call
    try:
        if isinstance(arguments, str) and len(arguments) <= _READ_CHARS:
            arguments = json.loads(arguments or "{}", parse_int=Number, parse_float=Number)
        return f"{name} {_spell(arguments)}"
    except (ValueError, OverflowError, RecursionError):
        return f"{name} {arguments if isinstance(arguments, str) else ''}"


def _spell(value: Any) -> str:
    """Spell a JSON value in one of the ways that mean the same; numbers as most clients have them."""
    if isinstance(value, Number | int | float) and not isinstance(value, bool):
        return repr(float(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{_spell(str(key))}:{_spell(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spell, value)) + "]"
    if isinstance(value, str):
        return json.dumps(unicodedata.normalize("NFC", _SIGNS.sub(r"\1", value.strip())))
    return "{}" if value is None else json.dumps(value)


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


NOTHING = say("")
