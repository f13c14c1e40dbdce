"""
The files of prefix snapshots: written by a llama-server, noted, bounded and removed here.

```
kvstack-prefix-DIGEST.bin         the snapshot: what the server made of a prompt, so for its owner alone
kvstack-prefix-DIGEST.json        the note; a snapshot without one is never restored
kvstack-prefix-DIGEST.refused     why it is not tried again: it was restored, and an answer showed that it was not there
kvstack-prefix-DIGEST.RANDOM.tmp  one that a server is writing
```

Stacks may share the directory.  A note is taken away while a server reads the snapshot and given back afterwards, so a
file that a server dies of is read once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from kvstack.llama.snapshots import NAME_PREFIX, FileStamp, SnapshotNote

__all__ = ["SnapshotFiles", "make_directory", "stamp"]

ABANDONED_AFTER_S = 3600.0
REFUSED_FOR_S = 7 * 24 * 3600.0
SPARE_BYTES = 512 * 1024 * 1024
"""Left free on the disk beside a new snapshot."""


def stamp(path: Path) -> FileStamp | None:
    """
    Length and time of a file; None if there is none.
    """
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
        """
        Name of a snapshot's file, as the server takes it.
        """
        return f"{name}.bin"

    def take(self, name: str, tokens: int) -> SnapshotNote | None:
        """
        Take a snapshot's note away, in order to restore it.

        Args:
            name: The snapshot.
            tokens: How many it must have.

        Returns:
            None if there is no snapshot that can be trusted; what cannot is removed.
        """
        path = self._path(name, "bin")
        try:
            note = SnapshotNote.from_json(self._path(name, "json").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return None  # there is none, or another stack reads it just now
        found = stamp(path)
        if (
            note is None
            or found is None
            or note != SnapshotNote(tokens, found.size_bytes, found.modified_ns)
            or not self._unlink(self._path(name, "json"))
        ):
            self.remove(name)
            return None
        return note

    def give_back(self, name: str, note: SnapshotNote) -> None:
        """
        Note that a snapshot is good, and was used now.
        """
        path = self._path(name, "json")
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(OSError):
            draft.touch(mode=0o600)
            draft.write_text(note.to_json(), encoding="utf-8")
            draft.replace(path)

    def remove(self, name: str) -> None:
        """
        Remove a snapshot and its note.
        """
        self._unlink(self._path(name, "json"))
        self._unlink(self._path(name, "bin"))

    def refuse(self, name: str, reason: str) -> None:
        """
        Remove a snapshot and do not make it again for some days.
        """
        self.remove(name)
        path = self._path(name, "refused")
        with contextlib.suppress(OSError):
            path.touch(mode=0o600)
            path.write_text(reason, encoding="utf-8")

    def refusal(self, name: str) -> str | None:
        """
        Why a snapshot is not to be made.
        """
        path = self._path(name, "refused")
        try:
            if time.time() - path.stat().st_mtime > REFUSED_FOR_S:
                path.unlink()
                return None
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def has_room(self, size_bytes: int) -> bool:
        """
        Whether the disk can take another snapshot.
        """
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
            path.replace(self._path(name, "bin"))
        except OSError:  # on Windows another server may be reading it
            self._unlink(path)
            return None
        return SnapshotNote(tokens, found.size_bytes, found.modified_ns)

    def drop(self, draft: str) -> None:
        """
        Remove a file that was not written.
        """
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
            elif (path.suffix == ".tmp" and age_s > ABANDONED_AFTER_S) or (
                path.suffix == ".refused" and age_s > REFUSED_FOR_S
            ):
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

    def _path(self, name: str, ending: str) -> Path:
        return self.directory / f"{name}.{ending}"

    @staticmethod
    def _unlink(path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True


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
