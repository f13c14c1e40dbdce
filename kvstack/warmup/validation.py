"""Checks whether a restored prefix holds, by how much of a prompt the server did not have to evaluate."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvstack.bus import Bus
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.warmup_request import WarmupRequest
from kvstack.proxy.request_log import RequestLog
from kvstack.state.events import AnswerSeen, Event, Notice, RequestEnded, RequestForwarded, WarmupJudged
from kvstack.upstream import Upstream, UpstreamError
from kvstack.warmup.identity import holds
from kvstack.warmup.prefix import Prefix, begins_with
from kvstack.warmup.snapshots import PrefixSnapshots

SETTLE_S = 10.0
"""How long the log may lag behind an answer."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Answered:
    number: int
    request: WarmupRequest
    prefix: Prefix
    cached_tokens: int


class SnapshotValidator:
    """
    Watches the requests after a restore until one begins with the restored prefix.

    One that finds it proves the snapshot.  One that does not find it disproves it only if the log shows that its slot
    held the restored prefix, and nothing else since: somebody may have had the slot, also past the proxy.

    Args:
        upstream: The server.
        snapshots: Whose prefix is to be proved.
        bus: Tells of the requests, and what the server's log says of them; takes events.
        log: The requests.
    """

    def __init__(self, upstream: Upstream, snapshots: PrefixSnapshots, bus: Bus, log: RequestLog) -> None:
        self._upstream = upstream
        self._snapshots = snapshots
        self._bus = bus
        self._log = log
        self._prefix: Prefix | None = None
        self._sent: set[int] = set()
        self._answers: asyncio.Queue[_Answered] = asyncio.Queue()
        bus.listen(self._on_event)

    def begin(self, prefix: Prefix | None) -> None:
        """
        Begin to validate what the slot holds now.

        Args:
            prefix: What was restored; None if that is nothing, or is about to be replaced.
        """
        self._prefix = prefix
        self._sent.clear()

    def _on_event(self, event: Event) -> None:
        match event:
            case RequestForwarded() if self._prefix is not None:
                self._sent.add(event.id)
            case AnswerSeen():
                self._on_answer(event)
            case RequestEnded():
                self._sent.discard(event.id)
            case _:
                pass

    def _on_answer(self, answer: AnswerSeen) -> None:
        if answer.cached_tokens is None:
            return
        self._snapshots.answered()
        request = self._log.get(answer.id) if answer.id in self._sent else None
        self._sent.discard(answer.id)
        if self._prefix is None or request is None or request.bodies is None or not can_be_rendered(request.path):
            return
        sent = WarmupRequest(request.path, request.bodies.rewritten.body)
        self._answers.put_nowait(_Answered(answer.id, sent, self._prefix, answer.cached_tokens))

    async def run(self) -> None:
        """Judge, until cancelled."""
        while True:
            answered = await self._answers.get()
            if answered.prefix is not self._prefix or not await self._begins_with(answered):
                continue
            if holds(answered.cached_tokens, len(answered.prefix.tokens)):
                self._accept(answered)
            elif await self._had_restored_slot(answered.number) and answered.prefix is self._prefix:
                self._reject(answered)

    async def _begins_with(self, answered: _Answered) -> bool:
        try:
            return await begins_with(self._upstream, answered.request, answered.prefix)
        except UpstreamError:
            return False

    async def _had_restored_slot(self, number: int) -> bool:
        """Whether the log shows that a request came to a slot that held what was restored."""
        deadline = time.monotonic() + SETTLE_S
        while (row := self._bus.stack_state.row(number)) is not None and not row.settled:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        work = row.work if row is not None else None
        if work is None or not (work.is_proved and work.holder_is_warmup) or work.holder_is_cut or work.ram_hit:
            return False
        before = [task for task in self._bus.stack_state.join.tasks if task.slot == work.slot and task.task < work.task]
        # What came while the stack was not ready yet is taken for its own until figures prove it.
        return work.slot == 0 and all(task.is_proved for task in before[-1:])

    def _accept(self, answered: _Answered) -> None:
        self.begin(None)
        self._bus.publish(WarmupJudged(time.time(), True, answered.cached_tokens))

    def _reject(self, answered: _Answered) -> None:
        now = time.time()
        self.begin(None)
        number, cached, tokens = answered.number, answered.cached_tokens, len(answered.prefix.tokens)
        reason = f"the snapshot was not valid: request {number} found {cached:,} of its {tokens:,} tokens cached"
        self._snapshots.fail(answered.prefix, reason)
        self._bus.publish(WarmupJudged(now, False, cached, reason))
        # That request has evaluated the prefix: to warm it up now would only cost its conversation the slot.
        text = f"The warm-up failed: {reason}, and has evaluated them. It was removed; the next start makes a new one"
        self._bus.publish(Notice(now, "warning", text))
