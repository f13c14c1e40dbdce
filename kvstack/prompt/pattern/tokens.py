"""
The named tokens of patterns: each reads by its own small grammar, as far as it goes.

Longer runs are read in part only, so a token costs the same wherever it is tried.
"""

from __future__ import annotations

import string
from collections.abc import Callable

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DIGITS = frozenset(string.digits)
_HEX = frozenset(string.hexdigits)
_ZONE = frozenset(string.ascii_letters + string.digits + "+-:/_")
_MAX_ZONE = 40
_MAX_RUN = 64
MAX_WORD = 512

Reader = Callable[[str, int], int]
"""Reads a token at an offset; returns the offset behind it, or -1."""


def _run(text: str, pos: int, allowed: frozenset[str], limit: int) -> int:
    end = min(len(text), pos + limit)
    while pos < end and text[pos] in allowed:
        pos += 1
    return pos


def _read_int(text: str, pos: int) -> int:
    end = _run(text, pos, _DIGITS, _MAX_RUN)
    return end if end > pos else -1


def read_hex(count: int) -> Reader:
    """Make the reader of so many hexadecimal digits; 0 for any number."""

    def read(text: str, pos: int) -> int:
        end = _run(text, pos, _HEX, count or _MAX_RUN)
        return end if (end - pos == count if count else end > pos) else -1

    return read


def _read_uuid(text: str, pos: int) -> int:
    for index, count in enumerate((8, 4, 4, 4, 12)):
        if index:
            if not text.startswith("-", pos):
                return -1
            pos += 1
        end = _run(text, pos, _HEX, count)
        if end - pos != count:
            return -1
        pos = end
    return pos


def _read_name(names: tuple[str, ...]) -> Reader:
    def read(text: str, pos: int) -> int:
        for name in names:
            if text.startswith(name, pos):
                end = pos + len(name)
                if not text[end : end + 1].isalpha():
                    return end
        return -1

    return read


def _number(text: str, pos: int, count: int, low: int, high: int) -> bool:
    digits = text[pos : pos + count]
    return len(digits) == count and _DIGITS.issuperset(digits) and low <= int(digits) <= high


def _read_date(text: str, pos: int) -> int:
    good = (
        _number(text, pos, 4, 1000, 9999)
        and text[pos + 4 : pos + 5] == "-"
        and _number(text, pos + 5, 2, 1, 12)
        and text[pos + 7 : pos + 8] == "-"
        and _number(text, pos + 8, 2, 1, 31)
    )
    return pos + 10 if good else -1


def _read_time(text: str, pos: int) -> int:
    hour = 2 if text[pos + 1 : pos + 2] in _DIGITS else 1
    if not (_number(text, pos, hour, 0, 23) and text[pos + hour : pos + hour + 1] == ":"):
        return -1
    pos += hour + 1
    if not _number(text, pos, 2, 0, 59):
        return -1
    pos += 2
    if text[pos : pos + 1] == ":" and _number(text, pos + 1, 2, 0, 60):
        pos += 3
        if text[pos : pos + 1] == "." and text[pos + 1 : pos + 2] in _DIGITS:
            pos = _run(text, pos + 1, _DIGITS, 9)
    if text[pos : pos + 3] in (" AM", " PM") and not text[pos + 3 : pos + 4].isalnum():
        pos += 3
    return pos


def _read_zone(text: str, pos: int) -> int:
    if not (text[pos : pos + 1] in ("+", "-") or (text[pos : pos + 1].isascii() and text[pos : pos + 1].isalpha())):
        return -1
    end = _run(text, pos, _ZONE, _MAX_ZONE)
    return end if text[end - 1] not in "+-:/_" else -1


def _read_word(text: str, pos: int) -> int:
    end = pos
    last = min(len(text), pos + MAX_WORD)
    while end < last and not text[end].isspace():
        end += 1
    return end if end > pos else -1


READERS: dict[str, Reader] = {
    "int": _read_int,
    "uuid": _read_uuid,
    "weekday": _read_name(tuple(name for day in _DAYS for name in (day, day[:3]))),
    "weekday:short": _read_name(tuple(day[:3] for day in _DAYS)),
    "weekday:long": _read_name(_DAYS),
    "month": _read_name(tuple(name for month in _MONTHS for name in (month, month[:3]))),
    "date": _read_date,
    "time": _read_time,
    "zone": _read_zone,
    "word": _read_word,
    "hex": read_hex(0),
}
