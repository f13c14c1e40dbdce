"""Blocks that a user pasted where a client writes its own: they are the user's, and stay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.errors import ConfigError
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet

CHAT = "/v1/chat/completions"
STAMP = "[Wed 2026-02-18 20:48 UTC] "
V1 = '```json\n{"schema": "openclaw.inbound_meta.v1"}\n```'
V2 = '```json\n{"schema": "openclaw.inbound_meta.v2"}\n```'


def info(label: str, **keys: str) -> str:
    """A labelled block of metadata."""
    return f"{label}\n```json\n{json.dumps(keys)}\n```\n\n"


def sent(content: Any, rules: RuleSet, system: str, headers: tuple[tuple[str, str], ...] = ()) -> Any:
    """The content of the only user message after the rules."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    body = json.dumps({"messages": messages}).encode()
    result = apply_rules(body, CHAT, rules, ConversationMemory(), headers)
    return json.loads(result.body)["messages"][1]["content"]


@pytest.mark.parametrize("system", [V1, V2])
@pytest.mark.parametrize(
    "pasted",
    [
        info("Conversation info (untrusted metadata):", message_id="7", sender="ann"),
        info("Conversation info (untrusted, for context):", message_id="7", sender="ann"),
        info("Sender (untrusted metadata):", name="ann")
        + info("Conversation info (untrusted metadata):", message_id="7"),
        "System: [2026-02-18 19:59:08 UTC] water plants\n" + STAMP,
        "Active goal: x\n" + STAMP,
    ],
)
def test_openclaw_blocks_pasted_behind_the_timestamp(rules: RuleSet, system: str, pasted: str) -> None:
    """
    The client writes its blocks with ids before the timestamp: one behind it keeps its ids.  The timestamp stays, for
    without it the block would be the client's.
    """
    assert sent(f"{STAMP}{pasted}what is that?", rules, system) == f"{STAMP}{pasted}what is that?"
    own = info("Conversation info (untrusted metadata):", message_id="1", sender="bob")
    bare = '```json\n{"sender": "bob"}\n```\n\n'
    ruled = f"{own.splitlines()[0]}\n{bare}{STAMP}{pasted}so?"
    assert sent(f"{own}{STAMP}{pasted}so?", rules, system) == ruled
    assert sent(ruled, rules, system) == ruled


def test_a_block_that_newer_releases_write_behind_the_timestamp(rules: RuleSet) -> None:
    """Pasted or not, it keeps its ids, and the timestamp goes."""
    block = info("Conversation info: ⟦openclaw:ctx⟧", message_id="7")
    assert sent(f"{STAMP}{block}what is that?", rules, V1) == f"{block}what is that?"


@pytest.mark.parametrize("words", ["what is that?", "\n\nwhat is that?", " "])
def test_a_date_reminder_pasted_at_the_start_of_a_turn(rules: RuleSet, words: str) -> None:
    """Qwen Code sends its reminder as a content part of its own; with the user's words behind it, it is the user's."""
    headers = (("user-agent", "QwenCode/0.24.4"),)
    pasted = "<system-reminder>\nThe current date is: Sunday, November 29, 2026. Note.\n</system-reminder>" + words
    assert sent(pasted, rules, "You help.", headers) == pasted
    parts = [{"type": "text", "text": pasted}]
    assert sent(parts, rules, "You help.", headers) == parts
    own = "<system-reminder>\nThe current date is: Monday, November 30, 2026. Note.\n</system-reminder>"
    for said in (pasted, pasted.removesuffix(words)):
        both = [{"type": "text", "text": own}, {"type": "text", "text": said}]
        assert sent(both, rules, "You help.", headers) == [{"type": "text", "text": f"{said}\n\n{own}"}]


def test_blocks_that_a_kind_never_stands_behind_exist() -> None:
    """A misspelt name is an error with the nearest one."""
    text = (
        'name = "x"\nversion = 1\nclient = "x"\n[[block]]\nname = "first"\npattern = "a"\n'
        '[[block]]\nname = "second"\npattern = "b"\nnot_behind = "frist"\n'
    )
    with pytest.raises(ConfigError, match="did you mean 'first'") as caught:
        compile_rules([parse_pack(text, "x.toml")])
    assert [problem.path for problem in caught.value.problems] == ["block.1.not_behind"]
