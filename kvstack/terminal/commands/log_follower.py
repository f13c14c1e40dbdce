"""
The end of a log file, and what is added to it, over rotation.

The file is opened for each look and closed again: on Windows an open file could not be renamed by its writer.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstack.terminal.format import one_line

BLOCK_BYTES = 64 * 1024
LINE_BYTES = 256 * 1024
"""A line that grows beyond it is given out in pieces."""


def last_lines(path: Path, count: int, end: int | None = None) -> list[str]:
    """
    The last whole lines of a file and, where it was just rotated, of the file before it.

    Args:
        path: The file; one that is missing has no lines.
        count: How many lines.
        end: Look at no more than this many bytes of the file.
    """
    if count <= 0:
        return []
    tail = _tail(path, count, end)
    if len(tail) < count:
        tail = _tail(path.with_name(f"{path.name}.1"), count - len(tail), None) + tail
    return [_shown(line) for line in tail]


def _tail(path: Path, count: int, end: int | None) -> list[bytes]:
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            if end is not None:
                position = min(position, end)
            data = b""
            while position > 0 and data.count(b"\n") <= count and len(data) < count * LINE_BYTES:
                step = min(BLOCK_BYTES, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
    except OSError:
        return []
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines[-count:]


class Follower:
    """
    Gives out what a growing file gets, from the moment of its making.

    Attributes:
        position: Bytes of the present file that were there before, or were given out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity, self.position = _look(path)
        # A line that is half written now is whole later: begin at its start.
        self.position -= _unfinished(path, self.position)
        self._half = b""

    def more(self) -> list[str]:
        """The whole lines that came since the last call."""
        identity, size = _look(self._path)
        data = b""
        if identity != self._identity:
            if self._identity is not None:
                data = self._rest_of_former()
            self._identity, self.position = identity, 0
        elif size < self.position:  # emptied by somebody
            self.position = 0
        if identity is not None:
            fresh = _read(self._path, self.position)
            self.position += len(fresh)
            data += fresh
        *lines, self._half = (self._half + data).split(b"\n")
        if len(self._half) > LINE_BYTES:
            lines.append(self._half)
            self._half = b""
        return [_shown(line) for line in lines]

    def _rest_of_former(self) -> bytes:
        # The file that was read so far has another name by now; files that came and went in between are in order too.
        files: list[Path] = []
        for number in range(1, 10):
            older = self._path.with_name(f"{self._path.name}.{number}")
            identity, _ = _look(older)
            if identity is None:
                break
            files.append(older)
            if identity == self._identity:
                between = b"".join(_read(file, 0) for file in reversed(files[:-1]))
                return _read(older, self.position) + between
        return b""


def _look(path: Path) -> tuple[tuple[int, int] | None, int]:
    try:
        status = path.stat()
    except OSError:
        return None, 0
    return (status.st_dev, status.st_ino), status.st_size


def _read(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read()
    except OSError:
        return b""


def _unfinished(path: Path, end: int) -> int:
    """How many bytes at the end of the file belong to a line without its end."""
    begin = max(0, end - BLOCK_BYTES)
    data = _read(path, begin)[: end - begin]
    return len(data) - (data.rfind(b"\n") + 1)


def _shown(line: bytes) -> str:
    return one_line(line.decode("utf-8", "replace").rstrip("\r").replace("\t", "    "))
