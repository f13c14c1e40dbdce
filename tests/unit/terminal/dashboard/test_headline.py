"""Tests of the one sentence: is the cache working, and if not, why?"""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from kvstack.state.causes import Cause
from kvstack.state.events import Difference
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView, ServerView, SlotView, WarmupView
from kvstack.state.stack_state import StackState
from kvstack.state.verdict import Reason, ReasonKind, Verdict
from kvstack.terminal.dashboard.glyphs import ASCII, UNICODE, chart, sparkline
from kvstack.terminal.dashboard.headline import decode_speed_by_context, level_of, read, recent_reuse_ratio
from kvstack.terminal.dashboard.live import glyphs_for
from kvstack.terminal.dashboard.slots import eta_s, slot_lines
from tests.unit.state.rows import changed, request_row

NOW_S = 1000.0
READY = StackState("box", ProxyView("http://127.0.0.1:1234"), State.READY, state_since_s=900.0)
ROW = request_row(
    id=1, time_s=990.0, method="POST", path="/v1/chat/completions", api="chat", phase="done", status=200,
    prompt=1000, cached=990, evaluated=10, generated=100, prefill_ms=21.3,
    decode_ms=2500.0, verdict=Verdict.HIT,
)  # fmt: skip
MISSED = {"cached": 10, "evaluated": 990}
CLIENT_CHANGED = Reason(ReasonKind.CLIENT_CHANGED)
CLOCK = {"reason": CLIENT_CHANGED, "difference": Difference(Cause.CLOCK, "system", 57)}
ID = {"reason": CLIENT_CHANGED, "difference": Difference(Cause.ID, "system", 6)}
LOST_TO_4 = {"reason": Reason(ReasonKind.SLOT_LOST_TO_REQUEST, request=4, client="hermes")}
FIRST = {"reason": Reason(ReasonKind.FIRST_REQUEST)}


def test_every_verdict_has_a_level() -> None:
    """No verdict falls back to the level of what is not known."""
    assert {verdict for verdict in Verdict if level_of(verdict) == "idle"} == {"CANCELLED", "UNKNOWN"}
    assert level_of(Verdict.REPROCESS) == "bad"


@pytest.mark.parametrize(
    ("verdict", "changes", "level", "head", "detail"),
    [
        ("HIT", {}, "good", "CACHE WORKS", "99 % of the last prompt came from the cache"),
        ("WARM", {}, "good", "CACHE WORKS", "99 % of the last prompt came from the cache"),
        ("RESTORED", {}, "good", "CACHE WORKS", "99 % of the last prompt came from the cache"),
        ("COLD", {}, "warn", "COLD", "the last prompt found nothing cached: 10 tokens in 21ms"),
        ("PARTIAL", CLOCK, "warn", "CACHE PARTLY", "clock in system @57: 10 tokens in 21ms"),
        # What every chat begins with is no part of a prompt that came from the cache.
        ("PARTIAL", {**ID, **MISSED, "cached": 0}, "bad", "CACHE MISSED", "id in system @6: 990 tokens in"),
        ("PARTIAL", {**ID, **MISSED}, "bad", "CACHE MISSED", "id in system @6: 990 tokens in 21ms"),
        (
            "TRUNCATED",
            {"reason": Reason(ReasonKind.CONTEXT_FULL)},
            "warn",
            "CONTEXT FULL",
            "the context is full: 10 tokens in 21ms",
        ),
        (
            "REPROCESS",
            {"reason": Reason(ReasonKind.NO_CHECKPOINT, 1000, 990)},
            "bad",
            "CACHE MISSED",
            "1,000 tokens matched, 990 kept: no checkpoint: 10 tokens in 21ms",
        ),
        ("EVICTED", {"prefill_ms": None}, "bad", "CACHE MISSED", "EVICTED: 10 tokens evaluated"),
        ("EVICTED", LOST_TO_4, "bad", "CACHE MISSED", "evicted by request 4 (hermes): 10 tokens in 21ms"),
        ("TEMPLATE", {}, "bad", "CACHE MISSED", "TEMPLATE: 10 tokens in 21ms"),
        ("FAILED", {"error": "the model\x1b[2J crashed"}, "bad", "REQUEST FAILED", "the model [2J crashed"),
        ("FAILED", {"status": None}, "bad", "REQUEST FAILED", "no reason given"),
    ],
)
def test_the_last_request_is_read(verdict: str, changes: dict[str, object], level: str, head: str, detail: str) -> None:
    """The sentence names what the last request met, why, and what it cost."""
    row = changed(ROW, verdict=Verdict(verdict), **changes)
    reading = read(replace(READY, requests=(row,)), NOW_S)
    assert (reading.level, reading.head) == (level, head)
    assert reading.detail.startswith(detail)


