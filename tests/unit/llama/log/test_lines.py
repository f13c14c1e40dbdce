"""Bytes become lines that are safe to show."""

from __future__ import annotations

import pytest

from kvstack.llama.log.lines import LINE_BYTES_KEPT, LineSplitter, clean_line, split_glued


def lines(*chunks: bytes) -> list[str]:
    """All lines of some chunks."""
    splitter = LineSplitter()
    found = [line for chunk in chunks for line in splitter.feed(chunk)]
    return found + splitter.close()


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\r", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\n\r\nb", ["a", "", "b"]),
        (b"", []),
        (b"a", ["a"]),
    ],
)
def test_line_ends(data: bytes, wanted: list[str]) -> None:
    """Every line end is one, also where the chunks part."""
    assert lines(data) == wanted
    for cut in range(len(data)):
        assert lines(data[:cut], data[cut:]) == wanted


def test_utf8_split_over_chunks() -> None:
    """A character that is cut by the pipe is whole again."""
    data = "prêt — 模型\n".encode()
    for cut in range(len(data)):
        assert lines(data[:cut], data[cut:]) == ["prêt — 模型"]


def test_broken_utf8() -> None:
    """A byte that is no UTF-8 (the server cuts metadata inside a character) becomes a replacement character."""
    assert lines(b"name = \xe6\xa8...\n") == ["name = \N{REPLACEMENT CHARACTER}..."]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x00b\x08c\x7fd\x9be", "abcde"),
        ("tab\there  ", "tab here"),
        ("right\u202eto left\u2066", "rightto left"),
        ("\x1b", ""),
        ("half \x1b[3", "half"),
        ("plain", "plain"),
    ],
)
def test_nothing_that_moves_a_cursor_survives(text: str, wanted: str) -> None:
    """Escape sequences, control and bidirectional characters are gone."""
    assert clean_line(text) == wanted


def test_an_endless_line_takes_no_memory() -> None:
    """A line is cut at a length; the rest of it is dropped until it ends."""
    splitter = LineSplitter()
    for _ in range(100):
        assert splitter.feed(b"x" * 10000) == []
    assert len(splitter._partial) <= LINE_BYTES_KEPT
    assert splitter.feed(b"\nnext\n") == ["x" * LINE_BYTES_KEPT, "next"]


def test_a_wrapper_is_not_glued() -> None:
    """A prefix with a space behind it belongs to its record."""
    line = "Mar 13 13:59:39 host prog[7]: 0.00.161.319 I slot launch_slot_: id  3 | task 42 | processing task"
    assert split_glued(line) == [line]


def test_three_records_in_one_line() -> None:
    """Every record that was glued is taken off."""
    assert split_glued("a.0.00.000.001 I b.0.00.000.002 W c.slot release: id  0 | task 1 | d") == [
        "a.",
        "0.00.000.001 I b.",
        "0.00.000.002 W c.",
        "slot release: id  0 | task 1 | d",
    ]
