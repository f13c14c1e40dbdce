"""
Records traffic: hands the model requests that come in to whoever listens, as JSON Lines.

Nothing is held while nobody listens, and no client waits for a listener: one that reads too slowly loses requests and
is told how many.  What a line holds is in `kvstack.proxy.capture_record`.

Between the requests a listener gets empty lines, which show that the stack lives, and `{"lost": N}` when N requests in
all have been lost to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstack.prompt.request.document import Document
from kvstack.proxy.body import cancel_when_gone
from kvstack.proxy.capture_record import Recorded, record, to_line
from kvstack.state.events import RequestReceived

MAX_LISTENERS = 4
MAX_WAITING = 64
MAX_WAITING_BYTES = 64 * 1024 * 1024
PAUSE_S = 1.0
"""Where a read cannot be interrupted (Windows), so often a reader can hear its Ctrl-C."""


class Captures:
    """
    The listeners of one stack.

    Everything here belongs to the event loop's thread.

    Args:
        max_listeners: How many there may be.
        max_waiting: Requests that wait for one listener.
        max_waiting_bytes: Bytes of their bodies.
    """

    def __init__(
        self,
        max_listeners: int = MAX_LISTENERS,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._max_listeners = max_listeners
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._listeners: set[Listener] = set()
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def add(self, received: RequestReceived, scope: Scope, body: bytes, document: Document | None = None) -> None:
        """
        Hand a request to the listeners.

        Args:
            received: Its facts.
            scope: Its ASGI scope.
            body: Its body as the client wrote it, decoded.
            document: What was read of it; None if that is no JSON object.
        """
        if self._listeners:
            recorded = record(received, scope, body, document)
            for listener in self._listeners:
                listener._put(recorded)

    def listen(self) -> Listener | None:
        """Begin to listen; None if too many do."""
        if len(self._listeners) >= self._max_listeners:
            return None
        listener = Listener(self, self._max_waiting, self._max_waiting_bytes)
        if self._closed:
            listener._end()
        self._listeners.add(listener)
        return listener

    def close(self) -> None:
        """The stack stops: each listener gets what waits for it, then the end."""
        self._closed = True
        for listener in self._listeners:
            listener._end()

    def _drop(self, listener: Listener) -> None:
        self._listeners.discard(listener)


class Listener:
    """
    One reader's requests; a context manager that ends the listening.

    Attributes:
        lost: Requests that this reader was too slow for.
    """

    def __init__(self, captures: Captures, max_waiting: int, max_waiting_bytes: int) -> None:
        self.lost = 0
        self._captures = captures
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[Recorded] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._wake = asyncio.Event()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._captures._drop(self)
        self._waiting.clear()
        self._waiting_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait."""
        return self._waiting_bytes

    async def lines(self, pause_s: float = PAUSE_S) -> AsyncIterator[bytes]:
        """
        The requests as they come, each as one line.

        Args:
            pause_s: After so many seconds without a request there is an empty line.
        """
        told = 0
        while True:
            if self.lost > told:
                told = self.lost
                yield b'{"lost": %d}\n' % told
            elif self._waiting:
                recorded = self._waiting.popleft()
                self._waiting_bytes -= recorded.size_bytes
                # Beside the loop: reading a large body through takes a while, and clients are served meanwhile.
                yield await asyncio.to_thread(to_line, recorded)
            elif self._ended:
                return
            else:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), pause_s)
                except TimeoutError:
                    yield b"\n"

    def _put(self, recorded: Recorded) -> None:
        # The newest is lost and not the oldest: the beginning of a conversation without its middle still can be used.
        if len(self._waiting) >= self._max_waiting or (
            self._waiting and self._waiting_bytes + recorded.size_bytes > self._max_waiting_bytes
        ):
            self.lost += 1
        else:
            self._waiting.append(recorded)
            self._waiting_bytes += recorded.size_bytes
        self._wake.set()

    def _end(self) -> None:
        self._ended = True
        self._wake.set()


class CaptureStream(StreamingResponse):
    """
    The answer to a listener: goes on until it leaves or the stack stops.

    Args:
        listener: What it listens to; let go with the end of the answer.
    """

    media_type = "application/jsonl"

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.lines(), headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send; a listener that leaves is noticed at once, also between two requests."""
        with self._listener:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self.stream_response(send))
                watching = group.create_task(cancel_when_gone(receive, sending))
                sending.add_done_callback(lambda _: watching.cancel())
