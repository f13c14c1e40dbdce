"""Only an answer tells whether a restored prefix holds, and only the right one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.prompt.warmup_request import WarmupRequest
from kvstack.proxy.request_log import RequestLog
from kvstack.stack.plan import make_plan
from kvstack.state.events import AnswerSeen, RequestEnded, StateChanged, WarmupEnded, WarmupStarted
from kvstack.state.lifecycle import State
from kvstack.upstream import Props, Upstream
from kvstack.warmup import validation as validation_module
from kvstack.warmup.pause import Pause
from kvstack.warmup.prefix import NoSnapshot, Prefix
from kvstack.warmup.snapshots import PrefixSnapshots
from kvstack.warmup.store import SnapshotFiles
from kvstack.warmup.validation import SnapshotValidator
from tests.integration.proxy.proxy_rig import CHAT
from tests.integration.stub_upstream import Received, StubUpstream, run_stub
from tests.integration.warmup.warmup_rig import Life, log_request

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
    """A validator with a restored prefix."""

    def __init__(self, stub: StubUpstream, directory: Path) -> None:
        text = f'name = "t"\n[server]\nurl = "http://127.0.0.1:{stub.port}"\n'
        plan = make_plan(parse_config(text, Path("/t.toml"), Path("/home/ann")), Path("/t.toml"), {})
        self.life = Life()
        self.log = RequestLog()
        self.files = SnapshotFiles(directory, 1000)
        self.upstream = Upstream(f"http://127.0.0.1:{stub.port}")
        self.snapshots = PrefixSnapshots(
            replace(plan.warmup_context, snapshot_dir=directory),
            self.upstream,
            Props,
            Pause(self.life.bus),
            lambda _: None,
        )
        self.validator = SnapshotValidator(self.upstream, self.snapshots, self.life.bus, self.log)
        self.restore()

    def restore(self) -> None:
        """The slot is filled from the file."""
        self.life.emit(WarmupStarted(1.0))
        self.validator.begin(None)
        self.validator.begin(PREFIX)
        self.life.emit(WarmupEnded(1.0, "done", 17, 0, 1.0, "", 17, "restored"))

    def send(self, text: str, path: str = CHAT, **keys: object) -> int:
        """A request goes to the server."""
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
        body = json.dumps({"messages": messages, **keys}).encode()
        log_request(self.log, self.life.numbers + 1, path, body)
        return self.life.ask(None)

    def work(self, cached: int, *, slot: int = 0) -> None:
        """The server does what it was asked for, and logs it."""
        self.life.finish(self.life.launch(slot), 40, cached, slot=slot)

    async def answer(self, number: int, cached: int | None) -> list[bool]:
        """Its answer comes; gives the judgements so far."""
        evaluated = None if cached is None else 40 - cached
        seen = AnswerSeen(number, 40, cached, evaluated, generated_tokens=8)
        for event in (seen, RequestEnded(2.0, number, 200, "done")):
            self.life.emit(event)
        self.log.end(number)
        for _ in range(50):
            await asyncio.sleep(0.005)
            if self.judgements():
                break
        return self.judgements()

    def judgements(self) -> list[bool]:
        """All so far."""
        published = self.life.bus.stack_state.warmup
        return [False] if published.outcome == "failed" else [True] if published.is_proved else []

    async def turn(self, text: str, cached: int, **keys: object) -> list[bool]:
        """A whole request."""
        number = self.send(text, **keys)  # type: ignore[arg-type]
        self.work(cached)
        return await self.answer(number, cached)


@asynccontextmanager
async def rig(directory: Path) -> AsyncIterator[Rig]:
    """A validator that runs."""
    async with run_stub(letters) as stub:
        made = Rig(stub, directory)
        running = asyncio.ensure_future(made.validator.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait({running})
            await made.upstream.close()


SYSTEM = "The system prompt of a workshop"


@pytest.mark.parametrize(("cached", "holds"), [(17, True), (13, True), (12, False), (0, False)])
async def test_the_first_request_with_the_prefix_decides(cached: int, holds: bool, tmp_path: Path) -> None:
    """Four tokens may be missing, no more."""
    async with rig(tmp_path) as made:
        assert await made.turn(SYSTEM, cached) == [holds]
        assert bool(made.life.bus.stack_state.notices) is not holds
        assert await made.turn(SYSTEM, 0) == [holds]


async def test_another_prompt_decides_nothing(tmp_path: Path) -> None:
    """It shares nothing with the prefix, so it tells nothing of it."""
    async with rig(tmp_path) as made:
        assert await made.turn("The weather", 4) == []


async def test_after_others_only_a_hit_decides(tmp_path: Path) -> None:
    """Somebody else had the slot: that the prefix is gone is not the snapshot's fault."""
    async with rig(tmp_path) as made:
        assert await made.turn("The weather", 0) == []
        assert await made.turn(SYSTEM, 0) == []
        assert await made.turn(SYSTEM, 17) == [True]


