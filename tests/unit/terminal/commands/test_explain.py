"""Tests of the text that `explain` prints."""

from __future__ import annotations

from typing import Any

import pytest

from kvstack.terminal.commands.explain import _text

DATA: dict[str, Any] = {
    "explanation": {
        "request": 3,
        "verdict": "FAILED",
        "headline": "The request failed.",
        "parts": [{"title": "What went wrong", "sentences": ["The client got HTTP 500: \x1b[2Jbad\x07 words."]}],
    },
    "request": {"id": 3, "difference": None},
}


def test_words_of_a_server_move_no_cursor() -> None:
    """An error's text is quoted, and what a terminal would obey is shown as what it is."""
    text = _text(DATA)
    assert "HTTP 500: \\x1b[2Jbad\\x07 words." in text
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (None, "no difference from a former request was found"),
        ({"cause": "clock", "path": "system", "offset": 7}, "no longer remembered"),
    ],
)
def test_without_a_text_that_is_said(difference: dict[str, object] | None, words: str) -> None:
    """Who asks for the text and gets none is told so; who does not ask is not."""
    data = {**DATA, "request": {"id": 3, "difference": difference}}
    assert words in _text(data, show_text=True)
    assert words not in _text(data)


def test_the_text_is_shown_where_there_is_one() -> None:
    """Place, before and after."""
    divergence = {"path": "system", "offset": 57012, "before": "at 10:00", "after": "at 10:01"}
    text = _text({**DATA, "divergence": divergence}, show_text=True)
    assert "The text around system @57,012" in text
    assert "no difference" not in text
