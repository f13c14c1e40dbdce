"""
`kvstack up -d`: the same command again, in a session of its own, with its output in the stack's directory.

Two may try it with one name at the same moment.  What the background process of each says goes to a file of its own.
Only the one whose process has become the stack makes that file `up.log`; the other tells why its process ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvstack.errors import AlreadyRunning, ChildLost, KvstackError, NotReady, NotRunning, StartFailed
from kvstack.process.identity import descendants, identify
from kvstack.rundir import RunDir, RunFile
from kvstack.terminal import control_client, format, output
from kvstack.terminal.plain_lines import verbs_for

POLL_S = 0.1
OUTPUT_BYTES = 1024 * 1024


def start_background(
    name: str, config_path: Path, overrides: Sequence[str], *, wait: bool, attached_url: str | None = None
) -> int:
    """
    Start a stack in the background.

    Args:
        name: Of the stack.
        config_path: The config file, absolute.
        overrides: `key.path=value` items.
        wait: Whether to wait until it is ready; else only until it is there.
        attached_url: Of the llama-server that it attaches to, or None.

    Returns:
        The exit code: that of the background process if it ended.

    Raises:
        AlreadyRunning: A stack of that name runs.
        KvstackError: The background process could not be started.
    """
    directory = RunDir(name)
    former = directory.read()
    if former is not None and control_client.alive(former):
        raise AlreadyRunning(
            f"A stack named {name!r} is already running",
            f"pid {former.pid}, {former.proxy_url}, {former.config_path}",
            f"See it with `kvstack status {name}`, stop it with `kvstack down {name}`.",
        )
    with _Said(directory) as said:
        process = _spawn(config_path, overrides, said.file)
        try:
            ended = _follow(directory, process, said, wait=wait, attached_url=attached_url)
        except KeyboardInterrupt:
            process.returncode = 0
            said.keep()
            output.say(f"\n{name} keeps running in the background; `kvstack down {name}` stops it")
            raise
        if ended:
            return _ended(name, config_path, process.returncode, said)
        process.returncode = 0  # it goes on without us, and that is meant
        return 0


class _Said:
    """
    What the background process says, after what those before it said, in a file for the owner alone.

    Attributes:
        path: Where it is now.
        is_kept: Whether it stays; if not, it is gone when this is left.
    """

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory.path
        self.path = self._directory / f"up.{os.getpid()}.log"
        self.is_kept = False
        self._open = contextlib.ExitStack()
        self._unchanged = contextlib.ExitStack()
        self._start = self._unchanged.enter_context(directory.unchanged_if_refused())
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self.file = os.fdopen(os.open(self.path, flags, 0o600), "ab")
            self._open.enter_context(self.file)
            self.file.write(self._former())
            # On a disk that is full this fails, and is told here: the process could tell nobody.
            self.file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} kvstack up -d\n".encode())
            self.file.flush()
            self._reader = self._open.enter_context(self.path.open("rb"))
            self._reader.seek(0, os.SEEK_END)
        except OSError as error:
            self._close()
            raise KvstackError(
                "The state directory cannot be used",
                f"{self._directory}: {error.strerror or error}",
                "Make it writable and free some space there, or set KVSTACK_STATE_DIR to another directory.",
            ) from None

    def __enter__(self) -> _Said:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def keep(self) -> None:
        """The process has become the stack: this is the stack's `up.log` now."""
        if self.is_kept:
            return
        self.is_kept = True
        self._start.may_be_refused = False
        final = self._directory / "up.log"
        with contextlib.suppress(OSError):  # Windows renames no open file: there it keeps its name
            self.path.replace(final)
            self.path = final

    def text(self) -> str:
        """What was said since the last look."""
        data = self._reader.read()
        return "\n".join(format.one_line(line) for line in data.decode("utf-8", "replace").splitlines())

    def _former(self) -> bytes:
        path = self._directory / "up.log"
        try:
            return path.read_bytes() if path.stat().st_size <= OUTPUT_BYTES else b""
        except OSError:
            return b""

    def _sweep(self) -> None:
        """Remove what a front that was killed has left behind."""
        for path in self._directory.glob("up.*.log"):
            number = path.name.split(".")[1]
            if number.isdecimal() and identify(int(number)) is None:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is tried again
            self._open.close()
        if not self.is_kept:
            # All of it was shown; and where no stack of this name has ever run, its directory goes too.
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                self._directory.rmdir()
        self._unchanged.close()


