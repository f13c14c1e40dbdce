"""How one pattern of the log is written down, and how its numbers are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvstack.state.log_facts import LogFact

Make = Callable[["re.Match[str]", int, "int | None"], "LogFact | None"]
"""Makes a fact of a match, the slot (-1 for none) and the task."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """
    One form of one message.

    Attributes:
        name: What it says, in a few words.
        head: The literal text that the message starts with (for `LOADING`: that it contains).
        regex: The whole message.
        make: Match, slot and task in, a fact out; None for a message that says nothing which is needed.
        builds: First and last build that is known to print it.
        sample: A real message; empty for an ignored one.
    """

    name: str
    head: str
    regex: re.Pattern[str]
    make: Make | None
    builds: str
    sample: str


_TOKENS = {
    "INT": r"(-?\d{1,18})",
    "NUM": r"(-?(?:\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?|nan(?:\((?:ind|snan)\))?|inf))",
    "ANY": r"(.*)",
    "*": r".*",
}
_TOKEN = re.compile(r"<(INT|NUM|ANY|\*)>")


def _compile(form: str) -> re.Pattern[str]:
    """
    Make an expression of a form: literal text with `<INT>`, `<NUM>`, `<ANY>` (kept) and `<*>` (not kept).

    Any run of blanks stands for any other, as the servers pad their numbers.
    """
    parts: list[str] = []
    position = 0
    for token in _TOKEN.finditer(form):
        parts.append(_literal(form[position : token.start()], before_token=True))
        parts.append(_TOKENS[token.group(1)])
        position = token.end()
    parts.append(_literal(form[position:]))
    return re.compile("".join(parts))


def _literal(text: str, *, before_token: bool = False) -> str:
    if before_token:
        # `(%5d accepted`, `%2zu/%2zu`: a number that fills its width has no blank before it, another has some.
        return _literal(text.rstrip(" ")) + " *"
    return re.sub(r"(?:\\? )+", " +", re.escape(text))


def pattern(name: str, form: str, make: Make | None, builds: str, sample: str) -> Pattern:
    """Write one pattern down by its form: literal text with `<INT>`, `<NUM>`, `<ANY>` and `<*>`."""
    head = re.split(r"<(?:INT|NUM|ANY|\*)>|  ", form, maxsplit=1)[0]
    return Pattern(name, head, _compile(form), make, builds, sample)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None  # `-nan(ind)`
    return value if math.isfinite(value) else None


def amount(text: str) -> float | None:
    """A number that is no placeholder: finite and not negative."""
    value = _number(text)
    return value if value is not None and value >= 0 else None


def ratio(text: str) -> float | None:
    """A ratio, 0 to 1."""
    value = amount(text)
    return None if value is None else min(value, 1.0)


def mib(text: str) -> int:
    """Mebibytes as bytes."""
    return round((amount(text) or 0.0) * 1048576)


def index(patterns: Iterable[Pattern]) -> Mapping[str, tuple[Pattern, ...]]:
    """Group patterns by their first word, so that a message meets only those that it can match."""
    groups: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        groups.setdefault(pattern.head.split(" ", 1)[0], []).append(pattern)
    return {word: tuple(group) for word, group in groups.items()}