def test_what_says_nothing_of_the_cache_is_passed_over() -> None:
    """Cancelled and unknown requests, side requests and lists of models leave the reading as it was."""
    rows = (
        ROW,
        changed(ROW, id=2, verdict=Verdict.CANCELLED),
        changed(ROW, id=3, verdict=Verdict.UNKNOWN, cached=None),
        changed(ROW, id=4, verdict=Verdict.COLD, side="title"),
        changed(ROW, id=5, verdict=Verdict.FAILED, api=None, method="GET", path="/v1/models"),
        changed(ROW, id=6, verdict=None, phase="forwarded"),
    )
    assert read(replace(READY, requests=rows), NOW_S).head == "CACHE WORKS"


def _recent(*verdicts: tuple[str, int, int, dict[str, object]]) -> StackState:
    """Requests of 1,000 tokens: verdict, cached, lost, reason."""
    rows = [
        changed(
            ROW, id=number, verdict=Verdict(verdict), cached=cached, evaluated=1000 - cached,
            lost=lost, **reason,
        )
        for number, (verdict, cached, lost, reason) in enumerate(verdicts)
    ]  # fmt: skip
    return replace(READY, requests=tuple(rows))


HIT = ("HIT", 990, 0, {})
COLD = ("COLD", 0, 1000, FIRST)
CHANGED = ("PARTIAL", 150, 840, CLOCK)
LOST = ("EVICTED", 0, 990, LOST_TO_4)


@pytest.mark.parametrize(
    ("verdicts", "head", "detail"),
    [
        ((COLD, CHANGED, LOST, HIT, HIT), "CACHE PARTLY", "43 % of the last 5 prompts reused; COLD: first request of"),
        (
            (COLD, CHANGED, CHANGED, HIT),
            "CACHE PARTLY",
            "32 % of the last 4 prompts reused; PARTIAL: clock in system @57",
        ),
        ((COLD, COLD, HIT), "CACHE PARTLY", "33 % of the last 3 prompts reused; COLD: first request"),
        ((HIT, LOST, HIT, LOST, HIT), "CACHE PARTLY", "59 % of the last 5 prompts reused; EVICTED: by request 4"),
        ((HIT, HIT, ("REPROCESS", 0, 990, {}), HIT), "CACHE PARTLY", "74 % of the last 4 prompts reused; most was"),
        # That a first prompt is evaluated once is no fault.
        ((COLD, ("HIT", 999, 0, {}), HIT), "CACHE WORKS", "66 % of the last 3 prompts came from the cache"),
        ((HIT,) * 9 + (CHANGED, HIT), "CACHE WORKS", "91 % of the last 10 prompts came from the cache"),
        ((LOST,) + (HIT,) * 10, "CACHE WORKS", "99 % of the last 10 prompts came from the cache"),
        # A long user text is evaluated and nothing is lost by that.
        ((("WARM", 300, 0, {}), ("HIT", 400, 0, {})), "CACHE WORKS", "35 % of the last 2 prompts came from the"),
    ],
)
def test_the_headline_agrees_with_the_rows(
    verdicts: tuple[tuple[str, int, int, str | None], ...], head: str, detail: str
) -> None:
    """A hit at the end is no green light while more is lost than saved, or what could be avoided is not small."""
    reading = read(_recent(*verdicts), NOW_S)
    assert (reading.head, reading.level) == (head, "good" if head == "CACHE WORKS" else "warn")
    assert reading.detail.startswith(detail)


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (State.STARTING, "attach", "http://10.0.0.5:8080: looking for the server (1 m 40 s so far)"),
        (State.LOADING, "nothing answers", "http://10.0.0.5:8080: nothing answers (1 m 40 s so far)"),
        (State.BACKOFF, "it is gone", "http://10.0.0.5:8080: it is gone: waiting until it is back (1 m 40 s so far)"),
    ],
)
def test_an_attached_server_is_waited_for_by_its_address(state: State, reason: str, words: str) -> None:
    """Nothing is said to be started or loaded where nothing is."""
    server = ServerView(url="http://10.0.0.5:8080", is_attached=True)
    assert read(replace(READY, state=state, reason=reason, server=server), NOW_S).detail == words


