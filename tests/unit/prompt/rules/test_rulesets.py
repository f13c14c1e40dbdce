"""Packs, settings and the user's own rules: reading, checking, combining."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any, get_args

import pytest

from kvstack.config.rules import Action, RulePatch
from kvstack.errors import ConfigError
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.pattern.tokens import READERS
from kvstack.prompt.report.listing import list_rules, show_edits
from kvstack.prompt.rules.compiler import Pack, compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings

Ruled = Callable[..., RuleSet]
CHAT = "/v1/chat/completions"


def said(text: str, rules: RuleSet) -> str:
    """Send one user text through the rules."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    found: str = json.loads(apply_rules(body, CHAT, rules).body)["messages"][0]["content"]
    return found


def test_all_packs_compile_and_their_rules_explain_themselves(packs: list[Pack]) -> None:
    """Each rule has a summary and a name that begins with its pack's."""
    assert len(packs) >= 11
    for pack in packs:
        for rule in pack.spec.rule:
            assert rule.name.startswith(f"{pack.spec.name}.")
            assert rule.summary.endswith(".")


def test_another_timestamp_pattern(ruled: Ruled) -> None:
    """A user replaces the pattern of the packed rule, or adds one to it."""
    text = "<2026-02-18 20:48> Hello"
    replaced = ruled(added=(RulePatch(name="openclaw.timestamps", pattern=("<{date} {time}> ",)),))
    extended = ruled(added=(RulePatch(name="openclaw.timestamps", also=("<{date} {time}> ",)),))
    assert said(text, ruled()) == text
    assert said(text, replaced) == said(text, extended) == "Hello"
    assert said("[Wed 2026-02-18 20:48 UTC] Hello", replaced) == "[Wed 2026-02-18 20:48 UTC] Hello"
    assert said("[Wed 2026-02-18 20:48 UTC] Hello", extended) == "Hello"


def test_a_rule_of_ones_own(ruled: Ruled) -> None:
    """A complete rule with a new name applies to any client, and comes and goes with its switch."""
    mine = RulePatch(name="mine.stamp", where="user head", action="drop", pattern=("at {time}: ",))
    assert said("at 20:48: go", ruled(added=(mine,))) == "go"
    off = mine.model_copy(update={"enabled": False})
    assert said("at 20:48: go", ruled(added=(off,))) == "at 20:48: go"


def test_switching_off_by_name(ruled: Ruled) -> None:
    """A packed rule can be disabled, and what stands behind its block is still found."""
    rules = ruled(disabled=frozenset({"openclaw.user-ids"}))
    system = '```json\n{"schema": "openclaw.inbound_meta.v1"}\n```'
    block = 'Conversation info (untrusted metadata):\n```json\n{"message_id": "1"}\n```\n\n'
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{block}[Wed 2026-02-18 20:48 UTC] x"},
    ]
    found = json.loads(apply_rules(json.dumps({"messages": messages}).encode(), CHAT, rules).body)
    assert found["messages"][1]["content"] == block + "x"


OPENCLAW = '```json\n{"schema": "openclaw.inbound_meta.v1"}\n```'


def said_to_openclaw(texts: list[str], rules: RuleSet) -> list[str]:
    """Send texts of the user through the rules, as OpenClaw would, and return what arrives."""
    messages = [{"role": "system", "content": OPENCLAW}, *({"role": "user", "content": text} for text in texts)]
    result = apply_rules(json.dumps({"messages": messages}).encode(), CHAT, rules, ConversationMemory())
    return [item["content"] for item in json.loads(result.body)["messages"][1:]]


@pytest.mark.parametrize(
    "patch",
    [
        RulePatch(name="openclaw.user-ids", also=("Facts:\n{json-fence}",)),
        RulePatch(
            name="openclaw.user-ids",
            pattern=("Facts:\n{json-fence}", "Conversation info (untrusted metadata):\n{json-fence}"),
        ),
    ],
)
def test_a_rule_with_a_named_block_takes_more_patterns(ruled: Ruled, patch: RulePatch) -> None:
    """`also` adds to the block, a pattern of one's own wins over it: with either, both labels are read."""
    rules = ruled(added=(patch,))
    for label in ("Facts:", "Conversation info (untrusted metadata):"):
        block = label + '\n```json\n{"message_id": "1", "sender": "ann"}\n```\n\n'
        stripped = label + '\n```json\n{"sender": "ann"}\n```\n\n'
        assert said_to_openclaw([block + "[Wed 2026-02-18 20:48 UTC] x"], rules) == [stripped + "x"]


