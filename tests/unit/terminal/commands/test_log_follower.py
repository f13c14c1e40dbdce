"""Tests of reading a log that grows and is rotated."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstack.rundir import RawLog
from kvstack.terminal.commands import log_follower
from kvstack.terminal.commands.log_follower import Follower, last_lines


def test_last_lines(tmp_path: Path) -> None:
    """The last lines come in order, without carriage returns and escapes."""
    path = tmp_path / "server.log"
    path.write_bytes(b"one\ntwo\r\n\x1b[31mthree\xff\nhalf")
    assert last_lines(path, 3) == ["two", " [31mthree\N{REPLACEMENT CHARACTER}", "half"]
    assert last_lines(path, 0) == []
    assert last_lines(tmp_path / "none", 5) == []


def test_last_lines_of_a_large_file(tmp_path: Path) -> None:
    """Lines are found across the blocks that are read."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"line {number:06}\n" for number in range(30_000)))
    assert last_lines(path, 12_000) == [f"line {number:06}" for number in range(18_000, 30_000)]


def test_last_lines_reach_into_the_file_before(tmp_path: Path) -> None:
    """Just after a rotation the file before it has the rest."""
    path = tmp_path / "server.log"
    log = RawLog(path, max_bytes=16)
    for number in range(5):
        log.write(f"line {number}\n".encode())
    log.close()
    assert path.read_bytes() == b"line 4\n"
    assert last_lines(path, 3) == ["line 2", "line 3", "line 4"]


@pytest.mark.parametrize("kept", [3, 9])
def test_follow_over_rotation(tmp_path: Path, kept: int) -> None:
    """No line is lost or told twice, also when several rotations lie between two looks."""
    path = tmp_path / "server.log"
    log = RawLog(path, max_bytes=40, kept=kept)
    log.write(b"before\n")
    follower = Follower(path)
    told: list[str] = []
    written: list[str] = []
    for number in range(40):
        text = f"line {number}"
        written.append(text)
        log.write(text.encode() + b"\n")
        if number % 7 == 0:
            told += follower.more()
    told += follower.more()
    log.close()
    assert told == written


def test_follow_gives_whole_lines(tmp_path: Path) -> None:
    """A line is given when its end is there, and a file that was half written is begun at the line's start."""
    path = tmp_path / "server.log"
    path.write_bytes(b"old\nha")
    follower = Follower(path)
    assert last_lines(path, 5, follower.position) == ["old"]
    with path.open("ab") as file:
        file.write("lf ü".encode()[:-1])
        file.flush()
        assert follower.more() == []
        file.write("ü".encode()[1:] + b"\nnext")
    assert follower.more() == ["half ü"]


def test_follow_bounds_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without an end is given out in pieces."""
    monkeypatch.setattr(log_follower, "LINE_BYTES", 10)
    path = tmp_path / "server.log"
    path.touch()
    follower = Follower(path)
    path.write_bytes(b"x" * 25)
    assert follower.more() == ["x" * 25]
    assert follower.more() == []


def test_follow_waits_for_the_file(tmp_path: Path) -> None:
    """A log that does not exist yet is followed from its first line."""
    path = tmp_path / "server.log"
    follower = Follower(path)
    assert follower.more() == []
    path.write_bytes(b"first\n")
    assert follower.more() == ["first"]
