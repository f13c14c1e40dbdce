"""
The answer that went out tells conversations apart which began with the same words: what a request holds in its place
was never answered to another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvstack.prompt.answering import Answer
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.prompt.saying import Call, say

Message = dict[str, Any]
OLD, NEW = "2026-11-29", "2026-11-30"
HELLO: Message = {"role": "user", "content": "hello"}
MORE: Message = {"role": "user", "content": "more"}
SAID = "Hi! How can I help you today?"
OTHER = "Hello. What would you like me to do?"


def pi(day: str) -> Message:
    """Pi's system message."""
    text = f"operating inside pi, a coding agent harness\nCurrent date: {day}\nCurrent working directory: /x"
    return {"role": "system", "content": text}


def says(text: str | None, *calls: Call) -> Message:
    """An answer as a chat client keeps it."""
    made = [{"id": "x", "type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def ask(rules: RuleSet, memory: ConversationMemory, *messages: Message, **headers: str) -> RewriteResult:
    """Apply the rules to a chat request."""
    body = json.dumps({"messages": messages, "max_tokens": 100}).encode()
    return apply_rules(body, "/v1/chat/completions", rules, memory, list(headers.items()))


def answered(answer: Answer, text: str, *calls: Call, tokens: int | None = 9, broken_off: bool = False) -> None:
    """Let an answer go out."""
    answer.expect()
    answer.begin()
    answer.end(say(text, calls), tokens, broken_off=broken_off)


def texts(stripped: RewriteResult) -> list[str]:
    """What goes upstream."""
    return [item["content"] for item in json.loads(stripped.body)["messages"]]


def day_of(stripped: RewriteResult) -> str:
    """The date that Pi's system text has upstream."""
    return texts(stripped)[0].split("Current date: ")[1][:10]


def test_another_conversations_second_turn(rules: RuleSet) -> None:
    """The one that it continues was lost: it gets nothing of one that merely began alike, neither now nor later."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    second = ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE)
    assert texts(second) == [pi(NEW)["content"], "hello", OTHER, "more"]
    answered(second.answer, "Done.")
    third = ask(rules, memory, pi("2026-12-01"), HELLO, says(OTHER), MORE, says("Done."), MORE)
    assert day_of(third) == NEW


def test_its_own_second_turn(rules: RuleSet) -> None:
    """Its answer came back: the date stays, and the new one is announced."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    second = ask(rules, memory, pi(NEW), HELLO, says(SAID), MORE)
    assert texts(second) == [pi(OLD)["content"], "hello", SAID, f"more\n\n[Current date: {NEW}]"]


LONG = " ".join(f"Line {n} of the file says {n * 7919 % 101}." for n in range(60))
CALL = ("read", '{"path":"notes.txt","limit":20}')


KEPT: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "white space": ((SAID,), (f"  {SAID}\n",)),
    "thinking": ((f"<think>They greet me, so I greet them.</think>\n\n{SAID}",), (SAID,)),
    "thinking opened by the template": ((f"They greet me, so I greet them.</think>{SAID}",), (SAID,)),
    "thinking that is kept": ((f"<think>They greet me.</think>{SAID}",), (f"<think>They greet me.</think>{SAID}",)),
    "a tag in front": ((f"[[reply_to_current]] {SAID}",), (SAID,)),
    "tags in front": ((f"[[reply_to_current]] <thinking>They greet me.</thinking>\n{SAID}",), (SAID,)),
    "signs": ((SAID,), (SAID.replace("!", "! 👋").replace("?", " ?"),)),
    "signs alone": (("👍",), (" 👍",)),
    "emphasis": ((LONG,), (LONG.replace("Line 2 ", "**Line 2** "),)),
    "letters in another form": (("Cafe\u0301 Ⅸ",), ("Caf\u00e9 IX",)),
    "arguments in another order": (
        ("Let me see.", CALL),
        ("Let me see.", ("read", '{"limit": 20, "path": "notes.txt"}')),
    ),
    "numbers": (("", ("f", '{"a":20.0,"b":1468123456789012480}')), ("", ("f", '{"a":20,"b":1.46812345678901248e18}'))),
    "text left out beside a call": (("Let me see.", CALL), (None, CALL)),
    "calls left out beside text": (("Let me see.", CALL), ("Let me see.",)),
    "calls": (("", CALL, ("ls", "{}")), ("", CALL, ("ls", ""))),
    "the same call once": (("", CALL, CALL, CALL), ("", CALL)),
    "results between calls": (("", CALL, ("ls", "{}")), ("", ("ls", "{}"))),
    "escapes": (("", ("say", '{"text":"caf\\u00e9"}')), ("", ("say", '{"text": "café"}'))),
    "arguments that are no JSON": (("", ("run", "{broken")), ("", ("run", "{broken"))),
    "nothing": ((SAID,), ("",)),
}


@pytest.mark.parametrize("name", KEPT)
def test_clients_keep_answers_in_their_own_ways(rules: RuleSet, name: str) -> None:
    """It is the same answer, or may be."""
    went_out, kept = KEPT[name]
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, *went_out)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(*kept), MORE)) == OLD


