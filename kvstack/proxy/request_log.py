"""
The one log of model requests; every other part refers to a request by its number.

A difference quotes sixty characters of a prompt, and bodies are prompts: both stay in memory, bounded, and are shown
only to whoever has the stack's token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstack.prompt.diff.difference import Divergence
from kvstack.prompt.diff.previous import Compared, FormerRequests
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.report.listing import Shown, show_edits
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.warmup_request import head_digest

REQUESTS_KEPT = 100
BODY_BYTES_KEPT = 256 * 1024 * 1024
FINGERPRINTED_BYTES = 4 * 1024 * 1024
"""The head of a larger request is not fingerprinted: that would take longer than it is worth."""


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
        compared: Its conversation, and where it differs from that one's former request.
        bodies: While it runs, and afterwards if they are kept.
        is_running: It has not ended.
    """

    number: int
    path: str
    compared: Compared
    bodies: Bodies | None
    is_running: bool = True

    @property
    def conversation(self) -> str | None:
        """Name of its conversation."""
        return self.compared.conversation

    @property
    def difference(self) -> Divergence | None:
        """Where it left its conversation, or what it begins like."""
        return self.compared.divergence

    def head_fingerprint(self) -> str | None:
        """Digest of system texts and tools as sent; None where the API has no such thing or the bodies are gone."""
        sent = self.bodies.rewritten.body if self.bodies is not None else None
        if sent is None or not can_be_rendered(self.path) or len(sent) > FINGERPRINTED_BYTES:
            return None
        return head_digest(sent)


class RequestLog:
    """
    The last requests, by number.

    The bodies of a request that runs are there anyway; of those that have ended the newest few are kept, if at all.
    Everything but `compare` belongs to the event loop's thread.

    Args:
        keep_bodies: Of how many ended requests the bodies are kept.
        max_body_bytes: How many bytes those may have; the newest is kept whatever its size.
    """

    def __init__(self, keep_bodies: int = 0, max_body_bytes: int = BODY_BYTES_KEPT) -> None:
        self.keeps_bodies = keep_bodies > 0
        self._keep_bodies = keep_bodies
        self._max_body_bytes = max_body_bytes
        self._former = FormerRequests()
        self._requests: dict[int, LoggedRequest] = {}

    def compare(self, number: int, path: str, rewritten: RewriteResult) -> Compared:
        """
        Compare a request with its conversation's former one, and remember it as that.

        Args:
            number: Number of the request.
            path: Request path.
            rewritten: What the rules made of it.
        """
        if rewritten.side is not None:
            # A title or memory request quotes the conversation but does not continue it.
            return Compared(rewritten.conversation)
        return self._former.compare(number, rewritten.body, path, rewritten.conversation)

    def add(self, request: LoggedRequest) -> None:
        """Take a request that begins."""
        self._requests[request.number] = request
        self._trim()

    def end(self, number: int) -> None:
        """A request has ended: let go of its bodies, unless they are kept."""
        if (request := self._requests.get(number)) is not None:
            request.is_running = False
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
