"""The one picture: events in, figures out, in the published shape."""

from __future__ import annotations

import json

import pytest

from kvstack.state.causes import Cause
from kvstack.state.events import (
    AnswerSeen,
    Difference,
    FirstByteSent,
    LogFactSeen,
    LogLineSeen,
    MemorySampled,
    Notice,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    RuleHit,
    ServerDescribed,
    ServerSpawned,
    StateChanged,
    WarmupEnded,
    WarmupJudged,
)
from kvstack.state.lifecycle import State
from kvstack.state.log_facts import UnknownRecord
from kvstack.state.records import ProxyView
from kvstack.state.reducer import reduce
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import encode
from tests.unit.state.story import Story

EMPTY = StackState("demo", ProxyView("http://127.0.0.1:1234"))


def received(number: int, time_s: float = 10.0, **changes: object) -> RequestReceived:
    """A request as the proxy tells of it."""
    values: dict[str, object] = {
        "time_s": time_s,
        "id": number,
        "method": "POST",
        "path": "/v1/responses",
        "api": "responses",
        "client": "openclaw",
        "conversation": "c1",
        "items": 8,
        "stream": True,
        "ts_removed": 2,
        "msg_ids_removed": 3,
        "items_modified": 3,
    }
    return RequestReceived(**{**values, **changes})  # type: ignore[arg-type]


def test_a_fresh_snapshot_says_nothing_it_does_not_know() -> None:
    """What is not known is null, and everything survives JSON."""
    shape = encode(EMPTY)
    assert json.loads(json.dumps(shape)) == shape
    assert shape["server"]["pid"] is None
    assert shape["server"]["ctx_per_slot"] is None
    assert shape["state"] == "starting"
    assert shape["decode_by_context"] == []
    assert shape["requests"] == []


def test_the_names_that_others_script_against() -> None:
    """The published names are all there."""
    story = Story()
    story.turn(100, 0)
    shape = encode(story.stack_state)
    assert shape.keys() >= {"name", "state", "proxy", "server", "totals", "requests"}
    assert shape["proxy"] == {"url": "http://127.0.0.1:1234"}
    assert shape["server"].keys() >= {"url", "pid", "build", "ctx_per_slot", "device"}
    assert shape["totals"].keys() >= {"requests", "prompt_tokens", "cached_tokens", "evaluated_tokens"}
    assert shape["requests"][0].keys() >= {
        "id",
        "path",
        "lcp_similarity_ratio",
        "verdict",
        "tokens",
        "timing",
        "change",
        "stripped",
        "work",
    }
    assert shape["requests"][0]["tokens"].keys() >= {"prompt", "cached", "evaluated", "generated", "reuse_ratio"}
    assert shape["requests"][0]["timing"].keys() >= {"prefill_ms", "ttft_ms", "decode_tokens_per_s"}
    assert shape["requests"][0]["stripped"] == {
        "ts_removed": 1,
        "msg_ids_removed": 2,
        "items_modified": 1,
        "rules": {},
    }


def test_a_request_from_its_receipt_to_its_end() -> None:
    """Phases, time to first token, figures and totals of one request."""
    stack_state = reduce(EMPTY, received(1))
    assert stack_state.requests[0].phase == "received"
    stack_state = reduce(stack_state, RequestForwarded(10.1, 1))
    assert stack_state.requests[0].phase == "forwarded"
    stack_state = reduce(stack_state, FirstByteSent(10.75, 1))
    assert (stack_state.requests[0].phase, stack_state.requests[0].timing.ttft_ms) == (
        "answering",
        pytest.approx(750.0),
    )
    assert stack_state.requests[0].verdict is None
    assert stack_state.totals.requests == 0
    stack_state = reduce(stack_state, AnswerSeen(1, 18402, 18377, 25, 40, 200.0, 1000.0, 39.0))
    stack_state = reduce(stack_state, RequestEnded(11.0, 1, 200, "done"))
    row = stack_state.requests[0]
    assert (row.phase, row.status, row.verdict) == ("done", 200, "WARM")
    assert (row.timing.prefill_ms, row.timing.decode_tokens_per_s) == (200.0, 39.0)
    assert row.tokens.reuse_ratio == pytest.approx(18377 / 18402)
    totals = stack_state.totals
    assert (totals.requests, totals.prompt_tokens, totals.cached_tokens, totals.evaluated_tokens) == (
        1,
        18402,
        18377,
        25,
    )
    assert (totals.ts_removed, totals.msg_ids_removed, totals.prefill_ms) == (2, 3, 200.0)