GREETING = "Hello {}! " + LONG
LONG_PATH = '{"path":"/home/dev/projects/a-long-directory-name/another-one/src/%s.py"}'


@pytest.mark.parametrize(
    ("went_out", "kept"),
    [
        (("Hi",), ("Hi Ann, the build is broken since this morning, shall I look?",)),
        (("ok",), ("Look at this book.",)),
        (("Done.",), ("Done. Next?",)),
        (("Done. Next?",), ("Done.",)),
        ((f"Hello! {SAID}",), (SAID,)),
        ((f"[[reply_to_current]] {SAID}",), (OTHER,)),
        ((GREETING.format("Ann"),), (GREETING.format("Bob"),)),
        ((f"{LONG} Yes.",), (f"{LONG} No.",)),
        ((LONG,), (LONG.replace("says", "reads"),)),
        ((LONG,), (LONG[:1000],)),
        ((LONG,), (LONG[1100:],)),
        (("", CALL), ("", ("read", '{"path":"other.txt","limit":20}'))),
        (("", CALL), ("", ("read", '{"path":"notes.txt","limit":21}'))),
        (("", CALL), ("", ("write", CALL[1]))),
        (("", ("read", LONG_PATH % "alpha")), ("", ("read", LONG_PATH % "omega"))),
        (("Let me see.", CALL), ("Let me see.", ("ls", "{}"))),
        (("Let me see.",), (None, CALL)),
        (("",), (SAID,)),
        ((SAID,), ("👍",)),
        (("👍",), ("👎",)),
        (("👍",), (SAID,)),
        (("<think>They greet me, so I greet them.",), (SAID,)),
        (("你好，我能帮你什么？",), ("早上好，今天要做什么呢？",)),
    ],
)
def test_what_is_another_answer(rules: RuleSet, went_out: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
    """Words in common do not make it the same."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, *went_out)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(*kept), MORE)) == NEW


@pytest.mark.parametrize(
    ("went_out", "kept", "day"),
    [
        (LONG[:1000], LONG[:990], OLD),
        (LONG[:1000], LONG[:1010] + "\n[interrupted]", OLD),
        ("Let me", "Let me explain how this works.", OLD),
        ("Let me explain", "Let", OLD),
        ("", "The thinking that was shown.", OLD),
        (LONG[:1000], GREETING, NEW),
        (LONG[:1000], LONG[:500] + " but " + LONG[500:], NEW),
        ("Let me", SAID, NEW),
    ],
)
def test_an_answer_that_broke_off(rules: RuleSet, went_out: str, kept: str, day: str) -> None:
    """Its client may have less of it, a mark behind it, or go on from there; but it begins alike."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, went_out, broken_off=True)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(kept), MORE)) == day


def test_an_item_that_the_client_adds(rules: RuleSet) -> None:
    """Another one of the assistant behind the answer does not make it another answer."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, "Done.")
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says("Done."), says("The build is green."), MORE)) == OLD


def waits(answer: Answer) -> None:
    """It was sent, and nothing came."""
    answer.expect()


def breaks(answer: Answer) -> None:
    """The client left, or the server failed, before the first word."""
    answer.expect()
    answer.end()


def begins(answer: Answer) -> None:
    """The client hears it."""
    answer.expect()
    answer.begin()


def stops_at_its_limit(answer: Answer) -> None:
    """It was cut off, but it began otherwise."""
    answered(answer, "Hi", tokens=100)


def stops_at_a_small_limit(answer: Answer) -> None:
    """As probes have it, and those who play again what they recorded."""
    answer.limit_tokens = 1
    answered(answer, "Hi", tokens=1)


def begins_alike(answer: Answer) -> None:
    """What its client hears so far may become that."""
    answer.expect()
    answer.begin(lambda: say(OTHER[:9]))


def begins_otherwise(answer: Answer) -> None:
    """What its client hears so far cannot become that."""
    answer.expect()
    answer.begin(lambda: say(SAID[:9]))


def is_lost(answer: Answer) -> None:
    """Its body was too long to be read."""
    begins(answer)
    answer.end(None, 9)


def never_went_out(answer: Answer) -> None:
    """It was counted or rendered, or the stack was not ready."""
    answer.end()


@pytest.mark.parametrize(
    ("fate", "day"),
    [
        (waits, NEW),
        (breaks, NEW),
        (begins, OLD),
        (begins_alike, OLD),
        (begins_otherwise, NEW),
        (stops_at_its_limit, NEW),
        (stops_at_a_small_limit, OLD),
        (is_lost, OLD),
        (never_went_out, OLD),
    ],
)
def test_as_far_as_it_is_known(rules: RuleSet, fate: Callable[[Answer], None], day: str) -> None:
    """Who has heard nothing cannot go on from it; what was heard and is not known tells nothing."""
    memory = ConversationMemory()
    fate(ask(rules, memory, pi(OLD), HELLO).answer)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE)) == day


def test_a_request_that_was_sent_twice(rules: RuleSet) -> None:
    """Its client takes one of the answers, and any of them is known."""
    for taken in (SAID, OTHER):
        memory = ConversationMemory()
        for text in (SAID, OTHER):
            answered(ask(rules, memory, pi(OLD), HELLO).answer, text)
        ask(rules, memory, pi(OLD), HELLO)
        assert day_of(ask(rules, memory, pi(NEW), HELLO, says(taken), MORE)) == OLD


def test_twins_are_told_apart(rules: RuleSet) -> None:
    """Two that began with the same words go on as what was answered to them, in any order."""
    for first, second in ((OLD, NEW), (NEW, OLD)):
        memory = ConversationMemory()
        for day, text in ((OLD, SAID), (NEW, OTHER)):
            answered(ask(rules, memory, pi(day), HELLO).answer, text)
        for day in (first, second):
            text = {OLD: SAID, NEW: OTHER}[day]
            assert day_of(ask(rules, memory, pi("2026-12-01"), HELLO, says(text), MORE)) == day


def test_later_turns_of_a_client_that_keeps_answers(rules: RuleSet) -> None:
    """Equal words and answers up to a turn, and then another answer: that is another conversation."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    answered(ask(rules, memory, pi(OLD), HELLO, says(SAID), MORE).answer, "Done.")
    third = ask(rules, memory, pi(NEW), HELLO, says(SAID), MORE, says("There is nothing more."), MORE)
    assert texts(third)[0::5] == [pi(NEW)["content"], "more"]


def test_an_assistants_words_that_stand_before_the_first_answer(rules: RuleSet) -> None:
    """Examples, or the history from before a restart, were never answered here: it is the last answer that counts."""
    memory = ConversationMemory()
    before = (HELLO, says("Got it."), MORE)
    answered(ask(rules, memory, pi(OLD), *before).answer, SAID)
    assert day_of(ask(rules, memory, pi(NEW), *before, says(OTHER), MORE)) == NEW
    assert day_of(ask(rules, memory, pi(NEW), *before, says(SAID), MORE)) == OLD


def test_a_client_that_alters_its_answers_is_refused_a_few_times_only(rules: RuleSet) -> None:
    """However long it goes on: what was placed comes back, for all turns since it was refused last."""
    memory, history = ConversationMemory(), [OPENCLAW]
    names = []
    for n in range(40):
        history.append({"role": "user", "content": f"turn {n}"})
        first = ask(rules, memory, *history, carrier(2 * n))
        answered(first.answer, "", ("send", f'{{"id":{n}}}'))
        history += [says(None, ("send", f'{{"id":"{n}"}}')), {"role": "tool", "tool_call_id": "x", "content": "sent"}]
        second = ask(rules, memory, *history, carrier(2 * n + 1))
        answered(second.answer, f"I have sent it for turn {n}.")
        history.append(says(f"I have sent it for turn {n}."))
        names += [first.conversation, second.conversation]
    assert len(set(names)) <= 5
    assert sum("OPENCLAW_INTERNAL" in text for text in texts(second) if text) > 30


def test_sent_again_while_another_one_waits(rules: RuleSet) -> None:
    """A repetition stays one where the conversation that waits one turn before was answered something else."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, OTHER)
    answered(ask(rules, memory, pi(OLD), HELLO, says(OTHER), MORE).answer, "Done.")
    answered(ask(rules, memory, pi(NEW), HELLO).answer, SAID)
    again = ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE)
    assert texts(again) == [pi(OLD)["content"], "hello", OTHER, f"more\n\n[Current date: {NEW}]"]


def test_nothing_of_one_that_waits_and_was_answered_something_else(rules: RuleSet) -> None:
    """Known from its third turn on, and sent again: the values are its own."""
    memory, third = ConversationMemory(), (HELLO, says(OTHER), MORE, says("One was told this."), MORE)
    answered(ask(rules, memory, pi("2026-11-28"), HELLO).answer, OTHER)
    answered(ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE).answer, "The other one was told that.")
    answered(ask(rules, memory, pi(OLD), *third).answer, "Third.")
    assert day_of(ask(rules, memory, pi(NEW), *third)) == OLD


@pytest.mark.parametrize("count", [8, 32, 33, 80])
def test_many_that_began_on_one_day(rules: RuleSet, count: int) -> None:
    """More answers to one request than are kept: each goes on, for it may be one that was forgotten."""
    memory = ConversationMemory()
    for n in range(count):
        answered(ask(rules, memory, pi(OLD), HELLO).answer, f"Answer {n} of many.")
    for n in range(count):
        assert day_of(ask(rules, memory, pi(NEW), HELLO, says(f"Answer {n} of many."), MORE)) == OLD


def test_requests_that_are_counted_push_no_answer_out(rules: RuleSet) -> None:
    """However often a client has its tokens counted."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    for _ in range(30):
        ask(rules, memory, pi(OLD), HELLO)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE)) == NEW
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(SAID), MORE)) == OLD


