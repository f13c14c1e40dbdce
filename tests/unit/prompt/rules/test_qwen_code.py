"""Qwen Code: the date that stands in front of the newest turn only, whatever that turn holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet

Part = dict[str, Any]
FIRST, OTHER = "Monday, November 30, 2026", "Tuesday, December 1, 2026"
IMAGE: Part = {"type": "image_url", "image_url": {"url": "data:,"}}


def text(words: str) -> Part:
    """A text part."""
    return {"type": "text", "text": words}


def reminder(day: str) -> Part:
    """What stands in front of the newest turn."""
    return text(f"<system-reminder>\nThe current date is: {day}. Note.\n</system-reminder>")


OPENING = text(f"<system-reminder>\nToday's date is {FIRST}.\n</system-reminder>")


@pytest.mark.parametrize("beside", [[IMAGE], [IMAGE, text("this")], [text("this"), IMAGE], [IMAGE, IMAGE]])
@pytest.mark.parametrize("day", [FIRST, OTHER])
def test_a_turn_with_an_image(rules: RuleSet, beside: list[Part], day: str) -> None:
    """The reminder goes if the first turn says the same, else behind the words: live and in history the same bytes."""
    memory = ConversationMemory()

    def send(*turns: list[Part]) -> list[Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
        for number, parts in enumerate(turns):
            messages += [{"role": "assistant", "content": f"answer {number}"}] if number else []
            messages.append({"role": "user", "content": parts})
        body = json.dumps({"messages": messages}).encode()
        headers = [("user-agent", "QwenCode/0.24.4")]
        sent = json.loads(apply_rules(body, "/v1/chat/completions", rules, memory, headers).body)["messages"]
        return [message["content"] for message in sent if message["role"] == "user"]

    opening = [OPENING, text("hello")]
    send(opening)
    live = send(opening, [reminder(day), *beside])
    history = send(opening, beside, [reminder(day), text("more")])
    assert live[1] == history[1]
    said = "\n".join(part.get("text", "<image>") for part in live[1])
    assert said.count("<image>") == beside.count(IMAGE)
    assert said.count("this") == len([part for part in beside if "text" in part])
    assert said.count(reminder(day)["text"]) == (day == OTHER)
    assert not said.startswith("<system-reminder>")
