"""Conversation memory: what is frozen, appended and placed, for whom, and what happens when memory fails."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.state import Chain, ConversationState
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings

CHAT = "/v1/chat/completions"
Body = dict[str, Any]

PACK = """
name = "test"
version = 1
client = "test"

[[detect]]
system = "TEST"

[[block]]
name = "over"
where = "message"
pattern = "<carrier>none</carrier>"

[[block]]
name = "carrier"
where = "message"
pattern = "<carrier>{text}</carrier>"

[[rule]]
name = "test.day"
where = "system"
pattern = "Day: [[{date}]]"
action = "freeze"
announce = true
text = "[Day: {value}]"

[[rule]]
name = "test.note"
where = "user head"
pattern = "<note>{line}</note>\\n"
action = "sticky"

[[rule]]
name = "test.pulse"
where = "system"
pattern = "Pulse: [[{int}]]\\n"
action = "tail"
text = "[pulse {value}]"

[[rule]]
name = "test.mode"
where = "user tail"
pattern = "<mode>{line}</mode>"
action = "sticky"

[[rule]]
name = "test.over"
where = "message"
block = "over"
action = "drop"

[[rule]]
name = "test.carrier"
where = "message"
block = "carrier"
action = "place"
same = "chat=[[{word}]]"
"""
RULES = compile_rules([parse_pack(PACK, "test.toml")])


def ask(*messages: tuple[str, str], day: str = "2026-11-29", pulse: int | None = None) -> Body:
    """A chat request of the test client."""
    system = f"TEST\nDay: {day}\n" + (f"Pulse: {pulse}\n" if pulse is not None else "") + "End."
    return {"messages": [{"role": "system", "content": system}, *({"role": r, "content": c} for r, c in messages)]}


def send(
    body: Body, memory: ConversationMemory, rules: RuleSet = RULES, **headers: str
) -> tuple[list[str], RewriteResult]:
    """Send a request; return the texts that go upstream."""
    result = apply_rules(json.dumps(body).encode(), CHAT, rules, memory, list(headers.items()))
    return [str(message["content"]) for message in json.loads(result.body)["messages"]], result


U1, A1, U2, A2, U3 = ("user", "one"), ("assistant", "yes"), ("user", "two"), ("assistant", "no"), ("user", "three")
CALL, TOOL = ("assistant", "calling"), ("tool", "result")


def test_frozen_value_is_replayed_and_its_change_told_once() -> None:
    """The first value stays; the new one is told in the turn that it came with, and never again."""
    memory = ConversationMemory()
    send(ask(U1), memory)
    send(ask(U1, A1, U2), memory)
    third, _ = send(ask(U1, A1, U2, A2, U3, day="2026-11-30"), memory)
    fourth, _ = send(ask(U1, A1, U2, A2, U3, A1, U1, day="2026-11-30"), memory)
    assert third[0] == fourth[0] == "TEST\nDay: 2026-11-29\nEnd."
    assert third[-1] == fourth[5] == "three\n\n[Day: 2026-11-30]"
    assert fourth[-1] == "one"


def test_another_value_at_the_second_turn_begins_anew() -> None:
    """Equal first words alone do not make a conversation: with another date it is a new one, and nothing is told."""
    memory = ConversationMemory()
    _, first = send(ask(U1), memory)
    texts, second = send(ask(U1, A1, U2, day="2026-11-30"), memory)
    assert (texts[0], texts[-1]) == ("TEST\nDay: 2026-11-30\nEnd.", "two")
    assert first.conversation != second.conversation


def test_trailing_messages_come_back_under_a_key_or_after_two_turns() -> None:
    """One that names no chat is not put into what may be another conversation that began with the same words."""
    keyless = ("user", "<carrier>id=1</carrier>")
    memory = ConversationMemory()
    send(ask(U1, keyless), memory)
    assert keyless[1] not in send(ask(U1, A1, U2), memory)[0]
    send(ask(U1, A1, U2, keyless), memory)
    assert send(ask(U1, A1, U2, A2, U3), memory)[0][4] == keyless[1]
    rules = compile_rules([parse_pack('session_headers = "x-session"\n' + PACK.strip(), "test.toml")])
    memory = ConversationMemory()
    send(ask(U1, keyless), memory, rules, **{"x-session": "a"})
    assert send(ask(U1, A1, U2), memory, rules, **{"x-session": "a"})[0][2] == keyless[1]


def test_change_in_a_tool_loop_waits_for_the_next_turn() -> None:
    """Nothing is appended to a turn that was answered already; the next turn hears of the change."""
    memory = ConversationMemory()
    send(ask(U1), memory)
    send(ask(U1, CALL, TOOL), memory)
    loop, _ = send(ask(U1, CALL, TOOL, CALL, TOOL, day="2026-11-30"), memory)
    after, _ = send(ask(U1, CALL, TOOL, CALL, TOOL, A1, U2, day="2026-11-30"), memory)
    assert loop[1:] == ["one", "calling", "result", "calling", "result"]
    assert after[-1] == "two\n\n[Day: 2026-11-30]"


def test_new_conversation_never_inherits() -> None:
    """A request without an answer in it starts anew, also with the same first words."""
    memory = ConversationMemory()
    send(ask(U1), memory)
    texts, result = send(ask(U1, day="2026-11-30"), memory)
    assert texts[0] == "TEST\nDay: 2026-11-30\nEnd."
    assert result.conversation is not None


def test_repeated_request_gets_the_same_bytes() -> None:
    """A retry, with a clock that moved on or not, is sent as the first try was."""
    memory = ConversationMemory()
    send(ask(U1), memory)
    send(ask(U1, A1, U2), memory)
    first = send(ask(U1, A1, U2, A2, U3, day="2026-11-30"), memory)
    assert send(ask(U1, A1, U2, A2, U3, day="2026-11-30"), memory)[0] == first[0]
    assert send(ask(U1, A1, U2, A2, U3, day="2026-12-01"), memory)[0] == first[0]


def test_edited_turn_continues_from_the_state_before_it() -> None:
    """A turn that the user rewrote finds what was known before that turn."""
    memory = ConversationMemory()
    _, start = send(ask(U1), memory)
    send(ask(U1, A1, U2), memory)
    send(ask(U1, A1, U2, A2, U3, day="2026-11-30"), memory)
    texts, result = send(ask(U1, A1, U2, A2, ("user", "three, but better"), day="2026-11-30"), memory)
    assert texts[0] == "TEST\nDay: 2026-11-29\nEnd."
    assert texts[-1] == "three, but better\n\n[Day: 2026-11-30]"
    assert result.conversation == start.conversation


def test_block_of_the_newest_turn_is_kept_when_it_is_history() -> None:
    """Sticky: the client sends the block with the newest turn only; upstream it stays with its turn."""
    memory = ConversationMemory()
    first, _ = send(ask(("user", "<note>x</note>\none")), memory)
    second, _ = send(ask(U1, A1, ("user", "<note>y</note>\ntwo")), memory)
    third, _ = send(ask(U1, A1, U2, A2, U3), memory)
    assert first[1] == second[1] == third[1] == "one\n\n<note>x</note>"
    assert second[3] == third[3] == "two\n\n<note>y</note>"


def test_tail_stays_the_same_inside_a_turn_and_leaves_with_it() -> None:
    """Tail: in a tool loop the turn keeps what it was told first; as history it is bare again."""
    memory = ConversationMemory()
    first, _ = send(ask(U1, pulse=1), memory)
    loop, _ = send(ask(U1, CALL, TOOL, pulse=2), memory)
    later, _ = send(ask(U1, CALL, TOOL, A1, U2, pulse=3), memory)
    assert first[1] == loop[1] == "one\n\n[pulse 1]"
    assert (later[1], later[-1]) == ("one", "two\n\n[pulse 3]")
    assert first[0] == loop[0] == later[0]


C1, C2 = ("user", "<carrier>chat=7 id=1</carrier>"), ("user", "<carrier>chat=7 id=2</carrier>")


def test_carrier_stays_where_it_first_stood() -> None:
    """In the tool loop the copy at the end is dropped; as history the carrier comes back at its place."""
    memory = ConversationMemory()
    first, _ = send(ask(U1, C1), memory)
    loop, _ = send(ask(U1, CALL, TOOL, C1), memory)
    later, _ = send(ask(U1, CALL, TOOL, A1, U2, C2), memory)
    assert first[1:] == ["one", C1[1]]
    assert loop[1:] == ["one", C1[1], "calling", "result"]
    assert later[1:] == ["one", C1[1], "calling", "result", "yes", "two", C2[1]]


def test_a_block_that_the_client_keeps_stays_with_its_turn() -> None:
    """Whether a client keeps the block in its history or not, each turn ends with its own, once."""
    note = {n: ("user", f"<note>{n}</note>\n{n}") for n in ("a", "b", "c")}
    for remembers in (True, False):
        memory = ConversationMemory()
        former: list[str] = []
        said: list[tuple[str, str]] = []
        for n, turn in note.items():
            said.append(turn)
            texts, _ = send(ask(*said), memory if remembers else ConversationMemory())
            assert texts[: len(former)] == former
            assert texts[-1] == f"{n}\n\n<note>{n}</note>"
            former = texts
            said.append(A1)


def test_a_block_that_the_client_keeps_is_told_apart_by_action() -> None:
    """The same holds for `tail`, which is not brought back where the client lets it go."""
    pack = PACK.replace('action = "sticky"', 'action = "tail"')
    rules = compile_rules([parse_pack(pack, "test.toml")])
    memory = ConversationMemory()
    first, second = ("user", "<note>x</note>\none"), ("user", "<note>y</note>\ntwo")
    assert send(ask(first), memory, rules)[0][-1] == "one\n\n<note>x</note>"
    kept, _ = send(ask(first, A1, second), memory, rules)
    assert kept[1:] == ["one\n\n<note>x</note>", "yes", "two\n\n<note>y</note>"]
    memory = ConversationMemory()
    send(ask(first), memory, rules)
    assert send(ask(U1, A1, second), memory, rules)[0][1:] == ["one", "yes", "two\n\n<note>y</note>"]


def test_a_block_at_the_end_stays_at_the_end() -> None:
    """A block that stands where it would be put is not lost, now or when its turn is history."""
    memory = ConversationMemory()
    first = ("user", "one\n\n<mode>plan</mode>")
    assert send(ask(first), memory)[0][-1] == first[1]
    assert send(ask(first, A1, U2), memory)[0][1] == first[1]
    assert send(ask(U1, A1, U2), memory)[0][1] == first[1]


def test_a_carrier_that_says_again_what_was_said_before_last_is_sent() -> None:
    """What stands last is what the model believes: only a copy of that one is dropped."""
    memory = ConversationMemory()
    for loop in ((C1,), (CALL, TOOL, C2), (CALL, TOOL, CALL, TOOL, C1)):
        texts, _ = send(ask(U1, *loop), memory)
    assert texts[1:] == ["one", C1[1], "calling", "result", C2[1], "calling", "result", C1[1]]


def test_a_carrier_that_says_nothing_is_dropped_unless_an_earlier_one_stands() -> None:
    """It tells that what the earlier one says is over."""
    over = ("user", "<carrier>none</carrier>")
    memory = ConversationMemory()
    assert send(ask(U1, over), memory)[0][1:] == ["one"]
    memory = ConversationMemory()
    send(ask(U1), memory)
    send(ask(U1, A1, U2, C1), memory)
    third, _ = send(ask(U1, A1, U2, A2, U3, over), memory)
    assert third[1:] == ["one", "yes", "two", C1[1], "no", "three", over[1]]
    fourth, _ = send(ask(U1, A1, U2, A2, U3, A1, U1, over), memory)
    assert fourth[1:] == [*third[1:], "yes", "one"]


def test_many_turns_of_another_kind_do_not_end_a_conversation() -> None:
    """A night of heartbeats, with another system text, between two turns of a chat that a model has answered in."""
    memory = ConversationMemory()
    send(ask(U1, C1), memory)
    former, result = send(ask(U1, A1, U2, C2), memory)
    said = [U1, A1, U2, A2]
    for number in range(5):
        other = ask(*said, ("user", f"beat {number}"))
        other["messages"][0]["content"] += " beats"
        send(other, memory)
        said += [("user", f"beat {number}"), ("assistant", "ok")]
    texts, again = send(ask(*said, U3), memory)
    assert texts[: len(former)] == former
    assert again.conversation == result.conversation


def test_changed_carrier_in_a_tool_loop_is_sent_beside_the_old_one() -> None:
    """The old one is cached, the new one says something new: both are sent, and both come back."""
    memory = ConversationMemory()
    send(ask(U1, C1), memory)
    loop, _ = send(ask(U1, CALL, TOOL, C2), memory)
    later, _ = send(ask(U1, CALL, TOOL, A1, U2), memory)
    assert loop[1:] == ["one", C1[1], "calling", "result", C2[1]]
    assert later[1:] == ["one", C1[1], "calling", "result", C2[1], "yes", "two"]


STRICT = "{{ raise_exception('Conversation roles must alternate user/assistant') }}"


def test_carriers_become_part_of_their_turn_where_roles_must_alternate() -> None:
    """A template that refuses two user messages in a row gets the carrier inside the user's text, for good."""
    memory = ConversationMemory()

    def texts(*messages: tuple[str, str]) -> list[str]:
        body = json.dumps(ask(*messages)).encode()
        sent = json.loads(apply_rules(body, CHAT, RULES, memory, chat_template=STRICT).body)["messages"]
        roles = [message["role"] for message in sent]
        assert all(one != two for one, two in pairwise(roles))
        return [message["content"] for message in sent][1:]

    first = texts(U1, C1)
    loop = texts(U1, CALL, TOOL, C1)
    later = texts(U1, CALL, TOOL, A1, U2, C2)
    assert first == [f"one\n\n{C1[1]}"]
    assert loop == [*first, "calling", "result"]
    assert later == [*loop, "yes", f"two\n\n{C2[1]}"]


