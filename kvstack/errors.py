"""
Every error that kvstack reports to a person, as one tree.

```
KvstackError                 1   something went wrong
├── UsageError               2   the command line asks for what cannot be
├── ConfigError              2   the config file has problems (all of them, at once)
├── StartFailed              3   the stack could not be brought up
│   ├── BinaryNotFound       3
│   ├── ModelNotFound        3
│   ├── PortTaken            3   by a program that is not a kvstack
│   └── NotReady             3   a running stack that is not (yet) ready
├── NotRunning               4   no such stack
├── AlreadyRunning           4   the name or the port is held by another kvstack
└── ChildLost                5   llama-server died and the restart budget is used up
```

An error message has three parts: what happened, the fact that shows it, and what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says with its exit status; the README lists the same table."""

    OK = 0
    ERROR = 1
    USAGE = 2
    START_FAILED = 3
    NOT_RUNNING = 4
    CHILD_LOST = 5
    INTERRUPTED = 130
    TERMINATED = 143


class KvstackError(Exception):
    """
    The root of the tree: an error in three parts.

    Attributes:
        what: One sentence that says what happened, without a trailing dot.
        fact: The evidence: a path, a port, an exit status, the last log lines.  May span lines, may be empty.
        next_step: What the reader can do now.  May be empty only where nothing can be done.
    """

    exit_code: ExitCode = ExitCode.ERROR

    def __init__(self, what: str, fact: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fact = fact
        self.next_step = next_step

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.fact, self.next_step) if part)


class UsageError(KvstackError):
    """The command line asks for something that cannot be done as asked."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Problem:
    """
    One thing that is wrong in a config or rule file.

    Attributes:
        path: Dotted key path, for example `server.ctx_size`; empty for the file as a whole.
        message: What is wrong and, where it is known, what is meant instead.
        line: Line number in the file, counted from 1, or None if the value did not come from a line of it.
    """

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{self.path}: {self.message}" if self.path else f"{where}{self.message}"


class ConfigError(KvstackError):
    """
    A config file, an override or a rule pack cannot be used.

    Attributes:
        source: The file's name as the person gave it.
        problems: All problems found, in the order of their lines.
    """

    exit_code = ExitCode.USAGE
    CORRECT_THE_KEYS = "Correct the keys named above; configs/README.md explains every key."

    def __init__(self, source: str, problems: Sequence[Problem], next_step: str = "") -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(
            f"{source} has {count} problem{'' if count == 1 else 's'}",
            "\n".join(f"  {problem}" for problem in self.problems),
            next_step or self.CORRECT_THE_KEYS,
        )


class StartFailed(KvstackError):
    """The stack could not be brought up."""

    exit_code = ExitCode.START_FAILED


class BinaryNotFound(StartFailed):
    """There is no usable llama-server."""


class ModelNotFound(StartFailed):
    """The model file is missing, incomplete or cannot be had."""


class PortTaken(StartFailed):
    """A port is held by a program that is not a kvstack."""


class NotReady(StartFailed):
    """The stack runs but cannot serve yet."""


class NotRunning(KvstackError):
    """No stack of that name (or none at all) is running."""

    exit_code = ExitCode.NOT_RUNNING


class AlreadyRunning(KvstackError):
    """The name or the port is held by another kvstack."""

    exit_code = ExitCode.NOT_RUNNING


class ChildLost(KvstackError):
    """llama-server died and the restart budget is used up."""

    exit_code = ExitCode.CHILD_LOST


def unexpected(error: BaseException) -> KvstackError:
    """A fault of kvstack itself, in three parts."""
    return KvstackError(
        "Internal error in kvstack",
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        "Please report it with the output of the same command with `kvstack --debug`.",
    )


def root_error(error: BaseException) -> BaseException:
    """Of errors that came together in a group, the one that a person should see: one of ours if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours, rest = error.split(KvstackError)
    chosen: BaseException = ours if ours is not None else rest if rest is not None else error
    while isinstance(chosen, BaseExceptionGroup):
        chosen = chosen.exceptions[0]
    return chosen


def out_of_descriptors(error: BaseException | None) -> bool:
    """
    Whether an error means that no file descriptor is left, in this process or in the whole system.

    Args:
        error: What was raised; what it was raised from counts too.
    """
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
        return True
    several = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(out_of_descriptors(one) for one in (error.__cause__ or error.__context__, *several))
