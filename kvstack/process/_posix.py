"""Process groups, signals and the evidence of the kernel: Linux, macOS and the BSDs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

assert sys.platform != "win32"


_PARENT_DEATH = Path(__file__).with_name("parent_death.py")
_HAS_DEATH_SIGNAL = sys.platform == "linux"


class Group:
    """
    A program in a session and a process group of its own.

    A closed terminal and a Ctrl-C in it do not reach the program: how it ends is the supervisor's decision.

    Attributes:
        pid: The program's process id, and the group's.
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
        command, environment = _guarded(argv, env)
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.stdout = self._process.stdout
        self.stderr = self._process.stderr
        self._reaped = False

    def wait(self) -> int:
        """
        Block until the program has ended; may be called from any thread.

        The process is left as a zombie where the system allows it: until `reap` nobody else can get its id, so that
        a signal to the group reaches nobody else.

        Returns:
            Exit status, or the negative number of the signal that ended it.
        """
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.wait()
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody collected it
            return self._process.wait()
        if info is None:
            return self._process.wait()
        status: int = info.si_status
        return status if info.si_code == os.CLD_EXITED else -status

    def reap(self) -> None:
        """Collect the ended program; afterwards no signal goes out any more."""
        self._reaped = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.1)

    def terminate(self) -> None:
        """Ask the group to end.  A stopped process is continued, else it could not follow."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._reaped:
            # macOS answers "not permitted" for a group that holds only zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


def _guarded(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    # The death signal follows the *thread* that starts the child, so only the main thread may ask for it.
    able = _HAS_DEATH_SIGNAL and threading.current_thread() is threading.main_thread()
    # The interpreter may be gone: a long-lived kvstack can outlive an upgrade of its own installation.
    if not able or not os.access(sys.executable, os.X_OK) or not _PARENT_DEATH.is_file():
        return list(argv), dict(env)
    loader = [f"{name}={value}" for name, value in env.items() if name.startswith("LD_")]
    environment = {name: value for name, value in env.items() if not name.startswith("LD_")}
    return [sys.executable, "-I", "-S", str(_PARENT_DEATH), str(os.getpid()), *loader, "--", *argv], environment


def start_clock_s(pid: int) -> float | None:
    """
    When a process started, in seconds since boot; None if there is none, or it is only a zombie.

    Since boot and not since the epoch: a machine without a battery-backed clock sets its time after kvstack has
    started, and each such step would move every start time that is told since the epoch.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in {"Z", "X", "x"}:
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def oom_kill_count(root: Path = Path("/")) -> int | None:
    """
    How often the kernel's OOM killer has struck in this process's control group; None where that is not told.

    Args:
        root: Where the system's files are.
    """
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        group = next(line[3:] for line in text.splitlines() if line.startswith("0::"))
        events = (root / "sys/fs/cgroup" / group.lstrip("/") / "memory.events").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def oom_killed(pid: int, path: Path = Path("/dev/kmsg")) -> bool | None:
    """
    Whether the kernel's log says that the OOM killer ended *pid*; None if the log may not be read.

    Args:
        pid: Process id.
        path: The kernel's log.
    """
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    needle = re.compile(rb"Killed process %d[ ,(]" % pid)
    found = False
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BlockingIOError:  # the end
                return found
            except BrokenPipeError:  # records were overwritten while we read
                continue
            if not record:
                return found
            found = found or needle.search(record) is not None
    except OSError:
        return found or None
    finally:
        os.close(log)
