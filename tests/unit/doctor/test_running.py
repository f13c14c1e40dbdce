"""The doctor on a stack that runs, or that gave up: its state, its warm-up, and what keeps its cache from working."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.doctor import Facts, Finding, Severity, diagnose
from kvstack.state.causes import Cause
from kvstack.state.events import Difference, StateChanged, WarmupEnded
from kvstack.state.lifecycle import State
from kvstack.state.verdict import Verdict
from tests.unit.state.rows import request_row
from tests.unit.state.story import Story


def found(story: Story | None = None, server: str = 'model = "m"', **more: object) -> dict[str, Finding]:
    """Findings by their codes."""
    config = parse_config(f'name = "box"\n[server]\n{server}', Path("/etc/box.toml"), Path("/"))
    facts = Facts(config, running=story.stack_state if story is not None else None, **more)  # type: ignore[arg-type]
    return {finding.code: finding for finding in diagnose(facts)}


def test_the_most_frequent_cause_is_named_with_its_remedy() -> None:
    """Most requests missed the cache because of one id: the doctor names it, how often, and what helps."""
    story = Story()
    story.turn(2900, 0, conversation="c0", how="lru")
    for number in range(1, 15):
        story.turn(
            2950,
            0,
            conversation=f"c{number}",
            difference=Difference(Cause.ID, "messages[0].content", number, 0),
            how="lru",
        )
    for items in range(2, 10):
        story.turn(2950 + items, 2940, conversation="c14", items=2 + items)
    finding = found(story)["cache-missed"]
    assert finding.severity is Severity.WARNING
    assert finding.what.startswith("14 of the last 23 requests ")
    assert finding.what.endswith(": id in messages[0].content")
    assert "request 15" in finding.evidence
    assert "add a rule with `drop` for this id" in finding.remedy
    assert "`kvstack explain 15`" in finding.remedy


def test_every_verdict_has_its_words() -> None:
    """Whatever keeps happening can be told."""
    for verdict in Verdict:
        row = request_row(verdict=verdict, prompt=9, cached=0, lost=9, phase="done")
        story = Story()
        story.stack_state = replace(story.stack_state, requests=(row, replace(row, id=2)))
        good = verdict in {"HIT", "WARM", "RESTORED", "CANCELLED", "FAILED", "UNKNOWN"}
        assert ("cache-missed" in found(story)) is not good


@pytest.mark.parametrize("changes", [0, 1])
def test_a_cache_that_works_is_no_finding(changes: int) -> None:
    """First prompts, and one change, are no habit."""
    story = Story()
    story.turn(2900, 0, how="lru")
    for number in range(changes):
        story.turn(2950, 0, items=4 + number, difference=Difference(Cause.CLOCK, "messages[0].content", 6, 0))
    for items in range(6, 16):
        story.turn(2950 + 10 * items, 2940 + 10 * items, items=items)
    assert found(story) == {}


def test_evictions_are_one_cause_whoever_took_the_slot() -> None:
    """Each was by another request; what helps is the same."""
    story = Story()
    story.turn(2900, 0, items=2, how="lru")
    for items in range(4, 12, 2):
        story.turn(400, 10, conversation="t", side="title", items=1, how="lru")
        story.turn(2900 + items, 12, items=items, how="lru")
    finding = found(story)["cache-missed"]
    assert finding.what.startswith("4 of the last 5 requests ")  # (titles are small, and no conversation)
    assert finding.what.endswith("their conversation had lost its slot to another one")
    assert "server.cache_ram_mib" in finding.remedy


def test_a_warm_up_that_failed() -> None:
    """The stack serves without it, so nobody else would tell."""
    story = Story()
    story.emit(WarmupEnded(story.now_s, "failed", detail="HTTP 400: no such model"))
    finding = found(story)["warmup-failed"]
    assert (finding.severity, finding.evidence) == (Severity.WARNING, "HTTP 400: no such model")
    assert "`kvstack warmup box`" in finding.remedy


def test_a_warm_up_that_did_not_fit() -> None:
    """No other warm-up helps there: the server has to be started with more room."""
    story = Story()
    detail = "HTTP 400: the request (1300 tokens) exceeds the available context size (512 tokens)"
    story.emit(WarmupEnded(story.now_s, "failed", detail=detail))
    remedy = found(story)["warmup-failed"].remedy
    assert "raise server.ctx_size" in remedy
    assert "start the stack again" in remedy


@pytest.mark.parametrize(
    ("state", "restarts", "code", "severity"),
    [
        (State.FAILED, 3, "stack-failed", Severity.ERROR),
        (State.BACKOFF, 1, "server-died", Severity.ERROR),
        (State.READY, 2, "server-died", Severity.WARNING),
        (State.READY, 0, None, None),
    ],
)
def test_a_server_that_died(state: State, restarts: int, code: str | None, severity: Severity | None) -> None:
    """Whether it gave up, is about to start again or runs again: the log has the server's last words."""
    story = Story()
    story.emit(StateChanged(story.now_s, state, "llama-server was ended by signal 11", restarts))
    shown = found(story)
    assert list(shown) == ([code] if code else [])
    if code is not None:
        assert shown[code].severity is severity
        assert "`kvstack logs box`" in shown[code].remedy


def test_a_last_run_that_failed() -> None:
    """A stack that gave up is gone; what it said in the end is told."""
    end = (
        "The stack's last run failed: llama-server died",
        "all 3 restarts are used up\n2 min ago",
        "Look at the log.",
    )
    finding = found(last_end=end)["stack-failed"]
    assert (finding.severity, finding.what, finding.evidence, finding.remedy) == (Severity.ERROR, *end)
    assert "stack-failed" not in found(Story(), last_end=end)


def test_a_server_that_is_attached_to_and_does_not_answer() -> None:
    """Clients would wait for nothing."""
    url = 'url = "http://127.0.0.1:9"'
    finding = found(server=url, unreachable="connection refused")["server-unreachable"]
    assert (finding.severity, finding.evidence) == (
        Severity.ERROR,
        "server.url = http://127.0.0.1:9: connection refused",
    )
    assert found(server=url) == {}