def _follow(
    directory: RunDir, process: subprocess.Popen[bytes], said: _Said, *, wait: bool, attached_url: str | None
) -> bool:
    """
    Wait until the process has become the stack, or with *wait* until that is ready.

    Returns:
        Whether the process ended before.
    """
    name = directory.name
    begun = time.monotonic()
    run = None
    while run is None:
        if process.poll() is not None:
            return True
        time.sleep(POLL_S)
        run = _own(directory, process.pid)
    said.keep()
    if not wait:
        output.say(f"{name} is starting in the background: {run.proxy_url} (pid {run.pid})")
        output.say(f"  {verbs_for(name, attached=attached_url is not None)}")
        return False
    told = ""
    while process.poll() is None:
        try:
            status = control_client.fetch_status(run)
        except (NotReady, NotRunning):
            status = {}
        text = _what_happens(status, attached_url)
        if text and text != told:
            told = text
            output.say(f"{name}: {text}")
        if status.get("state") == "ready":
            took = format.duration(time.monotonic() - begun)
            output.say(f"{name} is ready after {took}: {run.proxy_url} (pid {run.pid})")
            return False
        time.sleep(POLL_S)
    return True


def _spawn(config_path: Path, overrides: Sequence[str], file: BinaryIO) -> subprocess.Popen[bytes]:
    arguments = [*_ourselves(), *(["--debug"] if output.debug() else [])]
    arguments += ["up", str(config_path), "--no-dashboard", *(f"--set={item}" for item in overrides)]
    flags = 0
    if sys.platform == "win32":  # start_new_session says nothing there
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, creationflags=flags
    )


def _ourselves() -> list[str]:
    """
    This installation of kvstack as a command, without its arguments.

    `-P`: `-m` alone would import what lies in the current directory before what is installed.  `-I` would go too far:
    who has kvstack on PYTHONPATH or in the user's site needs them here as well, unless this process runs without them.
    """
    without = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [sys.executable, "-P", *(flag for flag, is_set in without.items() if is_set), "-m", "kvstack"]


def _own(directory: RunDir, pid: int) -> RunFile | None:
    """The run file, if the process that was started with this pid wrote it and lives."""
    run = directory.read()
    if run is None or not control_client.alive(run):
        return None
    # A launcher may stand between the two, as in a virtual environment on Windows.
    return run if run.pid == pid or run.pid in {one.pid for one in descendants(pid)} else None


def _what_happens(status: Mapping[str, Any], attached_url: str | None) -> str:
    """The stack's state, and what it waits for."""
    state, reason = str(status.get("state") or ""), str(status.get("reason") or "")
    if attached_url is not None and state in {"starting", "loading"}:
        return f"{state}: waiting until the llama-server at {attached_url} answers and has its model loaded"
    return format.one_line(f"{state}: {reason}" if reason and state != "ready" else state)


def _ended(name: str, config_path: Path, code: int, said: _Said) -> int:
    """What the background process said, for it is what it would have said here; its exit code is ours."""
    text = said.text()
    more = f"See {said.path}." if said.is_kept else f"Run it in the foreground to see more: `kvstack up {config_path}`."
    if code > 0 and text.strip():
        output.say(text.rstrip())
        return code
    if code > 0:
        error = KvstackError(
            f"The stack {name!r} ended during its start without giving a reason",
            f"exit status {code}; nothing could be written to {said.path.parent}, or nothing was said",
            f"Check the free space, and run it in the foreground: `kvstack up {config_path}`.",
        )
        output.say_error(error)
        return code
    if code < 0:
        raise StartFailed(
            f"The stack {name!r} was killed during its start", f"signal {-code}\n{text[-2000:]}".rstrip(), more
        )
    raise ChildLost(f"The stack {name!r} was stopped during its start", text[-2000:], more)
