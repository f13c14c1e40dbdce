"""Which request a request continues, also where the client rewrites what stands in front of the conversation."""

from __future__ import annotations

import json

import pytest

from kvstack.prompt.diff.difference import FoundDifference
from kvstack.prompt.diff.previous import FormerRequests
from kvstack.prompt.diff.segments import render
from kvstack.state.causes import Cause

PATH = "/v1/chat/completions"


def body(system: str, turns: int, words: str = "question") -> bytes:
    """A chat with so many answered turns and one open one."""
    messages = [{"role": "system", "content": system}]
    for number in range(turns):
        messages.append({"role": "user", "content": f"{words} {number}"})
        messages.append({"role": "assistant", "content": f"answer {number}"})
    messages.append({"role": "user", "content": f"{words} {turns}"})
    return json.dumps({"messages": messages}).encode()


def test_an_extension_has_a_former_request_and_no_divergence() -> None:
    """The good case."""
    former = FormerRequests()
    assert former.compare(1, render(body("S", 0), PATH), PATH, "c1").former is None
    compared = former.compare(2, render(body("S", 1), PATH), PATH, "c1")
    assert (compared.former, compared.found_difference) == (1, None)


def test_a_clock_in_the_system_text_does_not_hide_the_conversation() -> None:
    """The rules' memory calls it new each time; what was said tells that it is not (FR-18)."""
    former = FormerRequests()
    system = "You are an agent.\nCurrent time: 2026-02-18 20:4{}\nKeep the rules."
    former.compare(1, render(body(system.format(1), 0), PATH), PATH, "c1")
    compared = former.compare(2, render(body(system.format(2), 1), PATH), PATH, "c2")
    assert (compared.conversation, compared.former) == ("c1", 1)
    assert compared.found_difference is not None
    assert (compared.found_difference.difference.cause, compared.found_difference.difference.path) == (
        Cause.CLOCK,
        "messages[0].content",
    )
    assert former.compare(3, render(body(system.format(3), 2), PATH), PATH, "c3").former == 2


def test_equal_first_words_are_no_conversation() -> None:
    """Two sessions that begin with the same words are two (CLIENTS.md: Pi and Hermes)."""
    former = FormerRequests()
    former.compare(1, render(body("S", 0), PATH), PATH, "c1")
    assert former.compare(2, render(body("S", 0), PATH), PATH, "c2").former is None


def test_the_longest_known_beginning_is_the_former_request() -> None:
    """A branch of a conversation continues where it was, not at its root."""
    former = FormerRequests()
    former.compare(1, render(body("A", 0), PATH), PATH, "c1")
    former.compare(2, render(body("B", 2), PATH), PATH, "c2")
    assert former.compare(3, render(body("C", 3), PATH), PATH, "c3").former == 2


def test_another_endpoint_or_other_words_are_another_conversation() -> None:
    """Nothing is guessed."""
    former = FormerRequests()
    former.compare(1, render(body("A", 0), PATH), PATH, "c1")
    assert former.compare(2, render(body("B", 1), "/v1/messages"), "/v1/messages", "c2").former is None
    assert former.compare(3, render(body("B", 1, "other"), PATH), PATH, "c3").former is None


def test_memory_is_bounded_in_count_and_characters() -> None:
    """The conversation that was silent longest is forgotten, and costs nothing but the comparison."""
    former = FormerRequests(max_conversations=2)
    for number in range(3):
        former.compare(number, render(body("S", 0, f"words {number}"), PATH), PATH, f"c{number}")
    assert former.compare(9, render(body("S", 1, "words 0"), PATH), PATH, "c0").former is None
    small = FormerRequests(max_characters=1000)
    small.compare(1, render(body("S" * 900, 0, "one"), PATH), PATH, "c1")
    small.compare(2, render(body("S" * 900, 0, "two"), PATH), PATH, "c2")
    assert small.compare(3, render(body("S" * 900, 1, "one"), PATH), PATH, "c1").former is None
    assert small.compare(4, render(body("S" * 900, 2, "one"), PATH), PATH, "c1").former == 3


def test_what_cannot_be_read_is_passed_over() -> None:
    """No prompt, no conversation, no error."""
    former = FormerRequests()
    assert former.compare(1, render(b"{", PATH), PATH, "c1").former is None
    assert former.compare(2, render(body("S", 0), PATH), PATH, None).conversation is None
    assert former.compare(3, render(b"{}", "/v1/models"), "/v1/models", "c1").found_difference is None