@pytest.mark.parametrize("off", ["disabled", "enabled"])
def test_a_carrier_rule_that_is_off_leaves_the_field_to_the_general_one(ruled: Ruled, off: str) -> None:
    """Empty carriers that are not to be dropped are placed like all others: none is lost, none breaks the prefix."""
    settings: dict[str, Any] = (
        {"disabled": frozenset({"openclaw.empty-carrier"})}
        if off == "disabled"
        else {"added": (RulePatch(name="openclaw.empty-carrier", enabled=False),)}
    )
    rules, memory = ruled(**settings), ConversationMemory()
    empty = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
        '"Active exec sessions:\\nnone"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
    )
    head = [{"role": "system", "content": OPENCLAW}, {"role": "user", "content": "one"}]
    answered = [*head, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "two"}]
    sent = []
    for messages in (head, answered):
        body = json.dumps(
            {"messages": [*messages, {"role": "user", "content": empty}], "prompt_cache_key": "s"}
        ).encode()
        sent.append([item["content"] for item in json.loads(apply_rules(body, CHAT, rules, memory).body)["messages"]])
    assert sent == [[OPENCLAW, "one", empty], [OPENCLAW, "one", empty, "yes", "two"]]


@pytest.mark.parametrize(
    ("patch", "path", "message"),
    [
        (RulePatch(name="mine"), "rules.add.0", "no packed rule 'mine'"),
        (RulePatch(name="openclaw.timestamps", pattern=("{nope}",)), "rules.add.0.pattern", "no token {nope}"),
        (
            RulePatch(name="mine", where="system", action="drop", pattern=("{int}",)),
            "rules.add.0.pattern",
            "begin with",
        ),
        (RulePatch(name="mine", where="system", action="place", pattern=("x",)), "rules.add.0", "whole message"),
        (RulePatch(name="mine", where="first user", action="drop", pattern=("x",)), "rules.add.0", "inside"),
        (
            RulePatch(name="mine", where="system", action="drop", pattern=("x [[{int}]] y [[{int}]]",)),
            "rules.add.0.pattern",
            "one target",
        ),
        (RulePatch(name="mine", where="system", action="drop", pattern=("x [[]]",)), "rules.add.0.pattern", "between"),
        (
            RulePatch(name="mine", where="system", action="drop", pattern=("x {int}",), keys=("a",)),
            "rules.add.0.keys",
            "no JSON",
        ),
        (
            RulePatch(name="mine", where="system", action="drop", pattern=("x {int}",), has={"a": "b"}),
            "rules.add.0.has",
            "no JSON",
        ),
        (
            RulePatch(name="mine", where="message", action="drop", pattern=("{json-fence}",), keys=("a",)),
            "rules.add.0",
            "not in whole messages",
        ),
        (RulePatch(name="openclaw.system-ids", where="message"), "rules.add.0", "not in whole messages"),
        (RulePatch(name="openclaw.timestamps", announce=True, text="{value}"), "rules.add.0.announce", "is for the"),
        (RulePatch(name="pi.date", action="observe", constant="x"), "rules.add.0.constant", "is for the action const"),
        (RulePatch(name="openclaw.system-ids", same=("x",)), "rules.add.0.same", "place; this rule's is drop"),
        (RulePatch(name="pi.date", stable=True), "rules.add.0.stable", "drop; this rule's is freeze"),
        (
            RulePatch(name="pi.date", unless_in_first_user=True),
            "rules.add.0.unless_in_first_user",
            "sticky; this rule's is freeze",
        ),
        (RulePatch(name="openclaw.carrier", also=("{nope}",)), "rules.add.0.also", "no token {nope}"),
        (RulePatch(name="openclaw.timestamps", also=("{nope}",)), "rules.add.0.also", "no token {nope}"),
        (RulePatch(name="openclaw.user-ids", also=("x {line}",)), "rules.add.0.keys", "no JSON"),
        (RulePatch(name="openclaw.user_ids", also=("x",)), "rules.add.0.name", "did you mean 'openclaw.user-ids'?"),
        (RulePatch(name="openclaw.timestamp", enabled=True), "rules.add.0", "did you mean 'openclaw.timestamps'?"),
    ],
)
def test_user_rules_that_do_not_fit(packs: list[Pack], patch: RulePatch, path: str, message: str) -> None:
    """A rule that cannot work is refused with its key path and the reason."""
    with pytest.raises(ConfigError) as caught:
        compile_rules(packs, RuleSettings(added=(patch,), source="kv.toml"))
    assert caught.value.source == "kv.toml"
    assert any(problem.path == path and message in problem.message for problem in caught.value.problems)


