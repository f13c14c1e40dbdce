"""Why a request was not taken for the next one of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstack.prompt.diff.difference import find_difference
from kvstack.prompt.diff.segments import Segment, shared_length
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.trace import Trace, Turn
from kvstack.state.causes import Cause


class MismatchReason(StrEnum):
    """Why a request does not continue an earlier one."""

    UNANSWERED = "unanswered"
    SHORTER = "shorter"
    SESSION = "session"
    CHAT = "chat"
    DROPPED_VALUE = "dropped value"
    AMBIGUOUS = "ambiguous"
    OTHER_ITEM = "other item"
    OTHER_KIND = "other kind of item"
    TEXT = "text"


def traced_segments(trace: Trace) -> list[Segment]:
    """Return all that counts of a request, in order."""
    return [
        Segment(text.path, turn.item.role, text.normalized, turn.item.index)
        for turn in trace.turns
        for text in turn.texts
    ]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """
    Why a request does not continue an earlier one.

    Attributes:
        reason: Why.
        role: Of the item of the earlier request that differs; empty if none does.
        path: JSON path in the earlier request; empty if it is no place in it.
        offset: Characters into that text, as the client wrote it.
        cause: What kind of change it is; None if that is not known.
    """

    reason: MismatchReason
    role: str = ""
    path: str = ""
    offset: int = 0
    cause: Cause | None = None


def mismatch(former: Trace, current: Trace) -> Mismatch:
    """Find why a request was not taken for the next one of an earlier one."""
    if not current.answered:
        return Mismatch(MismatchReason.UNANSWERED)
    for old, new in zip(former.turns, current.turns, strict=False):
        if old.digest != new.digest:
            return _differing(former, current, old, new)
    if len(current.turns) < len(former.turns):
        return Mismatch(MismatchReason.SHORTER)
    one, other = former.hints, current.hints
    if one.session and other.session and one.session != other.session:
        return Mismatch(MismatchReason.SESSION)
    if one.trailing_key and other.trailing_key and one.trailing_key != other.trailing_key:
        return Mismatch(MismatchReason.CHAT)
    dropped = one.dropped_fingerprint, other.dropped_fingerprint
    if all(fingerprint.digest for fingerprint in dropped) and dropped[0] != dropped[1]:
        return Mismatch(MismatchReason.DROPPED_VALUE)
    return Mismatch(MismatchReason.AMBIGUOUS)


def _differing(former: Trace, current: Trace, old: Turn, new: Turn) -> Mismatch:
    if not old.texts:
        return Mismatch(MismatchReason.OTHER_ITEM)
    others = [text.normalized for text in new.texts] + [""] * len(old.texts)
    pairs = list(zip(old.texts, others, strict=False))
    text, other = next((pair for pair in pairs if pair[0].normalized != pair[1]), (old.texts[-1], None))
    at = 0 if other is None else shared_length(text.normalized, other)
    other_kind = not new.texts or new.item.role != old.item.role
    reason = MismatchReason.OTHER_KIND if other_kind else MismatchReason.TEXT
    found = find_difference(traced_segments(former), traced_segments(current))
    cause = found.difference.cause if found is not None and found.difference.path == text.path else None
    return Mismatch(reason, old.item.role, text.path, _as_written(text.replacements, at), cause)


def _as_written(ops: Sequence[Replacement], offset: int) -> int:
    """Turn an offset in a text as it counts into one in the text as it was written."""
    counted = written = 0
    for op in ops:
        gap = op.start - written
        if offset < counted + gap:
            break
        counted += gap + len(op.normalized)
        written = op.end
        if offset < counted:
            return op.start
    return written + offset - counted
