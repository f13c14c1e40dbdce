"""A stack's life on a bus, and requests in its log."""

from __future__ import annotations

from dataclasses import replace

from kvstack.bus import Bus
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.rules.compiler import compile_rules
from kvstack.prompt.rules.ruleset import RuleSettings
from kvstack.proxy.request_log import Bodies, LoggedRequest, RequestLog
from kvstack.state.events import Event
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from tests.unit.state.story import Story

NO_RULES = compile_rules([], RuleSettings())


class Life(Story):
    """A stack's life on a bus."""

    def __init__(self) -> None:
        self.bus = Bus(StackState("t", ProxyView("http://127.0.0.1:1")))
        self.events: list[Event] = []
        super().__init__()

    def emit(self, event: Event) -> None:
        """Let something happen."""
        self.events.append(event)
        self.bus.publish(event)
        self.stack_state = self.bus.stack_state


def log_request(log: RequestLog, number: int, path: str, body: bytes, conversation: str | None = None) -> None:
    """Log a request on which no rule acted."""
    rewritten = replace(apply_rules(body, path, NO_RULES), conversation=conversation)
    log.add(LoggedRequest.of(number, path, Bodies(body, rewritten)))
