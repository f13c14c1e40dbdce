"""
One stack's files: run file, lock and raw log in the state directory; what may be made again in the cache directory.

```
<state>/kvstack/NAME/run.json    who runs, where, and the token that acts on it (mode 0600)
<state>/kvstack/NAME/end.json    how the last stack ended, if an error ended it; gone when the next one runs
<state>/kvstack/NAME/lock        held for the life of the stack
<state>/kvstack/NAME/server.log  the llama-server's output as it came, and server.log.1, .2, ... before it
<cache>/kvstack/                 assembled models, prefix snapshots, probed binaries
```

`KVSTACK_STATE_DIR` and `KVSTACK_CACHE_DIR` replace the two directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import filelock
import platformdirs

from kvstack.errors import AlreadyRunning, KvstackError

LOG_BYTES = 16 * 1024 * 1024
LOG_FILES_KEPT = 3


def state_dir() -> Path:
    """Where stacks keep their run files and logs."""
    override = os.environ.get("KVSTACK_STATE_DIR")
    return Path(override).absolute() if override else platformdirs.user_state_path("kvstack", appauthor=False)


def cache_dir() -> Path:
    """Where kvstack keeps what it can make again."""
    override = os.environ.get("KVSTACK_CACHE_DIR")
    return Path(override).absolute() if override else platformdirs.user_cache_path("kvstack", appauthor=False)


def new_token() -> str:
    """A fresh secret for the routes that act."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class RunFile:
    """
    What another terminal needs to find and to trust a running stack.

    Attributes:
        name: The stack's name.
        pid: Process id of kvstack.
        started_s: Start time of that process as `kvstack.process.identity` gives it, in seconds: a pid alone may be
            somebody else's by now.
        proxy_url: Base URL of the proxy and the control routes.
        token: Secret for the routes that act.
        config_path: The config file, absolute.
        log_path: The raw log of the llama-server.
        version: Version of kvstack.
        server_pid: Process id of the llama-server, or None (attached, or between two starts).
        server_started_s: Its start time.
        server_argv0: Its program, as it was started.
        attached: Whether the llama-server is somebody else's, which keeps its own log.
        begun_s: When the stack was started, in seconds since the epoch; None if an older kvstack wrote the file.
    """

    name: str
    pid: int
    started_s: float
    proxy_url: str
    token: str
    config_path: str
    log_path: str
    version: str
    server_pid: int | None = None
    server_started_s: float | None = None
    server_argv0: str | None = None
    attached: bool = False
    begun_s: float | None = None

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunFile | None:
        """
        Read a run file's text.

        Returns:
            None if the text is none that any kvstack wrote (half written by a full disk, edited by hand).
        """
        return _from_json(cls, text)


@dataclass(frozen=True, slots=True)
class EndFile:
    """
    How a stack ended that an error ended: for who asks for it later, in another terminal.

    Attributes:
        name: The stack's name.
        pid: Process id that kvstack had.
        begun_s: When it was started, in seconds since the epoch.
        ended_s: When it ended, in seconds since the epoch.
        config_path: The config file, absolute.
        what: The error's first part.
        fact: Its second.
        next_step: Its third.
    """

    name: str
    pid: int
    begun_s: float
    ended_s: float
    config_path: str
    what: str
    fact: str
    next_step: str

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> EndFile | None:
        """
        Read such a file's text.

        Returns:
            None if the text is none that any kvstack wrote.
        """
        return _from_json(cls, text)


_File = TypeVar("_File", RunFile, EndFile)
_KINDS: dict[str, tuple[type, ...]] = {
    "pid": (int,),
    "started_s": (int, float),
    "begun_s": (int, float, type(None)),
    "ended_s": (int, float),
    "server_pid": (int, type(None)),
    "server_started_s": (int, float, type(None)),
    "server_argv0": (str, type(None)),
    "attached": (bool,),
}


def _from_json(cls: type[_File], text: str) -> _File | None:
    try:
        data: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    # A newer kvstack may add fields; a missing or mistyped one is no file of ours.
    known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
    if not all(isinstance(value, _KINDS.get(name, (str,))) for name, value in known.items()):
        return None
    try:
        return cls(**known)
    except TypeError:
        return None


@dataclass(slots=True)
class Refusable:
    """
    A start that may be refused.

    Attributes:
        may_be_refused: Whether it still may: the stack is not running yet.
    """

    may_be_refused: bool = True


