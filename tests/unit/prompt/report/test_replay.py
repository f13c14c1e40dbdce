"""Rules tried on recorded requests: what matched and did nothing, and why a request is not the next one of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.recording import Recorded, read_recording
from kvstack.prompt.report.mismatch import Mismatch, MismatchReason
from kvstack.prompt.report.replay import ReplayResult, try_requests, unmatched_rules
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.prompt.rules.trace import Trace
from kvstack.state.causes import Cause
from tests.golden.rules.corpus import load, names

CLOCK = RulePatch(name="mine.clock", where="system", pattern=("Current time: [[{date} {time}]]",), action="freeze")
IDS = ("0e7c9a52-6c1f-4a1e-9b7e-3f0a51c2d8e4", "b1946ac9-2492-4d23-8f4c-6d2f5e8a7c10")
PROSE = "Plants want water, light and a little patience. Answer in one sentence. "


def request(n: int, *, system: str, **more: Any) -> dict[str, Any]:
    """The nth request of a conversation, from 0."""
    turns = [{"role": "user", "content": "how often do ferns want water?"}]
    for number in range(n):
        turns += [
            {"role": "assistant", "content": f"answer {number}: twice a week, less in winter"},
            {"role": "user", "content": f"question {number}: and the moss beside them?"},
        ]
    return {**more, "messages": [{"role": "system", "content": system}, *turns]}


def record(*bodies: dict[str, Any], **more: Any) -> list[Recorded]:
    """Record bodies as `kvstack capture` does."""
    return read_recording("\n".join(json.dumps({"body": body, "headers": {}, **more}) for body in bodies))


def idle(one: ReplayResult) -> list[tuple[str, str, str]]:
    """The rules that matched and did nothing, where and why."""
    return [(found.rule, found.path, found.why) for found in one.stripped.unchanged]


def test_a_frozen_value_is_idle_until_it_changes(ruled: Callable[..., RuleSet]) -> None:
    """First it is kept, then it is the same, then it is replayed."""
    clocks = ["2026-02-18 20:48", "2026-02-18 20:48", "2026-02-18 20:49"]
    bodies = [request(n, system=f"{PROSE}\nCurrent time: {clock}\n") for n, clock in enumerate(clocks)]
    tried = try_requests(record(*bodies), ruled(added=(CLOCK,)))
    where = ("mine.clock", "messages[0].content")
    assert idle(tried[0]) == [(*where, "first value of a new conversation, kept for its next requests")]
    assert idle(tried[1]) == [(*where, "still the first value of its conversation")]
    assert idle(tried[2]) == []
    assert [(shown.rules, shown.removed, shown.inserted) for shown in tried[2].edits] == [
        (("mine.clock",), "2026-02-18 20:49", "2026-02-18 20:48")
    ]


def test_what_keeps_a_request_from_its_conversation_is_named(ruled: Callable[..., RuleSet]) -> None:
    """A changing id beside the frozen clock: named is the id, as the client wrote it, and not the clock before it."""
    systems = [f"Current time: 2026-02-18 20:4{n}\nRequest {uuid}\n{PROSE}" for n, uuid in enumerate(IDS)]
    bodies = [request(n, system=system) for n, system in enumerate(systems)]
    _, second = try_requests(record(*bodies), ruled(added=(CLOCK,)))
    assert second.stripped.starts
    assert second.new is not None
    assert second.new.like == 1
    place = systems[0].index(IDS[0])
    assert second.new.mismatch == Mismatch(MismatchReason.TEXT, "system", "messages[0].content", place, Cause.ID)
    assert second.compared is not None
    # Nothing was frozen yet, so what the server has ends at the clock, with the rules and without them.
    assert second.compared.before.common == second.compared.after.common
    assert second.compared.after.common.shared == systems[0].index("0\nRequest")


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({}, {"system": "Be brief."}, None),
        ({"n": 1}, {"n": 0}, MismatchReason.UNANSWERED),
        ({"n": 2}, {"n": 1}, MismatchReason.SHORTER),
        (
            {"n": 1, "model": "a", "prompt_cache_key": "x"},
            {"n": 2, "model": "a", "prompt_cache_key": "y"},
            MismatchReason.SESSION,
        ),
    ],
)
def test_other_reasons(rules: RuleSet, one: dict[str, Any], other: dict[str, Any], why: MismatchReason | None) -> None:
    """What is nowhere alike is just another conversation; else the reason is one that the memory has."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("sessions_yield", "tool_describe")]
    tools.append({"type": "function", "function": {"name": "tool_search"}})
    bodies = [request(**({"n": 0, "system": PROSE * 3, "tools": tools} | said)) for said in (one, other)]
    if why is None:
        bodies[1]["messages"][1]["content"] = "quite another thing"
    _, second = try_requests(record(*bodies), rules)
    assert second.new is not None
    assert second.new.mismatch == (None if why is None else Mismatch(why))
    assert second.new.like == (None if why is None else 1)


def test_an_edited_turn_is_named(rules: RuleSet) -> None:
    """The user's text that differs is where the conversation parts."""
    bodies = [request(n, system=PROSE * 3) for n in (1, 2)]
    bodies[1]["messages"][1]["content"] = "how often do palms want water?"
    _, second = try_requests(record(*bodies), rules)
    assert second.new is not None
    assert second.new.mismatch == Mismatch(MismatchReason.TEXT, "user", "messages[1].content", 13, Cause.HISTORY_EDITED)


