"""Places that change again and again, and whether their values come back: not a clock, but several devices or rooms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvstack.prompt.diff.difference import Cause, Divergence


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