LONG = "Keep the rules in mind and answer in plain words. " * 40
UUIDS = ("0b6f2f0e-1111-4222-8333-444455556666", "9c7a1d2b-2222-4333-9444-555566667777")


def differs(*bodies: bytes, path: str = PATH) -> FoundDifference | None:
    """Where the last of some requests, each the first of its conversation, parts from what is most similar to it."""
    former = FormerRequests()
    for number, one in enumerate(bodies, start=1):
        compared = former.compare(number, render(one, path), path, f"c{number}")
        assert (compared.conversation, compared.former) == (f"c{number}", None)
    return compared.found_difference


@pytest.mark.parametrize(
    ("system", "values", "cause"),
    [
        ("Trace {}\n" + LONG, UUIDS, Cause.ID),
        (LONG + "\nTrace {}", UUIDS, Cause.ID),
        ("Now: {}\n" + LONG, ("2026-02-18 20:41", "2026-02-18 20:42"), Cause.CLOCK),
        ("Budget left: {} tokens. " + LONG, ("19,998", "19,541"), Cause.COUNTER),
        ("{0} begins.\n" + LONG + "Again {0}.\n" + LONG, UUIDS, Cause.ID),
        ("You talk to {}. " + LONG, ("Ann", "Bob"), Cause.SYSTEM_CHANGED),
    ],
)
def test_a_new_conversation_names_what_changed_in_its_head(system: str, values: tuple[str, str], cause: Cause) -> None:
    """An agent that always begins anew: nothing is shared by the prompts, and it is said why."""
    found = differs(*(body(system.format(value), 0, f"task {value[-3:]}") for value in values))
    assert found is not None
    assert (found.difference.cause, found.difference.path) == (cause, "messages[0].content")
    assert found.difference.offset >= system.index("{")
    assert len(found.before) <= 60
    assert len(found.after) <= 60


def test_tools_are_a_part_of_the_head() -> None:
    """They stand in front of the system text in most templates."""
    tools = [{"type": "function", "function": {"name": f"t{number}", "description": LONG}} for number in range(3)]
    one, two = (
        json.dumps({"messages": [{"role": "user", "content": str(order)}], "tools": order}).encode()
        for order in (tools, tools[::-1])
    )
    found = differs(one, two)
    assert found is not None
    assert found.difference.cause is Cause.TOOLS_REORDERED


def test_the_most_similar_head_counts_and_of_several_the_newest() -> None:
    """Another agent's request in between is not what it should have been equal to."""
    mine, other = "You are one. Trace {}\n" + LONG, "You are another. Trace {}\n" + LONG[::-1]
    found = differs(*(body(text.format(value), 0, value) for value in UUIDS for text in (mine, other)))
    assert found is not None
    assert (found.difference.cause, found.old, found.new) == (Cause.ID, *UUIDS)


@pytest.mark.parametrize(
    "bodies",
    [
        # Equal heads: all could be shared.  Also if there is one that is nearly equal.
        (body(LONG, 0, "a"), body(LONG, 0, "b")),
        (body(f"1a2b {LONG}", 0, "a"), body(f"3c4d {LONG}", 0, "b"), body(f"1a2b {LONG}", 0, "c")),
        # Other agents: nobody meant these to be equal.
        (body(LONG, 0, "a"), body(LONG[::-1], 0, "b")),
        (body(LONG, 0, "a"), body(LONG + "And this is what the other agent does. " * 40, 0, "b")),
        # Not worth a word.
        (body("You are 1a2b.", 0, "a"), body("You are 3c4d.", 0, "b")),
        # No head at all: what users say differs.
        tuple(json.dumps({"messages": [{"role": "user", "content": f"{n} {LONG}"}]}).encode() for n in UUIDS),
    ],
)
def test_a_new_conversation_that_is_not_nearly_like_another(bodies: tuple[bytes, ...]) -> None:
    """Nothing is blamed."""
    assert differs(*bodies) is None


def test_another_endpoint_renders_otherwise() -> None:
    """Its head was not meant to be shared."""
    former = FormerRequests()
    former.compare(1, render(body(f"1a2b {LONG}", 0), PATH), PATH, "c1")
    assert (
        former.compare(2, render(body(f"3c4d {LONG}", 0), "/v1/messages"), "/v1/messages", "c2").found_difference
        is None
    )