def test_every_conversation_is_compared_with_its_own_last_request(rules: RuleSet) -> None:
    """Two that take turns: each request goes on from the one before the last."""
    other = "Sing a song of sixpence, and do it in French, please. " * 4
    bodies = [request(n, system=system) for n in (0, 1) for system in (PROSE * 3, other)]
    tried = try_requests(record(*bodies), rules)
    assert [one.stripped.conversation for one in tried] == ["c1", "c2", "c1", "c2"]
    assert [one.compared.number if one.compared else None for one in tried] == [None, None, 1, 2]
    for one in tried[2:]:
        assert one.compared is not None
        assert one.compared.after.found_difference is None
        added = one.recorded.value["messages"][-2:]
        assert one.compared.after.anew == sum(len(turn["content"]) + 1 for turn in added)


def test_a_constant_that_stands_there_already(ruled: Callable[..., RuleSet]) -> None:
    """It matched; else it would be said that it never did."""
    rule = RulePatch(
        name="mine.build", where="system", pattern=("Build: [[{line}]]",), action="constant", constant="none"
    )
    rules = ruled(added=(rule,))
    tried = try_requests(record(request(0, system="Build: none\nBe brief.")), rules)
    assert idle(tried[0]) == [("mine.build", "messages[0].content", "the constant stands there already")]
    assert unmatched_rules(rules, tried) == []


def test_a_rule_that_comes_too_late(ruled: Callable[..., RuleSet]) -> None:
    """Of two rules on one text the first acts, and the other one is told which."""
    inner = RulePatch(name="mine.inner", where="system", at="any", pattern=("time: [[{date}]]",), action="drop")
    outer = RulePatch(name="mine.outer", where="system", pattern=("Current time: {line}",), action="drop")
    tried = try_requests(record(request(0, system="Current time: 2026-02-18\nBe brief.")), ruled(added=(inner, outer)))
    assert idle(tried[0]) == [("mine.inner", "messages[0].content", "the rule mine.outer acts on the same text")]


def test_what_is_only_counted_is_idle(rules: RuleSet) -> None:
    """An observed block is a match without an edit."""
    tried = try_requests(record(request(0, system="The current date is 2026-02-18 20:48.\nBe brief.")), rules)
    assert idle(tried[0]) == [("open-webui.clock", "messages[0].content", "it only counts")]


def test_rules_of_the_config_that_never_match(ruled: Callable[..., RuleSet]) -> None:
    """Where the beginning of the pattern stands is told; packed rules are not, and one that is off says so."""
    word = RulePatch(name="mine.word", where="system", pattern=("Current time: [[{int}h]]",), action="freeze")
    gone = RulePatch(name="mine.gone", where="user head", pattern=("<<{int}>> ",), action="drop")
    off = RulePatch(name="mine.off", where="system", pattern=("Current time: ",), action="drop", enabled=False)
    line = RulePatch(name="mine.line", where="system", pattern=("time: [[{date}]]",), action="freeze")
    rules = ruled(added=(word, gone, off, line))
    tried = try_requests(record(request(0, system="Current time: 2026-02-18 20:48\n")), rules)
    unmatched = unmatched_rules(rules, tried)
    found = {one.rule.name: (one.request, one.path, one.head) for one in unmatched}
    assert [one.rule.name for one in unmatched if one.inside_line] == ["mine.line"]
    assert found == {
        "mine.word": (1, "messages[0].content", "Current time: "),
        "mine.line": (1, "messages[0].content", "time: "),
        "mine.gone": (None, "", ""),
        "mine.off": (None, "", ""),
    }


def test_keys_that_several_rules_cut_name_their_rule(rules: RuleSet) -> None:
    """One block, two rules for its keys: each edit names the one whose key it takes out."""
    block = json.dumps(
        {"schema": "openclaw.inbound_meta.v1", "message_id": "1", "chat": "x", "reply_to_id": "7"}, indent=1
    )
    (one,) = try_requests(record(request(0, system=f"Help.\n```json\n{block}\n```\n")), rules)
    assert [(shown.rules, "reply_to_id" in shown.removed) for shown in one.edits] == [
        (("openclaw.system-ids",), False),
        (("openclaw.system-reply-id",), True),
        (("openclaw.system-reply-id",), False),
    ]
    by_hit = {(hit.rule, hit.path): one.edits_of(hit) for hit in one.stripped.hits}
    assert by_hit == {
        ("openclaw.system-ids", "messages[0].content"): [0],
        ("openclaw.system-reply-id", "messages[0].content"): [1],
        ("openclaw.system-reply-id", "messages[1].content"): [2],
    }


@pytest.mark.parametrize("name", names())
def test_tracing_changes_nothing_and_every_edit_has_a_rule(rules: RuleSet, name: str) -> None:
    """What is read anew for a trace becomes what is taken over without one; each edit belongs to a hit."""
    plain, traced = ConversationMemory(), ConversationMemory()
    for sent in load(name):
        one = apply_rules(sent.body, sent.path, rules, plain, sent.headers)
        two = apply_rules(sent.body, sent.path, rules, traced, sent.headers, trace=Trace())
        assert (two.body, two.edits, two.conversation, two.starts) == (
            one.body,
            one.edits,
            one.conversation,
            one.starts,
        )
        assert sorted(map(repr, two.hits)) == sorted(map(repr, one.hits))
        assert two.items_modified == one.items_modified
        assert all(edit.by for edit in one.edits)
    tried = try_requests(
        [Recorded(sent.body.decode(), {}, sent.path, tuple(sent.headers)) for sent in load(name)], rules
    )
    for done in tried:
        tied = {n for hit in done.stripped.hits for n in done.edits_of(hit)}
        assert tied == set(range(len(done.edits)))
