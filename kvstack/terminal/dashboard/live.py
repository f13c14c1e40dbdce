"""
Draws the dashboard on a terminal, four times a second, and leaves the terminal as it was.

Drawing has a thread of its own: a terminal that does not read (Ctrl-S, a slow link) makes that thread wait, and
nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from rich.live import Live

from kvstack.state.stack_state import StackState
from kvstack.terminal.dashboard.frame import render
from kvstack.terminal.dashboard.glyphs import ASCII, UNICODE, Glyphs
from kvstack.terminal.output import console

INTERVAL_S = 0.25
LEAVE_TIMEOUT_S = 2.0


def glyphs_for(stream: TextIO) -> Glyphs:
    """The shapes that *stream*'s encoding can carry."""
    try:
        (UNICODE.levels + UNICODE.good + UNICODE.ellipsis).encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE


def in_foreground(stream: TextIO) -> bool:
    """Whether this process may draw on its terminal: a job started with `&` shares it with a shell."""
    if sys.platform == "win32":
        return True
    else:  # noqa: RET505 - so that a check for Windows knows that this is not for it
        try:
            return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return False


class Dashboard:
    """
    A context manager that shows the dashboard while it is open.

    Args:
        read: Gives the state to draw; called from the drawing thread.
        stream: The terminal.
        clock: The present, in seconds since the epoch.
        watching: Whether the stack runs elsewhere, so that Ctrl-C leaves the view alone.

    Attributes:
        error: Why drawing ended early, if it did.
        is_stuck: Whether the terminal read nothing any more when the dashboard was closed: what is printed to it now
            would wait for ever.
    """

    def __init__(
        self,
        read: Callable[[], StackState],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
        *,
        watching: bool = False,
    ) -> None:
        self.error: Exception | None = None
        self.is_stuck = False
        self._read = read
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._watching = watching
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> Dashboard:
        self._quiet.enter_context(_no_echo())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        # A terminal that reads nothing would make us wait for ever.
        self._thread.join(LEAVE_TIMEOUT_S)
        self.is_stuck = self._thread.is_alive()
        self._quiet.close()

    def _draw(self) -> None:
        try:
            self._frames()
        except Exception as error:  # the stack goes on without its picture
            self.error = error

    def _frames(self) -> None:
        screen = console(self._stream)
        glyphs = glyphs_for(self._stream)
        with Live(
            console=screen, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            last = False
            while not last:
                last = self._leave.is_set()
                width, height = screen.size
                picture = render(self._read(), width, height, self._clock(), glyphs, watching=self._watching)
                live.update(picture, refresh=True)
                self._leave.wait(INTERVAL_S)


if sys.platform == "win32":

    @contextlib.contextmanager
    def _no_echo() -> Iterator[None]:
        """Windows' console echoes nothing that nobody reads."""
        yield

else:
    import termios

    @contextlib.contextmanager
    def _no_echo() -> Iterator[None]:
        """Keep typed keys from being printed into the picture; Ctrl-C works as ever."""
        try:
            descriptor = sys.stdin.fileno()
            before = termios.tcgetattr(descriptor)
            after = termios.tcgetattr(descriptor)
            after[3] &= ~termios.ECHO
            termios.tcsetattr(descriptor, termios.TCSANOW, after)
        except (OSError, ValueError, termios.error):  # no terminal at stdin
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError, termios.error):
                # At once: a terminal that reads nothing would make us wait for its output to drain.
                termios.tcsetattr(descriptor, termios.TCSANOW, before)
                # Keys that were typed meanwhile are not meant for the shell.
                termios.tcflush(descriptor, termios.TCIFLUSH)
