"""The control routes over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvstack.state.events import (
    AnswerSeen,
    LogFactSeen,
    LogLineSeen,
    MemorySampled,
    Notice,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    ServerSpawned,
    StateChanged,
)
from kvstack.state.lifecycle import State
from kvstack.state.log_facts import SlotSelected, SlotsInitialised, TaskLaunched
from tests.integration.proxy.proxy_rig import (
    BODY,
    CHAT,
    answer,
    exchange,
    http,
    open_webui_strip,
    openclaw_strip,
    proxy,
)
from tests.integration.stub_upstream import run_stub

GRAFANA = Path(__file__).parents[3] / "configs" / "grafana" / "kvstack.json"
RECEIVED = RequestReceived(1.0, 1, "POST", CHAT, "chat", None, "c1", 2, True, 0, 0, 0)
ANSWER = json.dumps(
    {
        "choices": [],
        "timings": {"cache_n": 90, "prompt_n": 10, "prompt_ms": 50.0, "predicted_n": 4, "predicted_ms": 80.0},
    }
).encode()


async def test_control_routes_that_act_need_the_token() -> None:
    """Whoever reaches the port may look, but not act."""
    async with proxy(None) as running:
        status, _, body = await exchange(running.port, http("GET", "/kvstack/status"))
        assert status == 200
        assert json.loads(body)["name"] == "test"
        for path in ("/kvstack/stop", "/kvstack/warmup"):
            for header in ((), ("Authorization: Bearer wrong",), ("Authorization: Basic t0ken",)):
                status, _, _ = await exchange(running.port, http("POST", path, b"", *header))
                assert status == 401
        assert running.stack.stopped == []
        status, _, _ = await exchange(running.port, http("POST", "/kvstack/stop", b"", "Authorization: Bearer t0ken"))
        assert status == 202
        assert len(running.stack.stopped) == 1
        running.stack.ready = False
        status, _, _ = await exchange(running.port, http("POST", "/kvstack/warmup", b"", "Authorization: Bearer t0ken"))
        assert status == 503


async def test_an_unknown_control_route_is_ours_to_refuse() -> None:
    """It must not leak to the upstream."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        for path in ("/kvstack", "/kvstack/", "/kvstack/nope"):
            status, _, _ = await exchange(running.port, http("GET", path))
            assert status == 404
    assert stub.connections == 0


async def test_the_rules_are_those_of_the_running_stack() -> None:
    """With the switches it was started with, and how often each acted."""
    block = '```json\n{\n  "schema": "openclaw.inbound_meta.v1",\n  "message_id": "1"\n}\n```\n'
    body = chat(block, 0)
    async with run_stub(answer(ANSWER)) as stub, proxy(stub, strip=openclaw_strip) as running:
        await exchange(running.port, http("POST", CHAT, body))
        status, _, told = await exchange(running.port, http("GET", "/kvstack/rules"))
        counted = running.stack.stack_state().totals.rules
    assert status == 200
    rules = {rule["name"]: rule for rule in json.loads(told)["data"]["rules"]}
    assert rules["openclaw.timestamps"]["active"] is False
    assert {name: rule["hits"] for name, rule in rules.items() if rule["hits"]} == counted
    assert counted
    assert json.loads(told)["message"] == f"{len(rules)} rules, {sum(rule['active'] for rule in rules.values())} on"


