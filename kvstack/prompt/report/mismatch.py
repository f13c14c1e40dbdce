"""Why a request was not taken for the next one of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstack.prompt.diff.difference import diverge_rendered
from kvstack.prompt.diff.segments import Segment, shared_length
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.trace import Trace, Turn
from kvstack.state.causes import Cause

_SPEAKERS = {
    "system": "the system text",
    "user": "a user text",
    "assistant": "an answer of the model",
    "tool": "a tool result",
}


# What these say of a text is that it differs.
_SAID_ALREADY = (Cause.SYSTEM_CHANGED, Cause.HISTORY_EDITED, Cause.RESULT_CHANGED)


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
    Why a request does not go on from an earlier one.

    Attributes:
        what: In words.
        path: JSON path in the earlier request; empty if it is no place in it.
        offset: Characters into that text, as the client wrote it.
        cause: What kind of change it is; empty if that is not known.
    """

    what: str
    path: str = ""
    offset: int = 0
    cause: str = ""

    def __str__(self) -> str:
        if not self.path:
            return self.what
        kind = f" ({self.cause})" if self.cause and self.cause not in _SAID_ALREADY else ""
        return f"{self.what} differs @{self.offset:,}{kind} in {self.path}"


def mismatch(former: Trace, current: Trace) -> Mismatch:
    """Say why a request was not taken for the next one of an earlier one."""
    if not current.answered:
        return Mismatch("no model has answered in it yet, so it is the beginning of one")
    for old, new in zip(former.turns, current.turns, strict=False):
        if old.digest != new.digest:
            return _differing(former, current, old, new)
    if len(current.turns) < len(former.turns):
        return Mismatch("it ends before the other one does")
    one, other = former.hints, current.hints
    if one.session and other.session and one.session != other.session:
        return Mismatch("the client gives it another session id")
    if one.trailing_key and other.trailing_key and one.trailing_key != other.trailing_key:
        return Mismatch("its trailing messages name another chat")
    dropped = one.dropped_fingerprint, other.dropped_fingerprint
    if all(fingerprint.digest for fingerprint in dropped) and dropped[0] != dropped[1]:
        return Mismatch("the id or time that a rule drops from its first user text differs")
    return Mismatch("it may go on from more than one conversation, or too much is missing in between")


def _differing(former: Trace, current: Trace, old: Turn, new: Turn) -> Mismatch:
    if not old.texts:
        return Mismatch("an item that has no text differs")
    others = [text.normalized for text in new.texts] + [""] * len(old.texts)
    pairs = list(zip(old.texts, others, strict=False))
    text, other = next((pair for pair in pairs if pair[0].normalized != pair[1]), (old.texts[-1], None))
    at = 0 if other is None else shared_length(text.normalized, other)
    what = _SPEAKERS.get(old.item.role, "an item")
    if not new.texts or new.item.role != old.item.role:
        what = f"another kind of item follows: {what}"
    divergence = diverge_rendered(traced_segments(former), traced_segments(current))
    cause = str(divergence.cause) if divergence is not None and divergence.path == text.path else ""
    return Mismatch(what, text.path, _as_written(text.replacements, at), cause)


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
