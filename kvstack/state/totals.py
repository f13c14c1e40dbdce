"""
Sums over requests: what of each goes into the totals, and when; and the decode speed against context length.

Tokens and verdicts are counted as soon as a request is over, and corrected when the log tells more.  Seconds are
estimates: they are counted once the request's verdict is final, or has had time enough to become so, and stay as they
are from then on.  So what was saved and lost only grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstack.state.records import RequestRow, Totals

PATIENCE_S = 5.0
"""So long the log may take to tell of a request that is over."""


_FROM_TOKENS = 8
"""A few tokens say nothing of a speed."""

_SHORTEST_TOKENS = 1024


def account(totals: Totals, row: RequestRow, sign: int) -> Totals:
    """
    Add a request's figures, all but its seconds, or take them back.

    Args:
        totals: The sums.
        row: The request.
        sign: 1 or -1.
    """
    if row.verdict is None or row.api is None:
        return totals
    verdicts = dict(totals.verdicts)
    verdicts[row.verdict] = verdicts.get(row.verdict, 0) + sign
    known = row.tokens.prompt is not None and row.tokens.cached is not None and row.tokens.evaluated is not None
    return replace(
        totals,
        requests=totals.requests + sign,
        prompt_tokens=totals.prompt_tokens + sign * ((row.tokens.prompt or 0) if known else 0),
        cached_tokens=totals.cached_tokens + sign * ((row.tokens.cached or 0) if known else 0),
        evaluated_tokens=totals.evaluated_tokens + sign * ((row.tokens.evaluated or 0) if known else 0),
        generated_tokens=totals.generated_tokens + sign * (row.tokens.generated or 0),
        prefill_ms=totals.prefill_ms + sign * (row.timing.prefill_ms or 0.0),
        decode_ms=totals.decode_ms + sign * (row.timing.decode_ms or 0.0),
        verdicts={verdict: count for verdict, count in verdicts.items() if count},
    )


def add_seconds(totals: Totals, row: RequestRow) -> Totals:
    """Add what the cache saved and lost in one request."""
    if row.verdict is None or row.api is None:
        return totals
    return replace(
        totals, saved_s=totals.saved_s + (row.timing.saved_s or 0.0), cost_s=totals.cost_s + (row.timing.cost_s or 0.0)
    )


def is_late(row: RequestRow, now_s: float) -> bool:
    """Whether a request that is over has waited for its log long enough."""
    return row.timing.duration_ms is not None and row.time_s + row.timing.duration_ms / 1000.0 + PATIENCE_S <= now_s


def seconds(tokens: int | None, rate: float | None) -> float | None:
    """
    How long so many tokens take to prefill.

    Args:
        tokens: How many.
        rate: Tokens per second, if it is known.
    """
    if tokens is None:
        return None
    if tokens == 0:
        return 0.0
    return tokens / rate if rate else None


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
        prompt, generated = row.tokens.prompt, row.tokens.generated
        if not row.timing.decode_ms or not prompt or not generated or generated < _FROM_TOKENS:
            continue
        edge = max(_SHORTEST_TOKENS, 1 << (prompt + generated - 1).bit_length())
        count, tokens, spent_ms = sums.get(edge, (0, 0, 0.0))
        sums[edge] = count + 1, tokens + generated, spent_ms + row.timing.decode_ms
    return tuple(
        SpeedAtContext(edge, count, tokens * 1000.0 / spent_ms)
        for edge, (count, tokens, spent_ms) in sorted(sums.items())
    )
