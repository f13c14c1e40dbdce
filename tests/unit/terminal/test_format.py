"""Tests of how figures are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvstack.terminal import format


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "-"),
        (0, "0ms"),
        (0.31, "0.3ms"),
        (9.96, "10ms"),
        (53.25, "53ms"),
        (99.4, "99ms"),
        (99.6, "0.10s"),
        (240, "0.24s"),
        (9994, "9.99s"),
        (9996, "10.0s"),
        (39_149, "39.1s"),
        (412_000, "412s"),
        (1_620_000, "27m"),
        (7_200_000_0, "20h"),
    ],
)
def test_seconds(milliseconds: float | None, text: str) -> None:
    """A span is written in the unit that keeps three figures."""
    assert format.seconds(milliseconds) == text


@given(st.floats(min_value=0, max_value=3.6e9))
def test_seconds_fit_their_column(milliseconds: float) -> None:
    """No span up to a thousand hours needs more than five characters."""
    assert len(format.seconds(milliseconds)) <= 5


@pytest.mark.parametrize(
    ("speed", "text"),
    [(None, "-"), (41.25, "41.2"), (99.96, "100"), (1204.4, "1204"), (38_835.0, "39k"), (1e9, "999k")],
)
def test_rate(speed: float | None, text: str) -> None:
    """A speed has the figures that four characters can hold."""
    assert format.rate(speed) == text


@pytest.mark.parametrize(("number", "text"), [(0, "-"), (7, "7"), (999, "999"), (1000, "1k"), (12_345, "12k")])
def test_count(number: int, text: str) -> None:
    """A count fits three characters."""
    assert format.count(number, 3) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(None, "-"), (0.0, "0 %"), (0.001, "1 %"), (0.5, "50 %"), (0.9986, "99 %"), (0.9999, "99 %"), (1.0, "100 %")],
)
def test_percent_keeps_the_ends_for_all_and_nothing(ratio: float | None, text: str) -> None:
    """`100 %` means all and `0 %` means nothing."""
    assert format.percent(ratio) == text


@pytest.mark.parametrize(
    ("span_s", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 m 00 s"), (2472, "41 m 12 s"), (7500, "2 h 05 m"), (273_600, "3 d 04 h")],
)
def test_duration_has_two_units(span_s: float, text: str) -> None:
    """A duration shows its two largest units."""
    assert format.duration(span_s) == text


@pytest.mark.parametrize(("span_s", "text"), [(8047, "02:14:07"), (90_061, "1d 01:01:01"), (-3, "00:00:00")])
def test_elapsed_clock(span_s: float, text: str) -> None:
    """A running clock counts days apart, and never runs backwards."""
    assert format.elapsed_clock(span_s) == text


@pytest.mark.parametrize(
    ("size", "text"), [(None, "-"), (512 * 1024, "512 KiB"), (300 * 1024**2, "300 MiB"), (65_927_807_795, "61.4 GiB")]
)
def test_memory(size: int | None, text: str) -> None:
    """Memory is written in binary units."""
    assert format.memory(size) == text


def test_one_line_disarms_terminal_escapes() -> None:
    """Escapes, control characters and direction marks by another process cannot reach the terminal."""
    text = format.one_line("a\x1b[31mb\x07\r\nc\x9bd\u202ee\u200bf\ud800g\u2028h\ti")
    assert text == "a [31mb   c\N{REPLACEMENT CHARACTER}def\N{REPLACEMENT CHARACTER}g h i"


@given(st.text())
def test_one_line_is_one_printable_line(text: str) -> None:
    """Whatever comes in, what comes out is one line without control characters, and has a width."""
    shown = format.one_line(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in shown)
    assert cell_len(shown) >= 0
    shown.encode("utf-8")
