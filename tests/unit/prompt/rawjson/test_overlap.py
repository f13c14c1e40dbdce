"""What a body has in common with a former one, and how long requests are kept."""

from __future__ import annotations

import json
from typing import Any

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.overlap import Overlap
from kvstack.prompt.request.document import Api, read_document
from kvstack.prompt.rules.ruleset import RuleSet

CHAT = "/v1/chat/completions"


def say(*texts: str, model: str = "m") -> str:
    """A chat body of a system text and turns of the user."""
    roles = ["system"] + ["user"] * (len(texts) - 1)
    return json.dumps(
        {"model": model, "messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}
    )


def overlap(former: str, text: str) -> Overlap:
    """What the second has in common with the first."""
    return read_document(text, Api.CHAT, formers=[read_document(former, Api.CHAT)]).overlap


def test_a_grown_conversation_is_known_up_to_its_newest_turn() -> None:
    """All old items are taken over, the new one is read."""
    assert overlap(say("s", "a", "b"), say("s", "a", "b", "c")).runs == ((0, 3),)


def test_a_changed_system_text_and_moved_list_leave_the_rest_known() -> None:
    """A clock in front and other keys before the list cost their own length only."""
    document = say("it is 12:07, exactly", "a", "b", "c", model="another")
    assert overlap(say("it is 9:06", "a", "b"), document).runs == ((1, 3),)


def test_a_pruned_result_costs_itself() -> None:
    """What stands behind a changed item is known."""
    assert overlap(say("s", "a", "long result", "b"), say("s", "a", "", "b", "c")).runs == ((0, 2), (3, 4))


def test_a_number_that_goes_on_is_another_number() -> None:
    """The end of a number is known only by what follows."""
    document = read_document(
        '{"messages": [{}, 12]}', Api.CHAT, formers=[read_document('{"messages": [{}, 1]}', Api.CHAT)]
    )
    assert document.array is not None
    assert document.array.values == [{}, "12"]


def test_the_longest_overlap_wins() -> None:
    """Of several former requests the one is used that has most in common."""
    formers = [read_document(text, Api.CHAT) for text in (say("s", "x"), say("s", "a", "b"), say("s", "a"))]
    assert read_document(say("s", "a", "b", "c"), Api.CHAT, formers=formers).overlap == Overlap(1, ((0, 3),))


def kept(memory: ConversationMemory, rules: RuleSet) -> list[int]:
    """How many items each kept request has, newest first."""
    return [former.document.count for former in memory.recent.of(rules, Api.CHAT)]


def test_requests_of_one_conversation_take_the_place_of_each_other(rules: RuleSet) -> None:
    """Only the newest of a conversation is kept; another conversation with the same system text has its own."""
    memory = ConversationMemory()
    bodies: list[Any] = [say("s", "a", "b"), say("s", "a", "b", "c"), say("s", *"vwxyz"), say("s", "a", "b", "c", "d")]
    for body in bodies:
        apply_rules(body.encode(), CHAT, rules, memory)
    assert kept(memory, rules) == [5, 6]


def test_kept_requests_are_bounded(rules: RuleSet) -> None:
    """Neither many nor large requests take more than their room."""
    memory = ConversationMemory()
    for number in range(40):
        apply_rules(say(f"s{number}", f"a{number}").encode(), CHAT, rules, memory)
    assert len(kept(memory, rules)) == 16
    apply_rules(say("s", "a" * 20_000_000).encode(), CHAT, rules, memory)
    apply_rules(say("s", "b" * 20_000_000).encode(), CHAT, rules, memory)
    assert kept(memory, rules) == [2]
    apply_rules(say("s", *"c" * 40_000).encode(), CHAT, rules, memory)
    apply_rules(say("s", *"d" * 40_000).encode(), CHAT, rules, memory)
    assert kept(memory, rules) == [40_001]