@pytest.mark.parametrize(
    ("warmup", "head", "words"),
    [
        (WarmupView("done", 16_512, 16_512, 1.0), "READY", "16,512 tokens are warm"),
        (WarmupView("done", 17_100, 17_100, 1.0, boundary_tokens=16_512), "READY", "16,512 tokens are warm"),
        (WarmupView("failed", detail="HTTP 500"), "READY, NOT WARM", "HTTP 500"),
        (
            WarmupView("done", 16_512, 0, 8.0, 16_512, "restored"),
            "READY",
            "16,512 tokens are restored, which it will prove",
        ),
        (
            WarmupView("done", 16_512, 16_512, 8.0, 16_512, "saved"),
            "READY",
            "16,512 tokens are saved, which it will prove",
        ),
        (WarmupView("done", 16_512, 0, 8.0, 16_512, "restored", True), "READY", "16,512 tokens are warm"),
        (WarmupView("no prefix known"), "READY", "nothing is warm yet"),
    ],
)
def test_before_the_first_request(warmup: WarmupView, head: str, words: str) -> None:
    """Before the first request the warm-up is what there is to say."""
    reading = read(replace(READY, warmup=warmup), NOW_S)
    assert reading.head == head
    assert words in reading.detail


def test_while_the_first_request_runs() -> None:
    """A first request that runs is not waited for."""
    row = changed(ROW, verdict=None, phase="forwarded")
    assert "runs" in read(replace(READY, requests=(row,)), NOW_S).detail
    unknown = changed(ROW, verdict=Verdict.UNKNOWN)
    assert read(replace(READY, requests=(unknown,)), NOW_S).head == "NO FIGURES YET"


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [
        (State.STARTING, "idle", "starting llama-server for 1 m 40 s"),
        (State.LOADING, "idle", "llama-server loads the model for 1 m 40 s"),
        (State.WARMING, "idle", "evaluating the prefix for 1 m 40 s"),
        (State.BACKOFF, "bad", "killed by signal 9; it restarts soon (2 restarts)"),
        (State.STOPPING, "idle", "open streams finish, then llama-server stops (killed by signal 9)"),
        (State.FAILED, "bad", "killed by signal 9"),
        (State.STOPPED, "idle", "killed by signal 9"),
    ],
)
def test_a_stack_that_is_not_ready_is_read_by_its_state(state: State, level: str, words: str) -> None:
    """What happens, and for how long, comes before what the cache did."""
    stack_state = replace(READY, state=state, reason="killed by signal 9", restarts=2, requests=(ROW,))
    reading = read(stack_state, NOW_S)
    assert (reading.level, reading.head) == (level, state.upper())
    assert words in reading.detail