class RunDir:
    """The directory of one stack, by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = state_dir() / name
        self.log_path = self.path / "server.log"
        self._run_path = self.path / "run.json"
        self._end_path = self.path / "end.json"
        self._lock = filelock.FileLock(self.path / "lock", blocking=False)

    def lock(self) -> None:
        """
        Take the stack's lock, for as long as this process lives or until `unlock`.

        Raises:
            AlreadyRunning: Another kvstack holds it.
            KvstackError: The directory cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire()
        except filelock.Timeout:
            other = self.read()
            fact = f"pid {other.pid}, {other.proxy_url}, {other.config_path}" if other else str(self.path / "lock")
            raise AlreadyRunning(
                f"A stack named {self.name!r} is already running",
                fact,
                f"See it with `kvstack status {self.name}`, stop it with `kvstack down {self.name}`, "
                "or start this one under another name: `--set name=...`.",
            ) from None
        except OSError as error:
            raise KvstackError(
                "The state directory cannot be used",
                f"{self.path}: {error.strerror or error}",
                "Make it writable, or set KVSTACK_STATE_DIR to a directory that is.",
            ) from None

    def unlock(self) -> None:
        """Give the lock back."""
        self._lock.release(force=True)

    @contextlib.contextmanager
    def unchanged_if_refused(self) -> Iterator[Refusable]:
        """Try to start: as long as that may be refused, it leaves no trace of itself as the stack that ran last."""
        before_ns = 0  # where none of this name has ever run, that is older than all
        with contextlib.suppress(OSError):
            before_ns = self.path.stat().st_mtime_ns
        start = Refusable()
        try:
            yield start
        finally:
            if start.may_be_refused:
                with contextlib.suppress(OSError):
                    os.utime(self.path, ns=(before_ns, before_ns))

    def read(self) -> RunFile | None:
        """The run file, or None if there is none that can be read."""
        try:
            return RunFile.from_json(self._run_path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return None

    def read_end(self) -> EndFile | None:
        """How the last stack ended, or None if no error ended it."""
        try:
            return EndFile.from_json(self._end_path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return None

    def write(self, run: RunFile) -> None:
        """
        Replace the run file at once: a reader sees the old text or the new one.

        Raises:
            OSError: It cannot be written; the old one is still there, and nothing else.
        """
        _replace(self._run_path, run.to_json())

    def write_end(self, end: EndFile) -> None:
        """Leave word of how the stack ended.  Where that cannot be written, there is nobody to tell it to either."""
        with contextlib.suppress(OSError):
            _replace(self._end_path, end.to_json())

    def set_server(self, pid: int | None, started_s: float | None, argv0: str | None) -> None:
        """Note which llama-server is ours now, so that a later `up` can find what a killed run left."""
        run = self.read()
        if run is not None:
            self.write(replace(run, server_pid=pid, server_started_s=started_s, server_argv0=argv0))

    def clear(self) -> None:
        """Remove the run file: the stack ended in order."""
        self._run_path.unlink(missing_ok=True)

    def forget_end(self) -> None:
        """Another stack begins: how the last one ended is of no interest any more."""
        with contextlib.suppress(OSError):  # Windows: somebody reads it in this moment
            self._end_path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def names() -> list[str]:
    """Names of all stacks that have a run file, running or not, in alphabetical order."""
    return sorted(path.parent.name for path in state_dir().glob("*/run.json"))


def names_with_log() -> list[str]:
    """Names of all stacks whose log is there, running or not, in alphabetical order."""
    return sorted(path.parent.name for path in state_dir().glob("*/server.log"))


def last_used() -> str | None:
    """Name of the stack that was started, or ended, last of all; None if there has never been one."""

    def changed_s(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    # Run files and ends come into a stack's directory and go from it, and that is what its time says; a start that
    # was refused sets it back.
    directories = [path for path in state_dir().glob("*") if path.is_dir()]
    return max(directories, key=changed_s).name if directories else None


class RawLog:
    """
    The llama-server's output, byte for byte, rotated by size.

    Written by the pump threads.  A log that cannot be written is a pity, a child that waits for it would be a fault:
    writing never raises, and what was lost is counted.

    Attributes:
        lost_bytes: Bytes that could not be written.
    """

    def __init__(self, path: Path, max_bytes: int = LOG_BYTES, kept: int = LOG_FILES_KEPT) -> None:
        self.path = path
        self.lost_bytes = 0
        self._max_bytes = max_bytes
        self._kept = kept
        self._mutex = threading.Lock()
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append *data*."""
        with self._mutex:
            try:
                if self._file is None:
                    self._open()
                assert self._file is not None
                if self._size and self._size + len(data) > self._max_bytes:
                    self._rotate()
                view = memoryview(data)
                while view:  # unbuffered: a nearly full disk takes a part
                    written = self._file.write(view)
                    self._size += written
                    view = view[written:]
            except OSError:
                self.lost_bytes += len(data)

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._mutex:
            self._close()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Unbuffered: `logs -f` and a person's own `tail` see a line when the server wrote it.
        # For the owner alone: a log may hold what users wrote.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _rotate(self) -> None:
        self._close()
        oldest = self.path.with_name(f"{self.path.name}.{self._kept}")
        oldest.unlink(missing_ok=True)
        for number in range(self._kept - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._open()
