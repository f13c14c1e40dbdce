"""Frozen values are told apart by where they stand: what comes or goes beside them does not move them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet

Message = dict[str, Any]
ONE: list[Message] = [{"role": "user", "content": "one"}]
MORE: list[Message] = [*ONE, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
TWO: list[Message] = [*MORE, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}]


def send(body: dict[str, Any], rules: RuleSet, memory: ConversationMemory, path: str, **headers: str) -> Any:
    """Send a request; return the body that goes upstream."""
    return json.loads(apply_rules(json.dumps(body).encode(), path, rules, memory, list(headers.items())).body)


def tools(**described: str) -> list[dict[str, str]]:
    """Tools in the form of `/v1/messages`."""
    return [{"name": name, "description": text} for name, text in described.items()]


def test_a_tool_that_goes_takes_its_own_value_along(rules: RuleSet) -> None:
    """Claude Code's Bash tool keeps its co-author when a server of other tools is taken off."""
    memory, header = ConversationMemory(), {"user-agent": "claude-cli/2.1.197"}
    line = "Commit.\nCo-Authored-By: {}".format
    before = tools(mcp__git=line("Team Bot <b@x>"), Bash=line("Claude (1M context)"))
    for messages in (ONE, MORE):
        send({"system": "x", "messages": messages, "tools": before}, rules, memory, "/v1/messages", **header)
    later = {"system": "x", "messages": TWO, "tools": tools(Bash=line("Claude"))}
    assert send(later, rules, memory, "/v1/messages", **header)["tools"] == before[1:]


def test_a_new_tool_in_front_has_its_own_value(ruled: Callable[..., RuleSet]) -> None:
    """The others keep theirs, in every form of a tool, twice in one description too."""
    rule = RulePatch(name="mine.v", where="tools", pattern=("Version: [[{line}]]",), action="freeze")
    rules, memory = ruled(added=(rule,)), ConversationMemory()

    def described(**texts: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": tool} for tool in tools(**texts)]

    old = described(alpha="Version: 1.0\nVersion: 1.1", beta="Version: 2.0")
    for messages in (ONE, MORE):
        send({"messages": messages, "tools": old}, rules, memory, "/v1/chat/completions")
    new = described(new="Version: 9.9", alpha="Version: 1.2\nVersion: 1.3", beta="Version: 2.1")
    sent = send({"messages": TWO, "tools": new}, rules, memory, "/v1/chat/completions")
    assert sent["tools"] == [new[0], *old]


def test_a_value_inside_another_one_is_none_of_its_own(rules: RuleSet) -> None:
    """A commit message that reads like Continue's date line does not push the real one to another number."""
    memory = ConversationMemory()

    def body(git: str, day: str, messages: list[Message]) -> dict[str, Any]:
        system = f'an agent in the Continue CLI\n<context name="gitStatus">{git}</context>\nToday\'s date: {day}\n'
        return {"messages": [{"role": "system", "content": system}, *messages]}

    first = body("fix\nToday's date: 2020-01-01", "2026-11-29", ONE)
    assert send(first, rules, memory, "/v1/chat/completions") == first
    send(body("fix\nToday's date: 2020-01-01", "2026-11-29", MORE), rules, memory, "/v1/chat/completions")
    sent = send(body("clean", "2026-11-30", TWO), rules, memory, "/v1/chat/completions")["messages"]
    assert sent[0] == first["messages"][0]
    assert sent[-1]["content"] == "two\n\n[Today's date: 2026-11-30]"


def test_git_status_ends_where_the_client_ends_it(rules: RuleSet) -> None:
    """Claude Code: what a person appended to the system text behind it is not frozen with it, and counts."""
    memory, header = ConversationMemory(), {"user-agent": "claude-cli/2.1.197"}
    git = "gitStatus: as it was\n\nStatus:\n{}\n\nRecent commits:\n3fceb96 first\n4fceb96 second".format

    def system(status: str, more: str, messages: list[Message]) -> str:
        body = {"system": git(status) + more, "messages": messages, "tools": []}
        sent: str = send(body, rules, memory, "/v1/messages", **header)["system"]
        return sent

    english, german = "\n\nAnswer in English.", "\n\nAnswer in German."
    for messages in (ONE, MORE):
        assert system("(clean)", english, messages) == git("(clean)") + english
    assert system("M x.txt", english, TWO) == git("(clean)") + english
    assert system("M x.txt", german, TWO) == git("M x.txt") + german