def test_pasted_carrier_is_the_users() -> None:
    """A message of the user behind an answer is what the user wrote, whatever it looks like."""
    memory = ConversationMemory()
    send(ask(U1), memory)
    texts, result = send(ask(U1, A1, C1), memory)
    assert texts[-1] == C1[1]
    assert not any(hit.rule == "test.carrier" for hit in result.hits)


def test_twins_with_other_carriers_do_not_mix() -> None:
    """Two chats with equal words: each gets its own carrier back or, when that cannot be known, none."""
    memory = ConversationMemory()
    other = ("user", "<carrier>chat=8 id=1</carrier>")
    send(ask(U1, C1), memory)
    send(ask(U1, other), memory)
    mine, _ = send(ask(U1, A1, U2, C2), memory)
    unknown, _ = send(ask(U1, A1, ("user", "else")), memory)
    assert mine[2] == C1[1]
    assert not any("<carrier>" in text for text in unknown)


def test_twins_are_told_apart_by_their_live_values() -> None:
    """Two conversations with equal words and other dates keep their own."""
    memory = ConversationMemory()
    send(ask(U1, day="2026-11-01"), memory)
    send(ask(U1, day="2026-11-02"), memory)
    assert "2026-11-01" in send(ask(U1, A1, U2, day="2026-11-01"), memory)[0][0]
    assert "2026-11-02" in send(ask(U1, A2, U2, day="2026-11-02"), memory)[0][0]