@pytest.mark.parametrize("name", ["mine", "openclaw.timestamps"])
def test_a_rule_is_added_once(packs: list[Pack], name: str) -> None:
    """Of two that have one name neither is dropped in silence."""
    patch = RulePatch(name=name, where="system", action="drop", pattern=("x",))
    with pytest.raises(ConfigError) as caught:
        compile_rules(packs, RuleSettings(added=(patch, patch)))
    assert [problem.path for problem in caught.value.problems if "added before" in problem.message] == [
        "rules.add.1.name"
    ]


def test_disabling_what_there_is_not(packs: list[Pack]) -> None:
    """A name that no rule has is an error, not silence."""
    with pytest.raises(ConfigError, match="1 problem") as caught:
        compile_rules(packs, RuleSettings(disabled=frozenset({"openclaw.timestamp"})))
    assert "'openclaw.timestamp'; did you mean 'openclaw.timestamps'?" in str(caught.value)


def test_all_problems_of_a_pack_at_once() -> None:
    """Each problem has its key path and line."""
    text = (
        'name = "x"\nversion = 0\nclient = "x"\ncolour = 1\n\n[[rule]]\nname = "x.a"\nwhere = "roof"\naction = "drop"\n'
    )
    with pytest.raises(ConfigError) as caught:
        parse_pack(text, "x.toml")
    found = {(problem.path, problem.line) for problem in caught.value.problems}
    assert {("version", 2), ("colour", 4), ("rule.0.where", 8)} <= found


def test_bad_toml_and_bad_patterns() -> None:
    """Broken TOML and broken patterns are said as such."""
    with pytest.raises(ConfigError, match="1 problem"):
        parse_pack("name = ", "x.toml")
    rule = '[[rule]]\nname = "x.a"\nwhere = "system"\naction = "drop"\npattern = "a {"\n'
    pack = parse_pack(f'name = "x"\nversion = 1\nclient = "x"\n{rule}', "x.toml")
    with pytest.raises(ConfigError, match=r"x\.toml"):
        compile_rules([pack])


def test_two_rules_of_one_name(packs: list[Pack]) -> None:
    """A name belongs to one rule."""
    with pytest.raises(ConfigError, match="problem"):
        compile_rules([*packs, packs[0]])


def test_list_of_rules(ruled: Ruled) -> None:
    """The list says where each rule is from and whether it is in force."""
    mine = RulePatch(name="mine", where="user head", action="observe", pattern=("x ",))
    changed = RulePatch(name="pi.date", announce=False)
    lines = {line.name: line for line in list_rules(ruled(strip_timestamps=False, added=(mine, changed)))}
    assert (lines["openclaw.timestamps"].active, lines["openclaw.timestamps"].switch) == (False, "strip_timestamps")
    assert (lines["mine"].origin, lines["mine"].client) == ("config", "any")
    assert lines["pi.date"].origin == "pi 1 + config"
    assert lines["openclaw.carrier"].client == "openclaw"


def test_edits_can_be_shown(rules: RuleSet) -> None:
    """Each edit comes with what went, what came, and what stands around it."""
    text = "[Wed 2026-02-18 20:48 UTC] Hello"
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    (shown,) = show_edits(body, apply_rules(body, CHAT, rules))
    assert (shown.removed, shown.inserted) == ("[Wed 2026-02-18 20:48 UTC] ", "")
    assert shown.before.endswith('"content": "')
    assert shown.after == 'Hello"}]}'


def guide() -> str:
    """The guide to writing rules."""
    return files("kvstack.packs").joinpath("README.md").read_text("utf-8")


def test_examples_of_the_guide_work(ruled: Ruled) -> None:
    """Every rule that the guide shows is accepted, and the timestamp example does what it says."""
    examples = [tomllib.loads(text)["rules"] for text in re.findall(r"```toml\n(.*?)```", guide(), re.DOTALL)]
    assert len(examples) == 2
    for example in examples:
        added = tuple(RulePatch(**entry) for entry in example.get("add", ()))
        rules = ruled(added=added, disabled=frozenset(example.get("disable", ())))
        assert {patch.name for patch in added} <= {rule.name for rule in rules.rules}
    (stamp,) = examples[0]["add"]
    assert said("<2026-02-18 20:48> Hello", ruled(added=(RulePatch(**stamp),))) == "Hello"


