"""
From the child's pipes to the raw log, to the event loop, and to the memory of the last lines.

One daemon thread per pipe reads for as long as somebody holds the other end: a pipe that is not read stalls the server.
The thread waits for nobody.  The raw log gets every byte, first; the event loop gets whole lines through a bounded
queue, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Protocol

from kvstack.process.exit_report import is_error_line

QUEUE_BYTES = 4 * 1024 * 1024
TURN_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
LINE_BYTES = 64 * 1024
TAIL_LINES = 40
TELLING_LINES = 12
TAIL_CHARACTERS = 500


class RawSink(Protocol):
    """
    Where the bytes go first; `kvstack.rundir.RawLog` is one.

    Attributes:
        lost_bytes: What it could not take.
    """

    lost_bytes: int

    def write(self, data: bytes) -> None:
        """Take bytes from any thread; never raises."""


class Outbox:
    """
    The bounded way from the pump threads to the event loop.

    Attributes:
        dropped_bytes: What the event loop was too slow for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[bytes], None],
        limit_bytes: int = QUEUE_BYTES,
        turn_bytes: int = TURN_BYTES,
    ) -> None:
        self.dropped_bytes = 0
        self._loop = loop
        self._deliver = deliver
        self._limit_bytes = limit_bytes
        self._turn_bytes = turn_bytes
        self._mutex = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._scheduled = False
        self._closed = False

    def put(self, lines: bytes) -> None:
        """Hand over whole lines; called by the pump threads."""
        with self._mutex:
            if self._closed:
                return
            if self._waiting_bytes + len(lines) > self._limit_bytes:
                self.dropped_bytes += len(lines)
                return
            self._waiting.append(lines)
            self._waiting_bytes += len(lines)
            if self._scheduled:
                return
            self._scheduled = True
        # The loop is closed while kvstack ends; the raw log has the bytes.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._turn)

    def close(self) -> None:
        """Deliver what waits, then nothing any more; loop thread only."""
        with self._mutex:
            self._closed = True
        while self._waiting:
            self._hand_over(self._take())

    def _turn(self) -> None:
        # One slice per turn of the loop: 5 MB of log must not keep a client waiting.
        lines = self._take()
        if lines:
            self._hand_over(lines)
        with self._mutex:
            self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._loop.call_soon(self._turn)

    def _hand_over(self, lines: bytes) -> None:
        try:
            self._deliver(lines)
        except Exception as error:  # a fault in what reads the log must end neither the child nor its end
            self._loop.call_exception_handler({"message": "The log could not be read", "exception": error})

    def _take(self) -> bytes:
        with self._mutex:
            taken: list[bytes] = []
            size = 0
            while self._waiting and size < self._turn_bytes:
                taken.append(self._waiting.popleft())
                size += len(taken[-1])
            self._waiting_bytes -= size
        return b"".join(taken)


class Tail:
    """The last lines of the output, and those that tell why a server died: the cause is seldom the last one."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._last: deque[str] = deque(maxlen=TAIL_LINES)
        self._first_telling: list[str] = []
        self._last_telling: deque[str] = deque(maxlen=TELLING_LINES)

    def put(self, lines: bytes) -> None:
        """Look at whole lines; called by the pump threads."""
        for raw in lines.splitlines():
            text = raw[: TAIL_CHARACTERS * 4].decode("utf-8", "replace")[:TAIL_CHARACTERS].rstrip()
            if not text:
                continue
            telling = is_error_line(text)
            with self._mutex:
                self._last.append(text)
                if telling and len(self._first_telling) < TELLING_LINES:
                    self._first_telling.append(text)
                elif telling:
                    self._last_telling.append(text)

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        with self._mutex:
            return tuple(self._last)

    def error_lines(self) -> tuple[str, ...]:
        """The first and the last lines that tell of an error, oldest first."""
        with self._mutex:
            return (*self._first_telling, *self._last_telling)


class Pump:
    """
    Drains one pipe for life.

    Attributes:
        read_bytes: What came so far.
    """

    def __init__(
        self, pipe: IO[bytes], name: str, raw_log: RawSink, outbox: Outbox, tail: Tail, ended: Callable[[], None]
    ) -> None:
        self.read_bytes = 0
        self._pipe = pipe
        self._raw_log = raw_log
        self._outbox = outbox
        self._tail = tail
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        with self._pipe as pipe:
            while True:
                try:
                    data = pipe.read(READ_BYTES)  # unbuffered: what is there, as soon as something is there
                except (OSError, ValueError):
                    break
                if not data:
                    break
                self._raw_log.write(data)
                self.read_bytes += len(data)
                rest = self._pass_on(rest + data)
            if rest:
                self._give(rest + b"\n")
        self._ended()

    def _pass_on(self, data: bytes) -> bytes:
        # Whole lines only, so that the two pipes never mix within a line; a line without end is cut.
        end = data.rfind(b"\n") + 1
        if end:
            self._give(data[:end])
        rest = data[end:]
        if len(rest) > LINE_BYTES:
            self._give(rest + b"\n")
            rest = b""
        return rest

    def _give(self, lines: bytes) -> None:
        self._tail.put(lines)
        self._outbox.put(lines)