def test_only_the_first_token_counts() -> None:
    """A second first byte does not move the time."""
    stack_state = reduce(EMPTY, received(1))
    for time_s in (10.5, 12.0):
        stack_state = reduce(stack_state, FirstByteSent(time_s, 1))
    assert stack_state.requests[0].timing.ttft_ms == pytest.approx(500.0)


def _answered_in_one_piece(*, generated: int = 40, **ended: object) -> StackState:
    """A request that took five seconds, three of them for the decode, and whose client got all at once."""
    stack_state = reduce(EMPTY, received(1, stream=False))
    stack_state = reduce(stack_state, AnswerSeen(1, 18402, 18377, 25, generated, 200.0, 3000.0))
    return reduce(stack_state, RequestEnded(**{"time_s": 15.0, "id": 1, "status": 200, "outcome": "done", **ended}))  # type: ignore[arg-type]


def test_the_first_token_of_an_answer_in_one_piece() -> None:
    """It was there when the decode began, not when the answer came."""
    row = _answered_in_one_piece().requests[0]
    assert row.timing.duration_ms == pytest.approx(5000.0)
    assert row.timing.ttft_ms == pytest.approx(2000.0)
    assert not row.timing.is_streamed


def test_what_had_no_token_has_no_time_to_it() -> None:
    """Failed, cancelled and empty answers have no first token, and without the decode's time it is not known."""
    for stack_state in (
        _answered_in_one_piece(outcome="failed", status=500),
        _answered_in_one_piece(outcome="cancelled", status=None),
        _answered_in_one_piece(generated=0),
        reduce(reduce(EMPTY, received(1)), RequestEnded(15.0, 1, 200, "done")),
    ):
        assert stack_state.requests[0].timing.ttft_ms is None


def test_a_stream_that_broke_keeps_its_first_token() -> None:
    """The client saw a token before the end."""
    stack_state = reduce(reduce(EMPTY, received(1)), FirstByteSent(10.5, 1))
    stack_state = reduce(stack_state, RequestEnded(12.0, 1, 200, "failed", "the connection closed"))
    row = stack_state.requests[0]
    assert (row.timing.ttft_ms, row.verdict, row.error) == (pytest.approx(500.0), "FAILED", "the connection closed")


def test_the_decode_time_may_come_with_the_log() -> None:
    """An answer without timings gets its first token's time when the log has told of the decode."""
    story = Story()
    number = story.ask()
    task = story.launch()
    story.emit(AnswerSeen(number, 1000, 0, 1000, 8))
    story.now_s += 5.0
    story.end(number)
    assert story.row(number).timing.ttft_ms is None
    story.finish(task, 1000, 0, generated=8)
    row = story.row(number)
    assert (row.timing.decode_ms, row.timing.duration_ms) == (16.0, pytest.approx(5000.0, abs=20.0))
    assert row.timing.ttft_ms == pytest.approx((row.timing.duration_ms or 0) - 16.0)


def test_a_single_token_has_no_decode_speed() -> None:
    """The first token comes with the prefill: builds print a million tokens per second, or zero."""
    stack_state = reduce(EMPTY, received(1))
    stack_state = reduce(stack_state, AnswerSeen(1, 390, 389, 1, 1, 0.17, 0.001, 1_000_000.0))
    assert stack_state.requests[0].timing.decode_tokens_per_s is None


def test_events_of_forgotten_requests() -> None:
    """An event of a request that is not remembered changes nothing, and does no harm."""
    for event in (
        RequestForwarded(1.0, 9),
        FirstByteSent(1.0, 9),
        AnswerSeen(9, 1, 0, 1),
        RequestEnded(1.0, 9, 200, "done"),
    ):
        assert reduce(EMPTY, event).requests == ()


def test_rule_hits_are_counted() -> None:
    """What each rule did is summed up."""
    hits = (RuleHit("openclaw-timestamp", "drop", 2), RuleHit("openclaw-ids", "drop", 3))
    stack_state = reduce(reduce(EMPTY, received(1, hits=hits)), received(2, hits=hits[:1]))
    assert stack_state.totals.rules == {"openclaw-timestamp": 4, "openclaw-ids": 3}