def test_the_same_words_and_answers_up_to_a_turn(rules: RuleSet) -> None:
    """Two conversations whose turns are equal keep each what is theirs, and go on by the answers that differ."""
    memory, second = ConversationMemory(), (OPENCLAW, HELLO, says(SAID), MORE)
    answered(ask(rules, memory, OPENCLAW, HELLO, carrier(1)).answer, SAID)
    answered(ask(rules, memory, *second, carrier(2)).answer, "One was told this.")
    answered(ask(rules, memory, *second, carrier(7)).answer, "The other one was told that.")
    third = texts(ask(rules, memory, *second, says("One was told this."), MORE, carrier(3)))
    assert [n for text in third for n in range(10) if f"m{n}" in text] == [1, 2, 3]


def test_more_that_began_alike_than_are_kept(rules: RuleSet) -> None:
    """One that nothing is known of is no reason to take it, where others were forgotten."""
    memory = ConversationMemory()
    for n in range(1, 40):
        answered(ask(rules, memory, OPENCLAW, HELLO, carrier(100 + n)).answer, f"Answer {n}.")
    begins(ask(rules, memory, OPENCLAW, HELLO, carrier(199)).answer)
    for n in (39, 1):
        second = texts(ask(rules, memory, OPENCLAW, HELLO, says(f"Answer {n}."), MORE, carrier(200)))
        assert [text for text in second if "m1" in text] == ([carrier(139)["content"]] if n == 39 else [])


