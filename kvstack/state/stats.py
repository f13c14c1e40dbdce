"""Small statistics over remembered requests: decode speed against context length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstack.state.records import RequestRow

_FROM_TOKENS = 8
"""A few tokens say nothing of a speed."""

_SHORTEST_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SpeedAtContext:
    """
    Decode speed of the requests in one range of context lengths.

    Attributes:
        up_to_tokens: Upper end of the range, a power of two; the next smaller one is its lower end.
        requests: How many requests it is made of.
        tokens_per_s: Their tokens over their time.
    """

    up_to_tokens: int
    requests: int
    tokens_per_s: float


def decode_by_context(rows: Iterable[RequestRow]) -> tuple[SpeedAtContext, ...]:
    """
    Decode speed against context length: long contexts are slower, which is no fault of the cache.

    Returns:
        One entry per range that has requests, shortest contexts first.
    """
    sums: dict[int, tuple[int, int, float]] = {}
    for row in rows:
        prompt, generated = row.prompt_tokens, row.generated_tokens
        if not row.decode_ms or not prompt or not generated or generated < _FROM_TOKENS:
            continue
        edge = max(_SHORTEST_TOKENS, 1 << (prompt + generated - 1).bit_length())
        count, tokens, spent_ms = sums.get(edge, (0, 0, 0.0))
        sums[edge] = count + 1, tokens + generated, spent_ms + row.decode_ms
    return tuple(
        SpeedAtContext(edge, count, tokens * 1000.0 / spent_ms)
        for edge, (count, tokens, spent_ms) in sorted(sums.items())
    )
