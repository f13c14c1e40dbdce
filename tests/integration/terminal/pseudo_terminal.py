"""A program in a pseudo-terminal, and the screen that a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

__all__ = ["PseudoTerminal", "run_in_terminal"]


class PseudoTerminal:
    """
    A running program and its screen.

    Attributes:
        process: The program.
        raw: All that it has written.
    """

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, width: int, height: int) -> None:
        self.process = process
        self.raw = b""
        self._master = master
        self._slave = slave
        self._mutex = threading.Lock()
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def lines(self) -> list[str]:
        """The screen as it is now."""
        with self._mutex:
            return [line.rstrip() for line in self._screen.display]

    def wait_for(self, condition: Callable[[list[str]], bool], timeout_s: float = 30.0) -> list[str]:
        """Wait until the screen is as wanted; give it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lines = self.lines()
            if condition(lines):
                return lines
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError("not seen on the screen:\n" + "\n".join(self.lines()))

    def resize(self, width: int, height: int) -> None:
        """Change the terminal's size, as a person who drags its corner."""
        with self._mutex:
            self._screen.resize(height, width)
            fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._master, keys)

    def pause(self) -> None:
        """Read no more, as a terminal after Ctrl-S."""
        self._paused.set()

    def resume(self) -> None:
        """Read on."""
        self._paused.clear()

    def settings(self) -> list[object]:
        """What the terminal is set to (echo and the like)."""
        return termios.tcgetattr(self._slave)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the program's end; give its exit code."""
        code = self.process.wait(timeout_s)
        seen = -1
        while seen != len(self.raw):  # its last words are on their way
            seen = len(self.raw)
            time.sleep(0.3)
        return code

    def join(self) -> None:
        """Wait until all has been read."""
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        while True:
            if self._paused.is_set():
                time.sleep(0.01)
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._mutex:
                self.raw += data
                self._stream.feed(data)


@contextlib.contextmanager
def run_in_terminal(
    arguments: Sequence[str], width: int, height: int, environ: Mapping[str, str] | None = None
) -> Iterator[PseudoTerminal]:
    """Run a program in a terminal of its own; end it on the way out."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    given = {key: value for key, value in os.environ.items() if key not in {"CI", "NO_COLOR", "COLUMNS", "LINES"}}

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        arguments,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**given, "TERM": "xterm-256color", **(environ or {})},
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509 - the test has no thread that holds a lock here
    )
    terminal = PseudoTerminal(process, master, slave, width, height)
    try:
        yield terminal
    finally:
        terminal.resume()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        os.close(slave)
        # With the last slave gone the reader ends; before that its descriptor must not become another terminal's.
        terminal.join()
        os.close(master)