def test_a_session_of_the_client_narrows() -> None:
    """With the client's own session name equal words never meet, and without it the chain decides."""
    rules = compile_rules([parse_pack('session_headers = "x-session"\n' + PACK.strip(), "test.toml")])
    memory = ConversationMemory()
    send(ask(U1, day="2026-11-01"), memory, rules, **{"X-Session": "a"})
    send(ask(U1, day="2026-11-02"), memory, rules, **{"X-Session": "b"})
    assert "2026-11-01" in send(ask(U1, A1, U2, day="2026-11-09"), memory, rules, **{"x-session": "a"})[0][0]
    assert "2026-11-02" in send(ask(U1, A1, U2, day="2026-11-09"), memory, rules, **{"x-session": "b"})[0][0]
    assert "2026-11-09" in send(ask(U1, A1, U2, day="2026-11-09"), memory, rules, **{"x-session": "c"})[0][0]


def test_old_stranger_with_the_same_opening_gets_nothing() -> None:
    """After a restart a long conversation must not take over what a new one with equal first words left."""
    memory = ConversationMemory()
    send(ask(U1, C1, day="2026-11-01"), memory)
    turns = [pair for n in range(3, 7) for pair in (("assistant", f"a{n}"), ("user", f"u{n}"))]
    texts, _ = send(ask(U1, *turns, day="2026-11-09"), memory)
    assert "2026-11-09" in texts[0]
    assert not any("<carrier>" in text for text in texts)


