"""
Byte-exact edits of a JSON body.

A body is decoded once (UTF-8 round-trips exactly) and walked with the C scanner of `json`.  What a rule wants to
change is named by a JSON path and offsets in the *decoded* string; the edit is cut inside the raw literal through a
decoded-to-raw offset map, so everything else keeps its spelling: escapes, key order, numbers, duplicate keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from operator import itemgetter
from typing import Any, NamedTuple

JsonPath = tuple[str | int, ...]


class NotJson(ValueError):
    """The text is not one JSON value, or nests too deeply to be read."""


class Number(str):
    """A JSON number in its own spelling: big integers stay exact and cost no arithmetic."""

    __slots__ = ()


_scan = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=Number).scan_once  # type: ignore[attr-defined]
_SPACE = " \t\n\r"


MAX_ELEMENTS = 200_000
"""Messages of one request: more is nobody's conversation, and would keep all others waiting."""


class Edit(NamedTuple):
    """
    One replacement in the raw text of a body; a tuple, because a long conversation has thousands.

    Attributes:
        start: Offset of the first replaced character.
        end: Offset behind the last replaced character; equal to `start` for an insertion.
        replacement: Raw JSON text that takes its place.
        by: Who wants it: names of rules, each with the path at which it counts as a hit.
    """

    start: int
    end: int
    replacement: str
    by: tuple[tuple[str, JsonPath], ...] = ()


class Array(NamedTuple):
    """
    A JSON array with the places of its elements.

    Attributes:
        values: The elements, decoded.
        starts: Offset of the first character of each.
        ends: Offset behind the last character of each.
        end: Offset behind the closing bracket.
    """

    values: list[Any]
    starts: list[int]
    ends: list[int]
    end: int

    def spans(self) -> list[tuple[int, int]]:
        """Return the offsets of all elements."""
        return list(zip(self.starts, self.ends, strict=True))


class Member(NamedTuple):
    """One key and value of a JSON object, with its place in the text."""

    key: str
    key_start: int
    start: int
    end: int


def skip_space(text: str, pos: int) -> int:
    """Return the offset of the first character at or after *pos* that is not JSON white space."""
    length = len(text)
    while pos < length and text[pos] in _SPACE:
        pos += 1
    return pos


def read_value(text: str, pos: int) -> tuple[Any, int]:
    """
    Read one JSON value that starts exactly at *pos*.

    Raises:
        NotJson: There is no complete value.
    """
    try:
        value, end = _scan(text, pos)
    except (StopIteration, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return value, end


def walk_object(text: str, pos: int, *, deep: Iterable[str] = ()) -> tuple[list[Member], dict[str, Any], int]:
    """
    Walk the object that opens at *pos*; values are skipped at C speed.

    Args:
        text: The JSON text.
        pos: Offset of the opening brace.
        deep: Keys whose arrays are read element by element: their value is an `Array`.

    Returns:
        The members in order, the last value of each key, and the offset behind the closing brace.
    """
    members: list[Member] = []
    values: dict[str, Any] = {}
    pos = skip_space(text, pos + 1)
    if text.startswith("}", pos):
        return members, values, pos + 1
    try:
        while True:
            if not text.startswith('"', pos):
                raise NotJson(f"expected a key at {pos}")
            key_start = pos
            key, pos = scanstring(text, pos + 1, True)
            # Most writers put nothing, or one space: that takes no call.
            if not text.startswith(":", pos):
                pos = skip_space(text, pos)
                if not text.startswith(":", pos):
                    raise NotJson(f"expected a colon at {pos}")
            start = skip_space(text, pos + 1)
            if key in deep and text.startswith("[", start):
                values[key] = walked = walk_array(text, start)
                pos = walked.end
            else:
                values[key], pos = _scan(text, start)
            members.append(Member(key, key_start, start, pos))
            if not text.startswith(",", pos):
                pos = skip_space(text, pos)
                if text.startswith("}", pos):
                    return members, values, pos + 1
                if not text.startswith(",", pos):
                    raise NotJson(f"expected a comma at {pos}")
            pos = skip_space(text, pos + 1)
    except (StopIteration, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def find_member(text: str, pos: int, key: str) -> tuple[int, int] | None:
    """
    Find the value of a key in the object that opens at *pos*; of equal keys the last one counts.

    Args:
        text: JSON text that was read before, without an error.
        pos: Offset of the opening brace.
        key: The key.

    Returns:
        The offset of the value, and the one behind it; None if the object does not have the key.
    """
    found = None
    pos = skip_space(text, pos + 1)
    while text[pos] == '"':
        name, pos = scanstring(text, pos + 1, True)
        start = skip_space(text, skip_space(text, pos) + 1)
        _, pos = _scan(text, start)
        if name == key:
            found = (start, pos)
        pos = skip_space(text, pos)
        if text[pos] == ",":
            pos = skip_space(text, pos + 1)
    return found


def walk_array(text: str, pos: int) -> Array:
    """
    Read the array that opens at *pos*, keeping the place of each element.

    Args:
        text: The JSON text.
        pos: Offset of the opening bracket.

    Raises:
        NotJson: There is no complete array, or it has more than `MAX_ELEMENTS`.
    """
    values: list[Any] = []
    starts: list[int] = []
    ends: list[int] = []
    pos = skip_space(text, pos + 1)
    if text[pos : pos + 1] == "]":
        return Array(values, starts, ends, pos + 1)
    length = len(text)
    try:
        while True:
            value, end = _scan(text, pos)
            values.append(value)
            starts.append(pos)
            ends.append(end)
            pos = end
            if len(values) > MAX_ELEMENTS:
                raise NotJson("more elements than any context holds")
            while pos < length and text[pos] in _SPACE:
                pos += 1
            mark = text[pos : pos + 1]
            pos += 1
            if mark == ",":
                while pos < length and text[pos] in _SPACE:
                    pos += 1
            elif mark == "]":
                return Array(values, starts, ends, pos)
            else:
                raise NotJson(f"expected a comma at {pos - 1}")
    except (StopIteration, ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def escape(text: str) -> str:
    """Spell *text* as the inside of a JSON string literal."""
    return json.dumps(text)[1:-1]


def removal(
    spans: Sequence[tuple[int, int]], dropped: Sequence[bool], inside: tuple[int, int]
) -> list[tuple[int, int]]:
    """
    Tell which spans of text to cut so that the dropped members or elements leave no dangling comma.

    What remains reads as if the dropped ones had never been there, wherever they stood: an element goes with the
    separator before it; those before the first kept one go with the separator behind them.

    Args:
        spans: Offsets of all members or elements, in order.
        dropped: For each, whether it goes.
        inside: Offsets behind the opening and of the closing bracket; cut completely if nothing remains.

    Returns:
        Spans to cut, ascending, not overlapping.
    """
    if all(dropped):
        return [inside] if spans else []
    cuts: list[tuple[int, int]] = []
    first_kept = dropped.index(False)
    if first_kept:
        cuts.append((spans[0][0], spans[first_kept][0]))
    cuts.extend((spans[i - 1][1], spans[i][1]) for i in range(first_kept + 1, len(spans)) if dropped[i])
    merged: list[tuple[int, int]] = []
    for start, end in cuts:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Apply edits that do not overlap; insertions at one place keep their order."""
    out: list[str] = []
    done = 0
    for start, end, replacement, _ in sorted(edits, key=itemgetter(0, 1)):
        if start < done:
            raise ValueError(f"edits overlap at {start}")
        out.append(text[done:start])
        out.append(replacement)
        done = end
    out.append(text[done:])
    return "".join(out)
