"""Tests of plain lines."""

from __future__ import annotations

from dataclasses import replace

from kvstack.state.events import Event, Notice, RequestEnded, StateChanged, WarmupEnded, WarmupJudged
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView, RequestRow, ServerView
from kvstack.state.stack_state import StackState
from kvstack.state.verdict import Verdict
from kvstack.terminal.plain_lines import SETTLE_S, Announcer, Line, how_to_use, request_line
from tests.unit.state.rows import changed, request_row

ROW = request_row(
    id=7,
    time_s=100.0,
    method="POST",
    path="/v1/responses",
    api="responses",
    stream=True,
    items=8,
    ts_removed=2,
    msg_ids_removed=3,
    items_modified=3,
    phase="done",
    status=200,
    prompt=18402,
    cached=18377,
    evaluated=25,
    similarity_ratio=0.982,
    verdict=Verdict.HIT,
    settled=True,
)


def test_request_line_has_the_published_shape() -> None:
    """The line begins as published and goes on with similarity, tokens and verdict."""
    assert request_line(ROW) == (
        "POST /v1/responses | items=8 | ts_removed=2 | msg_ids_removed=3 | items_modified=3 | stream=True"
        " | sim_best=0.982 | cached=18377 | evaluated=25 | HIT"
    )


def test_what_is_not_known_is_a_dash() -> None:
    """Unknown figures are no zeros."""
    row = changed(ROW, similarity_ratio=None, cached=None, evaluated=None, verdict=None, stream=False)
    assert request_line(row).endswith(" | stream=False | sim_best=- | cached=- | evaluated=- | UNKNOWN")


def test_reason_and_status_follow_the_verdict() -> None:
    """A cause and a failed answer's status stand behind the verdict, on one line."""
    row = replace(ROW, verdict=Verdict.FAILED, error="bad\nJSON\x1b[2J", status=400)
    assert request_line(row).endswith(" | FAILED | why=bad JSON [2J | status=400")


def _snapshot(*rows: RequestRow) -> StackState:
    return StackState("box", ProxyView("http://127.0.0.1:1234"), State.READY, requests=rows)


def test_a_request_is_told_once_when_it_is_over() -> None:
    """Nothing is said before the end; then exactly one line."""
    announcer = Announcer()
    stack_state = _snapshot(ROW)
    assert announcer.settle(stack_state, 101.0) == []
    assert announcer.feed(RequestEnded(101.0, 7, 200, "done"), stack_state) == []
    assert announcer.settle(stack_state, 101.0) == [Line(request_line(ROW), is_data=True)]
    assert announcer.settle(stack_state, 102.0) == []


def test_a_request_waits_for_the_log_but_not_for_ever() -> None:
    """Figures of the log may come late; a request whose log never comes is told without them."""
    announcer = Announcer()
    early = changed(ROW, similarity_ratio=None, settled=False)
    announcer.feed(RequestEnded(101.0, 7, 200, "done"), _snapshot(early))
    assert announcer.settle(_snapshot(early), 101.0 + SETTLE_S / 2) == []
    assert announcer.settle(_snapshot(ROW), 101.0 + SETTLE_S / 2) == [Line(request_line(ROW), is_data=True)]
    announcer.feed(RequestEnded(103.0, 7, 200, "done"), _snapshot(early))
    assert announcer.settle(_snapshot(early), 103.0 + SETTLE_S) == [Line(request_line(early), is_data=True)]


def test_use_is_explained_once() -> None:
    """The first time that the stack is ready says how to use it; a restart does not repeat it."""
    announcer = Announcer()
    first = announcer.feed(StateChanged(1.0, State.READY, "warm"), _snapshot())
    assert first[0] == Line("ready: warm")
    assert any("http://127.0.0.1:1234/v1" in line.text for line in first)
    assert not any(line.is_data for line in first)
    assert announcer.feed(StateChanged(2.0, State.READY, "again"), _snapshot()) == [Line("ready: again")]


def test_where_there_is_no_log_none_is_offered() -> None:
    """The llama-server that a stack is attached to keeps its own."""
    own = "\n".join(how_to_use(_snapshot()))
    assert "kvstack status box | kvstack logs -f box | kvstack down box" in own
    attached = "\n".join(how_to_use(replace(_snapshot(), server=ServerView(is_attached=True))))
    assert "kvstack status box | kvstack down box" in attached
    assert "kvstack logs" not in attached


def test_an_attached_server_is_named_where_it_is_waited_for() -> None:
    """The line says who does not answer, and how."""
    stack = replace(_snapshot(), server=ServerView(url="http://10.0.0.5:8080", is_attached=True))
    event = StateChanged(1.0, State.LOADING, "nothing answers (connection refused)")
    assert Announcer().feed(event, stack) == [
        Line("loading: http://10.0.0.5:8080: nothing answers (connection refused)")
    ]


def test_a_warm_up_says_how_it_was_done() -> None:
    """Restored, saved, or why there is no snapshot; and what the first answer proved."""
    announcer = Announcer()

    def said(event: Event) -> str:
        (line,) = announcer.feed(event, _snapshot())
        assert not line.is_data
        return line.text

    restored = WarmupEnded(1.0, "done", 16512, 0, 8.0, boundary_tokens=16512, snapshot="restored")
    assert said(restored).startswith("warm-up: 16,512 tokens were restored from a snapshot in ")
    assert said(restored).endswith("; the first answer will prove it")
    saved = WarmupEnded(1.0, "done", 16512, 16512, 35_170.0, boundary_tokens=16512, snapshot="saved")
    assert said(saved).startswith("warm-up: 16,512 tokens were evaluated and saved as a snapshot in 35 s; ")
    chat = WarmupEnded(1.0, "done", 17_100, 17_100, 35_170.0, "no snapshot: why", boundary_tokens=16_512)
    assert said(chat).endswith("were evaluated in 35 s (no snapshot: why)")
    assert said(WarmupJudged(2.0, True, 16512)) == "warm-up: proved, 16,512 tokens were found cached"
    assert announcer.feed(WarmupJudged(2.0, False, 0, "x"), _snapshot()) == []  # a notice tells that


def test_notices_and_warm_up_are_talk() -> None:
    """Notices and the warm-up go to stderr, disarmed."""
    announcer = Announcer()
    notice = announcer.feed(Notice(1.0, "warning", "odd\x1b[1m text"), _snapshot())
    assert notice == [Line("warning: odd [1m text")]
    done = announcer.feed(WarmupEnded(1.0, "done", 16512, 16512, 35_170.0), _snapshot())
    assert done == [Line("warm-up: 16,512 tokens are warm, 16,512 were evaluated in 35 s")]
    # A text behind the prefix was evaluated as well, but nobody will ask for it.
    done = announcer.feed(WarmupEnded(1.0, "done", 17_100, 17_100, 35_170.0, boundary_tokens=16_512), _snapshot())
    assert done == [Line("warm-up: 16,512 tokens are warm, 17,100 were evaluated in 35 s")]