@pytest.mark.parametrize("fate", [breaks, never_went_out])
def test_many_that_say_nothing_or_the_same(rules: RuleSet, fate: Callable[[Answer], None]) -> None:
    """Retries while the server loads, and equal answers, are no reason to forget one, nor to take another one's."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    for _ in range(50):
        answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
        fate(ask(rules, memory, pi(OLD), HELLO).answer)
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(OTHER), MORE)) == NEW
    assert day_of(ask(rules, memory, pi(NEW), HELLO, says(SAID), MORE)) == OLD


def test_who_was_refused_once_is_no_prey(rules: RuleSet) -> None:
    """That a conversation began before a restart says nothing of its client: what follows is looked at as before."""
    memory, second = ConversationMemory(), (HELLO, says(OTHER), MORE)
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    answered(ask(rules, memory, pi(NEW), *second).answer, "One was told this.")
    third = ask(rules, memory, pi("2026-12-01"), *second, says("The other one was told that."), MORE)
    assert day_of(third) == "2026-12-01"


def test_the_session_comes_first(rules: RuleSet) -> None:
    """One that no session is known of is not taken for its answer, where the session says which one it is."""
    memory = ConversationMemory()

    def opencode(day: str) -> Message:
        return {"role": "system", "content": f"<env>\n  Today's date: {day}\n</env>"}

    agent, session = {"user-agent": "opencode/1"}, {"user-agent": "opencode/1", "x-session-id": "s"}
    answered(ask(rules, memory, opencode("Sat Nov 28 2026"), HELLO, **agent).answer, SAID)
    answered(ask(rules, memory, opencode("Sun Nov 29 2026"), HELLO, **session).answer, OTHER)
    second = ask(rules, memory, opencode("Mon Nov 30 2026"), HELLO, says(SAID), MORE, **session)
    assert "Sun Nov 29 2026" in texts(second)[0]


def test_answers_are_counted_in_the_memory(rules: RuleSet) -> None:
    """What an answer takes is given back with the request, whatever became of it; and it is no more than was said."""
    memory = ConversationMemory()
    wide = "\U0001f600" * 9 + "あいうえお " * 9000
    for n in range(50):
        answer = ask(rules, memory, pi(OLD), {"role": "user", "content": f"hello {n // 2}"}).answer
        if n % 3:
            answered(answer, wide, *((f"f{k}", f'{{"a":{k}}}') for k in range(40)))
        held = [getattr(answer._said, name) for name in ("text", "digest", "blocks", "calls")] if n % 3 else []
        assert sum(map(sys.getsizeof, held)) + 200 <= answer.cost_bytes
    memory.max_requests = 0
    ask(rules, memory, pi(OLD), HELLO)
    assert (memory.size_bytes, len(memory)) == (0, 0)


def test_an_answer_that_its_user_edited(rules: RuleSet) -> None:
    """It is rather another conversation: one prefill, and no error."""
    memory = ConversationMemory()
    answered(ask(rules, memory, pi(OLD), HELLO).answer, SAID)
    second = ask(rules, memory, pi(NEW), HELLO, says("I was edited by hand."), MORE)
    answered(second.answer, "Done.")
    third = ask(rules, memory, pi("2026-12-01"), HELLO, says("I was edited by hand."), MORE, says("Done."), MORE)
    assert (day_of(second), day_of(third)) == (NEW, NEW)


def test_a_session_needs_no_answer(rules: RuleSet) -> None:
    """Where the client names its conversation, it may keep what it wants."""
    memory = ConversationMemory()
    session = {"user-agent": "opencode/1", "x-session-id": "s"}

    def opencode(day: str) -> Message:
        return {"role": "system", "content": f"<env>\n  Today's date: {day}\n</env>"}

    answered(ask(rules, memory, opencode("Sun Nov 29 2026"), HELLO, **session).answer, SAID)
    second = ask(rules, memory, opencode("Mon Nov 30 2026"), HELLO, says(OTHER), MORE, **session)
    assert "Sun Nov 29 2026" in texts(second)[0]


OPENCLAW: Message = {"role": "system", "content": "running inside OpenClaw"}


def carrier(number: int) -> Message:
    """The carrier message of a turn in one chat."""
    said = f'"chat_id": "7", "message_id": "m{number}"'
    text = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{said}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    return {"role": "user", "content": text}


def test_carriers_of_one_chat(rules: RuleSet) -> None:
    """The carrier of a session that began with the same word never stands in another one of that chat."""
    memory = ConversationMemory()
    answered(ask(rules, memory, OPENCLAW, HELLO, carrier(1)).answer, SAID)
    other = ask(rules, memory, OPENCLAW, HELLO, says(OTHER), MORE, carrier(9))
    own = ask(rules, memory, OPENCLAW, HELLO, says(SAID), MORE, carrier(2))
    assert not any("m1" in text for text in texts(other))
    assert ["m1" in text for text in texts(own)] == [False, False, True, False, False, False]


def test_a_first_turn_that_was_sent_again_with_another_carrier(rules: RuleSet) -> None:
    """The carrier that stays is the one of the request whose answer was taken."""
    memory = ConversationMemory()
    for number, text in ((1, SAID), (2, OTHER)):
        answered(ask(rules, memory, OPENCLAW, HELLO, carrier(number)).answer, text)
    for number, text in ((1, SAID), (2, OTHER)):
        second = texts(ask(rules, memory, OPENCLAW, HELLO, says(text), MORE, carrier(3)))
        assert second == [OPENCLAW["content"], "hello", carrier(number)["content"], text, "more", carrier(3)["content"]]


@pytest.mark.parametrize(
    ("path", "first", "answer"),
    [
        ("/v1/responses", "input", {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}),
        ("/v1/messages", "messages", {"role": "assistant", "content": [{"type": "text"}]}),
    ],
)
def test_the_other_dialects(rules: RuleSet, path: str, first: str, answer: Message) -> None:
    """What an answer holds is found in each."""
    for kept, day in ((SAID, OLD), (OTHER, NEW)):
        memory = ConversationMemory()
        key = "instructions" if first == "input" else "system"

        def send(date: str, *items: Message, key: str = key, memory: ConversationMemory = memory) -> RewriteResult:
            body = json.dumps({key: pi(date)["content"], first: items}).encode()
            return apply_rules(body, path, rules, memory)

        answered(send(OLD, HELLO).answer, SAID)
        part = {**answer["content"][0], "text": kept}
        sent = json.loads(send(NEW, HELLO, {**answer, "content": [part]}, MORE).body)
        assert f"Current date: {day}" in sent[key]


def test_calls_and_text_of_one_answer_in_several_items(rules: RuleSet) -> None:
    """The Responses dialect has an item for each; together they are the answer."""
    for args, day in (('{"path": "a"}', OLD), ('{"path": "another one"}', NEW)):
        memory = ConversationMemory()

        def send(date: str, *items: Message, memory: ConversationMemory = memory) -> RewriteResult:
            body = json.dumps({"instructions": pi(date)["content"], "input": items}).encode()
            return apply_rules(body, "/v1/responses", rules, memory)

        answered(send(OLD, HELLO).answer, "", ("read", '{"path":"a"}'), ("ls", "{}"))
        second = send(
            NEW,
            HELLO,
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "read", "arguments": args},
            {"type": "function_call", "call_id": "2", "name": "ls", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "function_call_output", "call_id": "2", "output": "y"},
        )
        assert f"Current date: {day}" in json.loads(second.body)["instructions"]
