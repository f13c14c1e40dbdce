"""
Small statistics over remembered requests: quantiles, and decode speed against context length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstack.core.views import RequestRow

__all__ = ["CONTEXT_EDGES_TOKENS", "SpeedAtContext", "decode_by_context", "quantile"]

CONTEXT_EDGES_TOKENS = (2_048, 8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
"""Upper ends of the context lengths that are told apart; longer ones share the last group."""

_SPEED_FROM_TOKENS = 8
"""Shorter answers measure noise."""


@dataclass(frozen=True, slots=True)
class SpeedAtContext:
    """
    Decode speed of the requests in one range of context lengths.

    Attributes:
        up_to_tokens: Upper end of the range; None for the last one, which is open.
        requests: How many requests it is made of.
        tokens_per_s: Their median.
    """

    up_to_tokens: int | None
    requests: int
    tokens_per_s: float


def quantile(values: Sequence[float], share: float) -> float | None:
    """
    The value that a share of all values does not exceed, between neighbours interpolated.

    Args:
        values: In any order.
        share: 0 to 1; 0.5 is the median.

    Returns:
        None if there are no values.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError("a share is between 0 and 1")
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def decode_by_context(rows: Iterable[RequestRow]) -> tuple[SpeedAtContext, ...]:
    """
    Decode speed against context length: long contexts are slower, which is no fault of the cache.

    Returns:
        One entry per range that has requests, shortest contexts first.
    """
    groups: dict[int | None, list[float]] = {}
    for row in rows:
        speed, prompt, generated = row.decode_tokens_per_s, row.prompt_tokens, row.generated_tokens
        if speed is None or prompt is None or generated is None or generated < _SPEED_FROM_TOKENS:
            continue
        edge = next((edge for edge in CONTEXT_EDGES_TOKENS if prompt + generated <= edge), None)
        groups.setdefault(edge, []).append(speed)
    found: list[SpeedAtContext] = []
    for edge in (*CONTEXT_EDGES_TOKENS, None):
        median = quantile(groups.get(edge, ()), 0.5)
        if median is not None:
            found.append(SpeedAtContext(edge, len(groups[edge]), median))
    return tuple(found)
