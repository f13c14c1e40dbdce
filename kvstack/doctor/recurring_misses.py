"""What keeps happening: requests that lost to the same cause, summed up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstack.state.assessment import is_next_to_nothing
from kvstack.state.causes import Cause
from kvstack.state.records import RequestRow
from kvstack.state.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Habit:
    """
    A cause that cost more than one request its cache.

    Attributes:
        verdict: The verdict of these requests.
        cause: What the client changes; None if it is not the client's doing.
        path: Where.
        times: How many requests.
        lost_tokens: What they lost in all.
        newest: The last of them.
    """

    verdict: Verdict
    cause: Cause | None
    path: str | None
    times: int
    lost_tokens: int
    newest: RequestRow


def judged_rows(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """The requests that say something of the cache; side requests (titles, memory) only if there is nothing else."""
    judged = [
        row
        for row in rows
        if row.api is not None and row.verdict is not None and row.verdict.info.concerns_cache and row.tokens.prompt
    ]
    return [row for row in judged if row.side is None] or judged


def habits(rows: Iterable[RequestRow]) -> list[Habit]:
    """
    Sum up what cost requests their cache, most frequent first.

    Once is no habit.
    """
    grouped: dict[tuple[Verdict, Cause | None, str | None], list[RequestRow]] = {}
    for row in judged_rows(rows):
        nothing = is_next_to_nothing(row.tokens.cached or 0, row.tokens.prompt or 0)
        if row.verdict is None or row.verdict.info.level == "good" or not (row.tokens.lost or nothing):
            continue
        change = row.change.difference if row.verdict is Verdict.PARTIAL else None
        place = (None, None) if change is None else (change.cause, change.path)
        grouped.setdefault((row.verdict, *place), []).append(row)
    found = [
        Habit(verdict, cause, path, len(group), sum(row.tokens.lost or 0 for row in group), group[-1])
        for (verdict, cause, path), group in grouped.items()
        if len(group) > 1
    ]
    return sorted(found, key=lambda habit: (-habit.times, -habit.lost_tokens))