def parse_events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events as kind and data."""
    found = []
    for block in raw.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def test_events_begin_with_the_snapshot_and_have_no_gap() -> None:
    """Whoever adds the events to the snapshot has the stack, up to its end."""
    async with proxy(None) as running:
        publish = running.stack.bus.publish
        publish(MemorySampled(1.0, 1000))
        asking = asyncio.ensure_future(exchange(running.port, http("GET", "/kvstack/events")))
        while not running.stack.bus._subscriptions:  # noqa: ASYNC110 - the bus has no event for it
            await asyncio.sleep(0.01)
        for number in range(50):
            publish(MemorySampled(2.0, number))
        publish(LogLineSeen(2.0, "a line"))
        publish(StateChanged(3.0, State.STOPPING, "over"))
        status, headers, body = await asyncio.wait_for(asking, 10)
    assert status == 200
    assert ("content-type", "text/event-stream; charset=utf-8") in headers
    events = parse_events(body)
    assert events[0][0] == "Snapshot"
    assert events[0][1]["server"]["rss_bytes"] == 1000
    assert [data["rss_bytes"] for kind, data in events if kind == "MemorySampled"] == list(range(50))
    assert events[-1] == ("StateChanged", {"time_s": 3.0, "state": "stopping", "reason": "over", "restarts": 0})
    assert not running.stack.bus._subscriptions


async def test_a_reader_that_is_too_slow_gets_the_whole_picture_again() -> None:
    """A gap is closed by a snapshot, and nobody waits for the reader."""
    async with proxy(None) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("GET", "/kvstack/events"))
        await asyncio.wait_for(reader.readuntil(b"event: Snapshot"), 5)
        for number in range(5000):  # in one go: the reader's queue overflows
            running.stack.bus.publish(MemorySampled(2.0, number))
        running.stack.bus.publish(StateChanged(3.0, State.STOPPING, "over"))
        rest = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    again = rest.split(b"event: Snapshot", 1)[1]
    assert b'"rss_bytes": 4999' in again
    assert b'"state": "stopping"' in again


async def test_a_reader_that_leaves_is_forgotten() -> None:
    """A closed dashboard must not fill memory."""
    async with proxy(None) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("GET", "/kvstack/events"))
        await asyncio.wait_for(reader.readuntil(b"event: Snapshot"), 5)
        writer.close()
        deadline = asyncio.get_running_loop().time() + 5
        while running.stack.bus._subscriptions and asyncio.get_running_loop().time() < deadline:
            running.stack.bus.publish(Notice(1.0, "info", "x"))
            await asyncio.sleep(0.02)
        assert not running.stack.bus._subscriptions


async def test_metrics_say_what_the_cache_did() -> None:
    """Base units, and the figures of the answers."""
    async with run_stub(answer(ANSWER)) as stub, proxy(stub) as running:
        for _ in range(2):
            await exchange(running.port, http("POST", CHAT, BODY))
        status, headers, body = await exchange(running.port, http("GET", "/kvstack/metrics"))
    assert status == 200
    assert ("content-type", "text/plain; version=0.0.4; charset=utf-8") in headers
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples["kvstack_prompt_tokens_total",] == 200
    assert samples["kvstack_cached_tokens_total",] == 180
    assert samples["kvstack_evaluated_tokens_total",] == 20
    assert samples["kvstack_generated_tokens_total",] == 8
    assert samples["kvstack_prefill_seconds_total",] == 0.1
    assert samples["kvstack_decode_seconds_total",] == 0.16
    assert samples["kvstack_reuse_ratio",] == 0.9
    assert sum(value for (name, *_), value in samples.items() if name == "kvstack_requests_total") == 2
    assert samples["kvstack_state", "starting"] == 1
    assert samples["kvstack_strip_failures_total",] == 0
    # A figure that may fall must not be declared as one that only grows.
    assert samples["kvstack_bypassing_tasks",] == 0


async def test_the_dashboard_for_grafana_shows_existing_metrics_only() -> None:
    """A panel without data would say that the product is broken."""
    import re

    text = GRAFANA.read_text(encoding="utf-8")
    asked = set(re.findall(r"\bkvstack_\w+", " ".join(_expressions(json.loads(text)))))
    async with run_stub(answer(ANSWER)) as stub, proxy(stub) as running:
        running.stack.bus.publish(MemorySampled(1.0, 1000))
        running.stack.bus.publish(StateChanged(1.0, State.STARTING, "start"))
        await exchange(running.port, http("POST", CHAT, BODY))
        _, _, body = await exchange(running.port, http("GET", "/kvstack/metrics"))
    declared = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE ")}
    assert asked
    assert asked <= declared


def _expressions(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [value for key, value in node.items() if key == "expr" and isinstance(value, str)]
        return own + [found for value in node.values() for found in _expressions(value)]
    if isinstance(node, list):
        return [found for value in node for found in _expressions(value)]
    return []


def chat(system: str, turns: int) -> bytes:
    """A chat whose system text a test chooses."""
    messages = [{"role": "system", "content": system}]
    for number in range(turns):
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    return json.dumps({"messages": [*messages, {"role": "user", "content": f"q{turns}"}]}).encode()


TOKEN = "Authorization: Bearer t0ken"


async def test_a_request_is_explained_and_its_text_needs_the_token() -> None:
    """Figures and places for everybody who reaches the port, sixty characters of a prompt for the owner alone."""
    async with run_stub(answer(ANSWER)) as stub, proxy(stub) as running:
        for turn in range(2):
            await exchange(running.port, http("POST", CHAT, chat(f"Rules.\nnonce 8f3a2b{turn}d\nMore.", turn)))
        for number in ("2", "last"):
            status, _, body = await exchange(running.port, http("GET", f"/kvstack/requests/{number}"))
            data = json.loads(body)["data"]
            assert (status, data["request"]["id"]) == (200, 2)
            assert "messages[0].content" in json.dumps(data["explanation"])
            assert "nonce" not in body.decode()
        status, _, body = await exchange(running.port, http("GET", "/kvstack/requests/2?text=1"))
        assert status == 401
        status, _, body = await exchange(running.port, http("GET", "/kvstack/requests/2?text=1", b"", TOKEN))
        divergence = json.loads(body)["data"]["divergence"]
        assert divergence["path"] == "messages[0].content"
        assert "8f3a2b0d" in divergence["before"]
        assert "8f3a2b1d" in divergence["after"]
        for unknown in ("3", "0", "x", "-1", "99999999999999999999999", "%C2%B2"):
            status, _, _ = await exchange(running.port, http("GET", f"/kvstack/requests/{unknown}"))
            assert status == 404


async def test_slots_of_another_server_explain_nothing() -> None:
    """The server was started again with one slot: that says nothing of a request that its former one had."""
    async with proxy(None) as running:
        publish = running.stack.bus.publish
        told = []
        for run, slots in ((1, 4), (2, 1)):
            publish(StateChanged(1.0, State.BACKOFF, "died"))
            publish(ServerSpawned(1.0, 4000 + run, ("llama-server",)))
            publish(LogFactSeen(1.0, run, SlotsInitialised(slots)))
            publish(replace(RECEIVED, id=run))
            publish(RequestForwarded(1.0, run))
            publish(LogFactSeen(1.0, run, SlotSelected(0, "lru")))
            publish(LogFactSeen(1.0, run, TaskLaunched(0, 7)))
            publish(RequestEnded(2.0, run, 502, "failed"))
        for number in (1, 2):
            _, _, body = await exchange(running.port, http("GET", f"/kvstack/requests/{number}"))
            told.append("its only one" in json.dumps(json.loads(body)["data"]["explanation"]))
    assert told == [False, True]


async def test_last_is_the_newest_request_and_its_verdict_is_waited_for() -> None:
    """Who has just got an answer means that one, though the proxy may be a moment behind; a long prefill is told of."""
    async with proxy(None) as running:
        publish = running.stack.bus.publish
        for number in (1, 2):
            publish(replace(RECEIVED, time_s=time.time(), id=number))
            publish(RequestForwarded(time.time(), number))
            if number == 1:
                publish(RequestEnded(time.time(), 1, 200, "done"))
        asking = asyncio.ensure_future(exchange(running.port, http("GET", "/kvstack/requests/last")))
        await asyncio.sleep(0.2)
        publish(AnswerSeen(2, 100, 90, 10, 4, 50.0, 80.0))
        publish(RequestEnded(time.time(), 2, 200, "done"))
        _, _, body = await asyncio.wait_for(asking, 5)
        told = json.loads(body)["data"]["request"]
        assert (told["id"], told["tokens"]["cached"], told["verdict"] is None) == (2, 90, False)
        publish(replace(RECEIVED, time_s=time.time(), id=3))
        _, _, body = await exchange(running.port, http("GET", "/kvstack/requests/last"))
        assert (json.loads(body)["data"]["request"]["id"], json.loads(body)["message"]) == (
            3,
            "The request is still running.",
        )


async def test_the_similarity_is_that_of_the_newest_request() -> None:
    """A request whose slot was not chosen by likeness has none: the former one's would be taken for it."""

    async def shown() -> bool:
        _, _, body = await exchange(running.port, http("GET", "/kvstack/metrics"))
        return b"\nkvstack_lcp_similarity_ratio 0.982\n" in body

    async with proxy(None) as running:
        publish = running.stack.bus.publish
        publish(ServerSpawned(1.0, 4711, ("llama-server",)))
        for number, chosen in ((1, SlotSelected(0, "lcp", 0.982, 0.1, 1.0)), (2, SlotSelected(0, "lru"))):
            publish(replace(RECEIVED, id=number))
            publish(RequestForwarded(2.0, number))
            assert await shown() == (number == 2)  # while it has no slot yet the newest one that has counts
            publish(LogFactSeen(2.0, 1, chosen))
            publish(LogFactSeen(2.0, 1, TaskLaunched(0, number)))
            assert await shown() == (number == 1)
            publish(AnswerSeen(number, 100, 90, 10, 4, 50.0, 80.0))
            publish(RequestEnded(3.0, number, 200, "done"))
            assert await shown() == (number == 1)


