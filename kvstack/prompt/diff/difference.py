"""
Where two requests of one conversation differ first, and why.

The earlier request should be the beginning of the later one.  Where it is not, everything behind the first
difference is evaluated again; this module finds that place and says what kind of change it is.  It never takes a text
for volatile because it looks like a clock: a value counts only if it differs between the two requests.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstack.prompt.diff.segments import Segment, common_prefix, extends, shared_length
from kvstack.prompt.diff.value_kinds import Kind, changed_values
from kvstack.state.causes import Cause
from kvstack.state.events import Difference

_SNIPPET = 60
_NEARLY_ALL = 0.9
_SENTENCE_END = re.compile(r"(?<=[.;,:]\ )")


@dataclass(frozen=True, slots=True)
class FoundDifference:
    """
    The first difference of two requests, with what only their texts show.

    Attributes:
        difference: Its place and its cause.
        position_ratio: How far into the earlier request that is, 0 to 1.
        lost: Characters of the earlier request behind it.
        before: 60 characters around it in the earlier request.
        after: 60 characters around it in the later one.
        old: The part that changed, as it was.
        new: The part that changed, as it is.
    """

    difference: Difference
    position_ratio: float
    lost: int
    before: str
    after: str
    old: str
    new: str

    def flat(self) -> dict[str, Any]:
        """Return its fields and those of the difference as one JSON object."""
        fields: dict[str, Any] = asdict(self)
        place: dict[str, Any] = fields.pop("difference")
        return place | fields


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
    """Say how similar two rendered texts are: what begins or ends alike, or what consists of the same sentences."""
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


def find_difference(old: Sequence[Segment], new: Sequence[Segment]) -> FoundDifference | None:
    """Find the first difference of two rendered requests; None if *new* extends *old*, or either is empty."""
    if not old or not new:
        return None
    for number, segment in enumerate(old):
        other = new[number] if number < len(new) else None
        if other is not None and ((segment.role, segment.text) == (other.role, other.text) or extends(segment, other)):
            continue
        return _describe(old, new, number)
    return None


def _describe(old: Sequence[Segment], new: Sequence[Segment], number: int) -> FoundDifference:
    segment = old[number]
    other = new[number] if number < len(new) else Segment("", "", "")
    offset = shared_length(segment.text, other.text) if segment.role == other.role else 0
    common = common_prefix(old, new)
    before, after = _changed(segment.text, other.text)
    cause = _cause(old, new, number, before, after)
    item = None if segment.role == "tools" or segment.index < 0 else segment.index
    return FoundDifference(
        difference=Difference(cause, segment.path, offset, item, _behind(cause, before, after)),
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
    """Spell a tool without its orders: keys sorted, and lists of required names too."""

    def calm(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: sorted(map(str, inner)) if key == "required" and isinstance(inner, list) else calm(inner)
                for key, inner in value.items()
            }
        return [calm(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(calm(json.loads(text)), sort_keys=True)


def _trimmed(old: Sequence[Segment], new: Sequence[Segment], number: int) -> bool:
    """Whether what stands here now stood further behind before, and goes on as it did."""
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


_CAUSES = {
    Kind.CLOCK: Cause.CLOCK,
    Kind.ID: Cause.ID,
    Kind.COUNTER: Cause.COUNTER,
    Kind.SPACE: Cause.WHITE_SPACE,
}


def _text_cause(before: str, after: str, otherwise: Cause) -> Cause:
    """Say what kind of value changed first, from the words that differ."""
    first = changed_values(before, after).first
    return otherwise if first is None else _CAUSES[first]


_NAMED_BY_VALUES = frozenset({Cause.CLOCK, Cause.ID, Cause.COUNTER, Cause.SYSTEM_CHANGED, Cause.TOOLS_CHANGED})


def _behind(cause: Cause, before: str, after: str) -> tuple[Cause, ...]:
    if cause not in _NAMED_BY_VALUES:
        return ()
    return tuple(_CAUSES[kind] for kind in changed_values(before, after).behind)


def _changed(one: str, other: str) -> tuple[str, str]:
    """Return the parts of two texts that differ, widened to whole words."""
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