def test_requests_without_a_prompt_are_not_counted() -> None:
    """Totals are about model requests."""
    stack_state = reduce(reduce(EMPTY, received(1, api=None)), RequestEnded(11.0, 1, 200, "done"))
    assert stack_state.totals.requests == 0
    assert stack_state.totals.verdicts == {}


def test_states() -> None:
    """The state, when it began, and when the stack did; a repeated state does not restart its clock."""
    stack_state = reduce(EMPTY, StateChanged(5.0, State.STARTING, "first start"))
    stack_state = reduce(stack_state, StateChanged(6.0, State.LOADING, ""))
    stack_state = reduce(stack_state, StateChanged(7.0, State.LOADING, "compiling shaders"))
    assert (stack_state.state, stack_state.reason, stack_state.state_since_s, stack_state.started_s) == (
        State.LOADING,
        "compiling shaders",
        6.0,
        5.0,
    )
    stack_state = reduce(stack_state, ServerSpawned(7.5, 4711, ("llama-server",)))
    stack_state = reduce(stack_state, MemorySampled(8.0, 1234))
    assert (stack_state.server.pid, stack_state.server.rss_bytes) == (4711, 1234)
    stack_state = reduce(stack_state, StateChanged(9.0, State.BACKOFF, "died", restarts=1))
    assert (stack_state.server.pid, stack_state.server.rss_bytes, stack_state.restarts) == (None, None, 1)


def test_a_stack_that_has_not_begun_is_about_to() -> None:
    """The first picture of `up` does not say that nothing runs; the clock starts with the first event."""
    assert EMPTY.state is State.STARTING
    stack_state = reduce(EMPTY, StateChanged(5.0, State.STARTING, "start"))
    assert (stack_state.state_since_s, stack_state.started_s) == (5.0, 5.0)


def test_descriptions_add_up() -> None:
    """What an event leaves open keeps its value; a new process starts with nothing but its address."""
    stack_state = reduce(EMPTY, ServerDescribed(1.0, url="http://127.0.0.1:12345", build="b10068", ctx_per_slot=32768))
    stack_state = reduce(stack_state, ServerDescribed(2.0, model="tiny.gguf"))
    server = stack_state.server
    assert (server.url, server.build, server.ctx_per_slot, server.model) == (
        "http://127.0.0.1:12345",
        "b10068",
        32768,
        "tiny.gguf",
    )
    server = reduce(stack_state, ServerSpawned(3.0, 7, ())).server
    assert (server.url, server.build, server.pid, server.started_s) == ("http://127.0.0.1:12345", None, 7, 3.0)


def test_what_the_log_tells_of_the_server() -> None:
    """FR-32: device, offload, buffers, slots, threshold, RAM cache and warnings come from the log."""
    story = Story()
    for line in (
        "0.00.318.187 I llama_prepare_model_devices: using device Vulkan0 (Radeon 8060S) (00:c5:0) - 2048 MiB free",
        "0.00.320.708 I load_tensors: offloaded 49/49 layers to GPU",
        "0.00.320.762 I load_tensors:      Vulkan0 model buffer size =     2.00 MiB",
        "0.00.325.317 I llama_kv_cache:    Vulkan0 KV buffer size =     1.00 MiB",
        "0.00.325.318 I llama_kv_cache:    Vulkan0 KV buffer size =     3.00 MiB",
        "0.00.326.000 I srv    load_model: prompt cache is enabled, size limit: 8192 MiB",
        "0.00.326.001 W srv    load_model: cache_reuse is not supported by this context, it will be disabled",
        "0.00.326.002 W srv    load_model: cache_reuse is not supported by this context, it will be disabled",
        "0.00.327.000 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'false'",
        "0.00.328.000 I slot get_availabl: id  0 | task -1 | selected slot by LCP similarity,"
        " sim_best = 0.5 (> 0.250 thold), f_keep = 1.0",
        "0.00.329.000 I srv        update:  - cache state: 2 prompts, 64.000 MiB (limits: 8192.0 MiB)",
    ):
        story.log(line)
    server = story.stack_state.server
    assert (server.device, server.layers_offloaded, server.layers_total) == ("Vulkan0", 49, 49)
    assert server.device_name == "Radeon 8060S"
    assert server.buffers_bytes == {"model Vulkan0": 2 * 1048576, "kv Vulkan0": 4 * 1048576}
    assert (server.slots, server.ctx_per_slot, server.kv_unified) == (4, 32768, False)
    assert server.similarity_threshold_ratio == 0.25
    assert server.warnings == ("cache_reuse is not supported by this context, it will be disabled",)
    assert [notice.level for notice in story.stack_state.notices] == ["warning"]
    ram = story.stack_state.ram_cache
    assert (ram.prompts, ram.size_bytes, ram.limit_bytes) == (2, 64 * 1048576, 8192 * 1048576)


