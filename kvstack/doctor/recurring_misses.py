"""What keeps happening: requests that lost to the same cause, summed up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstack.state.records import RequestRow
from kvstack.state.verdict import is_next_to_nothing

_SAY_NOTHING = frozenset({None, "CANCELLED", "UNKNOWN", "FAILED"})
_GOOD = frozenset({"HIT", "WARM", "RESTORED"})


@dataclass(frozen=True, slots=True)
class Habit:
    """
    A cause that cost more than one request its cache.

    Attributes:
        verdict: The verdict of these requests.
        place: What the client changes and where, without the offset; None if it is not the client's doing.
        times: How many requests.
        lost_tokens: What they lost in all.
        newest: The last of them.
    """

    verdict: str
    place: str | None
    times: int
    lost_tokens: int
    newest: RequestRow


def judged_rows(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """The requests that say something of the cache; side requests (titles, memory) only if there is nothing else."""
    judged = [row for row in rows if row.api is not None and row.verdict not in _SAY_NOTHING and row.prompt_tokens]
    return [row for row in judged if row.side is None] or judged


def habits(rows: Iterable[RequestRow]) -> list[Habit]:
    """
    Sum up what cost requests their cache, most frequent first.

    Once is no habit.
    """
    grouped: dict[tuple[str, str | None], list[RequestRow]] = {}
    for row in judged_rows(rows):
        nothing = is_next_to_nothing(row.cached_tokens or 0, row.prompt_tokens or 0)
        if row.verdict is None or row.verdict in _GOOD or not (row.lost_tokens or nothing):
            continue
        change = row.difference if row.verdict == "PARTIAL" else None
        place = f"{change.cause} in {change.path}" if change is not None else None
        grouped.setdefault((row.verdict, place), []).append(row)
    found = [
        Habit(verdict, place, len(group), sum(row.lost_tokens or 0 for row in group), group[-1])
        for (verdict, place), group in grouped.items()
        if len(group) > 1
    ]
    return sorted(found, key=lambda habit: (-habit.times, -habit.lost_tokens))
