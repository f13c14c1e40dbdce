"""
What the proxy remembers of the requests that went through it: where each left its conversation, and, if that is
wanted, their bodies.

A difference quotes sixty characters of a prompt, and bodies are prompts: both stay in memory, bounded, and are shown
to whoever has the stack's token alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvstack.prompt.diff.difference import Divergence
from kvstack.prompt.diff.previous import Compared, FormerRequests
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.report.listing import Shown, show_edits

DIVERGENCES_KEPT = 100
BODY_BYTES_KEPT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeptBody:
    """One request, as it came and as it went."""

    path: str
    original: bytes
    stripped: RewriteResult

    def edits(self) -> list[Shown]:
        """Each edit, with what stands around it."""
        return show_edits(self.original, self.stripped)


class History:
    """
    The last requests.

    Args:
        keep_bodies: Of how many requests the bodies are kept.
    """

    def __init__(self, keep_bodies: int = 0) -> None:
        self.keeps_bodies = keep_bodies > 0
        self._keep_bodies = keep_bodies
        self._former = FormerRequests()
        self._divergences: OrderedDict[int, Divergence] = OrderedDict()
        self._bodies: OrderedDict[int, KeptBody] = OrderedDict()
        self._body_bytes = 0

    def add(self, number: int, path: str, original: bytes, stripped: RewriteResult) -> Compared:
        """
        Take a request, and lay it beside its conversation's former one.

        Args:
            number: Number of the request.
            path: Request path.
            original: The body as it came, decoded.
            stripped: What the rules made of it.
        """
        if self._keep_bodies:
            self._bodies[number] = KeptBody(path, original, stripped)
            self._body_bytes += len(original) + len(stripped.body)
            while len(self._bodies) > self._keep_bodies or (
                self._body_bytes > BODY_BYTES_KEPT and len(self._bodies) > 1
            ):
                _, dropped = self._bodies.popitem(last=False)
                self._body_bytes -= len(dropped.original) + len(dropped.stripped.body)
        if stripped.side is not None:
            # A title or memory request quotes the conversation but does not continue it.
            return Compared(stripped.conversation)
        compared = self._former.compare(number, stripped.body, path, stripped.conversation)
        if compared.divergence is not None:
            self._divergences[number] = compared.divergence
            while len(self._divergences) > DIVERGENCES_KEPT:
                self._divergences.popitem(last=False)
        return compared

    def divergence(self, number: int) -> Divergence | None:
        """Where a request left its conversation, or what it begins like, if it did and is still remembered."""
        return self._divergences.get(number)

    def body(self, number: int) -> KeptBody | None:
        """A request's bodies, if they were kept."""
        return self._bodies.get(number)
