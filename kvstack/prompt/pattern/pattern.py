"""
How a rule recognises text: literals and named tokens, never regular expressions.

`[{weekday:short} {date} {time} {zone}] ` is a pattern.  A token reads as far as its own small grammar goes and
never gives back, so a match costs what it reads and nothing else.  `[[` and `]]` mark the part that a rule changes;
without them that is the whole match.  `{{` and `}}` are braces.  A line end in a pattern matches LF and CRLF.

| token | reads |
| --- | --- |
| `{int}` | decimal digits, 64 at most |
| `{hex}`, `{hex:5}` | hexadecimal digits: up to 64, or exactly that many |
| `{uuid}` | 8-4-4-4-12 hexadecimal digits |
| `{weekday}`, `{weekday:short}`, `{weekday:long}` | an English day name |
| `{month}` | an English month name, long or short |
| `{date}` | 2026-02-18 |
| `{time}` | 20:48, 20:48:05, 20:48:05.123, 8:48 PM |
| `{zone}` | UTC, PST, GMT+5:30, +02:00, Z, Europe/Berlin |
| `{word}` | characters other than white space, 512 at most |
| `{line}` | anything up to what comes next in the pattern, or the end of the line; stays in the line |
| `{text}` | anything up to the next literal of the pattern, across lines; at the end of a pattern: everything |
| `{json}` | one JSON value |
| `{json-fence}` | a line ```` ```json ````, one JSON object, a line ```` ``` ```` |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstack.prompt.pattern.tokens import MAX_WORD, READERS, Reader, read_hex
from kvstack.prompt.rawjson.scan import NotJson, read_value, skip_space


class PatternError(ValueError):
    """A pattern cannot be compiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """
    Where a pattern matched.

    Attributes:
        start: Offset of the match.
        end: Offset behind it.
        target: Offsets of the part that a rule changes.
        json: Offsets of the JSON value of a `{json}` or `{json-fence}` token, if the pattern has one.
        value: That value, decoded.
    """

    start: int
    end: int
    target: tuple[int, int]
    json: tuple[int, int] | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Literal:
    lines: tuple[str, ...]

    def read(self, text: str, pos: int) -> int:
        first = True
        for line in self.lines:
            if not first:
                pos = _line_end(text, pos)
                if pos < 0:
                    return -1
            if not text.startswith(line, pos):
                return -1
            pos += len(line)
            first = False
        return pos

    def find(self, text: str, pos: int, end: int) -> int:
        """Find the literal at or after *pos*, starting before *end*."""
        head = self.lines[0]
        if head:
            while True:
                pos = text.find(head, pos, end)
                if pos < 0 or self.read(text, pos) >= 0:
                    return pos
                pos += 1
        while True:
            newline = text.find("\n", pos, end)
            if newline < 0:
                return -1
            start = newline - 1 if newline > pos and text[newline - 1] == "\r" else newline
            if self.read(text, start) >= 0:
                return start
            pos = newline + 1


def _line_end(text: str, pos: int) -> int:
    if text.startswith("\n", pos):
        return pos + 1
    if text.startswith("\r\n", pos):
        return pos + 2
    return -1


# Keys of what a search has seen, beside the indices of tokens.
_NEWLINE, _CLOSE = -1, -2

_DAY = ("date", "weekday", "month")

_SPECIAL = ("line", "text", "json", "json-fence")


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    reader: Reader | None


