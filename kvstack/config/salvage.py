"""What of a faulty config can be read all the same, so that it is checked further: all problems are named at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvstack.config.model import Config, Place
from kvstack.config.parse import apply_overrides, table_lists_repaired

_PATTERN_KEYS = ("pattern", "also", "same")
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Salvaged:
    """
    The part of a config that can be used.

    Attributes:
        config: Without the keys and the rules that are faulty.
        rules: Which numbers its rules have among all `[[rules.add]]` of the file.
        patterns: Key path and text of each pattern of the rules that are left out.
        lost: Key paths of what was left out.
    """

    config: Config
    rules: tuple[int, ...]
    patterns: tuple[tuple[str, str], ...]
    lost: tuple[str, ...]

    def is_whole(self, path: str) -> bool:
        """Whether nothing was left out of a key or a section."""
        ways = [(f"{lost}.", f"{path}.") for lost in self.lost]
        return not any(one.startswith(other) or other.startswith(one) for one, other in ways)


def salvage(text: str, source: Path, home: Path, overrides: Sequence[str] = ()) -> Salvaged | None:
    """
    Read a config file's text without what is faulty.

    Args:
        text: The TOML document.
        source: The file's path, absolute.
        home: What `~` stands for.
        overrides: `key.path=value` items.

    Returns:
        None if it is no TOML, or nothing of it can be used.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    apply_overrides(raw, overrides, {})
    table_lists_repaired(raw, {})
    section = raw.get("rules")
    added = section.get("add") if isinstance(section, dict) else None
    every = list(added) if isinstance(added, list) else []
    numbers = list(range(len(every)))
    lost: list[str] = []
    for _ in range(_ROUNDS):
        raw.setdefault("name", "salvaged")
        raw.setdefault("server", {})
        try:
            config = Config.model_validate(raw, context=Place(source.parent, home))
        except ValidationError as error:
            places = {_deepest(raw, details["loc"]) for details in error.errors()}
            lost += (".".join(map(str, _numbered(place, numbers))) for place in places)
            # The last of a list first: what is before it keeps its place.
            for place in sorted(places, key=_order, reverse=True):
                _remove(raw, place)
                if place[:2] == ("rules", "add") and len(place) == 3:
                    del numbers[int(place[2])]
            _forget_names(raw, [every[number] for number in range(len(every)) if number not in numbers])
            continue
        left_out = [number for number in range(len(every)) if number not in numbers]
        patterns = tuple(found for number in left_out for found in _patterns(every[number], f"rules.add.{number}"))
        return Salvaged(config, tuple(numbers), patterns, tuple(lost))
    return None


def _deepest(raw: Mapping[str, Any], location: Sequence[int | str]) -> tuple[int | str, ...]:
    """The part of a problem's place that can be taken out: of a rule all, of the rest as little as possible."""
    place: list[int | str] = []
    inner: Any = raw
    for part in location:
        try:
            inner = inner[part]
        except (KeyError, IndexError, TypeError):  # a mark of pydantic's, or a key that is missing
            break
        place.append(part)
        if len(place) == 3 and place[:2] == ["rules", "add"]:
            break
    return tuple(place)


def _order(place: tuple[int | str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((part, "") if isinstance(part, int) else (-1, part) for part in place)


def _numbered(place: tuple[int | str, ...], numbers: Sequence[int]) -> tuple[int | str, ...]:
    """The place as the file has it: rules before it may have been taken out."""
    if place[:2] == ("rules", "add") and len(place) > 2:
        return (*place[:2], numbers[int(place[2])], *place[3:])
    return place


def _remove(raw: dict[str, Any], place: tuple[int | str, ...]) -> None:
    inner: Any = raw
    for part in place[:-1]:
        inner = inner[part]
    if place:
        del inner[place[-1]]


def _forget_names(raw: dict[str, Any], rules: Sequence[Any]) -> None:
    """A rule that is left out is not unknown: whoever switches it off names it rightly."""
    section = raw.get("rules")
    if isinstance(section, dict) and isinstance(disabled := section.get("disable"), list):
        names = [rule.get("name") for rule in rules if isinstance(rule, dict)]
        section["disable"] = [name for name in disabled if name not in names]


def _patterns(rule: Any, path: str) -> list[tuple[str, str]]:
    found = []
    for key in _PATTERN_KEYS if isinstance(rule, dict) else ():
        value = rule.get(key)
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        found += [(f"{path}.{key}", text) for text in texts if isinstance(text, str) and text]
    return found