async def test_a_request_past_the_proxy_takes_the_slot(tmp_path: Path) -> None:
    """Only the log tells of it."""
    async with rig(tmp_path) as made:
        made.work(0)
        assert await made.turn(SYSTEM, 0) == []


async def test_a_request_past_the_proxy_before_the_stack_is_ready(tmp_path: Path) -> None:
    """It comes between the restore and the first moment of service, where tasks are taken for the warm-up's own."""
    async with rig(tmp_path) as made:
        made.life.emit(StateChanged(1.0, State.WARMING, ""))
        made.work(0)
        made.life.emit(StateChanged(1.0, State.READY, ""))
        assert await made.turn(SYSTEM, 0) == []


async def test_an_emptied_slot_and_another_slot_decide_nothing(tmp_path: Path) -> None:
    """Somebody erased it; the server took another one."""
    async with rig(tmp_path) as made:
        number = made.send(SYSTEM)
        made.work(0, slot=1)
        assert await made.answer(number, 0) == []
        made.life.log("slot prompt_clear: id  0 | task -1 | clearing prompt with 17 tokens")
        assert await made.turn(SYSTEM, 0) == []


async def test_without_the_log_only_a_hit_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then who had the slot; a log that is late is waited for, but not for ever."""
    monkeypatch.setattr(validation_module, "SETTLE_S", 0.1)
    async with rig(tmp_path) as made:
        assert await made.answer(made.send(SYSTEM), 0) == []
        assert await made.answer(made.send(SYSTEM), 17) == [True]


async def test_a_late_log_decides(tmp_path: Path) -> None:
    """It comes after the answer, as it often does."""
    async with rig(tmp_path) as made:
        number = made.send(SYSTEM)
        task = made.life.launch()
        assert await made.answer(number, 0) == []
        made.life.finish(task, 40, 0)
        await asyncio.sleep(0.2)
        assert made.judgements() == [False]


@pytest.mark.parametrize("key", [{"cache_prompt": False}, {"lora": [{"id": 0, "scale": 0.5}]}])
async def test_a_request_that_wants_no_cache_decides_nothing(key: dict[str, object], tmp_path: Path) -> None:
    """Its client said so."""
    async with rig(tmp_path) as made:
        assert await made.turn(SYSTEM, 0, **key) == []


async def test_what_cannot_be_rendered_or_has_no_figures_decides_nothing(tmp_path: Path) -> None:
    """Other dialects, clients that left, servers that do not tell."""
    async with rig(tmp_path) as made:
        number = made.send("The system prompt", "/v1/responses")
        made.work(0)
        assert await made.answer(number, 0) == []
        made.restore()
        assert await made.answer(made.send("The system prompt"), None) == []


async def test_a_warm_up_begins_anew(tmp_path: Path) -> None:
    """An answer to a request from before it says nothing of what the slot holds since."""
    async with rig(tmp_path) as made:
        number = made.send("The system prompt")
        made.work(0)
        made.restore()
        assert await made.answer(number, 0) == []
        assert await made.turn("The system prompt", 17) == [True]


async def test_a_failure_is_told_and_lasts_as_long_as_the_stack(tmp_path: Path) -> None:
    """This stack makes no other snapshot; the next start makes a new one."""
    async with rig(tmp_path) as made:
        assert await made.turn(SYSTEM, 0) == [False]
        assert "the next start makes a new one" in made.life.bus.stack_state.notices[-1].text
        assert "request 1 found 0 of its 17 tokens cached" in made.life.bus.stack_state.warmup.detail
        with pytest.raises(NoSnapshot, match="was not valid"):
            await made.snapshots.warm_up(WarmupRequest(CHAT, b"{}"))
    async with rig(tmp_path) as made:
        assert await made.turn(SYSTEM, 17) == [True]


async def test_what_was_asked_is_kept_as_long_as_it_runs(tmp_path: Path) -> None:
    """A client that leaves takes its words with it."""
    async with rig(tmp_path) as made:
        number = made.send("The secret")
        assert "secret" in repr(made.log.get(number))
        made.life.emit(RequestEnded(2.0, number, None, "cancelled"))
        made.log.end(number)
        assert "secret" not in repr(made.log.get(number))
        assert "secret" not in repr(vars(made.validator))


async def test_a_death_is_blamed_on_what_is_on_trial_alone(tmp_path: Path) -> None:
    """Until the first answer; and once, since there is no other snapshot afterwards."""
    async with rig(tmp_path) as made:
        assert made.snapshots.on_death() is None
        made.snapshots._on_trial = PREFIX
        assert await made.turn("The weather", 0) == []
        assert made.snapshots.on_death() is None
        made.snapshots._on_trial = PREFIX
        assert made.snapshots.on_death() is not None
        assert made.snapshots.on_death() is None
        with pytest.raises(NoSnapshot, match="died"):
            await made.snapshots.warm_up(WarmupRequest(CHAT, b"{}"))