async def test_half_a_surrogate_pair_can_be_shown() -> None:
    """A client's text may hold what UTF-8 has no spelling for; figures and quotes are told all the same."""
    async with run_stub(answer(ANSWER)) as stub, proxy(stub, keep_bodies=2) as running:
        for turn in range(2):
            body = chat(f"Rules \ud800 {turn} more.", turn)
            assert b"\\ud800" in body
            await exchange(running.port, http("POST", CHAT, body))
        for path in ("/kvstack/requests/2?text=1", "/kvstack/requests/2/diff", "/kvstack/status"):
            status, _, told = await exchange(running.port, http("GET", path, b"", TOKEN))
            assert status == 200
            assert json.loads(told)


async def test_a_diff_is_shown_if_bodies_are_kept_and_to_the_owner_alone() -> None:
    """Original against stripped: the endpoint that users of a stripping proxy ask for first."""
    original = chat("S", 0).replace(b'"q0"', b'"[Wed 2026-02-18 20:48 UTC] q0"')
    async with run_stub(answer(ANSWER)) as stub, proxy(stub, strip=openclaw_strip, keep_bodies=1) as running:
        await exchange(running.port, http("POST", CHAT, chat("S", 0)))
        await exchange(running.port, http("POST", CHAT, original))
        status, _, _ = await exchange(running.port, http("GET", "/kvstack/requests/2/diff"))
        assert status == 401
        status, _, body = await exchange(running.port, http("GET", "/kvstack/requests/2/diff", b"", TOKEN))
        data = json.loads(body)["data"]
        assert status == 200
        assert data["original"] == original.decode()
        assert data["stripped"] == stub.received[1].body.decode()
        assert [(edit["removed"], edit["inserted"]) for edit in data["edits"]] == [("[Wed 2026-02-18 20:48 UTC] ", "")]
        assert [hit["rule"] for hit in data["hits"]] == ["openclaw.timestamps"]
        status, _, body = await exchange(running.port, http("GET", "/kvstack/requests/1/diff", b"", TOKEN))
        assert status == 404
        assert "no longer kept: proxy.keep_bodies" in json.loads(body)["message"]


