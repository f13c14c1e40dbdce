"""
The files of prefix snapshots: written by a llama-server, noted, bounded and removed here.

```
kvstack-prefix-DIGEST.bin         the snapshot: what the server made of a prompt, so for its owner alone
kvstack-prefix-DIGEST.json        the note; a snapshot without one is never restored
kvstack-prefix-DIGEST.RANDOM.tmp  one that a server is writing
```

Stacks may share the directory.  A note is taken away while a server reads the snapshot and given back afterwards, so a
file that brings everything down, this process included, is read once.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from io import BufferedIOBase
from pathlib import Path

from kvstack.warmup.identity import NAME_PREFIX, FileStamp, SnapshotNote

ABANDONED_AFTER_S = 3600.0

SPARE_BYTES = 512 * 1024 * 1024
"""Left free on the disk beside a new snapshot."""


class DamagedSnapshot(Exception):
    """What is wrong with a snapshot that was removed; the text is for a person."""


def stamp(path: Path) -> FileStamp | None:
    """Length and time of a file; None if there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return FileStamp(str(path), status.st_size, status.st_mtime_ns) if path.is_file() else None


class SnapshotFiles:
    """
    The snapshots in one directory.

    Args:
        directory: The server's `--slot-save-path`.
        limit_bytes: How much all of them may take.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes

    def file_name(self, name: str) -> str:
        """Name of a snapshot's file, as the server takes it."""
        return f"{name}.bin"

    def check(self, name: str, tokens: int) -> SnapshotNote | None:
        """
        Read all of a snapshot, and say whether it is as noted.

        All of it, and not samples: half a gibibyte takes half a second, and the server is to read it anyway.

        Args:
            name: The snapshot.
            tokens: How many it must have.

        Returns:
            Its note; None if there is no snapshot.

        Raises:
            DamagedSnapshot: There was one that cannot be trusted; it is removed.
        """
        try:
            text = self._path(name, "json").read_text(encoding="utf-8")
        except OSError:
            return None  # there is none, or another stack reads it just now
        except UnicodeDecodeError:
            text = ""
        note = SnapshotNote.from_json(text)
        if note is None or note.tokens != tokens:
            problem = "its metadata cannot be read"
        elif not self._is_as_noted(name, note):
            problem = "its file is gone or has changed"
        elif self._digest(name) != note.digest:
            problem = "its file does not match what was saved"
        else:
            return note
        self.remove(name)
        raise DamagedSnapshot(problem)

    def take(self, name: str) -> bool:
        """Take a snapshot's note away, in order to restore it; false if another stack has done so."""
        return self._unlink(self._path(name, "json"))

    def give_back(self, name: str, note: SnapshotNote) -> None:
        """Note that a snapshot is good, and was used now."""
        if not self._is_as_noted(name, note):
            return  # another stack has made it anew, and has a note for it
        path = self._path(name, "json")
        if not self._write(path, note.to_json()):
            self._unlink(self._path(name, "bin"))  # the disk is full: without a note it would only take room

    def remove(self, name: str) -> None:
        """Remove a snapshot and its note."""
        self._unlink(self._path(name, "json"))
        self._unlink(self._path(name, "bin"))

    def has_room(self, size_bytes: int) -> bool:
        """Whether the disk can take another snapshot."""
        try:
            return shutil.disk_usage(self.directory).free >= size_bytes + SPARE_BYTES
        except OSError:
            return False

    def begin(self, name: str) -> str:
        """
        Make an empty file for a server to write to; it keeps our permissions.

        Returns:
            Its name.

        Raises:
            OSError: It cannot be made.
        """
        path = self.directory / f"{name}.{secrets.token_hex(4)}.tmp"
        path.touch(mode=0o600, exist_ok=False)
        return path.name

    def accept(self, draft: str, name: str, tokens: int, written_bytes: int) -> SnapshotNote | None:
        """
        Give a written file its name.

        Args:
            draft: Name of the file.
            name: The snapshot.
            tokens: How many it has.
            written_bytes: How many bytes the server says that it wrote.

        Returns:
            Its note, which is not on the disk yet: see `give_back`.  None if the file is not whole; then it is gone.
        """
        path = self.directory / draft
        found = stamp(path)
        if found is None or not found.size_bytes or found.size_bytes != written_bytes:
            self._unlink(path)
            return None
        self._unlink(self._path(name, "json"))
        try:
            with path.open("r+b") as file:
                os.fsync(file.fileno())  # before there is a note: after a power cut it must not vouch for empty blocks
                digest = _digest_of(file)
            path.replace(self._path(name, "bin"))
        except OSError:  # on Windows another server may be reading it
            self._unlink(path)
            return None
        return SnapshotNote(tokens, found.size_bytes, found.modified_ns, digest)

    def drop(self, draft: str) -> None:
        """Remove a file that was not written."""
        self._unlink(self.directory / draft)

    def tidy(self, keep: str) -> None:
        """
        Remove what was left half done, and of the rest what has not been used for the longest, until all fit.

        Args:
            keep: The snapshot that is in use here.
        """
        now = time.time()
        used: list[tuple[float, int, str]] = []
        for path in self._ours():
            try:
                status = path.stat()
            except OSError:
                continue
            age_s = now - status.st_mtime
            name = path.name.partition(".")[0]
            if path.suffix == ".bin":
                note = stamp(self._path(name, "json"))
                if note is not None:
                    used.append((note.modified_ns / 1e9, status.st_size, name))
                elif age_s > ABANDONED_AFTER_S and name != keep:
                    self._unlink(path)
            elif path.suffix == ".tmp" and age_s > ABANDONED_AFTER_S:
                self._unlink(path)
        total = sum(size for _, size, _ in used)
        for _, size, name in sorted(used):
            if total <= self.limit_bytes:
                break
            if name != keep:
                self.remove(name)
                total -= size

    def _ours(self) -> list[Path]:
        try:
            return list(self.directory.glob(f"{NAME_PREFIX}*"))
        except OSError:
            return []

    def _is_as_noted(self, name: str, note: SnapshotNote) -> bool:
        found = stamp(self._path(name, "bin"))
        return found is not None and (found.size_bytes, found.modified_ns) == (note.size_bytes, note.modified_ns)

    def _digest(self, name: str) -> str | None:
        try:
            with self._path(name, "bin").open("rb") as file:
                return _digest_of(file)
        except OSError:
            return None

    def _write(self, path: Path, text: str) -> bool:
        """Write a small file of ours, whole or not at all."""
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            draft.touch(mode=0o600)
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError:
            self._unlink(draft)
            return False
        return True

    def _path(self, name: str, ending: str) -> Path:
        return self.directory / f"{name}.{ending}"

    @staticmethod
    def _unlink(path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True


def _digest_of(file: BufferedIOBase) -> str:
    return hashlib.file_digest(file, "blake2b").hexdigest()


def make_directory(path: Path) -> str | None:
    """
    Make the directory of the snapshots, for its owner alone.

    Returns:
        Why it cannot be made or written; None if all is well.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"
