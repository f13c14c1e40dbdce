"""
By what a request is known, kept to be shown: why it was not taken for the next one of a conversation.

Nothing of this is needed to apply rules.  It repeats what the memory compares, in words instead of digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstack.prompt.diff.difference import diverge_rendered
from kvstack.prompt.diff.segments import Segment
from kvstack.prompt.memory.fingerprint import beside_text
from kvstack.prompt.memory.state import Hints
from kvstack.prompt.request.document import spell_path
from kvstack.prompt.request.message import Item
from kvstack.prompt.rules.edits import Replacement, changed_text
from kvstack.state.causes import Cause

_SPEAKERS = {
    "system": "the system text",
    "user": "a user text",
    "assistant": "an answer of the model",
    "tool": "a tool result",
}


# What these say of a text is that it differs.
_SAID_ALREADY = (Cause.SYSTEM_CHANGED, Cause.HISTORY_EDITED, Cause.RESULT_CHANGED)


@dataclass(frozen=True, slots=True)
class Turn:
    """
    One item that counts when conversations are compared.

    Attributes:
        digest: What it counts as.
        segments: Its texts as they count: what rules take out, freeze or make constant is masked.
        ops: What rules want to replace in each of these texts.
    """

    digest: bytes
    segments: tuple[Segment, ...]
    ops: tuple[tuple[Replacement, ...], ...]


@dataclass(slots=True)
class Trace:
    """
    By what one request is known.

    Attributes:
        turns: The items that count, in order.
        hints: What it says of its conversation beside words.
        answered: A model has spoken in it.
    """

    turns: list[Turn] = field(default_factory=list)
    hints: Hints = field(default_factory=Hints)
    answered: bool = False

    def add(self, item: Item, digest: bytes, ops: Sequence[Sequence[Replacement]]) -> None:
        """
        Note an item that counts.

        Args:
            item: The item.
            digest: What it counts as.
            ops: The settled replacements in each of its texts.
        """
        texts = list(zip(item.texts, ops, strict=True))
        segments = [
            Segment(spell_path(text.path), item.role, changed_text(text, own, bare=True), item.index)
            for text, own in texts
        ]
        held = [tuple(own) for _, own in texts]
        for beside in beside_text(item.value):
            segments.append(Segment(spell_path(item.path), item.role, beside, item.index))
            held.append(())
        self.turns.append(Turn(digest, tuple(segments), tuple(held)))

    @property
    def segments(self) -> list[Segment]:
        """All that counts, in order."""
        return [segment for turn in self.turns for segment in turn.segments]


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


def part(former: Trace, current: Trace) -> Mismatch:
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
        return Mismatch("its carrier messages name another chat")
    dropped = one.dropped_fingerprint, other.dropped_fingerprint
    if all(fingerprint.digest for fingerprint in dropped) and dropped[0] != dropped[1]:
        return Mismatch("the id or time that a rule drops from its first user text differs")
    return Mismatch("it may go on from more than one conversation, or too much is missing in between")


def _differing(former: Trace, current: Trace, old: Turn, new: Turn) -> Mismatch:
    place, at = 0, 0
    for place, one in enumerate(old.segments):
        other = new.segments[place].text if place < len(new.segments) else ""
        if one.text != other:
            at = next((n for n, pair in enumerate(zip(one.text, other, strict=False)) if pair[0] != pair[1]), -1)
            at = min(len(one.text), len(other)) if at < 0 else at
            break
    if not old.segments:
        return Mismatch("an item that has no text differs")
    segment = old.segments[place]
    what = _SPEAKERS.get(segment.role, "an item")
    if not new.segments or new.segments[0].role != segment.role:
        what = f"another kind of item follows: {what}"
    divergence = diverge_rendered(former.segments, current.segments)
    cause = str(divergence.cause) if divergence is not None and divergence.path == segment.path else ""
    return Mismatch(what, segment.path, _as_written(old.ops[place], at), cause)


def _as_written(ops: Sequence[Replacement], offset: int) -> int:
    """Turn an offset in a text as it counts into one in the text as it was written."""
    counted = written = 0
    for op in ops:
        gap = op.start - written
        if offset < counted + gap:
            break
        counted += gap + len(op.bare)
        written = op.end
        if offset < counted:
            return op.start
    return written + offset - counted
