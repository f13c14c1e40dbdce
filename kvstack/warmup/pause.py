"""Holds clients' requests back for the moment in which a warm-up fills the slot from a file."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstack.bus import Bus
from kvstack.proxy.request_log import RequestLog
from kvstack.state.events import Event, RequestForwarded, WarmupStepped
from kvstack.state.lifecycle import State

QUIET_S = 2.0
"""How long a request that is being served gets to end, in seconds: longer would make the others wait for too long."""
LOOK_S = 0.02

CONVERSATIONS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """
    What is remembered of a client's conversation; no text of it.

    Attributes:
        request: Number of its newest request.
        path: That one's endpoint.
        head_fingerprint: Digest of its system texts and tools; None where the request has no such thing.
    """

    request: int
    path: str
    head_fingerprint: str | None


class Pause:
    """
    Open for clients' requests, except while a slot is filled.

    Args:
        bus: Knows which requests are with the server.
        log: The requests, where somebody will ask for the conversations.
    """

    def __init__(self, bus: Bus, log: RequestLog | None = None) -> None:
        self._bus = bus
        self._log = log
        self._open = asyncio.Event()
        self._open.set()
        self._newest: OrderedDict[Hashable, tuple[int, Conversation]] = OrderedDict()
        if log is not None:
            bus.listen(self._on_event)

    @property
    def is_open(self) -> bool:
        """Whether requests may pass."""
        return self._open.is_set()

    async def wait_open(self, timeout_s: float) -> bool:
        """
        Wait until requests may pass.

        Args:
            timeout_s: Not longer than this, in seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError:
            return False
        return True

    def is_taken(self) -> bool:
        """Whether this run of the server has seen a client's request, so that a slot may hold a conversation."""
        stack_state = self._bus.stack_state
        return any(row.run == stack_state.join.run and row.phase != "received" for row in stack_state.requests) or any(
            slot.tokens and not slot.is_warmup for slot in stack_state.slots
        )

    def conversations(self) -> list[Conversation]:
        """The conversations that have a slot of this run of the server, the newest first; all, if it has no log."""
        join = self._bus.stack_state.join
        held = {slot.request for slot in join.slots}
        return [
            conversation
            for run, conversation in reversed(self._newest.values())
            if run == join.run and (not join.facts or conversation.request in held)
        ]

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[bool]:
        """Hold requests back while the block runs; false if one is with the server and does not end."""
        if self._bus.stack_state.state is not State.READY:  # nobody is served
            yield True
            return
        self._open.clear()
        try:
            deadline = time.monotonic() + QUIET_S
            while self._is_serving() and time.monotonic() < deadline:  # noqa: ASYNC110 - a Snapshot wakes nobody
                await asyncio.sleep(LOOK_S)
            yield not self._is_serving()
        finally:
            self._open.set()

    def step(self, prompt_tokens: int, evaluated_tokens: int) -> None:
        """Tell that a task of the server was the warm-up's own."""
        self._bus.publish(WarmupStepped(time.time(), prompt_tokens, evaluated_tokens))

    def _is_serving(self) -> bool:
        stack_state = self._bus.stack_state
        return any(
            row.run == stack_state.join.run and row.phase != "received" and not row.is_over
            for row in stack_state.requests
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RequestForwarded):
            self._remember(event.id)

    def _remember(self, number: int) -> None:
        """Remember which conversation a request continues."""
        request = self._log.get(number) if self._log is not None else None
        if request is None:
            return
        key = request.conversation or number
        conversation = Conversation(number, request.path, request.head_fingerprint)
        self._newest.pop(key, None)
        self._newest[key] = (self._bus.stack_state.join.run, conversation)
        while len(self._newest) > CONVERSATIONS_KEPT:
            self._newest.popitem(last=False)