def test_the_guide_names_every_token_and_action() -> None:
    """Nothing that a rule may say is left out of the guide."""
    text = guide()
    for token in (*READERS, "line", "text", "json", "json-fence", "hex:5"):
        assert f"`{{{token}}}`" in text
    for action in get_args(Action):
        assert f"| `{action}` |" in text


@pytest.mark.parametrize("where", ["message", "user tail"])
def test_has_says_which_block_is_meant(ruled: Ruled, where: Any) -> None:
    """At every position: a block without that key, or with another value, is somebody else's."""
    rule = RulePatch(name="mine.x", where=where, pattern=("{json-fence}",), has={"schema": "mine.v"}, action="drop")
    rules = ruled(added=(rule,))

    def sent(schema: str) -> list[str]:
        fence = f'```json\n{{"schema": "{schema}"}}\n```'
        texts = ["hi", fence] if where == "message" else [f"hi\n{fence}"]
        return said_to_openclaw(texts, rules)

    assert sent("mine.v1") == ["hi"]
    assert sent("yours.v1") == (
        ["hi", '```json\n{"schema": "yours.v1"}\n```']
        if where == "message"
        else ['hi\n```json\n{"schema": "yours.v1"}\n```']
    )


@pytest.mark.parametrize("memory", [None, ConversationMemory()])
def test_a_timestamp_that_is_replaced_is_not_removed(ruled: Ruled, memory: ConversationMemory | None) -> None:
    """The counter counts what went, with a memory as without."""
    rules = ruled(added=(RulePatch(name="openclaw.timestamps", action="constant", constant="[t] "),))
    body = json.dumps({"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] hi"}]}).encode()
    result = apply_rules(body, CHAT, rules, memory)
    assert json.loads(result.body)["messages"][0]["content"] == "[t] hi"
    assert (result.ts_removed, result.items_modified) == (0, 1)


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        ("Current time: {date} {time}", "Current time: 2026-11-30 11:00:07", "Current time: 2026-11-30"),
        ("Current time: [[{date} {time}]]", "Current time: 2026-11-30 11:00:07", "Current time: 2026-11-30"),
        ("Current time: {date}[[ {time}]]", "Current time: 2026-11-30 11:00:07", "Current time: 2026-11-30"),
        ("Now: {date}T{time}{zone}.", "Now: 2026-11-30T11:00:07+02:00.", "Now: 2026-11-30."),
        (
            "Now: {weekday}, {date}, {time} ({zone})",
            "Now: Mon, 2026-11-30, 8:48 PM (UTC)",
            "Now: Mon, 2026-11-30 (UTC)",
        ),
        ("It is {time} on {date}", "It is 20:48 on 2026-11-30", "It is 2026-11-30"),
        ("Clock: [[{time}]] of {weekday}", "Clock: 20:48 of Monday", "Clock:  of Monday"),
        ("Ticks: [[{int}]] since", "Ticks: 4711 since", "Ticks:  since"),
    ],
)
def test_coarsen_leaves_the_day(ruled: Ruled, pattern: str, text: str, left: str) -> None:
    """The time goes, with what joins it to the day; a target that is the time alone, or none, goes as it is."""
    rule = RulePatch(name="mine.clock", where="system", at="any", action="coarsen", pattern=(pattern,))
    body = json.dumps({"messages": [{"role": "system", "content": f"Be kind. {text}\nMore."}]}).encode()
    sent = json.loads(apply_rules(body, "/v1/chat/completions", ruled(added=(rule,))).body)
    assert sent["messages"][0]["content"] == f"Be kind. {left}\nMore."


def test_a_dialect_that_there_is_not_is_named() -> None:
    """A rule for an API that no request has would never act."""
    patch = RulePatch(name="mine.a", where="system", pattern=("x",), action="drop", dialects=("chat", "chatt"))
    with pytest.raises(ConfigError) as caught:
        compile_rules([], RuleSettings(added=(patch,)))
    (problem,) = caught.value.problems
    assert problem.path == "rules.add.0.dialects"
    assert "'chatt'" in problem.message
