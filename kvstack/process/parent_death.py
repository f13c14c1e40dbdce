"""
Runs a program that must not outlive its parent: `parent_death.py PARENT [LD_NAME=VALUE ...] -- PROGRAM [ARG ...]`.

Linux sends the signal asked for here when the thread that started this process ends, however it ends.  The setting
survives `exec`, so the program keeps this process's id and is a direct child of kvstack.  It is asked for on this side
of the `exec` and not between `fork` and `exec` in kvstack, where threads make it unsafe to run anything.

Variables for the dynamic loader are applied here: they are meant for the program, not for the interpreter that runs
this.
Started by path, with `-I -S`: it imports nothing of kvstack.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

assert sys.platform != "win32"

PR_SET_PDEATHSIG = 1
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    """
    Ask for the signal, then become the program.

    Returns:
        The exit status where the program could not be run, as a shell gives it.
    """
    parent = int(arguments[0])
    split = arguments.index("--")
    for setting in arguments[1:split]:
        name, _, value = setting.partition("=")
        os.environ[name] = value
    command = arguments[split + 1 :]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was asked for
        return EXIT_NOT_EXECUTABLE
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores these, and `exec` would hand that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"error: cannot execute {command[0]}: {error.strerror}\n")
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
