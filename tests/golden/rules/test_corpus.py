"""Recorded conversations of real clients, before and after the rules."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest

from kvstack.prompt.diff.segments import CommonPrefix, common_prefix, render
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.state.causes import Cause
from tests.differences import difference_of_bodies
from tests.golden.rules.corpus import FOLDER, Request, load, names

EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text("utf-8"))

# What no rule can mend: another kind of turn, another channel, or a group's one-time introduction in the system text.
OTHER_PREFIX = {
    "openclaw-2026.2.17-4",
    "openclaw-2026.2.17-responses-3",
    "openclaw-2026.5.12-4",
    "openclaw-2026.9.6-2",
    "openclaw-2026.9.6-4",
}


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    """All packs with default settings."""
    found = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    return compile_rules([parse_pack(files("kvstack.packs").joinpath(name).read_text("utf-8"), name) for name in found])


def run(name: str, rules: RuleSet, *, filled: bool = True) -> list[tuple[Request, RewriteResult]]:
    """Send a conversation through the rules."""
    memory = ConversationMemory()
    requests = load(name, filled=filled)
    return [(request, apply_rules(request.body, request.path, rules, memory, request.headers)) for request in requests]


def pairs(done: list[tuple[Request, RewriteResult]]) -> list[tuple[CommonPrefix, CommonPrefix]]:
    """Compare consecutive requests of the main conversation, before and after."""
    rendered = [
        (render(request.body, request.path), render(stripped.body, request.path))
        for request, stripped in done
        if not request.side
    ]
    return [(common_prefix(one[0], two[0]), common_prefix(one[1], two[1])) for one, two in pairwise(rendered)]


@pytest.mark.parametrize("name", names())
def test_common_prefix(rules: RuleSet, name: str) -> None:
    """The share of each request that the next one keeps, as recorded before and as expected after the rules."""
    found = [[round(raw.kept_ratio, 3), round(ruled.kept_ratio, 3)] for raw, ruled in pairs(run(name, rules))]
    assert found == EXPECTED["pairs"][name]
    if name not in OTHER_PREFIX:
        assert all(after == 1.0 for _, after in found)


@pytest.mark.parametrize("name", names())
def test_no_conversation_gets_worse(rules: RuleSet, name: str) -> None:
    """A conversation keeps at least the share that it kept before, and no request has more to be evaluated again."""
    found = pairs(run(name, rules))
    for raw, ruled in found:
        assert ruled.current - ruled.shared <= raw.current - raw.shared
    raw_shared, raw_previous = sum(raw.shared for raw, _ in found), sum(raw.previous for raw, _ in found)
    shared, previous = sum(ruled.shared for _, ruled in found), sum(ruled.previous for _, ruled in found)
    assert shared * raw_previous >= raw_shared * previous


@pytest.mark.parametrize("case", EXPECTED["edits"])
def test_exact_bytes(rules: RuleSet, case: str) -> None:
    """The bytes that go upstream are the client's, with exactly these edits."""
    name, _, number = case.partition("#")
    request, stripped = run(name, rules, filled=False)[int(number)]
    expected, done = "", 0
    text = request.body.decode()
    for start, removed, inserted in EXPECTED["edits"][case]:
        assert text[start : start + len(removed)] == removed
        expected += text[done:start] + inserted
        done = start + len(removed)
    assert stripped.body.decode() == expected + text[done:]


@pytest.mark.parametrize("name", [name for name in names() if name.startswith(("codex", "cline"))])
def test_nothing_to_do_for_codex_and_cline(rules: RuleSet, name: str) -> None:
    """Clients that extend their prompts get the very bytes through that they sent, and are recognised."""
    for request, stripped in run(name, rules):
        assert stripped.body is request.body
        assert stripped.client == name.partition("-")[0]


@pytest.mark.parametrize("name", names())
def test_client_and_side_requests_are_recognised(rules: RuleSet, name: str) -> None:
    """Each request is known by its client, and side requests are told from the main conversation."""
    client = name.rsplit("-0.", 1)[0].rsplit("-1.", 1)[0].rsplit("-2.", 1)[0].rsplit("-3.", 1)[0].rsplit("-2026", 1)[0]
    for request, stripped in run(name, rules):
        if request.side:
            assert stripped.side in ("title", "memory")
        else:
            assert stripped.client == client.removesuffix("-agent")
            assert stripped.side in (None, "heartbeat", "cron")


@pytest.mark.parametrize("name", names())
def test_applying_the_rules_again_changes_nothing(rules: RuleSet, name: str) -> None:
    """What went through the rules once comes out of them as it is, with the same memory and without one."""
    memory = ConversationMemory()
    for request in load(name):
        once = apply_rules(request.body, request.path, rules, memory, request.headers).body
        assert apply_rules(once, request.path, rules, memory, request.headers).body == once
        assert apply_rules(once, request.path, rules, None, request.headers).body == once


@pytest.mark.parametrize("name", names())
def test_two_conversations_at_once_do_not_mix(rules: RuleSet, name: str) -> None:
    """A conversation gets the same bytes with all the others going on beside it in the same memory."""
    alone = [stripped.body for _, stripped in run(name, rules)]
    memory = ConversationMemory()
    others = [other for other in names() if other != name][:6]
    mine = load(name)
    together = []
    for number, request in enumerate(mine):
        for other in others:
            beside = load(other)
            if number < len(beside):
                apply_rules(beside[number].body, beside[number].path, rules, memory, beside[number].headers)
        together.append(apply_rules(request.body, request.path, rules, memory, request.headers).body)
    assert together == alone


@pytest.mark.parametrize("name", names())
def test_cause_of_each_divergence(rules: RuleSet, name: str) -> None:
    """What parts consecutive requests is named before the rules, and after them nothing that a rule could mend."""
    done = [(request, stripped) for request, stripped in run(name, rules) if not request.side]
    raw = [difference_of_bodies(one.body, two.body, one.path) for (one, _), (two, _) in pairwise(done)]
    assert [f"{found.difference.cause} in {found.difference.path}" if found else None for found in raw] == EXPECTED[
        "causes"
    ][name]
    ruled = [difference_of_bodies(one.body, two.body, request.path) for (request, one), (_, two) in pairwise(done)]
    mendable = {Cause.ID, Cause.CLOCK, Cause.COUNTER, Cause.MOVED, Cause.DECORATION}
    assert not any(found and found.difference.cause in mendable for found in ruled)
