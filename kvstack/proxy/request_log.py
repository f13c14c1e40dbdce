"""
The one log of model requests; every other part refers to a request by its number.

A difference quotes sixty characters of a prompt, and bodies are prompts: both stay in memory, bounded, and are shown
only to whoever has the stack's token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstack.prompt.diff.difference import FoundDifference
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.report.listing import Shown, show_edits

REQUESTS_KEPT = 100
BODY_BYTES_KEPT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bodies:
    """A request as it came, decoded, and what the rules made of it."""

    original: bytes
    rewritten: RewriteResult

    @property
    def size_bytes(self) -> int:
        """What holding them costs."""
        return len(self.original) + len(self.rewritten.body)

    def edits(self) -> list[Shown]:
        """Each edit, with what stands around it."""
        return show_edits(self.original, self.rewritten)


@dataclass(slots=True)
class LoggedRequest:
    """
    One model request.

    Attributes:
        number: Its number.
        path: Its path.
        conversation: Name of its conversation.
        found_difference: Where it left its conversation, or what it begins like.
        bodies: While it runs, and afterwards if they are kept.
        is_running: It has not ended.
    """

    number: int
    path: str
    conversation: str | None
    found_difference: FoundDifference | None
    bodies: Bodies | None
    is_running: bool = True

    @classmethod
    def of(cls, number: int, path: str, bodies: Bodies) -> LoggedRequest:
        """A request that begins."""
        rewritten = bodies.rewritten
        return cls(number, path, rewritten.conversation, rewritten.found_difference, bodies)

    @property
    def head_fingerprint(self) -> str | None:
        """Digest of its system texts and tools as sent; None once its bodies are gone, or without such things."""
        return self.bodies.rewritten.head_fingerprint if self.bodies is not None else None


class RequestLog:
    """
    The last requests, by number.

    The bodies of a request that runs are there anyway; of those that have ended the newest few are kept, if at all.
    Everything here belongs to the event loop's thread.

    Args:
        keep_bodies: Of how many ended requests the bodies are kept.
        max_body_bytes: How many bytes those may have; the newest is kept whatever its size.
    """

    def __init__(self, keep_bodies: int = 0, max_body_bytes: int = BODY_BYTES_KEPT) -> None:
        self.keeps_bodies = keep_bodies > 0
        self._keep_bodies = keep_bodies
        self._max_body_bytes = max_body_bytes
        self._requests: dict[int, LoggedRequest] = {}

    def add(self, request: LoggedRequest) -> None:
        """Take a request that begins."""
        self._requests[request.number] = request
        self._trim()

    def end(self, number: int) -> None:
        """A request has ended: let go of its bodies, unless they are kept."""
        if (request := self._requests.get(number)) is not None:
            request.is_running = False
            if request.bodies is not None:  # the bytes are kept, if at all, and not what was read of them as well
                bodies = request.bodies
                request.bodies = replace(bodies, rewritten=replace(bodies.rewritten, document=None, _digest_head=None))
            self._trim()

    def get(self, number: int) -> LoggedRequest | None:
        """A request that is still remembered."""
        return self._requests.get(number)

    def _trim(self) -> None:
        ended = [request for request in self._requests.values() if not request.is_running]
        kept_bytes = 0
        with_bodies = [request for request in reversed(ended) if request.bodies is not None]
        for place, request in enumerate(with_bodies):
            assert request.bodies is not None
            kept_bytes += request.bodies.size_bytes
            if place >= self._keep_bodies or (kept_bytes > self._max_body_bytes and place > 0):
                request.bodies = None
        surplus = len(self._requests) - max(REQUESTS_KEPT, self._keep_bodies)
        for request in ended[: max(0, surplus)]:
            del self._requests[request.number]
