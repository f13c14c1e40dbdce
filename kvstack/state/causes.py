"""The kinds of change by which a request leaves its conversation's former one: each with its meaning and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What kind of change made two requests differ."""

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

    @property
    def meaning(self) -> str:
        """What happened, as a clause."""
        return CAUSES[self].meaning

    @property
    def advice(self) -> str | None:
        """What to do about it, in a sentence; None if nothing helps."""
        return CAUSES[self].advice


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """What is said of a cause."""

    meaning: str
    advice: str | None


CAUSES: Mapping[Cause, CauseInfo] = {
    Cause.CLOCK: CauseInfo(
        "a date or time changed",
        "A rule with `freeze`, `coarsen` or `drop` keeps a clock from changing the prompt.",
    ),
    Cause.ID: CauseInfo("an id changed", "Add a rule with `drop` for this id."),
    Cause.COUNTER: CauseInfo(
        "a number changed", "A rule with `tail` moves a counter to the end, where it costs nothing."
    ),
    Cause.DECORATION: CauseInfo(
        "a turn lost or gained a block when it became history",
        "A rule with `sticky` keeps what the client adds to the newest turn when that turn becomes history.",
    ),
    Cause.MOVED: CauseInfo(
        "a message moved or was not kept", "A rule with `place` leaves a moving block where it first stood."
    ),
    Cause.TOOLS_CHANGED: CauseInfo(
        "the tools changed",
        "Keep the client's tools the same for a conversation: tool servers that come and go change them.",
    ),
    Cause.TOOLS_REORDERED: CauseInfo(
        "the same tools came in another order",
        "Keep the client's tools in one order: some tool servers list theirs anew for each request.",
    ),
    Cause.KEYS_REORDERED: CauseInfo(
        "the same JSON came with its keys in another order",
        "The client writes the same JSON in another order each time; a newer release may be steadier.",
    ),
    Cause.SYSTEM_CHANGED: CauseInfo(
        "the system text changed",
        "Keep what changes out of the system text, or freeze it with a rule.",
    ),
    Cause.RESULT_CHANGED: CauseInfo(
        "an old tool result was pruned or rewritten",
        "The client prunes old tool results: let it do so less often, or not at all.",
    ),
    Cause.HISTORY_EDITED: CauseInfo(
        "an earlier turn was edited",
        "The client rewrites older turns: if that is compaction, give it a larger window.",
    ),
    Cause.TRIMMED: CauseInfo(
        "the oldest messages were left out",
        "The client drops its oldest turns: give it a larger window, so that this happens less often.",
    ),
    Cause.WHITE_SPACE: CauseInfo(
        "only white space changed",
        "The client writes the same text with other white space; a rule can make both the same.",
    ),
    Cause.OTHER_CONVERSATION: CauseInfo("the requests have nothing in common", None),
}
"""The one table of causes."""