@dataclass(frozen=True, slots=True)
class Pattern:
    """
    A compiled pattern.

    Attributes:
        source: As it was written.
        head: The literal with which every match begins; empty if the pattern begins with a token.
    """

    source: str
    elements: tuple[_Literal | _Token, ...]
    target_from: int | None
    target_to: int | None
    head: str

    @property
    def reads_json(self) -> bool:
        """It has a token that reads JSON, whose keys a rule can name."""
        return any(isinstance(element, _Token) and element.name in ("json", "json-fence") for element in self.elements)

    def coarsened(self) -> Pattern:
        """
        Return the pattern with a target that is the time of its clock, and what joins that to the day; the same pattern
        if its target has no time, or no day.
        """
        first = self.target_from or 0
        last = len(self.elements) if self.target_to is None else self.target_to
        names = {n: one.name for n, one in enumerate(self.elements) if first <= n < last and isinstance(one, _Token)}
        times = [n for n, name in names.items() if name == "time"]
        if not times or not any(name.partition(":")[0] in _DAY for name in names.values()):
            return self
        end = times[-1] + 1
        if names.get(end) == "zone":  # as in 11:00:07+02:00
            end += 1
        before = [n for n in names if n < times[0]]
        if before:
            return replace(self, target_from=before[-1] + 1, target_to=end)
        return replace(self, target_from=times[0], target_to=min((n for n in names if n >= end), default=end))

    def match(self, text: str, pos: int) -> Found | None:
        """Match exactly at *pos*."""
        # Most attempts end here.  A line end may be CRLF: that takes a closer look.
        if self.head != "\n" and not text.startswith(self.head, pos):
            return None
        return self.match_on(text, pos, {})

    def search(self, text: str, begin: int, end: int, *, anywhere: bool) -> Iterator[Found]:
        """Yield the matches inside a span that do not overlap, each at the start of a line unless *anywhere*."""
        return (found for _, found in search_all([(self, anywhere)], text, begin, end))

    def match_on(self, text: str, pos: int, seen: dict[int, int]) -> Found | None:
        """Match exactly at *pos*, with what a search has *seen* of the text before."""
        start = pos
        target_start = start
        target_end = -1
        span: tuple[int, int] | None = None
        value: Any = None
        for index, element in enumerate(self.elements):
            if index == self.target_from:
                target_start = pos
            if index == self.target_to:
                target_end = pos
            if isinstance(element, _Literal):
                pos = element.read(text, pos)
            elif element.reader is not None:
                pos = element.reader(text, pos)
            elif element.name in ("line", "text"):
                pos = self._read_open(text, pos, index, seen)
            else:
                found = _read_fence(text, pos, seen) if element.name == "json-fence" else _read_json(text, pos)
                if found is None:
                    return None
                span, value, pos = found
            if pos < 0:
                return None
        if target_end < 0:
            target_end = pos
        return Found(start, pos, (target_start, target_end), span, value)

    def _read_open(self, text: str, pos: int, index: int, seen: dict[int, int]) -> int:
        """
        Read `{line}` or `{text}`: up to the next literal, or as far as the token may go.

        *seen* keeps where the next line end and the next literal of each token were found last: for a later start
        the answer is the same unless it was passed.
        """
        element = self.elements[index]
        assert isinstance(element, _Token)
        following = self.elements[index + 1] if index + 1 < len(self.elements) else None
        limit = len(text)
        if element.name == "line":
            newline = seen.get(_NEWLINE, -1)
            if newline < pos:
                newline = text.find("\n", pos)
                seen[_NEWLINE] = newline = newline if newline >= 0 else limit
            limit = newline - 1 if newline > pos and text[newline - 1] == "\r" else newline
        if following is None:
            return limit
        if isinstance(following, _Token):
            return _first_read(following, text, pos, min(limit, pos + MAX_WORD))
        if element.name == "line" and not following.lines[0]:
            return limit
        place = seen.get(index, -1)
        if place < pos:
            place = following.find(text, pos, len(text))
            seen[index] = place = place if place >= 0 else len(text) + 1
        return place if place < limit else -1


def search_all(
    patterns: Sequence[tuple[Pattern, bool]], text: str, begin: int, end: int
) -> Iterator[tuple[int, Found]]:
    """
    Search a span for several patterns that begin with the same literal.

    However often a pattern begins without ending, no part of the text is read more than a few times.

    Args:
        patterns: Each with whether it may match anywhere, or at the start of a line only.
        text: The text.
        begin: Start of the span.
        end: End of the span.

    Yields:
        The number of a pattern and its match; matches of one pattern do not overlap.
    """
    head = patterns[0][0].head
    seen: list[dict[int, int]] = [{} for _ in patterns]
    resume = [begin] * len(patterns)
    pos = text.find(head, begin, end)
    while pos >= 0:
        at_line = pos == 0 or text[pos - 1] == "\n"
        for number, (pattern, anywhere) in enumerate(patterns):
            if pos >= resume[number] and (at_line or anywhere):
                found = pattern.match_on(text, pos, seen[number])
                if found is not None and pos < found.end <= end:
                    resume[number] = found.end
                    yield number, found
        pos = text.find(head, max(pos + 1, min(resume)), end)


