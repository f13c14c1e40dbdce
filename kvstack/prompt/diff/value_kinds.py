"""
Which kind of volatile value two texts differ in: a clock, an id, a counter; the first one, and others behind it.

The cache stumbles over the first character that differs and over nothing else, so that one gives its name, however
many values behind it change too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstack.prompt.pattern.pattern import Pattern, compile_pattern

_MAX_CHARACTERS = 20_000
"""What is longer is no value, and not worth a search for one."""

_MAX_INSERTED_CHARACTERS = 200
"""A text that came or went as a whole is called by a value in it up to this length."""

_WORD = re.compile(r"[\w\-.:/,+]+")
_EDGES = "\"'`,;:.-_/+"
_AFTER = re.compile(r"(?i:z|am|pm)?|[T_,/].*|[+-]\d\d:?\d\d")
_JOINTS = frozenset({"at", "on", "of", "am", "pm", "utc", "gmt"})
_ORDINALS = ("st", "nd", "rd", "th")

_DATE, _TIME, _DAY, _MONTH, _SLASHES = map(
    compile_pattern, ("{date}", "{time}", "{weekday}", "{month}", "{int}/{int}/{int}")
)
_UUID = compile_pattern("{uuid}")
_HEX = compile_pattern("{hex}")


class Kind(Enum):
    """Kinds of values that clients change by themselves."""

    CLOCK = "clock"
    ID = "id"
    COUNTER = "counter"
    SPACE = "white space"


@dataclass(frozen=True, slots=True)
class Changed:
    """
    What differs between two texts.

    Attributes:
        first: Kind of the first difference; None if that is no such value.
        behind: Other kinds of values that differ behind it.
    """

    first: Kind | None
    behind: tuple[Kind, ...] = ()


def changed_values(before: str, after: str) -> Changed:
    """
    Say what kinds of values differ.

    Args:
        before: The part that differs, widened to whole words, as it was.
        after: The same part, as it is.
    """
    if before.split() == after.split():
        return Changed(Kind.SPACE)
    before, after = before[:_MAX_CHARACTERS], after[:_MAX_CHARACTERS]
    old, new = list(_WORD.finditer(before)), list(_WORD.finditer(after))
    same = sum(1 for _ in itertools.takewhile(lambda pair: _is_same(*pair), zip(old, new, strict=False)))
    one, other = _Rest.of(before, old, same), _Rest.of(after, new, same)
    if not one.words or not other.words:
        return Changed(_inserted((one if one.words else other).text))
    if one.words[0] == other.words[0]:  # only what stands in front of it differs
        return Changed(Kind.SPACE if not (one.gap.strip() or other.gap.strip()) else None)
    heads = _clock_at_head(one.words), _clock_at_head(other.words)
    if all(heads):
        first: Kind | None = Kind.CLOCK
    else:
        heads = 1, 1
        first = _kind(one.words[0], other.words[0])
    rest = one.words[heads[0] :], other.words[heads[1] :]
    behind = [kind for kind, values in ((Kind.CLOCK, _clocks), (Kind.ID, _ids)) if _differ(*map(values, rest))]
    return Changed(first, tuple(kind for kind in behind if kind is not first))


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is left of a text behind the words that are the same: its words, the gap before the first, all of it."""

    words: list[str]
    gap: str
    text: str

    @classmethod
    def of(cls, text: str, words: Sequence[re.Match[str]], same: int) -> _Rest:
        start = words[same - 1].end() if same else 0
        gap = text[start : words[same].start()] if same < len(words) else text[start:]
        return cls([word[0] for word in words[same:]], gap, text[start:])


def _is_same(one: re.Match[str], other: re.Match[str]) -> bool:
    return one.start() == other.start() and one[0] == other[0] and one.string[: one.end()] == other.string[: one.end()]


def _differ(old: list[str], new: list[str]) -> bool:
    return bool(old) and bool(new) and old != new


def _inserted(text: str) -> Kind | None:
    """The first value of a text that only one of the two has."""
    if len(text) > _MAX_INSERTED_CHARACTERS:
        return None
    words = [word[0] for word in _WORD.finditer(text)]
    for place, word in enumerate(words):
        if _UUID.match(word.strip(_EDGES), 0) is not None:
            return Kind.ID
        if _clock_at_head(words[place:]):
            return Kind.CLOCK
    return _kind(text.strip(), text.strip()) if len(words) == 1 else None


def _kind(one: str, other: str) -> Kind | None:
    words = [word.strip("\"'`,;:.[](){}<>= \n") for word in (one, other)]
    if all(_UUID.match(word, 0) is not None for word in words):
        return Kind.ID
    if all(word.replace(",", "").replace(".", "").isdecimal() for word in words):
        return Kind.COUNTER
    return Kind.ID if all(map(_is_id, words)) else None


def _is_id(word: str) -> bool:
    """Whether a word is made like an id: one run of letters and digits with digits in it, four at least."""
    core = word.replace("-", "").replace("_", "").replace(":", "")
    if len(core) < 4 or not core.isalnum():
        return False
    found = _HEX.match(core, 0)
    return any(char.isdigit() for char in core) or (found is not None and found.end == len(core) and len(core) >= 5)


def _clock_at_head(words: Sequence[str]) -> int:
    """How many words from the first one on tell a date or a time together; 0 if they do not."""
    run = list(itertools.takewhile(_may_tell_time, words[:8]))
    if not run:
        return 0
    if _tells_time(run[0]):
        return len(run)
    # `22 Mar`, `30, 2026 11:00`, `22 at 11:00`, `8 PM`: a number of a date, not a count that a date follows.
    number = run[0].strip(_EDGES)
    following = run[1].strip(_EDGES) if len(run) > 1 else ""
    is_day = number[-2:].lower() in _ORDINALS or (number.isdecimal() and int(number) <= 31)
    if not is_day or not following:
        return 0
    if following.lower() in {"am", "pm"} or _is_name(following) or _is_year(following):
        return len(run)
    is_joined = following.lower() in _JOINTS and len(run) > 2 and _tells_time(run[2])
    return len(run) if is_joined or _reads(_TIME, following) else 0


def _is_year(word: str) -> bool:
    return len(word) == 4 and word.isdecimal() and word[:2] in {"19", "20"}


def _may_tell_time(word: str) -> bool:
    core = word.strip(_EDGES)
    if core.lower() in _JOINTS or (core.isdecimal() and len(core) <= 4) or _tells_time(word):
        return True
    return core[-2:].lower() in _ORDINALS and core[:-2].isdecimal()


def _tells_time(word: str) -> bool:
    core = word.strip(_EDGES)
    return _is_name(core) or any(_reads(pattern, core) for pattern in (_DATE, _TIME, _SLASHES))


def _is_name(word: str) -> bool:
    return any(_reads(pattern, word) for pattern in (_DAY, _MONTH))


def _reads(pattern: Pattern, word: str) -> bool:
    """Whether a pattern reads a word as a whole, but for what may follow in a date: `T11:00:07Z`, `pm`, `+02:00`."""
    found = pattern.match(word, 0)
    return found is not None and _AFTER.fullmatch(word, found.end) is not None


def _clocks(words: Sequence[str]) -> list[str]:
    return [word for word in words if _tells_time(word)]


def _ids(words: Sequence[str]) -> list[str]:
    cores = [word.strip(_EDGES) for word in words]
    return [core for core in cores if _is_id(core) and not (core.isdecimal() or core.isalpha() or _tells_time(core))]
