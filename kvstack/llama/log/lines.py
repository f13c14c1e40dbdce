"""
Bytes in, clean lines out.

A server's pipe gives bytes in chunks of any size.  A `LineSplitter` makes the lines that a person and the grammar can
read: without line ends, escape sequences and control characters, cut at a length that no server line needs, and with
records that the server glued together (a message without its newline, b8227) taken apart again.

The same bytes give the same lines, however they are cut into chunks.
"""

from __future__ import annotations

import re

LINE_BYTES_KEPT = 16384
"""Longer lines are cut here: a debug level prints whole prompts, and a broken writer never ends its line."""

_LINE_END = re.compile(rb"\r\n|\r|\n")

_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and other strings
    r"|[ -/]*[0-~]?"  # the two-character ones
    r")"
)

# C0 without tab, DEL, C1; line separators; bidirectional controls, which reorder what a terminal shows.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")

# A record that starts in the middle of a line, right behind another one's last character.  A wrapper's prefix
# (`host prog[pid]: `, `[58983] `) ends with a space and is no such thing.
_GLUED = re.compile(
    r"(?<=[^\s\d])(?=\d{1,6}\.\d\d\.\d{3}\.\d{3} [A-Z] )"
    r"|(?<=[^\s\w|:])(?=(?:slot|srv|que|res) {1,13}[\w()~<>]{1,14}: )"
)


def clean_line(text: str) -> str:
    """Take escape sequences, control characters and trailing blanks out of one line; a tab becomes a space."""
    # The common line is printable throughout and skips both searches.
    if not text.isprintable():
        text = _CONTROL.sub("", _ESCAPE.sub("", text).replace("\t", " "))
    return text.rstrip(" ")


def split_glued(line: str) -> list[str]:
    """
    Cut a line at the records that were glued to its end.

    One sample (b8227): `W No parser definition detected, assuming pure content parser.0.05.230.074 I srv …`.
    """
    cuts = [match.start() for match in _GLUED.finditer(line)]
    if not cuts:
        return [line]
    return [line[start:end] for start, end in zip([0, *cuts], [*cuts, len(line)], strict=True)]


class LineSplitter:
    """Incremental splitter with bounded memory; never raises."""

    def __init__(self, keep_bytes: int = LINE_BYTES_KEPT) -> None:
        self._keep = keep_bytes
        self._partial = bytearray()
        self._after_cr = False

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes; return the lines that they complete."""
        if self._after_cr and data:
            # A CR at the end of a chunk ended its line already; an LF that follows belongs to it.
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if not data:
            return []
        pieces = data.split(b"\n") if b"\r" not in data else _LINE_END.split(data)
        self._after_cr = data[-1:] == b"\r"
        lines: list[str] = []
        for piece in pieces[:-1]:
            self._keep_piece(piece)
            self._finish(lines)
        self._keep_piece(pieces[-1])
        return lines

    def close(self) -> list[str]:
        """Return what is left without a line end."""
        lines: list[str] = []
        if self._partial:
            self._finish(lines)
        return lines

    def _keep_piece(self, piece: bytes) -> None:
        room = self._keep - len(self._partial)
        if room > 0:
            self._partial += piece[:room]

    def _finish(self, lines: list[str]) -> None:
        text = clean_line(self._partial.decode("utf-8", errors="replace"))
        self._partial.clear()
        # Inside a JSON line a record is not glued but wrapped.
        lines.extend([text] if not text or text[0] == "{" else split_glued(text))
