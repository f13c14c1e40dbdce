"""
The bus: an event is reduced into the stack's state, then handed to whoever listens.

Publishing never waits.  A reader that is too slow loses its oldest events and sees how many; the state is always
whole.  Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from kvstack.state.events import Event
from kvstack.state.reducer import reduce
from kvstack.state.stack_state import StackState


class Bus:
    """
    Takes events, keeps the stack's state, feeds the subscriptions.

    Attributes:
        stack_state: The stack as of the last event.
    """

    def __init__(self, stack_state: StackState) -> None:
        self.stack_state = stack_state
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Callable[[Event], None]] = []

    def publish(self, event: Event) -> None:
        """Reduce *event* into the stack's state, then put it into every subscription."""
        self.stack_state = reduce(self.stack_state, event)
        for subscription in self._subscriptions:
            subscription._put(event)
        for listener in self._listeners:
            listener(event)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """
        Call *listener* with every event, at once, for the bus's whole life; it must be quick and must not raise.

        A part of the stack listens so where it needs an event before the next one; a reader subscribes.
        """
        self._listeners.append(listener)

    def subscribe(self, maxsize: int = 1000) -> Subscription:
        """
        Begin to listen.  The subscription's `stack_state` and its events have no gap between them.

        Args:
            maxsize: Events that wait for a slow reader; the oldest are dropped beyond it.
        """
        subscription = Subscription(self, maxsize)
        self._subscriptions.add(subscription)
        return subscription

    def _drop(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)


class Subscription:
    """
    An async iterator of events; a context manager that ends the listening.

    Attributes:
        stack_state: The stack's state at the moment of subscribing.
        dropped: Events that this reader was too slow for.
    """

    def __init__(self, bus: Bus, maxsize: int) -> None:
        self.stack_state = bus.stack_state
        self.dropped = 0
        self._bus = bus
        self._events: deque[Event] = deque(maxlen=maxsize)
        self._wake = asyncio.Event()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    def current(self) -> StackState:
        """The state as of now, events that still wait here included."""
        return self._bus.stack_state

    def close(self) -> None:
        """Stop listening."""
        self._bus._drop(self)

    def _put(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)
        self._wake.set()
