"""Conversations that say the same, both remembered: a request that repeats one may be the other one's next."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet

Message = dict[str, Any]
HELLO: list[Message] = [{"role": "user", "content": "hello"}]
MORE: list[Message] = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "more"}]
NEXT: list[Message] = [*MORE, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "next"}]


def send(system: str, messages: list[Message], rules: RuleSet, memory: ConversationMemory, **headers: str) -> list[str]:
    """Send a chat request; return the texts that go upstream."""
    body = json.dumps({"messages": [{"role": "system", "content": system}, *messages]}).encode()
    sent = json.loads(apply_rules(body, "/v1/chat/completions", rules, memory, list(headers.items())).body)
    return [message["content"] for message in sent["messages"]]


def pi(day: str) -> str:
    """Pi's system text."""
    return f"operating inside pi, a coding agent harness\nCurrent date: {day}\nCurrent working directory: /x"


def test_yesterdays_script_and_todays(rules: RuleSet) -> None:
    """Each keeps its own date, and none is told the other one's."""
    memory, one, two = ConversationMemory(), pi("2026-11-29"), pi("2026-11-30")
    for system in (one, two):
        for messages in (HELLO, MORE):
            assert send(system, messages, rules, memory) == [system, *(item["content"] for item in messages)]
    for system in (one, two):
        assert send(system, NEXT, rules, memory) == [system, *(item["content"] for item in NEXT)]


def test_git_status_of_another_start(rules: RuleSet) -> None:
    """A value that nobody announces stays with its conversation."""
    memory = ConversationMemory()
    for branch in ("old", "new"):
        system = f'an agent in the Continue CLI\n<context name="gitStatus">branch {branch}</context>'
        for messages in (HELLO, MORE):
            assert send(system, messages, rules, memory)[0] == system


def test_the_same_chat_begun_anew(rules: RuleSet) -> None:
    """A carrier of the former session never stands in the new one, not even in the same chat."""
    memory = ConversationMemory()

    def carrier(number: int) -> Message:
        said = f'"chat_id": "7", "message_id": "m{number}"'
        return {
            "role": "user",
            "content": f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{said}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
        }

    system = "running inside OpenClaw"
    for number, messages in enumerate((HELLO, MORE)):
        send(system, [*messages, carrier(number)], rules, memory)
    first = send(system, [*HELLO, carrier(2)], rules, memory)
    second = send(system, [*MORE, carrier(3)], rules, memory)
    assert not any("m0" in text or "m1" in text for text in (*first, *second))
    assert "m3" in second[-1]


def test_a_repetition_is_one_where_nobody_else_waits(rules: RuleSet) -> None:
    """The same request again gets what it got, also while a stranger with other words waits."""
    memory, one = ConversationMemory(), pi("2026-11-29")
    send(one, HELLO, rules, memory)
    send(one, [{"role": "user", "content": "other words"}], rules, memory)
    send(one, MORE, rules, memory)
    first = send(pi("2026-11-30"), NEXT, rules, memory)
    assert first == [one, "hello", "Hi", "more", "ok", "next\n\n[Current date: 2026-11-30]"]
    assert send(pi("2026-11-30"), NEXT, rules, memory) == first


def test_a_session_may_hold_several_conversations(rules: RuleSet, ruled: Callable[..., RuleSet]) -> None:
    """Agents of one session that begin with the same words: its name does not tell them apart, so neither is taken."""
    rule = RulePatch(name="mine.secret", where="system", pattern=("Secret: [[{word}]]\n",), action="sticky")
    own, memory = ruled(added=(rule,)), ConversationMemory()
    session = {"user-agent": "opencode/1", "x-session-id": "s"}
    for secret in ("p1", "q1"):
        assert send(f"Secret: {secret}\nx", HELLO, own, memory, **session)[1] == f"hello\n\nSecret: {secret}"
    assert send("Secret: p2\nx", MORE, own, memory, **session)[1:] == ["hello", "Hi", "more\n\nSecret: p2"]


def test_a_repetition_while_another_one_waits_is_not_taken_for_its_next(rules: RuleSet) -> None:
    """Where both could be, it is neither: what the model was told is at most told again, in its own words."""
    memory, one, two = ConversationMemory(), pi("2026-11-29"), pi("2026-11-30")
    send(one, HELLO, rules, memory)
    send(one, MORE, rules, memory)
    assert send(two, NEXT, rules, memory)[0] == one
    send(two, HELLO, rules, memory)
    send(two, MORE, rules, memory)
    assert send(two, NEXT, rules, memory) == [two, "hello", "Hi", "more", "ok", "next"]
