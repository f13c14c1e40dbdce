"""Quantiles, and decode speed against context length."""

from __future__ import annotations

import pytest

from kvstack.core.stats import SpeedAtContext, decode_by_context, quantile
from kvstack.core.views import RequestRow


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([], 0.5, None), ([3.0], 0.9, 3.0), ([1.0, 2.0, 9.0], 0.5, 2.0), ([4.0, 2.0], 0.5, 3.0), ([1.0, 2.0], 1.0, 2.0)],
)
def test_quantile(values: list[float], share: float, wanted: float | None) -> None:
    """The usual definition, between neighbours interpolated."""
    assert quantile(values, share) == wanted


def test_a_share_is_a_share() -> None:
    """Percent are refused."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile([1.0], 50)


def row(prompt: int, speed: float | None, generated: int = 100) -> RequestRow:
    """A request with a decode speed."""
    return RequestRow(
        1, 1.0, "POST", "/x", "chat", prompt_tokens=prompt, generated_tokens=generated, decode_tokens_per_s=speed
    )


def test_speed_by_context() -> None:
    """Requests are grouped by the context they end at; short answers and unknown speeds are left out."""
    rows = [row(1000, 50.0), row(1500, 54.0), row(2000, 40.0), row(300_000, 9.0), row(1000, None), row(900, 99.0, 2)]
    assert decode_by_context(rows) == (
        SpeedAtContext(2048, 2, 52.0),
        SpeedAtContext(8192, 1, 40.0),
        SpeedAtContext(None, 1, 9.0),
    )
