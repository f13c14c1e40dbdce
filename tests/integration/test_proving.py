"""
Only an answer tells whether a restored prefix holds, and only the right one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstack.core.config import parse_config
from kvstack.core.events import AnswerSeen, Event, Notice, WarmupJudged
from kvstack.plan import make_plan
from kvstack.prefixes import Prefix
from kvstack.proving import Prover
from kvstack.snapshotting import PrefixSnapshots
from kvstack.upstream import Props, Upstream
from tests.integration.proxy_rig import CHAT
from tests.integration.stub_upstream import Received, StubUpstream, run_stub

PREFIX = Prefix("kvstack-prefix-0", tuple(ord(mark) for mark in "The system prompt"))


async def letters(request: Received, writer: asyncio.StreamWriter) -> None:
    """A server whose template joins all texts and whose tokens are letters."""
    body = json.loads(request.body)
    if "/apply-template" in request.request_line:
        said = {"prompt": "".join(message["content"] for message in body["messages"])}
        data = json.dumps(said).encode()
    else:
        data = json.dumps({"tokens": [ord(mark) for mark in body["content"]]}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(data) + data)
    await writer.drain()


class Rig:
    """A prover with a restored prefix."""

    def __init__(self, stub: StubUpstream) -> None:
        text = f'name = "t"\n[server]\nurl = "http://127.0.0.1:{stub.port}"\n'
        plan = make_plan(parse_config(text, Path("/t.toml"), Path("/home/ann")), Path("/t.toml"), {})
        self.events: list[Event] = []
        self.upstream = Upstream(f"http://127.0.0.1:{stub.port}")
        snapshots = PrefixSnapshots(plan, self.upstream, Props, None)  # type: ignore[arg-type]
        self.prover = Prover(self.upstream, snapshots, self.events.append)
        self.prover.begin(PREFIX)

    def send(self, number: int, text: str, path: str = CHAT) -> None:
        """A request goes to the server."""
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
        self.prover.sent(number, path, json.dumps({"messages": messages}).encode())

    async def answer(self, number: int, cached: int | None) -> list[bool]:
        """Its answer comes; gives the judgements so far."""
        self.prover.answered(AnswerSeen(number, cached_tokens=cached))
        for _ in range(100):
            await asyncio.sleep(0.005)
            if any(isinstance(event, WarmupJudged) for event in self.events):
                break
        return [event.holds for event in self.events if isinstance(event, WarmupJudged)]


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """A prover that runs."""
    async with run_stub(letters) as stub:
        made = Rig(stub)
        running = asyncio.ensure_future(made.prover.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait({running})
            await made.upstream.close()


@pytest.mark.parametrize(("cached", "holds"), [(17, True), (13, True), (12, False), (0, False)])
async def test_the_first_request_with_the_prefix_decides(cached: int, holds: bool) -> None:
    """Four tokens may be missing, no more."""
    async with rig() as made:
        made.send(1, "The system prompt of a workshop")
        assert await made.answer(1, cached) == [holds]
        assert any(isinstance(event, Notice) for event in made.events) is not holds
        made.send(2, "The system prompt of a workshop")
        assert await made.answer(2, 0) == [holds]


async def test_another_prompt_decides_nothing() -> None:
    """It shares nothing with the prefix, so it tells nothing of it."""
    async with rig() as made:
        made.send(1, "The weather")
        assert await made.answer(1, 4) == []


async def test_after_others_only_a_hit_decides() -> None:
    """Somebody else had the slot: that the prefix is gone is not the snapshot's fault."""
    async with rig() as made:
        made.send(1, "The weather")
        assert await made.answer(1, 0) == []
        made.send(2, "The system prompt of a workshop")
        assert await made.answer(2, 0) == []
        made.send(3, "The system prompt of a workshop")
        assert await made.answer(3, 17) == [True]


async def test_what_cannot_be_rendered_or_has_no_figures_decides_nothing() -> None:
    """Other dialects, clients that left, servers that do not tell."""
    async with rig() as made:
        made.send(1, "The system prompt", "/v1/responses")
        assert await made.answer(1, 0) == []
        made.prover.begin(PREFIX)
        made.send(2, "The system prompt")
        assert await made.answer(2, None) == []
        made.send(3, "The system prompt")
        assert await made.answer(3, 0) == []


async def test_a_warm_up_begins_anew() -> None:
    """An answer to a request from before it says nothing of what the slot holds since."""
    async with rig() as made:
        made.send(1, "The system prompt")
        made.prover.begin(None)
        made.prover.begin(PREFIX)
        assert await made.answer(1, 0) == []
        made.send(2, "The system prompt")
        assert await made.answer(2, 17) == [True]
