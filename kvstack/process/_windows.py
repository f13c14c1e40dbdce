"""Job objects and console groups: Windows."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

assert sys.platform == "win32"

from ctypes import wintypes  # noqa: E402 - exists on Windows only

_EXTENDED_LIMIT_INFORMATION = 9
_LIMIT_KILL_ON_JOB_CLOSE = 0x2000


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", wintypes.DWORD),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", wintypes.DWORD),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", wintypes.DWORD),
        ("SchedulingClass", wintypes.DWORD),
    )


class _ExtendedLimits(ctypes.Structure):
    _fields_ = (
        ("BasicLimitInformation", _BasicLimits),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


def _kernel() -> ctypes.WinDLL:
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = wintypes.HANDLE
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, wintypes.LPCWSTR)
    kernel.SetInformationJobObject.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD)
    kernel.AssignProcessToJobObject.argtypes = (wintypes.HANDLE, wintypes.HANDLE)
    kernel.TerminateJobObject.argtypes = (wintypes.HANDLE, wintypes.UINT)
    kernel.CloseHandle.argtypes = (wintypes.HANDLE,)
    return kernel


class Group:
    """
    A program in a console group and a job object of its own; the job ends with the last handle on it, with kvstack.

    Attributes:
        pid: The program's process id.
        stdout: Reading end of the program's standard output.
        stderr: Reading end of its standard error.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], directory: Path | None = None) -> None:
        """
        Start the program.

        Args:
            argv: Program and arguments.
            env: Its whole environment.
            directory: Where it runs; default: where this process does.

        Raises:
            OSError: It cannot be started.
        """
        self._kernel = _kernel()
        self._job = self._new_job()
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP,
            )
        except OSError:
            self._close_job()
            raise
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.stdout = self._process.stdout
        self.stderr = self._process.stderr
        if self._job is not None:
            # Popen keeps the handle in a private attribute only; without the job the program itself can still be ended.
            handle = getattr(self._process, "_handle", None)
            if handle is None or not self._kernel.AssignProcessToJobObject(self._job, int(handle)):
                self._close_job()

    def wait(self) -> int:
        """
        Block until the program has ended; may be called from any thread.

        Returns:
            Exit status.
        """
        return self._process.wait()

    def reap(self) -> None:
        """Let go of the ended program."""
        self._close_job()

    def terminate(self) -> None:
        """Ask the program to end: a Ctrl-Break, which a process without a console cannot be sent."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.CTRL_BREAK_EVENT)

    def kill(self) -> None:
        """End the program and everything that it started."""
        if self._job is not None:
            self._kernel.TerminateJobObject(self._job, 1)
        with contextlib.suppress(OSError):
            self._process.kill()

    def _new_job(self) -> int | None:
        job: int | None = self._kernel.CreateJobObjectW(None, None)
        if job is None:
            return None
        limits = _ExtendedLimits()
        limits.BasicLimitInformation.LimitFlags = _LIMIT_KILL_ON_JOB_CLOSE
        size = ctypes.sizeof(limits)
        if not self._kernel.SetInformationJobObject(job, _EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), size):
            self._kernel.CloseHandle(job)
            return None
        return job

    def _close_job(self) -> None:
        if self._job is not None:
            self._kernel.CloseHandle(self._job)
            self._job = None


def start_clock_s(pid: int) -> float | None:
    """Not told apart from the start time since the epoch here."""
    del pid
    return None


def oom_kill_count() -> int | None:
    """Windows has no OOM killer."""
    return None


def oom_killed(pid: int) -> bool | None:
    """Windows has no OOM killer."""
    del pid
    return None