async def test_a_refusal_names_what_to_turn_on() -> None:
    """The setting where one is off, the header and its file where the token is missing."""
    async with run_stub(answer(ANSWER)) as stub, proxy(stub) as running:

        async def told(method: str, path: str, *headers: str) -> tuple[int, str]:
            status, _, body = await exchange(running.port, http(method, path, b"", *headers))
            message = json.loads(body)["message"]
            assert isinstance(message, str)
            return status, message

        await exchange(running.port, http("POST", CHAT, chat("S", 0)))
        for method, path in (
            ("GET", "/kvstack/requests/1/diff"),
            ("GET", "/kvstack/requests/1?text=1"),
            ("GET", "/kvstack/capture"),
            ("POST", "/kvstack/warmup"),
            ("POST", "/kvstack/stop"),
        ):
            status, message = await told(method, path)
            assert status == 401
            assert "`Authorization: Bearer TOKEN`" in message
            assert "test/run.json" in message
        status, message = await told("GET", "/kvstack/requests/1/diff", TOKEN)
        assert (status, "set proxy.keep_bodies to a number" in message) == (404, True)
        running.stack.outcome = "no prefix known"
        status, message = await told("POST", "/kvstack/warmup", TOKEN)
        assert (status, "warmup.request_file" in message) == (409, True)


async def test_a_side_request_does_not_continue_the_conversation() -> None:
    """A title request quotes the chat; the chat's next turn is laid beside the chat's last one."""
    task = "### Task:\nGenerate a concise, 3-5 word title"
    title = json.dumps({"messages": [{"role": "system", "content": "T"}, {"role": "user", "content": task}]}).encode()
    async with run_stub(answer(ANSWER)) as stub, proxy(stub, strip=open_webui_strip) as running:
        for body in (chat("S", 0), title, chat("S", 1)):
            await exchange(running.port, http("POST", CHAT, body))
    received = [event for event in running.events if isinstance(event, RequestReceived)]
    assert [event.side for event in received] == [None, "title", None]
    assert [event.difference for event in received] == [None, None, None]
    assert received[0].conversation == received[2].conversation