def test_context_per_slot_is_the_split_one() -> None:
    """FR-31: four slots share the context, which each older build says slot by slot."""
    story = Story()
    story.log("srv    load_model: initializing slots, n_slots = 4")
    for slot in range(4):
        story.log(f"slot   load_model: id  {slot} | task -1 | new slot, n_ctx = 32768")
    assert (story.stack_state.server.slots, story.stack_state.server.ctx_per_slot) == (4, 32768)


def test_a_sleeping_server_forgets() -> None:
    """Sleep loses the KV cache: nothing is shown as held any more."""
    story = Story()
    story.turn(100, 0)
    story.log("que    start_loop: x\nsrv  x: entering sleeping state")
    assert story.stack_state.server.asleep
    assert story.stack_state.slots == ()
    story.log("srv  x: exiting sleeping state")
    assert not story.stack_state.server.asleep


def test_drift_is_shown() -> None:
    """Records that are not understood are counted, with a few samples."""
    stack_state = EMPTY
    for number in range(9):
        stack_state = reduce(stack_state, LogFactSeen(1.0, 1, UnknownRecord("slot", f"dancing {number}")))
    stack_state = reduce(stack_state, LogFactSeen(1.0, 1, UnknownRecord("slot", "dancing 0")))
    assert stack_state.log.drift == 10
    assert len(stack_state.log.drift_samples) == 5
    assert encode(stack_state)["log"]["drift"] == 10


def test_lines_and_notices_are_bounded() -> None:
    """Only the newest are kept."""
    stack_state = EMPTY
    for number in range(200):
        stack_state = reduce(stack_state, LogLineSeen(1.0, f"line {number}"))
        stack_state = reduce(stack_state, Notice(float(number), "info", f"notice {number}"))
    assert stack_state.log_lines == tuple(f"line {number}" for number in range(150, 200))
    assert len(stack_state.notices) == 50
    assert stack_state.notices[-1] == Notice(199.0, "info", "notice 199")


def test_the_warmup_is_shown() -> None:
    """What the warm-up did, and how long it took."""
    stack_state = reduce(EMPTY, WarmupEnded(1.0, "done", 7504, 7504, 812.5, boundary_tokens=7494))
    assert encode(stack_state)["warmup"] == {
        "outcome": "done",
        "prompt_tokens": 7504,
        "evaluated_tokens": 7504,
        "duration_ms": 812.5,
        "boundary_tokens": 7494,
        "snapshot": None,
        "is_proved": False,
        "detail": "",
        "is_running": False,
    }
    assert stack_state.warmup.warm_tokens == 7494
    assert reduce(EMPTY, WarmupEnded(1.0, "done", 7504, 7504)).warmup.warm_tokens == 7504
    assert reduce(EMPTY, WarmupEnded(1.0, "failed", 7504, boundary_tokens=7494)).warmup.warm_tokens is None


def test_a_restored_prefix_is_proved_or_not() -> None:
    """An answer decides; until then it is neither warm for sure nor failed."""
    restored = reduce(EMPTY, WarmupEnded(1.0, "done", 7494, 0, 8.0, boundary_tokens=7494, snapshot="restored"))
    assert restored.warmup.is_unproved
    assert [(slot.slot, slot.is_warmup, slot.tokens) for slot in restored.slots] == [(0, True, 7494)]
    good = reduce(restored, WarmupJudged(2.0, True, 7494))
    assert (good.warmup.is_proved, good.warmup.is_unproved, good.warmup.warm_tokens) == (True, False, 7494)
    bad = reduce(restored, WarmupJudged(2.0, False, 0, "it did not hold"))
    assert (bad.warmup.outcome, bad.warmup.detail, bad.warmup.warm_tokens) == ("failed", "it did not hold", None)
    assert not reduce(EMPTY, WarmupEnded(1.0, "done", 7494, 7494)).warmup.is_unproved


