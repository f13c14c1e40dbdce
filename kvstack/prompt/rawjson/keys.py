"""Keys in the JSON of a metadata block: found at any depth, cut without a dangling comma."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from kvstack.prompt.rawjson.scan import read_value, removal, skip_space, walk_array, walk_object

_MAX_DEPTH = 32


@dataclass(slots=True)
class KeyCuts:
    """
    What cutting keys out of a JSON value takes.

    Attributes:
        spans: Offsets to cut, ascending.
        counts: How often each key was found.
        values: Last value of each key found, as it is spelled.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def cut_keys(text: str, start: int, keys: Set[str]) -> KeyCuts:
    """Find *keys* in the JSON value at *start* and everything inside it."""
    cuts = KeyCuts()
    _visit(text, start, keys, cuts, 0)
    cuts.spans.sort()
    return cuts


def _visit(text: str, start: int, keys: Set[str], cuts: KeyCuts, depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    if text.startswith("{", start):
        members, _, end = walk_object(text, start)
        dropped = [member.key in keys for member in members]
        if any(dropped):
            cuts.spans += removal([(m.key_start, m.end) for m in members], dropped, (start + 1, end - 1))
        for member, gone in zip(members, dropped, strict=True):
            if gone:
                cuts.counts[member.key] = cuts.counts.get(member.key, 0) + 1
                cuts.values[member.key] = text[member.start : member.end]
            elif text[member.start] in "{[":
                _visit(text, member.start, keys, cuts, depth + 1)
    elif text.startswith("[", start):
        for first in walk_array(text, start).starts:
            _visit(text, first, keys, cuts, depth + 1)


def fits(value: Any, has: dict[str, str]) -> bool:
    """Whether a JSON object has these keys with string values that begin as given."""
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) and value[key].startswith(start) for key, start in has.items()
    )


def plain(spelled: str) -> str:
    """Return a JSON value as a person writes it: a string without its quotes."""
    value, _ = read_value(spelled, skip_space(spelled, 0))
    return value if type(value) is str else spelled