def test_reuse_is_summed_over_the_last_ten() -> None:
    """Tokens are summed, so that a short prompt does not count as much as a long one; old requests fade out."""
    old = [changed(ROW, cached=0)] * 5
    new = [*[changed(ROW, cached=1000)] * 9, changed(ROW, prompt=9000, cached=0)]
    assert recent_reuse_ratio([*old, *new]) == pytest.approx(0.5)
    assert recent_reuse_ratio([changed(ROW, cached=None)]) is None


def test_decode_speed_by_context() -> None:
    """Speeds are grouped by powers of two of the context; answers of a few tokens do not count."""
    rows = [ROW, changed(ROW, prompt=9000, decode_ms=5000.0), changed(ROW, generated=2, decode_ms=1.0)]
    assert decode_speed_by_context(rows) == [(2048, 40.0), (16384, 20.0)]
    assert decode_speed_by_context([changed(ROW, decode_ms=None)]) == []


def _with_slots(*slots: SlotView) -> StackState:
    running = changed(ROW, verdict=None, phase="forwarded", client="openclaw", prompt=None)
    return replace(READY, requests=(running,), slots=slots)


def test_slots_panel() -> None:
    """A running prefill has a bar, tokens, time left and its owner; a slot that rests says what it holds."""
    busy = SlotView(
        0, 500, 99, "a", "openclaw", 1, task=7, running_prompt_tokens=18_402, processed_tokens=9201, tokens_per_s=460.05
    )
    rest = SlotView(1, 4096, 4000, "b", "hermes", 9, checkpoints=3)
    stack_state = _with_slots(busy, rest)
    assert eta_s(stack_state, busy) == pytest.approx(20.0)
    lines = [line.plain for line in slot_lines(stack_state, 80, 8, ASCII, idle=True)]
    assert lines[0] == " slot 0 ########........  50 %  9,201/18,402  ETA 20 s  openclaw request 1"
    assert lines[1] == " slot 1 holds 4,096  3 checkpoints  hermes request 9"
    assert len(slot_lines(stack_state, 80, 8, ASCII, idle=False)) == 1
    assert len(slot_lines(stack_state, 80, 1, ASCII, idle=True)) == 1


def test_a_slot_that_nobody_asked_for_through_the_proxy() -> None:
    """A task that bypasses the proxy is said to; the warm-up is named."""
    bypass = SlotView(0, 500, None, task=8)
    warmup = SlotView(1, 500, None, is_warmup=True, task=9)
    lines = [line.plain for line in slot_lines(_with_slots(bypass, warmup), 80, 8, UNICODE, idle=True)]
    assert lines[0].endswith("not through the proxy")
    assert lines[1].endswith("warm-up")


def test_sparkline_shows_the_newest_at_the_right() -> None:
    """Heights follow the ratios, what is not known is a dot, and old points fall out at the left."""
    points = [(0.0, ""), (0.5, ""), (None, ""), (0.99, ""), (1.0, "")]
    assert sparkline(points, 10, UNICODE).plain == "▁▅·██"
    assert sparkline(points, 2, UNICODE).plain == "██"
    assert sparkline(points, 0, UNICODE).plain == ""


def test_chart_has_the_threshold_as_a_line() -> None:
    """The threshold's row is dotted between the bars and labelled with its value."""
    rows = [row.plain for row in chart([(1.0, ""), (0.2, ""), (None, "")], 20, 4, 0.3, UNICODE)]
    assert [row[:6] for row in rows] == [" 1.00 ", "      ", " 0.30 ", " 0.00 "]
    assert [row[6] for row in rows] == ["█", "█", "█", "█"]
    assert rows[2][7] == "┄"
    assert rows[3][8] == "▆"
    assert rows[3][10] == "·"


@pytest.mark.parametrize(
    ("encoding", "glyphs"), [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), ("cp437", ASCII)]
)
def test_shapes_follow_the_encoding(encoding: str, glyphs: object) -> None:
    """A terminal whose encoding lacks the shapes gets ASCII."""
    assert glyphs_for(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is glyphs
