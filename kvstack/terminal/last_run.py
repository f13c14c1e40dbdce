"""How a stack ended that does not run any more, and where more of it can be read."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from kvstack.rundir import RunDir
from kvstack.terminal import format

COARSE_S = 1.0
"""The times of files come from another clock, which may be behind."""


@dataclass(frozen=True, slots=True)
class Told:
    """
    What is known of an end.

    Attributes:
        how: Which stack, when, why, and the files; spans lines.
        next_step: What its error advises, and how to start it again.
    """

    how: str
    next_step: str


def told(name: str, pid: int | None = None) -> Told | None:
    """
    How the last stack of that name ended.

    Args:
        name: The stack.
        pid: Only if it was the one that had this process id.

    Returns:
        None if it was stopped, was killed, still runs, or has never been.
    """
    directory = RunDir(name)
    end = directory.read_end() if name else None
    if end is None or (pid is not None and pid != end.pid):
        return None
    lines = [f"{name!r} ended {_when(end.ended_s)}: {end.what}", *end.fact.splitlines()]
    lines += [f"{what}: {path}" for what, path, _ in _files(directory, end.begun_s)]
    again = f"Start it again: `kvstack up {end.config_path}`."
    return Told("\n".join(lines), f"{end.next_step}\n{again}" if end.next_step else again)


def last_written(name: str, begun_s: float | None) -> list[str]:
    """
    The files in which the last words of a stack are that could not say how it ended, and when they were written.

    Args:
        name: The stack.
        begun_s: When it was started, in seconds since the epoch; None if that is not known.
    """
    if begun_s is None:
        return []
    found = _files(RunDir(name), begun_s)
    return [f"{what}, last written {_when(written_s)}: {path}" for what, path, written_s in found]


def _files(directory: RunDir, begun_s: float) -> list[tuple[str, Path, float]]:
    """What was written since then: a stack in the foreground prints to its terminal, an attached one has no log."""
    found = []
    for what, path in (("what it printed", directory.path / "up.log"), ("llama-server's log", directory.log_path)):
        with contextlib.suppress(OSError):
            written_s = path.stat().st_mtime
            if written_s >= begun_s - COARSE_S:
                found.append((what, path, written_s))
    return found


def _when(time_s: float) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    return f"{moment} ({format.duration(max(0.0, time.time() - time_s))} ago)"
