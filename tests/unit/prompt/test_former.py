"""
Which request a request continues, also where the client rewrites what stands in front of the conversation.
"""

from __future__ import annotations

import json

from kvstack.prompt.divergence import Cause
from kvstack.prompt.former import FormerRequests

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
    assert former.compare(1, body("S", 0), PATH, "c1").former is None
    compared = former.compare(2, body("S", 1), PATH, "c1")
    assert (compared.former, compared.divergence) == (1, None)


def test_a_clock_in_the_system_text_does_not_hide_the_conversation() -> None:
    """The rules' memory calls it new each time; what was said tells that it is not (FR-18)."""
    former = FormerRequests()
    system = "You are an agent.\nCurrent time: 2026-02-18 20:4{}\nKeep the rules."
    former.compare(1, body(system.format(1), 0), PATH, "c1")
    compared = former.compare(2, body(system.format(2), 1), PATH, "c2")
    assert (compared.conversation, compared.former) == ("c1", 1)
    assert compared.divergence is not None
    assert (compared.divergence.cause, compared.divergence.path) == (Cause.CLOCK, "messages[0].content")
    assert former.compare(3, body(system.format(3), 2), PATH, "c3").former == 2


def test_equal_first_words_are_no_conversation() -> None:
    """Two sessions that begin with the same words are two (CLIENTS.md: Pi and Hermes)."""
    former = FormerRequests()
    former.compare(1, body("S", 0), PATH, "c1")
    assert former.compare(2, body("S", 0), PATH, "c2").former is None


def test_the_longest_known_beginning_is_the_former_request() -> None:
    """A branch of a conversation continues where it was, not at its root."""
    former = FormerRequests()
    former.compare(1, body("A", 0), PATH, "c1")
    former.compare(2, body("B", 2), PATH, "c2")
    assert former.compare(3, body("C", 3), PATH, "c3").former == 2


def test_another_endpoint_or_other_words_are_another_conversation() -> None:
    """Nothing is guessed."""
    former = FormerRequests()
    former.compare(1, body("A", 0), PATH, "c1")
    assert former.compare(2, body("B", 1), "/v1/messages", "c2").former is None
    assert former.compare(3, body("B", 1, "other"), PATH, "c3").former is None


def test_memory_is_bounded_in_count_and_characters() -> None:
    """The conversation that was silent longest is forgotten, and costs nothing but the comparison."""
    former = FormerRequests(max_conversations=2)
    for number in range(3):
        former.compare(number, body("S", 0, f"words {number}"), PATH, f"c{number}")
    assert former.compare(9, body("S", 1, "words 0"), PATH, "c0").former is None
    small = FormerRequests(max_characters=1000)
    small.compare(1, body("S" * 900, 0, "one"), PATH, "c1")
    small.compare(2, body("S" * 900, 0, "two"), PATH, "c2")
    assert small.compare(3, body("S" * 900, 1, "one"), PATH, "c1").former is None
    assert small.compare(4, body("S" * 900, 2, "one"), PATH, "c1").former == 3


def test_what_cannot_be_read_is_passed_over() -> None:
    """No prompt, no conversation, no error."""
    former = FormerRequests()
    assert former.compare(1, b"{", PATH, "c1").former is None
    assert former.compare(2, body("S", 0), PATH, None).conversation is None
    assert former.compare(3, b"{}", "/v1/models", "c1").divergence is None
