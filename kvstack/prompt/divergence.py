"""
Where two requests of one conversation part, and why.

The earlier request should be the beginning of the later one.  Where it is not, everything behind the first
difference is evaluated again; this module finds that place and says what kind of change it is.  It never takes a text
for volatile because it looks like a clock: a value counts only if it differs between the two requests.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstack.prompt.pattern import Pattern, compile_pattern
from kvstack.prompt.rendering import Segment, common_prefix, extends, render, shared_length

__all__ = ["Cause", "Divergence", "Habit", "Likeness", "diverge", "diverge_rendered", "habits", "likeness"]

_SNIPPET = 60
_NEARLY_ALL = 0.9
_SENTENCE_END = re.compile(r"(?<=[.;,:]\ )")


class Cause(StrEnum):
    """
    What kind of change made two requests part.
    """

    CLOCK = "clock"
    ID = "id"
    COUNTER = "counter"
    DECORATION = "decoration"
    MOVED = "moved block"
    TOOLS_CHANGED = "tools changed"
    TOOLS_REORDERED = "tools reordered"
    KEYS_REORDERED = "keys reordered"
    SYSTEM_CHANGED = "system text changed"
    RESULT_CHANGED = "old tool result changed"
    HISTORY_EDITED = "history edited"
    TRIMMED = "window trimmed"
    WHITE_SPACE = "white space"
    OTHER_CONVERSATION = "other conversation"


_SENTENCES = {
    Cause.CLOCK: "a date or time changed",
    Cause.ID: "an id changed",
    Cause.COUNTER: "a number changed",
    Cause.DECORATION: "a turn lost or gained a block when it became history",
    Cause.MOVED: "a message moved or was not kept",
    Cause.TOOLS_CHANGED: "the tools changed",
    Cause.TOOLS_REORDERED: "the same tools came in another order",
    Cause.KEYS_REORDERED: "the same JSON came with its keys in another order",
    Cause.SYSTEM_CHANGED: "the system text changed",
    Cause.RESULT_CHANGED: "an old tool result was pruned or rewritten",
    Cause.HISTORY_EDITED: "an earlier turn was edited",
    Cause.TRIMMED: "the oldest messages were left out",
    Cause.WHITE_SPACE: "only white space changed",
    Cause.OTHER_CONVERSATION: "the requests have nothing in common",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """
    The first difference of two requests.

    Attributes:
        cause: What kind of change it is.
        path: JSON path in the earlier request.
        offset: Characters into that text.
        position_ratio: How far into the earlier request that is, 0 to 1.
        lost: Characters of the earlier request behind it.
        before: 60 characters around it in the earlier request.
        after: 60 characters around it in the later one.
        old: The part that changed, as it was.
        new: The part that changed, as it is.
    """

    cause: Cause
    path: str
    offset: int
    position_ratio: float
    lost: int
    before: str
    after: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{_SENTENCES[self.cause]} in {self.path} @{self.offset:,}"


@dataclass(frozen=True, slots=True)
class Habit:
    """
    A place that changed more than once.

    Attributes:
        cause: What kind of change.
        path: Where.
        times: How often.
        lost: Characters lost to it in all.
        alternating: Values come back: not a clock but several devices or rooms that share a conversation.
    """

    cause: Cause
    path: str
    times: int
    lost: int
    alternating: bool


@dataclass(frozen=True, slots=True)
class Likeness:
    """
    How much two texts have in common, wherever it stands.

    Attributes:
        shared: Characters that both have.
        ratio: Their share of the longer one, 0 to 1.
    """

    shared: int
    ratio: float


def likeness(old: Sequence[Segment], new: Sequence[Segment]) -> Likeness:
    """
    Say how similar two rendered texts are: what begins or ends alike, or what consists of the same sentences.
    """
    ends = sum(
        _ends_alike(one.text, other.text) for one, other in zip(old, new, strict=False) if one.role == other.role
    )
    longer = max(sum(len(segment.text) for segment in segments) for segments in (old, new))
    shared = ends
    if ends < longer * _NEARLY_ALL:  # to count sentences takes ten times as long
        common = _sentences(old) & _sentences(new)
        shared = max(ends, sum(len(sentence) * count for sentence, count in common.items()))
    return Likeness(shared, shared / longer if longer else 0.0)


def _ends_alike(one: str, other: str) -> int:
    if one == other:
        return len(one)
    start = shared_length(one, other)
    return start + shared_length(one[start:][::-1], other[start:][::-1])


def _sentences(segments: Sequence[Segment]) -> Counter[str]:
    """Lines and sentences, with the spaces and line ends behind them, so that all add up to the whole."""
    found: Counter[str] = Counter()
    for segment in segments:
        found.update(part for line in segment.text.splitlines(keepends=True) for part in _SENTENCE_END.split(line))
    return found


def diverge(previous: bytes, current: bytes, path: str) -> Divergence | None:
    """
    Find the first difference of two requests of one conversation.

    Args:
        previous: The earlier body.
        current: The later body.
        path: Their request path.

    Returns:
        The difference, or None if the later request extends the earlier one, or either cannot be read.
    """
    return diverge_rendered(render(previous, path), render(current, path))


def diverge_rendered(old: Sequence[Segment], new: Sequence[Segment]) -> Divergence | None:
    """
    Find the first difference of two rendered requests; None if *new* extends *old*, or either is empty.
    """
    if not old or not new:
        return None
    for number, segment in enumerate(old):
        other = new[number] if number < len(new) else None
        if other is not None and ((segment.role, segment.text) == (other.role, other.text) or extends(segment, other)):
            continue
        return _describe(old, new, number)
    return None


def _describe(old: Sequence[Segment], new: Sequence[Segment], number: int) -> Divergence:
    segment = old[number]
    other = new[number] if number < len(new) else Segment("", "", "")
    offset = shared_length(segment.text, other.text) if segment.role == other.role else 0
    common = common_prefix(old, new)
    before, after = _changed(segment.text, other.text)
    return Divergence(
        cause=_cause(old, new, number, before, after),
        path=segment.path,
        offset=offset,
        position_ratio=common.kept_ratio,
        lost=common.previous - common.shared,
        before=_around(segment.text, offset),
        after=_around(other.text, offset),
        old=before,
        new=after,
    )


def _cause(old: Sequence[Segment], new: Sequence[Segment], number: int, before: str, after: str) -> Cause:
    segment = old[number]
    other = new[number] if number < len(new) else None
    if segment.role == "tools" or (other is not None and other.role == "tools"):
        return _tools_cause(old, new, before, after)
    if segment.role == "system":
        return _text_cause(before, after, Cause.SYSTEM_CHANGED)
    following = old[number + 1] if number + 1 < len(old) else None
    steps_up = other is not None and following is not None and following.text == other.text and segment.role == "user"
    if steps_up and following is not None and following.index == segment.index:
        # The next part took this one's place: what the client put in front of the words is gone.
        return Cause.DECORATION
    if _trimmed(old, new, number):
        return Cause.TRIMMED
    if other is None or segment.role != other.role:
        return Cause.MOVED
    if steps_up:
        return Cause.MOVED
    if segment.role == "user" and _decorated(segment.text, other.text):
        return Cause.DECORATION
    fallback = Cause.RESULT_CHANGED if segment.role == "tool" else Cause.HISTORY_EDITED
    return _text_cause(before, after, fallback)


def _tools_cause(old: Sequence[Segment], new: Sequence[Segment], before: str, after: str) -> Cause:
    mine = [segment.text for segment in old if segment.role == "tools"]
    theirs = [segment.text for segment in new if segment.role == "tools"]
    if Counter(mine) == Counter(theirs):
        return Cause.TOOLS_REORDERED
    if list(map(_sorted, mine)) == list(map(_sorted, theirs)):
        return Cause.KEYS_REORDERED
    if len(mine) == len(theirs):
        return _text_cause(before, after, Cause.TOOLS_CHANGED)
    return Cause.TOOLS_CHANGED


def _sorted(text: str) -> str:
    """
    Spell a tool without its orders: keys sorted, and lists of required names too.
    """

    def calm(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: sorted(map(str, inner)) if key == "required" and isinstance(inner, list) else calm(inner)
                for key, inner in value.items()
            }
        return [calm(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(calm(json.loads(text)), sort_keys=True)


def _trimmed(old: Sequence[Segment], new: Sequence[Segment], number: int) -> bool:
    """
    Tell whether what stands here now stood further behind before, and goes on as it did.
    """
    rest = [(segment.role, segment.text) for segment in new[number : number + 3]]
    if len(rest) < 2:
        return False
    return any(
        [(segment.role, segment.text) for segment in old[start : start + len(rest)]] == rest
        for start in range(number + 1, len(old) - 1)
        if old[start].text == rest[0][1]
    )


def _decorated(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return bool(shorter) and len(shorter) < len(longer) and (longer.endswith(shorter) or longer.startswith(shorter))


_CLOCKS: tuple[Pattern, ...] = tuple(
    map(compile_pattern, ("{date}", "{time}", "{weekday}", "{month}", "{int}/{int}/{int}", "{int} AM", "{int} PM"))
)
_UUID = compile_pattern("{uuid}")
_HEX = compile_pattern("{hex}")


def _text_cause(before: str, after: str, otherwise: Cause) -> Cause:
    """
    Say what kind of value changed, from the words that differ.
    """
    if before.split() == after.split():
        return Cause.WHITE_SPACE
    found = _value_cause(before, after)
    if found is None:
        # More than one thing changed; the first is what the cache stumbles over.
        found = _value_cause(*((text.split() or [""])[0] for text in (before, after)))
    return found or otherwise


def _value_cause(before: str, after: str) -> Cause | None:
    values = [text for text in (before, after) if text.strip()]
    if not values or any(len(text) > 200 for text in values):
        return None
    if all(_holds(text, _CLOCKS) for text in values):
        return Cause.CLOCK
    words = [text.strip("\"'`,;:.[](){}<>= \n") for text in values]
    if all(_UUID.match(word, 0) is not None for word in words):
        return Cause.ID
    if all(word.replace(",", "").replace(".", "").isdecimal() for word in words):
        return Cause.COUNTER
    if all(_is_id(word) for word in words):
        return Cause.ID
    return None


def _holds(text: str, patterns: Sequence[Pattern]) -> bool:
    return any(
        pattern.match(text, pos) is not None
        for pos in range(len(text))
        if not pos or not text[pos - 1].isalnum()
        for pattern in patterns
    )


def _is_id(word: str) -> bool:
    """
    Tell whether a word is made like an id: one run of letters and digits with digits in it, four at least.
    """
    core = word.replace("-", "").replace("_", "").replace(":", "")
    if len(core) < 4 or not core.isalnum():
        return False
    found = _HEX.match(core, 0)
    return any(char.isdigit() for char in core) or (found is not None and found.end == len(core) and len(core) >= 5)


def _changed(one: str, other: str) -> tuple[str, str]:
    """
    Return the parts of two texts that differ, widened to whole words.
    """
    start = shared_length(one, other)
    tail = shared_length(one[start:][::-1], other[start:][::-1])
    while start > 0 and _in_word(one[start - 1]):
        start -= 1
    while tail > 0 and _in_word(one[len(one) - tail]):
        tail -= 1
    return one[start : len(one) - tail], other[start : len(other) - tail]


def _in_word(char: str) -> bool:
    return char.isalnum() or char in "-_.:/,+"


def _around(text: str, offset: int) -> str:
    half = _SNIPPET // 2
    return text[max(0, offset - half) : offset + half]


def habits(divergences: Sequence[Divergence]) -> list[Habit]:
    """
    Sum up what happened more than once at the same place, most expensive first.

    One change is no habit: a value is volatile only if it changed in two pairs of requests at least.
    """
    grouped: dict[tuple[Cause, str], list[Divergence]] = {}
    for divergence in divergences:
        grouped.setdefault((divergence.cause, divergence.path), []).append(divergence)
    found = [
        Habit(
            cause,
            path,
            len(group),
            sum(divergence.lost for divergence in group),
            any(later.new == earlier.old for earlier, later in itertools.pairwise(group)),
        )
        for (cause, path), group in grouped.items()
        if len(group) > 1
    ]
    return sorted(found, key=lambda habit: -habit.lost)
