"""
`kvstack up -d`: the same command again, in a session of its own, with its output in the stack's directory.
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
from kvstack.rundir import RunDir, RunFile
from kvstack.terminal import client, figures, output

__all__ = ["start_background"]

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
    if former is not None and client.alive(former):
        raise AlreadyRunning(
            f"A stack named {name!r} is running already",
            f"pid {former.pid}, {former.proxy_url}, {former.config_path}",
            f"See it with `kvstack status {name}`, end it with `kvstack down {name}`.",
        )
    output_path = directory.path / "up.log"
    begun = time.monotonic()
    with _open_output(output_path) as file:
        offset = file.tell()
        process = _spawn(config_path, overrides, file)
    run = None
    while run is None:
        if process.poll() is not None:
            return _ended(directory, process.returncode, output_path, offset)
        time.sleep(POLL_S)
        run = _living(directory)
    if not wait:
        process.returncode = 0  # it goes on without us, and that is meant
        output.say(f"{name} starts in the background: {run.proxy_url} (pid {run.pid})")
        output.say(f"  kvstack status {name} | kvstack logs -f {name} | kvstack down {name}")
        return 0
    try:
        return _wait_ready(directory, run, process, begun, output_path, offset, attached_url)
    except KeyboardInterrupt:
        process.returncode = 0
        output.say(f"\n{name} goes on in the background; `kvstack down {name}` stops it")
        raise


def _open_output(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists() and path.stat().st_size > OUTPUT_BYTES:
            path.unlink()
        # For the owner alone, also if it is there already: it may hold what users wrote.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
        path.chmod(0o600)
        return os.fdopen(descriptor, "ab")
    except OSError as error:
        raise KvstackError(
            "The state directory cannot be used",
            f"{path}: {error.strerror or error}",
            "Make it writable, or set KVSTACK_STATE_DIR to a directory that is.",
        ) from None


def _spawn(config_path: Path, overrides: Sequence[str], file: BinaryIO) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "kvstack", *(["--debug"] if output.debug() else [])]
    arguments += ["up", str(config_path), "--no-dashboard", *(f"--set={item}" for item in overrides)]
    flags = 0
    if sys.platform == "win32":  # start_new_session says nothing there
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, creationflags=flags
    )


def _living(directory: RunDir) -> RunFile | None:
    # Its pid is not compared with the one that was spawned: on Windows a launcher stands between them.
    run = directory.read()
    return run if run is not None and client.alive(run) else None


def _wait_ready(
    directory: RunDir,
    run: RunFile,
    process: subprocess.Popen[bytes],
    begun: float,
    output_path: Path,
    offset: int,
    attached_url: str | None,
) -> int:
    name = directory.name
    told = ""
    while True:
        if process.poll() is not None:
            return _ended(directory, process.returncode, output_path, offset)
        try:
            status = client.fetch_status(run)
        except (NotReady, NotRunning):
            status = {}
        text = _what_happens(status, attached_url)
        if text and text != told:
            told = text
            output.say(f"{name}: {text}")
        if status.get("state") == "ready":
            process.returncode = 0
            took = figures.duration(time.monotonic() - begun)
            output.say(f"{name} is ready after {took}: {run.proxy_url} (pid {run.pid})")
            return 0
        time.sleep(POLL_S)


def _what_happens(status: Mapping[str, Any], attached_url: str | None) -> str:
    """The stack's state, and what it waits for."""
    state, reason = str(status.get("state") or ""), str(status.get("reason") or "")
    if attached_url is not None and state in {"starting", "loading"}:
        return f"{state}: waiting until the llama-server at {attached_url} answers and has its model loaded"
    return figures.one_line(f"{state}: {reason}" if reason and state != "ready" else state)


def _ended(directory: RunDir, code: int, output_path: Path, offset: int) -> int:
    """What the background process said, for it is what it would have said here; its exit code is ours."""
    name = directory.name
    said = _read(output_path, offset)
    if code > 0:
        if {path.name for path in directory.path.iterdir()} == {output_path.name}:
            # No stack of this name has ever begun to run: what was said is shown here, and nothing is left behind.
            with contextlib.suppress(OSError):
                output_path.unlink()
                directory.path.rmdir()
        output.say(said.rstrip())
        return code
    if code < 0:
        raise StartFailed(
            f"The stack {name!r} was killed while it started", f"signal {-code}\n{said[-2000:]}", f"See {output_path}."
        )
    raise ChildLost(f"The stack {name!r} was stopped while it started", said[-2000:], f"See {output_path}.")


def _read(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return ""
    return "\n".join(figures.one_line(line) for line in data.decode("utf-8", "replace").splitlines())
