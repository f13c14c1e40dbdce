"""The table of requests: which columns fit a width, and what stands in them.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

from kvstack.state.explain import reason_words
from kvstack.state.records import RequestRow
from kvstack.state.verdict import Level
from kvstack.terminal import format
from kvstack.terminal.dashboard.glyphs import Glyphs, cut, piece
from kvstack.terminal.dashboard.headline import level_of

STYLES: dict[Level, str] = {"good": "bold green", "warn": "bold yellow", "bad": "bold red", "idle": "dim"}

_API_WORDS = {"chat": "chat", "responses": "resp", "messages": "msgs", "completion": "comp"}
WHY_WIDTH = 32
"""Cells that the reason needs to stand in the row; with less it gets a line of its own below."""


@dataclass(frozen=True, slots=True)
class Column:
    """
    One column.

    Attributes:
        title: Its heading.
        width: In cells.
        rank: The columns of the lowest ranks are the first to get a place, 1 before 2.
        cell: Its text.
        justify: Side that the text stands at.
    """

    title: str
    width: int
    rank: int
    cell: Callable[[RequestRow], str]
    justify: Literal["left", "right"] = "right"


def api_word(row: RequestRow) -> str:
    """The API of a request in at most four letters."""
    if row.api is None:
        return format.UNKNOWN
    return _API_WORDS.get(row.api, format.one_line(row.api)[:4])


def why_words(row: RequestRow) -> str:
    """The reason of a verdict and what it cost, or nothing."""
    why = format.one_line(reason_words(row) or row.error or "")
    if why and row.timing.cost_s is not None and row.timing.cost_s >= 0.1:
        why = f"cost {format.seconds(row.timing.cost_s * 1000)}: {why}"
    return why


def verdict_style(row: RequestRow) -> str:
    """The style that carries a row's verdict."""
    return "cyan" if row.verdict is None else STYLES[level_of(row.verdict)]


def _verdict(row: RequestRow) -> str:
    if row.verdict is not None:
        return row.verdict
    if row.phase == "answering":
        return "decode"
    if row.phase == "forwarded":
        if row.tokens.processed and row.tokens.prompt:
            return f"pre {format.percent(min(1.0, row.tokens.processed / row.tokens.prompt))}"
        return "prefill"
    return {"received": "waits"}.get(row.phase, row.phase)


def _count(value: int | None, width: int) -> str:
    text = format.tokens(value)
    return text if len(text) <= width else text.replace(",", "")


def _columns(count: int) -> tuple[Column, ...]:
    return (
        Column("time", 8, 1, lambda row: format.clock_time(row.time_s), "left"),
        Column("api", 4, 4, api_word, "left"),
        Column("client", 12, 8, lambda row: row.side or row.client or format.UNKNOWN, "left"),
        Column("prompt", count, 2, lambda row: _count(row.tokens.prompt, count)),
        Column("cached", count, 2, lambda row: _count(row.tokens.cached, count)),
        Column("new", count, 2, lambda row: _count(row.tokens.evaluated, count)),
        Column("reuse", 5, 7, lambda row: format.percent(row.tokens.reuse_ratio)),
        Column("sim_best", 8, 3, lambda row: format.ratio(row.lcp_similarity_ratio)),
        Column("prefill", 7, 3, lambda row: format.seconds(row.timing.prefill_ms)),
        Column("TTFT", 5, 5, lambda row: format.seconds(row.timing.ttft_ms)),
        Column("out", count, 9, lambda row: _count(row.tokens.generated, count)),
        Column("t/s", 4, 5, lambda row: format.rate(row.timing.decode_tokens_per_s)),
        Column("ids", 3, 6, lambda row: format.count(row.stripped.msg_ids_removed, 3)),
        Column("ts", 3, 6, lambda row: format.count(row.stripped.ts_removed, 3)),
        Column("verdict", 9, 1, _verdict, "left"),
    )


class RequestTable:
    """
    The layout for one width.

    Attributes:
        why_inline: Whether the reason of a verdict has a column, or a line of its own.
    """

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self._lead = " " if width > 88 else ""  # aligned with the lines around it, where that costs no column
        width -= len(self._lead)
        self._width = width
        self._glyphs = glyphs
        everything = _columns(6 if width < 90 else 7)
        chosen: set[str] = set()
        used = -1
        for rank in sorted({column.rank for column in everything}):
            group = [column for column in everything if column.rank == rank]
            need = sum(column.width + 1 for column in group)
            if used + need > width:
                break
            used += need
            chosen.update(column.title for column in group)
        self._columns = [column for column in everything if column.title in chosen]
        self._why_width = width - used - 2
        self.why_inline = self._why_width >= WHY_WIDTH

    def heading(self) -> Text:
        """The line of titles."""
        cells = [_justified(column.title, column) for column in self._columns]
        if self.why_inline:
            cells.append("why")
        return self._fitted(piece(" ".join(cells), "bold"))

    def lines(self, row: RequestRow) -> list[Text]:
        """One request: its row and, where it does not fit in, the reason below."""
        text = Text()
        for column in self._columns:
            if text:
                text.append(" ")
            if column.title == "verdict":
                text.append(_justified(column.cell(row), column), verdict_style(row))
            else:
                shown = cut(piece(format.one_line(column.cell(row))), column.width, self._glyphs).plain.rstrip()
                text.append(_justified(shown, column), _cell_style(column.title, row))
        why = why_words(row)
        lines = [text]
        if why and self.why_inline:
            text.append(f" {why}", "italic")
        elif why:
            lines.append(piece(f"  {self._glyphs.corner} ", "dim") + piece(why, "italic"))
        return [self._fitted(line) for line in lines]

    def _fitted(self, line: Text) -> Text:
        return piece(self._lead) + cut(line, self._width, self._glyphs)

    def block(self, rows: Sequence[RequestRow], height: int) -> list[Text]:
        """The newest requests that fit into *height* lines, the newest first."""
        lines: list[Text] = []
        for row in reversed(rows):
            more = self.lines(row)
            if len(lines) + len(more) > height:
                if len(lines) < height:
                    lines.append(more[0])
                break
            lines += more
        return lines


def _justified(text: str, column: Column) -> str:
    missing = max(0, column.width - cell_len(text))
    return " " * missing + text if column.justify == "right" else text + " " * missing


def _cell_style(title: str, row: RequestRow) -> str:
    if title in {"time", "api", "client"}:
        return "dim"
    if title in {"sim_best", "cached", "new"}:
        return verdict_style(row).removeprefix("bold ") if row.verdict else "cyan"
    return ""
