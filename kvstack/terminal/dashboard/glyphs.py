"""
The shapes that the dashboard is drawn with, and what is drawn from figures: bars, sparklines, columns.

There are two sets, for terminals that can show more than ASCII and for those that cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of shapes."""

    good: str
    bad: str
    warn: str
    idle: str
    arrow: str
    separator: str
    ellipsis: str
    corner: str
    rule: str
    threshold: str
    full: str
    empty: str
    levels: str
    """Eight heights of a bar, the lowest first."""
    unknown: str


UNICODE = Glyphs("✔", "✘", "▲", "○", "→", "·", "…", "└", "─", "┄", "█", "░", "▁▂▃▄▅▆▇█", "·")
ASCII = Glyphs("+", "x", "!", "o", "->", "|", "...", "`-", "-", "-", "#", ".", "_..::||#", "?")

Point = tuple[float | None, str]
"""A ratio (None: not known) and the style to draw it in."""


def piece(text: str, style: str = "") -> Text:
    """Text whose style ends with it: what is appended later does not inherit it."""
    return Text().append(text, style)


def cut(text: Text, width: int, glyphs: Glyphs) -> Text:
    """*text* in exactly *width* cells: filled up with spaces, or cut with an ellipsis."""
    if text.cell_len > width:
        text.truncate(max(0, width - len(glyphs.ellipsis)))
        text.append(glyphs.ellipsis[:width])
    text.truncate(width, pad=True)
    return text


def progress_bar(ratio: float, width: int, glyphs: Glyphs, style: str) -> Text:
    """A bar of *width* cells, filled to *ratio*."""
    filled = max(0, min(width, int(ratio * width)))
    return piece(glyphs.full * filled, style) + piece(glyphs.empty * (width - filled), "dim")


def sparkline(points: Sequence[Point], width: int, glyphs: Glyphs) -> Text:
    """The newest *width* points as one row, the newest at the right."""
    text = Text()
    for value, style in points[-width:] if width > 0 else ():
        if value is None:
            text.append(glyphs.unknown, "dim")
        else:
            text.append(glyphs.levels[min(7, max(0, int(value * 8)))], style)
    return text


def chart(
    points: Sequence[Point], width: int, height: int, threshold_ratio: float | None, glyphs: Glyphs
) -> list[Text]:
    """The newest points as bars of *height* rows with a scale at the left and the threshold as a dotted line."""
    scale = 6
    room = max(1, (width - scale) // 2)  # a bar and a gap each
    shown = list(points[-room:])
    line_row = None if threshold_ratio is None else min(height - 1, int(threshold_ratio * height))
    rows: list[Text] = []
    for row in range(height - 1, -1, -1):
        label = "1.00" if row == height - 1 else "0.00" if row == 0 else ""
        if row == line_row and threshold_ratio is not None:
            label = f"{threshold_ratio:.2f}"
        text = piece(f"{label:>{scale - 1}} ", "dim")
        behind = glyphs.threshold if row == line_row else " "
        for value, style in shown:
            if value is None:
                text.append(glyphs.unknown if row == 0 else behind, "dim")
            else:
                eighths = int(max(0.0, min(1.0, value)) * height * 8) - row * 8
                if row == 0:
                    eighths = max(1, eighths)  # a similarity of nothing is a figure too
                if eighths <= 0:
                    text.append(behind, "dim")
                else:
                    text.append(glyphs.levels[min(8, eighths) - 1], style)
            text.append(behind, "dim")
        text.append(behind * max(0, width - text.cell_len), "dim")
        rows.append(text)
    return rows
