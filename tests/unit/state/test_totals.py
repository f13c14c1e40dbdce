"""Decode speed against context length."""

from __future__ import annotations

from kvstack.state.records import RequestRow
from kvstack.state.totals import SpeedAtContext, decode_by_context
from tests.unit.state.rows import request_row


def row(prompt: int, decode_ms: float | None, generated: int = 100) -> RequestRow:
    """A request with a decode time."""
    return request_row(prompt=prompt, generated=generated, decode_ms=decode_ms)


def test_speed_by_context() -> None:
    """Requests are grouped by the context that they end at; short answers and unknown times are left out."""
    rows = [
        row(100, 500.0),
        row(1000, 2000.0),
        row(1948, 1000.0),
        row(1949, 4000.0),
        row(300_000, 10_000.0),
        row(1000, None),
        row(900, 50.0, 7),
    ]
    assert decode_by_context(rows) == (
        SpeedAtContext(1024, 1, 200.0),
        SpeedAtContext(2048, 2, 200 / 3.0),
        SpeedAtContext(4096, 1, 25.0),
        SpeedAtContext(524_288, 1, 10.0),
    )