def test_requests_of_one_conversation_at_the_same_time() -> None:
    """Branches from one state do not see each other: states are superseded, never changed."""
    memory = ConversationMemory()
    send(ask(U1, C1), memory)
    send(ask(U1, A1, U2, C2), memory)
    left, _ = send(ask(U1, A1, U2, A2, ("user", "left"), day="2026-11-30"), memory)
    right, _ = send(ask(U1, A1, U2, A2, ("user", "right"), C1), memory)
    again, _ = send(ask(U1, A1, U2, A2, ("user", "left"), A1, U3, day="2026-11-30"), memory)
    said = ["one", C1[1], "yes", "two", C2[1], "no"]
    assert left[1:] == [*said, "left\n\n[Day: 2026-11-30]"]
    assert right[1:] == [*said, "right", C1[1]]
    assert again[: len(left)] == left


def test_ids_and_form_do_not_count() -> None:
    """Changed call ids, cache marks, and a string that became a list of one part are the same conversation."""
    memory = ConversationMemory()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = ask(U1, CALL, TOOL)
    body["messages"][2] |= {"tool_calls": [call], "content": None}
    body["messages"][3]["tool_call_id"] = "call_1"
    send(ask(U1), memory)
    _, first = send(body, memory)
    later = ask(U1, CALL, TOOL, A1, U2)
    later["messages"][1]["content"] = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    later["messages"][2] |= {"tool_calls": [call | {"id": "call1"}], "content": ""}
    later["messages"][3]["tool_call_id"] = "call1"
    _, second = send(later, memory)
    assert first.conversation == second.conversation