def test_nothing_is_warm_after_the_server_died() -> None:
    """What the warm-up did is lost with the process; the next one tells anew."""
    stack_state = reduce(EMPTY, StateChanged(1.0, State.READY, ""))
    stack_state = reduce(stack_state, WarmupEnded(1.0, "done", 7504, 7504))
    stack_state = reduce(stack_state, StateChanged(2.0, State.BACKOFF, "died"))
    assert stack_state.warmup.outcome == "pending"


def test_no_slot_outlives_its_server() -> None:
    """During the back-off nothing holds anything, whatever the log's last words are, until the next server tells."""
    story = Story()
    story.turn(3000, 0)
    story.log(
        "srv        update:  - cache state: 3 prompts, 210.500 MiB (limits: 1024.000 MiB, 65536 tokens, 70000 est)"
    )
    assert [slot.tokens for slot in story.stack_state.slots] == [3007]
    assert story.stack_state.ram_cache.prompts == 3
    limit = story.stack_state.ram_cache.limit_bytes
    running = story.launch()
    story.emit(StateChanged(story.now_s, State.BACKOFF, "died"))
    assert story.stack_state.slots == ()
    assert encode(story.stack_state)["slots"] == []
    assert (story.stack_state.ram_cache.prompts, story.stack_state.ram_cache.limit_bytes) == (None, limit)
    story.finish(running, 3100, 3000)
    assert story.stack_state.slots == ()
    story.emit(StateChanged(story.now_s, State.STARTING, "restart"))
    assert story.stack_state.slots == ()
    story.spawn()
    story.emit(StateChanged(story.now_s, State.LOADING, ""))
    assert story.stack_state.slots == ()
    story.emit(StateChanged(story.now_s, State.READY, ""))
    story.turn(500, 0, conversation="c2")
    assert [slot.tokens for slot in story.stack_state.slots] == [507]


def test_saved_and_lost_seconds() -> None:
    """Seconds come from the measured rate: here one token per millisecond."""
    story = Story()
    story.turn(10000, 0)
    story.turn(10050, 9996, items=4)
    story.turn(10100, 2000, items=6, difference=Difference(Cause.CLOCK, "system", 0))
    hit, partial = story.row(2), story.row(3)
    assert (hit.timing.saved_s, hit.timing.cost_s) == (pytest.approx(9.996), 0.0)
    assert (partial.timing.saved_s, partial.timing.cost_s) == (pytest.approx(2.0), pytest.approx(8.05))
    totals = story.stack_state.totals
    assert totals.saved_s == pytest.approx(0 + 9.996 + 2.0)
    assert totals.cost_s == pytest.approx(10.0 + 0 + 8.05)
    assert story.stack_state.prefill_tokens_per_s == pytest.approx(1000.0)


def test_seconds_never_go_back() -> None:
    """A log that comes late corrects verdict and rate, but what the totals have shown stays."""
    story = Story()
    story.turn(10000, 0)
    number = story.ask(items=4)
    task = story.launch(how="lcp", similarity=0.9)
    story.answer(number, 10050, 9050)
    story.end(number)
    before = story.stack_state.totals
    assert before.saved_s == 0.0  # the log may still tell that it was otherwise
    story.emit(MemorySampled(story.now_s + 4.0, 1))
    assert story.stack_state.totals.saved_s == 0.0
    story.emit(MemorySampled(story.now_s + 6.0, 1))
    shown = story.stack_state.totals
    assert (shown.saved_s, shown.cost_s) == (pytest.approx(9.05), pytest.approx(10.0 + 0.95))
    other = story.ask(conversation=None)
    story.finish(story.launch(1), 5000, 0, slot=1)
    story.answer(other, 5000, 0)
    story.end(other)
    story.finish(task, 10050, 9050)
    assert story.row(number).settled
    after = story.stack_state.totals
    assert after.saved_s == shown.saved_s
    assert after.cost_s == pytest.approx(shown.cost_s + 5.0)


def test_short_prefills_do_not_measure_the_rate() -> None:
    """A handful of tokens measures the overhead."""
    story = Story()
    story.turn(40, 0)
    assert story.stack_state.prefill_tokens_per_s is None
