"""
Does a restored prefix hold?  Only an answer tells: how much of its prompt the server did not have to evaluate.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstack.core.events import AnswerSeen, Event, Notice, WarmupJudged
from kvstack.llama.snapshots import holds
from kvstack.prefixes import Prefix, begins_with
from kvstack.prompt.dialects import Api, api_of
from kvstack.prompt.warmup import WarmupRequest
from kvstack.snapshotting import PrefixSnapshots
from kvstack.upstream import Upstream, UpstreamError

__all__ = ["Prover"]

WATCHED = 8
"""Requests under way whose answers are waited for."""


@dataclass(frozen=True, slots=True)
class _Sent:
    request: WarmupRequest
    is_first: bool
    """Nobody had the slot between the restore and this request: it must find all of the prefix."""


class Prover:
    """
    Watches the requests after a restore until one begins with the restored prefix.

    One that finds it proves the snapshot.  The first one of all must find it: if it does not, the snapshot is removed
    and not made again soon.  A later one that does not may have come when others had the slot, and proves nothing.

    Args:
        upstream: The server.
        snapshots: Whose prefix is to be proved.
        publish: Takes events.
    """

    def __init__(self, upstream: Upstream, snapshots: PrefixSnapshots, publish: Callable[[Event], None]) -> None:
        self._upstream = upstream
        self._snapshots = snapshots
        self._publish = publish
        self._prefix: Prefix | None = None
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._was_used = False
        self._answers: asyncio.Queue[tuple[Prefix, _Sent, int]] = asyncio.Queue()

    def begin(self, prefix: Prefix | None) -> None:
        """
        Doubt what the slot holds now.

        Args:
            prefix: What was restored; None if that is nothing, or is about to be replaced.
        """
        self._prefix = prefix
        self._sent.clear()
        self._was_used = False

    def sent(self, number: int, path: str, body: bytes) -> None:
        """
        A model request goes to the server.

        Args:
            number: Of the request.
            path: Its endpoint.
            body: As the server gets it.
        """
        if self._prefix is None:
            return
        is_first = not self._was_used
        self._was_used = True
        if api_of(path) is Api.CHAT:
            self._sent[number] = _Sent(WarmupRequest(path, body), is_first)
            while len(self._sent) > WATCHED:
                self._sent.popitem(last=False)

    def answered(self, answer: AnswerSeen) -> None:
        """
        A request has its answer.
        """
        sent = self._sent.pop(answer.id, None)
        if sent is None or self._prefix is None or answer.cached_tokens is None:
            return
        if sent.is_first or holds(answer.cached_tokens, len(self._prefix.tokens)):
            self._answers.put_nowait((self._prefix, sent, answer.cached_tokens))

    async def run(self) -> None:
        """
        Judge, until cancelled.
        """
        while True:
            prefix, sent, cached = await self._answers.get()
            if prefix is self._prefix and await self._begins_with(sent.request, prefix):
                self._judge(prefix, cached)

    async def _begins_with(self, request: WarmupRequest, prefix: Prefix) -> bool:
        try:
            return await begins_with(self._upstream, request, prefix)
        except UpstreamError:
            return False

    def _judge(self, prefix: Prefix, cached: int) -> None:
        now = time.time()
        self._prefix = None
        self._sent.clear()
        if holds(cached, len(prefix.tokens)):
            self._publish(WarmupJudged(now, True, cached))
            return
        reason = (
            f"the snapshot did not hold: the first request found {cached:,} of its {len(prefix.tokens):,} tokens cached"
        )
        self._snapshots.refuse(prefix, reason)
        self._publish(WarmupJudged(now, False, cached, reason))
        text = f"The warm-up failed: {reason}. It was removed; the next warm-up evaluates the prefix in the chat form"
        self._publish(Notice(now, "warning", text))
