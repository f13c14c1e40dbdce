"""What is appended to the newest turn: the same bytes once it is answered, what is meant now when it is sent again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet

Message = dict[str, Any]
STRICT = "{{ raise_exception('Conversation roles must alternate') }}"
HELLO: Message = {"role": "user", "content": "hello"}
CALL: list[Message] = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
]


def send(system: str, messages: list[Message], rules: RuleSet, memory: ConversationMemory, template: str = "") -> Any:
    """Send a chat request; return the messages that go upstream."""
    body = json.dumps({"messages": [{"role": "system", "content": system}, *messages]}).encode()
    sent = apply_rules(body, "/v1/chat/completions", rules, memory, chat_template=template).body
    return json.loads(sent)["messages"]


@pytest.mark.parametrize("action", ["sticky", "tail", "coarsen"])
def test_a_clock_does_not_change_a_turn_in_its_tool_loop(ruled: Callable[..., RuleSet], action: Any) -> None:
    """What stands in front of a tool's result is cached; sent again without one, the turn has the new time."""
    rule = RulePatch(name="mine.clock", where="system", pattern=("Now: [[{time}]]\n",), action=action, text="[{value}]")
    rules, memory = ruled(added=(rule,)), ConversationMemory()
    first = send("Now: 20:48\nx", [HELLO], rules, memory)[1]["content"]
    assert "20:48" in first
    assert send("Now: 20:49\nx", [HELLO, *CALL], rules, memory)[1]["content"] == first


def test_several_texts_of_one_rule_stay_several(ruled: Callable[..., RuleSet]) -> None:
    """Each keeps its own, sent again and in the tool loop."""
    keys = RulePatch(name="openclaw.system-reply-id", keys=("reply_to_id", "thread_id"))
    rules, memory = ruled(added=(keys,)), ConversationMemory()
    meta = '```json\n{"schema": "openclaw.inbound_meta.v1", "reply_to_id": "7", "thread_id": "9"}\n```\n'
    wanted = "hello\n\n[reply_to_id: 7]\n\n[reply_to_id: 9]"
    for messages in ([HELLO], [HELLO], [HELLO, *CALL]):
        assert send(meta, messages, rules, memory)[1]["content"] == wanted
    assert send(meta.replace("9", "8"), [HELLO], rules, memory)[1]["content"] == wanted.replace("9", "8")


def test_a_turn_that_can_have_no_text_leaves_the_ones_before_alone(rules: RuleSet) -> None:
    """Nothing is merged into a turn that was answered."""
    memory = ConversationMemory()

    def carrier(number: int) -> Message:
        said = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx {number}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
        return {"role": "user", "content": said}

    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    send("running inside OpenClaw", said[:1], rules, memory, STRICT)
    first = send("running inside OpenClaw", [*said, HELLO, carrier(1)], rules, memory, STRICT)
    later = [*said, HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": None}, carrier(2)]
    assert send("running inside OpenClaw", later, rules, memory, STRICT)[:4] == first


@pytest.mark.parametrize("off", [{"enabled": False}, {"dialects": ("messages",)}])
def test_has_counts_for_a_rule_that_does_not_act_too(ruled: Callable[..., RuleSet], off: dict[str, Any]) -> None:
    """Messages that it does not mean are the user's: two conversations that differ in one are two."""
    rule = RulePatch(name="mine.x", where="message", pattern=("CTX {json}",), has={"kind": "ctx"}, action="drop", **off)
    rules, memory = ruled(added=(rule,)), ConversationMemory()
    names = set()
    for order in (1, 2):
        said = [HELLO, {"role": "user", "content": f'CTX {{"order": {order}}}'}, {"role": "assistant", "content": "y"}]
        for messages in (said[:2], [*said, HELLO]):
            body = json.dumps({"messages": messages}).encode()
            names.add((order, apply_rules(body, "/v1/chat/completions", rules, memory).conversation))
    assert len(names) == 2


def test_line_ends_behind_a_block_that_ends_with_a_line(ruled: Callable[..., RuleSet]) -> None:
    """They go with it, with or without a blank before them; behind a prefix in the line they are the user's."""
    mode = RulePatch(name="mine.mode", where="user head", pattern=("Mode: {line}",), action="drop")
    rules = ruled(added=(mode,))
    for text, wanted in (
        ("Mode: x\n\nwords", "words"),
        ("Mode: x \n\nwords", "words"),
        ("[Wed 2026-02-18 20:48 UTC] \n\nwords", "\n\nwords"),
    ):
        sent = send("x", [{"role": "user", "content": text}], rules, ConversationMemory())
        assert sent[1]["content"] == wanted
