"""The one value that a request becomes: what it holds beside the body to send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.prompt.diff.previous import FormerRequests
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.state.causes import Cause

CHAT = "/v1/chat/completions"
META = '```json\n{{"schema": "openclaw.inbound_meta.v1", "message_id": "{}"}}\n```\n'
BASH = {"name": "Bash", "description": "Commit.\nCo-Authored-By: Claude"}


def ask(system: str, *said: str, **more: Any) -> bytes:
    """A chat request; what was said, the user first, then in turns."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    return json.dumps({"messages": [{"role": "system", "content": system}, *turns], **more}).encode()


def test_a_request_is_compared_with_its_former_one_by_number(rules: RuleSet) -> None:
    """The former request is named by the caller's number, and what differs is a value."""
    memory, formers = ConversationMemory(), FormerRequests()

    def send(number: int, body: bytes) -> RewriteResult:
        return apply_rules(body, CHAT, rules, memory, number=number, formers=formers)

    first = send(7, ask(f"{META.format(1)}rest", "hi"))
    second = send(9, ask(f"{META.format(2)}rest", "hi", "yo", "more"))
    third = send(12, ask(f"{META.format(3)}other", "hi", "yo", "more", "ok", "on"))
    assert (first.former, first.found_difference) == (None, None)
    assert (second.former, second.found_difference, second.conversation) == (7, None, first.conversation)
    assert third.former == 9
    assert third.found_difference is not None
    assert third.found_difference.difference.cause is Cause.SYSTEM_CHANGED


def test_a_comparison_that_fails_costs_the_explanation_alone(rules: RuleSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rules made is sent, with a warning."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    formers = FormerRequests()
    monkeypatch.setattr(formers, "compare", fail)
    body = ask(META.format(1), "hi")
    result = apply_rules(body, CHAT, rules, number=1, formers=formers)
    assert result.body != body
    assert "ZeroDivisionError" in result.warnings[-1]


def test_head_fingerprint_is_taken_after_the_rules(rules: RuleSet) -> None:
    """Ids that rules drop and all that was said make no difference; tools and other system texts do."""

    def head(body: bytes) -> str | None:
        return apply_rules(body, CHAT, rules).head_fingerprint

    one = head(ask(META.format(1), "hi", tools=[BASH], max_tokens=5))
    assert one == head(ask(META.format(2), "ho", "yo", "more", tools=[BASH], temperature=0.5))
    others = [
        ask(META.format(1) + "x", "hi", tools=[BASH]),
        ask(META.format(1), "hi"),
        ask("x", "hi", tool_choice="none"),
    ]
    assert one not in {head(body) for body in others}
    assert head(b"{") is None


def test_head_fingerprint_holds_the_frozen_value_of_a_tool(rules: RuleSet) -> None:
    """A tool's description counts as it goes out."""
    memory, header = ConversationMemory(), [("user-agent", "claude-cli/2.1.197")]
    other = {**BASH, "description": "Commit.\nCo-Authored-By: Claude (1M context)"}
    said, fingerprints = ["one", "yes", "two", "ok", "three"], []
    for turns, tool in ((1, BASH), (3, BASH), (5, other)):
        body = json.dumps(
            {
                "system": "x",
                "messages": [{"role": ("user", "assistant")[n % 2], "content": s} for n, s in enumerate(said[:turns])],
                "tools": [tool],
            }
        ).encode()
        fingerprints.append(apply_rules(body, "/v1/messages", rules, memory, header).head_fingerprint)
    assert len(set(fingerprints)) == 1


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]


def head_of(body: dict[str, Any], rules: RuleSet) -> str | None:
    """The head fingerprint of a chat request."""
    return apply_rules(json.dumps(body).encode(), CHAT, rules).head_fingerprint


def test_requests_of_one_prefix_have_one_head(rules: RuleSet) -> None:
    """What a warm-up sends, and what its client sends later: another question, other figures, one head."""
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "first"}
    recorded = {"model": "m", "messages": [system, user], "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    warm = head_of(recorded, rules)
    later = recorded | {"temperature": 0.5, "stream": True, "model": "n", "max_tokens": 9}
    later["messages"] = [system, user, {"role": "assistant", "content": "A"}, {"role": "user", "content": "second"}]
    assert warm == head_of(later, rules) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "system", "content": "T"}]},
        {"messages": [{"role": "user", "content": "S"}]},
        {"tools": []},
        {"chat_template_kwargs": {"x": 2}},
        {"reasoning_effort": "high"},
        {"something_new": 1},
    ],
)
def test_what_may_render_otherwise_is_another_head(change: dict[str, Any], rules: RuleSet) -> None:
    """Rather one head too many: that costs one conversation a moment, the contrary leaves a prefix cold."""
    body = {"messages": [{"role": "system", "content": "S"}], "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    assert head_of(body, rules) != head_of(body | change, rules)


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"[" * 100_000, b"\xff"])
def test_what_is_no_chat_request_has_no_head(body: bytes, rules: RuleSet) -> None:
    """Whatever a client sends."""
    assert apply_rules(body, CHAT, rules).head_fingerprint is None
