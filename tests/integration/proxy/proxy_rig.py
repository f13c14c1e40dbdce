"""The proxy's real application on a real socket, with a stack that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from kvstack.bus import Bus, Subscription
from kvstack.errors import NotReady
from kvstack.prompt.diff.previous import FormerRequests
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.report.listing import RuleLine, list_rules
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSettings
from kvstack.proxy.app import make_app
from kvstack.proxy.forward import Forward, Rewrite
from kvstack.proxy.keys import Keys
from kvstack.proxy.request_log import RequestLog
from kvstack.proxy.serve import ProxyServer, bind
from kvstack.state.events import Event, WarmupEnded
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from kvstack.upstream import Upstream
from tests.integration.stub_upstream import Handler, Received, StubUpstream
from tests.ports import free_port

__all__ = [
    "BODY",
    "CHAT",
    "FakeStack",
    "Running",
    "always_ready",
    "answer",
    "chunks",
    "closed_port",
    "exchange",
    "http",
    "open_webui_strip",
    "openclaw_strip",
    "plain_strip",
    "proxy",
]

NO_RULES = compile_rules([], RuleSettings())
CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'


@dataclass
class FakeStack:
    """What the control routes see."""

    stopped: list[str] = field(default_factory=list)
    ready: bool = True
    outcome: Literal["done", "no prefix known"] = "done"
    bus: Bus = field(default_factory=lambda: Bus(StackState("test", ProxyView("http://127.0.0.1:0"))))

    def stack_state(self) -> StackState:
        """The stack as the bus has it."""
        return self.bus.stack_state

    def rules(self) -> list[RuleLine]:
        """OpenClaw's, without its timestamps."""
        text = (resources.files("kvstack.packs") / "openclaw.toml").read_text(encoding="utf-8")
        settings = RuleSettings(strip_timestamps=False)
        return list_rules(compile_rules([parse_pack(text, "openclaw.toml")], settings))

    def subscribe(self) -> Subscription:
        """Listen to the bus."""
        return self.bus.subscribe()

    async def warm_up(self) -> WarmupEnded:
        """Done, unless it is not ready."""
        if not self.ready:
            raise NotReady("The stack is not ready")
        return WarmupEnded(0.0, self.outcome, 10, 10, 1.0)

    def request_stop(self, reason: str) -> None:
        """Remember that somebody asked."""
        self.stopped.append(reason)


@dataclass
class Running:
    """A proxy that serves, and what it published."""

    port: int
    forward: Forward
    events: list[Event]
    stack: FakeStack

    def of(self, kind: type[Event]) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Former:
    """The former requests of the proxy that serves now."""

    requests: FormerRequests = field(default_factory=FormerRequests)


MEMORY = ConversationMemory()
FORMER = Former()


def plain_strip(body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
    """The rule engine without rules."""
    return apply_rules(body, path, NO_RULES, MEMORY, headers, number=number, formers=FORMER.requests)


def openclaw_strip(body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
    """The rule engine with OpenClaw's pack."""
    text = (resources.files("kvstack.packs") / "openclaw.toml").read_text(encoding="utf-8")
    rules = compile_rules([parse_pack(text, "openclaw.toml")], RuleSettings())
    return apply_rules(body, path, rules, MEMORY, headers, number=number, formers=FORMER.requests)


def open_webui_strip(body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
    """The rule engine with Open WebUI's pack, which names side requests."""
    text = (resources.files("kvstack.packs") / "open-webui.toml").read_text(encoding="utf-8")
    rules = compile_rules([parse_pack(text, "open-webui.toml")], RuleSettings())
    return apply_rules(body, path, rules, MEMORY, headers, number=number, formers=FORMER.requests)


async def always_ready(_: float) -> bool:
    """The server is up."""
    return True


@asynccontextmanager
async def proxy(
    stub: StubUpstream | None,
    *,
    strip: Rewrite = plain_strip,
    wait_ready: Callable[[float], object] = always_ready,
    max_body_bytes: int = 1_000_000,
    cors_origins: tuple[str, ...] = (),
    ready_timeout_s: float = 0.2,
    upstream_port: int | None = None,
    keep_bodies: int = 0,
    is_stopping: bool = False,
    slot_actions: bool = True,
    keys: Keys | None = None,
) -> AsyncIterator[Running]:
    """Serve the real application on a free port."""
    FORMER.requests = FormerRequests()
    events: list[Event] = []
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    target = stub.port if stub is not None else upstream_port or closed_port()
    upstream = Upstream(f"http://127.0.0.1:{target}")
    stack = FakeStack()

    def publish(event: Event) -> None:
        events.append(event)
        stack.bus.publish(event)

    forward = Forward(
        upstream,
        strip,
        wait_ready,  # type: ignore[arg-type]
        publish,
        max_body_bytes=max_body_bytes,
        ready_timeout_s=ready_timeout_s,
        cors_origins=cors_origins,
        log=RequestLog(keep_bodies),
        is_stopping=lambda: is_stopping,
        slot_actions=slot_actions,
        keys=keys,
    )
    server = ProxyServer(make_app(forward, stack, "t0ken", "1.2.3"), listener, 2.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run())
        await server.started()
        try:
            yield Running(port, forward, events, stack)
        finally:
            server.stop()
            await forward.close_exchanges(0)
    await upstream.close()


def closed_port() -> int:
    """A port on which nobody listens."""
    return free_port()


def http(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as bytes."""
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def exchange(port: int, request: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Send a request on its own connection; give status, header pairs and body (chunks joined)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
    if ("transfer-encoding", "chunked") in headers:
        body = b"".join(chunks(body))
    return int(lines[0].split()[1]), headers, body


def chunks(body: bytes) -> list[bytes]:
    """Undo chunked framing; the last chunk must be there."""
    found = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return found
        found.append(rest[:length])
        body = rest[length + 2 :]


def answer(body: bytes, status: str = "200 OK", *headers: str, content_type: str = "application/json") -> Handler:
    """A handler that answers always the same."""

    async def handle(_: Received, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return handle