def test_memory_is_bounded() -> None:
    """Count and bytes stay within their limits, and the oldest requests go first."""
    memory = ConversationMemory(max_requests=10, max_bytes=40_000)
    for number in range(50):
        send(ask(("user", f"words {number}"), ("user", f"<carrier>chat=7 {'x' * 900} {number}</carrier>")), memory)
        assert len(memory) <= 10
        assert memory.size_bytes <= 40_000
    over = ("user", "<carrier>chat=7 id=0</carrier>")
    texts, _ = send(ask(("user", "words 49"), A1, U2, over), memory)
    assert any("xxx" in text for text in texts)
    texts, _ = send(ask(("user", "words 1"), A1, U2, over), memory)
    assert not any("xxx" in text for text in texts)


def test_a_long_conversation_does_not_push_out_the_others() -> None:
    """What its states have in common counts once: memory grows with what is new, and all of it is given back."""
    memory = ConversationMemory(max_requests=200, max_bytes=1_500_000)
    send(ask(("user", "short"), C1), memory)
    said: list[tuple[str, str]] = []
    for number in range(150):
        said.append(("user", f"turn {number}"))
        send(ask(*said, ("user", f"<carrier>{'x' * 900} {number}</carrier>")), memory)
        said.append(("assistant", f"answer {number}"))
    texts, _ = send(ask(("user", "short"), A1, U2, C2), memory)
    assert texts[1:] == ["short", C1[1], "yes", "two", C2[1]]
    assert 150 * 4 * 900 < memory.size_bytes < 150 * 4 * 2_500
    memory.max_requests = 0
    send(ask(("user", "last")), memory)
    assert (len(memory), memory.size_bytes) == (0, 0)


def test_a_state_larger_than_the_memory_is_not_kept() -> None:
    """One request that alone exceeds the limit leaves nothing behind, and nothing fails."""
    memory = ConversationMemory(max_bytes=2_000)
    memory.remember(Chain((b"x",), (1,), 0), ConversationState("c1", frozen={"a": "y" * 5_000}))
    assert (len(memory), memory.size_bytes) == (0, 0)


def test_other_rules_forget_cached_items() -> None:
    """Results of a rule set are not used for another one with the same memory."""
    memory = ConversationMemory()
    pack = parse_pack(PACK, "test.toml")
    body = ask(("user", "[Wed] one"), A1, U2)
    strips = RulePatch(name="mine", where="user head", action="drop", pattern="[{weekday:short}] ")
    with_rule = compile_rules([pack], RuleSettings(added=(strips,)))
    assert send(body, memory, RULES)[0][1] == "[Wed] one"
    assert send(body, memory, with_rule)[0][1] == "one"
    assert send(body, memory, RULES)[0][1] == "[Wed] one"
