"""The files of prefix snapshots: noted, bounded, never trusted."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from kvstack.warmup.identity import NAME_PREFIX, SnapshotNote
from kvstack.warmup.store import DamagedSnapshot, SnapshotFiles, make_directory

NAME = f"{NAME_PREFIX}{'a' * 32}"
HOUR_S = 3600.0


def written(files: SnapshotFiles, name: str = NAME, size: int = 100) -> SnapshotNote:
    """A snapshot as a server writes one."""
    draft = files.begin(name)
    (files.directory / draft).write_bytes(b"x" * size)
    note = files.accept(draft, name, 7, size)
    assert note is not None
    files.give_back(name, note)
    return note


def age(path: Path, seconds: float) -> None:
    """Make a file older."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def left(files: SnapshotFiles) -> list[str]:
    """Endings of all files that there are."""
    return sorted(path.name.removeprefix(NAME) for path in files.directory.iterdir())


def test_a_snapshot_is_for_its_owner_alone(tmp_path: Path) -> None:
    """From its first byte on: the server writes into a file that we made."""
    if sys.platform == "win32":
        pytest.skip("no such permissions there")
    directory = tmp_path / "a" / "b"
    assert make_directory(directory) is None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = SnapshotFiles(directory, 1000)
    draft = files.begin(NAME)
    assert stat.S_IMODE((directory / draft).stat().st_mode) == 0o600
    files.drop(draft)
    written(files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_snapshot_is_taken_once(tmp_path: Path) -> None:
    """While a server reads it, it has no note: whoever dies of it does not find it again."""
    files = SnapshotFiles(tmp_path, 1000)
    note = written(files)
    assert files.check(NAME, 7) == note
    assert files.take(NAME)
    assert files.check(NAME, 7) is None
    assert not files.take(NAME)
    assert left(files) == [".bin"]
    files.give_back(NAME, note)
    assert files.check(NAME, 7) == note


@pytest.mark.parametrize(
    "damage", ["shorter", "longer", "gone", "touched", "other tokens", "no note", "no text", "one bit"]
)
def test_a_snapshot_that_is_not_as_noted_is_removed(damage: str, tmp_path: Path) -> None:
    """A server may die of it."""
    files = SnapshotFiles(tmp_path, 1000)
    note = written(files)
    path = tmp_path / files.file_name(NAME)
    match damage:
        case "shorter":
            os.truncate(path, 99)
            os.utime(path, ns=(note.modified_ns, note.modified_ns))
        case "longer":
            path.write_bytes(b"x" * 101)
            os.utime(path, ns=(note.modified_ns, note.modified_ns))
        case "gone":
            path.unlink()
        case "touched":
            os.utime(path, ns=(note.modified_ns + 1, note.modified_ns + 1))
        case "no note":
            (tmp_path / f"{NAME}.json").write_text("{", encoding="utf-8")
        case "no text":
            (tmp_path / f"{NAME}.json").write_bytes(b"\xff")
        case "one bit":
            path.write_bytes(b"x" * 57 + b"y" + b"x" * 42)
            os.utime(path, ns=(note.modified_ns, note.modified_ns))
    problems = {
        "no note": "metadata",
        "no text": "metadata",
        "other tokens": "metadata",
        "one bit": "does not match what was saved",
    }
    with pytest.raises(DamagedSnapshot, match=problems.get(damage, "gone or has changed")):
        files.check(NAME, 8 if damage == "other tokens" else 7)
    assert left(files) == []
    assert files.check(NAME, 7) is None


@pytest.mark.parametrize(("size", "said"), [(0, 0), (0, 100), (100, 0), (99, 100), (101, 100)])
def test_what_was_not_written_whole_is_no_snapshot(size: int, said: int, tmp_path: Path) -> None:
    """On a full disk an older server says 200, the right number of tokens, and no bytes."""
    files = SnapshotFiles(tmp_path, 1000)
    draft = files.begin(NAME)
    (tmp_path / draft).write_bytes(b"x" * size)
    assert files.accept(draft, NAME, 7, said) is None
    assert left(files) == []


def test_two_stacks_that_make_the_same_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each writes a file of its own; the last one stays, with its own note."""
    one, other = SnapshotFiles(tmp_path, 1000), SnapshotFiles(tmp_path, 1000)
    drafts = [files.begin(NAME) for files in (one, other)]
    assert drafts[0] != drafts[1]
    for draft, size in zip(drafts, (100, 200), strict=True):
        (tmp_path / draft).write_bytes(b"x" * size)
    first = one.accept(drafts[0], NAME, 7, 100)
    second = other.accept(drafts[1], NAME, 7, 200)
    assert first is not None
    assert second is not None
    one.give_back(NAME, first)  # too late: that file was replaced
    assert left(other) == [".bin"]
    other.give_back(NAME, second)
    assert other.check(NAME, 7) == second


def test_a_snapshot_whose_note_cannot_be_written_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was filled by it, perhaps."""

    def full(path: Path, text: str, encoding: str) -> int:
        raise OSError(errno.ENOSPC, f"{path}: {len(text)} more in {encoding}")

    files = SnapshotFiles(tmp_path, 1000)
    draft = files.begin(NAME)
    (tmp_path / draft).write_bytes(b"x" * 100)
    note = files.accept(draft, NAME, 7, 100)
    assert note is not None
    monkeypatch.setattr(Path, "write_text", full)
    files.give_back(NAME, note)
    assert left(files) == []


def test_the_longest_unused_ones_go_first(tmp_path: Path) -> None:
    """Used is when its note was written; the one in use stays, whatever it takes."""
    files = SnapshotFiles(tmp_path, 250)
    names = [f"{NAME_PREFIX}{mark * 32}" for mark in "abc"]
    for number, name in enumerate(names):
        written(files, name)
        age(tmp_path / f"{name}.json", 100 - number)
    files.tidy(names[0])
    assert sorted(path.stem for path in tmp_path.glob("*.bin")) == [names[0], names[2]]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == [names[0], names[2]]
    SnapshotFiles(tmp_path, 50).tidy(names[0])
    assert [path.stem for path in tmp_path.glob("*.bin")] == [names[0]]


def test_what_was_left_half_done_goes_after_an_hour_and_other_files_never(tmp_path: Path) -> None:
    """The directory may be the user's own."""
    files = SnapshotFiles(tmp_path, 1000)
    for name in (f"{NAME}.1234.tmp", f"{NAME}.bin", "mine.bin", "mine.tmp"):
        (tmp_path / name).write_bytes(b"x")
    files.tidy("other")
    assert len(list(tmp_path.iterdir())) == 4
    for path in tmp_path.iterdir():
        age(path, 2 * HOUR_S)
    files.tidy("other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.bin", "mine.tmp"]


def test_a_directory_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    """No snapshots then, and no failure."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert make_directory(tmp_path / "file" / "b") is not None
    files = SnapshotFiles(tmp_path / "none", 1000)
    assert files.check(NAME, 7) is None
    assert not files.take(NAME)
    assert not files.has_room(0)
    files.tidy(NAME)
    files.remove(NAME)
    with pytest.raises(OSError, match="No such file"):
        files.begin(NAME)