def _first_read(token: _Token, text: str, pos: int, limit: int) -> int:
    assert token.reader is not None
    while pos < limit:
        if token.reader(text, pos) >= 0:
            return pos
        pos += 1
    return -1


def _read_json(text: str, pos: int) -> tuple[tuple[int, int], Any, int] | None:
    pos = skip_space(text, pos)
    try:
        value, end = read_value(text, pos)
    except NotJson:
        return None
    return (pos, end), value, end


def _read_fence(text: str, pos: int, seen: dict[int, int]) -> tuple[tuple[int, int], Any, int] | None:
    if not text.startswith("```json", pos):
        return None
    pos = _line_end(text, pos + 7)
    if pos < 0:
        return None
    # No JSON holds a line end in a string, so none goes on behind the first closing line.  Only what stands before it
    # is read: the scanner counts all lines before an error, which takes forever where many fences are broken.
    close = seen.get(_CLOSE, -1)
    if close < pos - 1:
        close = text.find("\n```", pos - 1)
        seen[_CLOSE] = close = close if close >= 0 else len(text)
    start = skip_space(text, pos)
    if close == len(text) or not text.startswith("{", start):
        return None
    try:
        value, length = read_value(text[start:close], 0)
    except NotJson:
        return None
    end = start + length
    if skip_space(text, end) != close + 1:
        return None
    after = close + 4
    if after < len(text) and _line_end(text, after) < 0:
        return None
    return (start, end), value, after


def compile_pattern(source: str) -> Pattern:
    """
    Compile a pattern.

    Raises:
        PatternError: The pattern is empty, names an unknown token, or could match in more than one way.
    """
    elements: list[_Literal | _Token] = []
    marks: list[int] = []
    literal: list[str] = []

    def flush() -> None:
        if literal:
            elements.append(_Literal(tuple("".join(literal).replace("\r\n", "\n").split("\n"))))
            literal.clear()

    pos = 0
    while pos < len(source):
        pair = source[pos : pos + 2]
        if pair in ("{{", "}}"):
            literal.append(pair[0])
            pos += 2
        elif pair == "[[" and len(marks) == 2:
            raise PatternError("a second [[: a pattern has one target")
        elif pair in ("[[", "]]") and len(marks) == (pair == "]]"):
            flush()
            marks.append(len(elements))
            pos += 2
        elif source[pos] == "{":
            close = source.find("}", pos)
            if close < 0:
                raise PatternError(f"a brace is open at character {pos + 1}; write {{{{ for a literal brace")
            flush()
            elements.append(_token(source[pos + 1 : close]))
            pos = close + 1
        else:
            literal.append(source[pos])
            pos += 1
    flush()
    if not elements:
        raise PatternError("the pattern is empty")
    if len(marks) == 1:
        raise PatternError("[[ has no ]]")
    if marks and marks[0] == marks[1]:
        raise PatternError("nothing stands between [[ and ]]")
    for element, following in itertools.pairwise(elements):
        if not (isinstance(element, _Token) and isinstance(following, _Token)):
            continue
        if element.name == "text" or (element.name == "line" and following.reader is None):
            raise PatternError(f"{{{element.name}}} needs a literal behind it, not {{{following.name}}}")
    target_from, target_to = marks or (None, None)
    return Pattern(source, tuple(elements), target_from, target_to, _head(elements[0]))


def _head(first: _Literal | _Token) -> str:
    if isinstance(first, _Literal):
        return first.lines[0] if first.lines[0] else "\n"
    return "```json" if first.name == "json-fence" else ""


def _token(name: str) -> _Token:
    if name in _SPECIAL:
        return _Token(name, None)
    reader = READERS.get(name)
    if reader is None and name.startswith("hex:") and name[4:].isdecimal() and int(name[4:]) > 0:
        reader = read_hex(int(name[4:]))
    if reader is None:
        known = ", ".join(f"{{{known}}}" for known in (*READERS, "hex:5", *_SPECIAL))
        raise PatternError(f"there is no token {{{name}}}; tokens are {known}")
    return _Token(name, reader)
