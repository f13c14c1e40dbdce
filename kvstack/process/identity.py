"""
Which process is which: a pid alone may be somebody else's by now.

A process is known by its pid and its start time.  Everything that a llama-server of ours starts is known by a mark in
its environment, wherever it went: into another session, or to another parent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

if sys.platform == "win32":
    from kvstack.process import _windows as system
else:
    from kvstack.process import _posix as system


MARK_VARIABLE = "KVSTACK_OWNER"
"""Environment variable that says which kvstack process a process belongs to."""

_SAME_S = 0.005

_GONE = (psutil.Error, OSError, ValueError, OverflowError)
"""What looking at a process may raise: it is gone, it is not ours, or no process can have such a pid."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """
    One process of all times.

    Attributes:
        pid: Process id.
        started_s: Start time in seconds: since boot on Linux, since the epoch elsewhere.  To be compared, not shown.
    """

    pid: int
    started_s: float


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the live process that has this pid now; None if there is none, or only a zombie."""
    if sys.platform == "linux":
        started_s = system.start_clock_s(pid)
    else:
        started_s = _start_time_s(pid)
    return None if started_s is None else ProcessIdentity(pid, started_s)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether that very process still lives."""
    now = identify(identity.pid)
    return now is not None and abs(now.started_s - identity.started_s) < _SAME_S


def mark(owner: ProcessIdentity, serial: int) -> str:
    """What `MARK_VARIABLE` holds in all that comes from the *serial*-th child of the kvstack process *owner*."""
    return f"{owner.pid}-{owner.started_s:.2f}-{serial}"


def marked(owner: ProcessIdentity, serial: int | None = None) -> set[ProcessIdentity]:
    """All live processes from the *serial*-th child of *owner*, or from any child; blocks for some milliseconds."""
    wanted = mark(owner, 0)[:-1] if serial is None else mark(owner, serial)

    def carries(pid: int) -> bool:
        value = _variable(pid) if pid != os.getpid() else None
        return value is not None and (value.startswith(wanted) if serial is None else value == wanted)

    return set(_identities(pid for pid in psutil.pids() if carries(pid)))


def descendants(pid: int) -> set[ProcessIdentity]:
    """All live processes below *pid*, itself not counted; blocks for some milliseconds."""
    try:
        return set(_identities(child.pid for child in psutil.Process(pid).children(recursive=True)))
    except _GONE:
        return set()


def holds_port(pid: int, port: int) -> bool | None:
    """Whether a process or one of its descendants listens on a TCP port; None if the system does not tell."""
    told = False
    for member in [pid, *(identity.pid for identity in descendants(pid))]:
        try:
            connections = psutil.Process(member).net_connections(kind="tcp")
        except _GONE:
            continue
        told = True
        if any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in connections):
            return True
    return False if told else None


def port_owners(port: int) -> set[int] | None:
    """The pids that listen on a TCP port; None if the system does not tell."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except _GONE:
        return None
    owners = [
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    ]
    known = {pid for pid in owners if pid is not None}
    # A socket without a pid belongs to another user.
    return known if known or not owners else None


def sweep(
    server: ProcessIdentity | None,
    argv0: str | None,
    owner: ProcessIdentity | None = None,
    timeout_s: float = 5.0,
) -> bool:
    """
    End what a killed kvstack left behind, never a stranger; blocks until it is gone.

    Args:
        server: The llama-server of that run.
        argv0: Its program: pid and start time must belong to this one.
        owner: The kvstack process of that run; what carries its mark is ended too.
        timeout_s: How long each of the two steps, asking and ending, may take.

    Returns:
        Whether anything was found and ended.  A run whose kvstack still lives has left nothing behind.
    """
    if owner is not None and is_alive(owner):
        return False
    found: set[ProcessIdentity] = set()
    if server is not None and argv0 is not None and is_alive(server) and _runs(server.pid, argv0):
        found |= {server} | descendants(server.pid)
    if owner is not None:
        found |= marked(owner)
    if not found:
        return False
    end_all(found, kill=False)
    if left := _outlast(found, timeout_s):
        end_all(left, kill=True)
        left = _outlast(left, timeout_s)
    return not left


def end_all(processes: Iterable[ProcessIdentity], *, kill: bool) -> None:
    """Ask processes to end, or end them; those that are gone are passed over."""
    for identity in processes:
        if is_alive(identity):
            with contextlib.suppress(*_GONE):
                process = psutil.Process(identity.pid)
                if kill:
                    process.kill()
                else:
                    process.terminate()
                    if sys.platform != "win32":
                        process.resume()


def _outlast(processes: set[ProcessIdentity], timeout_s: float) -> set[ProcessIdentity]:
    deadline = time.monotonic() + timeout_s
    while left := {identity for identity in processes if is_alive(identity)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _start_time_s(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except _GONE:
        return None


def _runs(pid: int, argv0: str) -> bool:
    with contextlib.suppress(*_GONE):
        process = psutil.Process(pid)
        command = process.cmdline()
        if command and command[0] == argv0:
            return True
        # A script runs under its interpreter, which stands first then.
        if argv0 in command[1:3]:
            return True
        with contextlib.suppress(OSError):
            return Path(process.exe()).samefile(argv0)
    return False


def _variable(pid: int) -> str | None:
    try:
        return psutil.Process(pid).environ().get(MARK_VARIABLE)
    except _GONE:
        return None


def _identities(pids: Iterable[int]) -> Iterator[ProcessIdentity]:
    for pid in pids:
        identity = identify(pid)
        if identity is not None:
            yield identity
