"""The field reports FR-01 to FR-24: what people saw break their cache, each as a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstack.config.rules import RulePatch
from kvstack.prompt.diff.segments import common_prefix, render
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.state.causes import Cause
from tests.differences import difference_of_bodies

CHAT = "/v1/chat/completions"
Body = dict[str, Any]
Ruled = Callable[..., RuleSet]

META = (
    '## Inbound Context (trusted metadata)\n\n```json\n{{\n  "schema": "openclaw.inbound_meta.v1",\n{keys}\n}}\n```\n'
)
INFO = (
    "Conversation info (untrusted metadata):\n```json\n"
    '{{\n  "message_id": "{id}",\n  "sender": "ann"\n}}\n```\n\n{words}'
)


def meta(**keys: object) -> str:
    """An OpenClaw metadata block with these keys."""
    return META.format(keys=",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in keys.items()))


def message(role: str, content: object, **more: object) -> Body:
    """One message."""
    return {"role": role, "content": content, **more}


def send(
    rules: RuleSet,
    body: Body,
    path: str = CHAT,
    memory: ConversationMemory | None = None,
    headers: Sequence[tuple[str, str]] = (),
) -> tuple[Body, RewriteResult]:
    """Apply the rules; return the body that goes upstream, decoded, and what was done."""
    result = apply_rules(json.dumps(body).encode(), path, rules, memory, headers)
    return json.loads(result.body), result


def extends(one: Body, other: Body, path: str = CHAT) -> bool:
    """Tell whether the prompt of one body is the beginning of the other's."""
    prefix = common_prefix(render(json.dumps(one).encode(), path), render(json.dumps(other).encode(), path))
    return prefix.shared == prefix.previous


def grown(system: Callable[[int], object], user: Callable[[int, bool], object], turns: int = 3) -> list[Body]:
    """
    A conversation as growing chat bodies.

    Args:
        system: The system text of the request of a turn.
        user: The user text of a turn; the second argument tells whether it is the newest.
        turns: Number of turns.
    """
    bodies = []
    for turn in range(turns):
        messages = [message("system", system(turn))]
        for earlier in range(turn):
            messages += [message("user", user(earlier, False)), message("assistant", f"answer {earlier}")]
        bodies.append({"model": "m", "messages": [*messages, message("user", user(turn, True))]})
    return bodies


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_fr_01_ids_in_the_system_block(rules: RuleSet, position: str) -> None:
    """FR-01: the per-message keys of the system block leave, wherever they stand, and the prompt extends."""

    def system(turn: int) -> str:
        volatile = {"message_id": f"48{turn}", "message_id_full": f"x/48{turn}", "sender_id": str(turn)}
        stable = {"chat_id": "telegram:77", "channel": "telegram"}
        if position == "first":
            keys = volatile | stable
        elif position == "last":
            keys = stable | volatile
        else:
            keys = {"chat_id": "telegram:77"} | volatile | {"channel": "telegram"}
        return "You help.\n" + meta(**keys) + "More."

    one, two, three = (send(rules, body)[0] for body in grown(system, lambda turn, _: f"words {turn}"))
    assert extends(one, two)
    assert extends(two, three)
    assert '"chat_id": "telegram:77"' in one["messages"][0]["content"]


def test_fr_01_only_key(rules: RuleSet) -> None:
    """FR-01: what is left of a block with nothing else is still JSON."""
    text = send(rules, grown(lambda _: meta(message_id="4"), lambda *_: "hi", 1)[0])[0]["messages"][0]["content"]
    assert json.loads(text.split("```json")[1].split("```")[0]) == {"schema": "openclaw.inbound_meta.v1"}


def test_fr_02_responses_with_block_and_bracket(rules: RuleSet) -> None:
    """FR-02: the reference case, over /v1/responses with a developer item: N and N+1 get one prefix."""

    def body(turn: int) -> Body:
        items: list[Body] = [message("developer", "You help.\n" + meta(message_id=f"id-{turn}", channel="web"))]
        for earlier in range(turn + 1):
            words = f"[Wed 2026-02-18 20:4{earlier} UTC] Hello {earlier}."
            text = INFO.format(id=f"id-{earlier}", words=words)
            items.append(message("user", [{"type": "input_text", "text": text}]))
            if earlier < turn:
                items.append({"type": "message", **message("assistant", [{"type": "output_text", "text": "Yes."}])})
        return {"stream": True, "input": items}

    one, two = (send(rules, body(turn), "/v1/responses")[0] for turn in range(2))
    assert extends(one, two, "/v1/responses")
    assert one["input"][1]["content"][0]["text"].endswith("}\n```\n\nHello 0.")


def test_fr_03_block_late_in_the_system_text(rules: RuleSet) -> None:
    """FR-03: a block behind 57,000 characters and 40 tools is found, and without the rule the difference is."""
    tools = [{"type": "function", "function": {"name": f"t{n}", "parameters": {}}} for n in range(40)]
    filler = "word " * 11_400
    one, two = (
        body | {"tools": tools}
        for body in grown(lambda t: filler + "\n" + meta(message_id=t), lambda t, _: t * "x" + "hi", 2)
    )
    found = difference_of_bodies(json.dumps(one).encode(), json.dumps(two).encode(), CHAT)
    assert found is not None
    assert (found.difference.path, found.difference.offset > 57_000) == ("messages[0].content", True)
    assert extends(send(rules, one)[0], send(rules, two)[0])


FR_04 = "## Current Date & Time\nWednesday, February 18th, 2026 — 20:{minute}\nTime zone: Europe/Rome\n"


def test_fr_04_clock_in_the_system_text(rules: RuleSet, ruled: Ruled) -> None:
    """FR-04: reported but not measured, so counted only; coarsened to the day on demand, and the time zone stays."""
    body = grown(
        lambda _: "You run inside OpenClaw.\n" + meta(channel="x") + FR_04.format(minute=48), lambda *_: "hi", 1
    )[0]
    sent, result = send(rules, body)
    assert sent == body
    assert [hit.rule for hit in result.hits] == ["openclaw.system-clock"]
    active = ruled(added=(RulePatch(name="openclaw.system-clock", action="coarsen", text="[{value}]"),))
    sent, _ = send(active, body)
    assert "Wednesday, February 18th, 2026\nTime zone: Europe/Rome\n" in sent["messages"][0]["content"]
    assert sent["messages"][1]["content"].endswith("February 18th, 2026 — 20:48]")


def test_fr_05_active_memory_moves_behind_the_words(rules: RuleSet, ruled: Ruled) -> None:
    """FR-05: a fresh summary in front of the newest words; on demand it goes behind them, and history keeps it."""
    block = "Context:\n<active_memory_plugin>\nlikes tea {0}\n</active_memory_plugin>"
    bodies = grown(
        lambda _: "You run inside OpenClaw.\n" + meta(channel="x"),
        lambda turn, newest: (block.format(turn) + "\n\n" if newest else "") + f"what now {turn}?",
    )
    assert send(rules, bodies[0])[0] == bodies[0]
    active = ruled(added=(RulePatch(name="openclaw.active-memory", action="sticky"),))
    memory = ConversationMemory()
    sent = [send(active, body, memory=memory)[0] for body in bodies]
    assert sent[0]["messages"][1]["content"] == "what now 0?\n\n" + block.format(0)
    assert extends(sent[0], sent[1])
    assert extends(sent[1], sent[2])


def test_fr_06_heartbeat_is_a_side_request(rules: RuleSet) -> None:
    """FR-06: a heartbeat has its own conversation and is labelled, so that the chat's eviction can be explained."""
    memory = ConversationMemory()
    chat = grown(lambda _: "You run inside OpenClaw.\n" + meta(channel="web"), lambda turn, _: f"words {turn}", 3)
    beat = {
        "model": "m",
        "messages": [
            message("system", "Beat. " + meta(channel="heartbeat")),
            message("user", "Read HEARTBEAT.md if it exists"),
        ],
    }
    first = send(rules, chat[1], memory=memory)[1]
    side = send(rules, beat, memory=memory)[1]
    again = send(rules, chat[2], memory=memory)[1]
    assert side.side == "heartbeat"
    assert (first.side, again.side) == (None, None)
    assert first.conversation == again.conversation != side.conversation


def test_fr_07_pruned_tool_result_is_named(rules: RuleSet) -> None:
    """FR-07: an old tool result that was cleared is what parts the requests, and the rules leave it alone."""
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    one = {
        "messages": [
            message("system", "s"),
            message("user", "[Tue 2026-02-17 10:00 UTC] a"),
            message("assistant", None, tool_calls=[call]),
            message("tool", "r" * 6000),
        ]
    }
    two = {
        "messages": [
            *one["messages"][:3],
            message("tool", "[older tool result cleared]"),
            message("assistant", "b"),
            message("user", "c"),
        ]
    }
    found = difference_of_bodies(json.dumps(one).encode(), json.dumps(two).encode(), CHAT)
    assert found is not None
    assert (found.difference.cause, found.difference.path) == (Cause.RESULT_CHANGED, "messages[3].content")
    assert send(rules, two)[0]["messages"][3] == two["messages"][3]


def test_fr_08_the_model_keeps_the_id_it_reacts_to(ruled: Ruled) -> None:
    """FR-08: with "system" the id of the newest message stands once, in the newest turn, and nowhere before it."""
    bodies = grown(
        lambda turn: "s\n" + meta(message_id=4821 + turn), lambda turn, _: INFO.format(id=4821 + turn, words="go")
    )
    sent, _ = send(ruled(strip_message_ids="system"), bodies[2])
    whole = json.dumps(sent)
    assert whole.count("4823") == 1
    assert "4823" in sent["messages"][-1]["content"]


def test_fr_08_warning_names_the_way_out(rules: RuleSet, ruled: Ruled) -> None:
    """FR-08: true takes ids away from a model that may react; it is said once, and only then."""
    parameters = {"type": "object", "properties": {"action": {"enum": ["send", "react"]}}}
    tool = {"type": "function", "function": {"name": "message", "parameters": parameters}}
    body = grown(lambda _: "s\n" + meta(message_id=1), lambda *_: "hi", 1)[0] | {"tools": [tool]}
    memory = ConversationMemory()
    first = send(rules, body, memory=memory)[1]
    second = send(rules, body, memory=memory)[1]
    assert ['"system"' in warning for warning in first.warnings] == [True]
    assert second.warnings == ()
    assert send(ruled(strip_message_ids="system"), body)[1].warnings == ()
    parameters["properties"]["action"]["enum"] = ["send"]  # type: ignore[index]
    assert send(rules, body)[1].warnings == ()


@pytest.mark.parametrize(
    "stamp", ["Wed 2026-03-04 15:56 GMT+8", "Mon 2026-03-02 09:05 GMT+5:30", "Sun 2026-01-18 00:19:42 PST"]
)
def test_fr_09_any_zone(rules: RuleSet, stamp: str) -> None:
    """FR-09: the prefix goes in whatever zone it is written."""
    sent, result = send(rules, {"messages": [message("user", f"[{stamp}] text")]})
    assert (sent["messages"][0]["content"], result.ts_removed) == ("text", 1)


def test_fr_10_event_lines_keep_their_text(rules: RuleSet, ruled: Ruled) -> None:
    """FR-10: a queued event and the reminder that repeats it stay; on demand only the event's clock goes."""
    event = "System: [2026-02-18 19:59:08 UTC] water plants\n\n"
    text = event + "A scheduled reminder has been triggered. Do it.\n\nwater plants"
    body = {"messages": [message("system", meta(channel="x")), message("user", text)]}
    sent, result = send(rules, body)
    assert sent == body
    assert [hit.rule for hit in result.hits] == ["openclaw.event-time"]
    assert result.side == "cron"
    active = ruled(added=(RulePatch(name="openclaw.event-time", action="drop"),))
    sent, _ = send(active, body)
    assert sent["messages"][1]["content"] == text.replace("[2026-02-18 19:59:08 UTC] ", "")


BILLING = "x-anthropic-billing-header: cc_version=2.1.120.cf9; cc_entrypoint=cli; cch={cch};{rest}"


@pytest.mark.parametrize(("cch", "rest"), [("543cf", ""), ("0A1B2", ""), ("543cf0a", " more; text"), ("fffff", "")])
def test_fr_11_billing_checksum(rules: RuleSet, cch: str, rest: str) -> None:
    """FR-11: the checksum becomes llama-server's own constant; the text behind it and a user's copy stay."""
    pasted = BILLING.format(cch=cch, rest="")
    body = {
        "system": [{"type": "text", "text": BILLING.format(cch=cch, rest=rest)}, {"type": "text", "text": "You are …"}],
        "messages": [message("user", pasted)],
    }
    sent, _ = send(rules, body, "/v1/messages")
    assert sent["system"][0]["text"] == BILLING.format(cch="fffff", rest=rest).replace(".cf9", ".000")
    assert sent["messages"] == body["messages"]
    assert send(rules, sent, "/v1/messages")[0] == sent


def test_fr_12_git_status_is_frozen(rules: RuleSet) -> None:
    """FR-12: the git status of the first request is replayed in its conversation, and only there."""
    headers = [("User-Agent", "claude-cli/2.1.197 (external, sdk-cli)")]

    def body(turn: int, status: str) -> Body:
        turns = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
        return {
            "system": [{"type": "text", "text": f"You are …\n\ngitStatus: x\n\nStatus:\n{status}"}],
            "messages": [*turns[: 2 * turn], message("user", "ace"[turn])],
        }

    memory = ConversationMemory()
    send(rules, body(0, "(clean)"), "/v1/messages", memory, headers)
    send(rules, body(1, "(clean)"), "/v1/messages", memory, headers)
    later, _ = send(rules, body(2, " M src/a.py"), "/v1/messages", memory, headers)
    assert later["system"][0]["text"].endswith("(clean)")
    fresh, _ = send(
        rules, {**body(0, " M src/a.py"), "messages": [message("user", "z")]}, "/v1/messages", memory, headers
    )
    assert fresh["system"][0]["text"].endswith(" M src/a.py")


def test_fr_13_date_at_midnight(rules: RuleSet) -> None:
    """FR-13: the date stays what it was in the system text, and the new one is told once, in the newest turn."""
    days = ["Sun Mar 22 2026", "Sun Mar 22 2026", "Mon Mar 23 2026", "Mon Mar 23 2026"]
    bodies = grown(lambda turn: f"<env>\n  Today's date: {days[turn]}\n</env>", lambda turn, _: f"words {turn}", 4)
    memory = ConversationMemory()
    client = [("User-Agent", "opencode/1.18.33")]
    one, two, three, four = (send(rules, body, memory=memory, headers=client)[0] for body in bodies)
    assert extends(one, two)
    assert extends(two, three)
    assert extends(three, four)
    assert three["messages"][-1]["content"] == "words 2\n\n[Today's date: Mon Mar 23 2026]"
    assert four["messages"][-1]["content"] == "words 3"


@pytest.mark.parametrize(
    "line",
    [
        "Conversation started: by {}, about taxes",
        "Conversation started: Monday, April 13, 2026 12:0{} AM",
        "Today's date: 2024-01-0{}",
        "Today's date: Sun Mar 2{} 2026",
        "Current date: 2026-11-1{}\nCurrent working directory: /srv",
    ],
)
def test_a_date_in_the_system_text_of_an_unknown_client_is_its_own(rules: RuleSet, line: str) -> None:
    """A mail or a ticket in the system text may hold such a line: without its client no rule of a client acts."""
    memory = ConversationMemory()
    for body in grown(
        lambda turn: f"Answer from this mail.\n\n{line.format(turn)}\nRent is 500.", lambda turn, _: f"w {turn}"
    ):
        assert send(rules, body, memory=memory)[0] == body


def test_fr_14_home_assistant_clock(rules: RuleSet, ruled: Ruled) -> None:
    """FR-14: reported but not measured, so counted only; on demand it moves behind the words, and is not lost."""
    clock = "Current time is 20:37:19. Today's date is 2024-12-20."
    body = {"messages": [message("system", f"{clock}\nYou are a voice assistant"), message("user", "lights on")]}
    assert send(rules, body)[0] == body
    active = ruled(added=(RulePatch(name="home-assistant.clock", action="tail"),))
    sent, _ = send(active, body)
    assert sent["messages"][0]["content"] == "You are a voice assistant"
    assert sent["messages"][1]["content"] == "lights on\n\n" + clock


def test_fr_16_started_line_is_frozen_per_conversation(rules: RuleSet) -> None:
    """FR-16: each conversation keeps its own start, also with equal first turns; none gets the other's."""

    def bodies(times: list[str], answer: str) -> list[Body]:
        made = grown(
            lambda turn: (
                f"You are Hermes.\n\nConversation started: Monday, April 13, 2026 {times[turn]}\nModel: m\nProvider: p"
            ),
            lambda turn, _: f"words {turn}",
            len(times),
        )
        for body in made:
            for said in body["messages"]:
                if said["role"] == "assistant":
                    said["content"] = answer
        return made

    memory = ConversationMemory()
    one = bodies(["12:06 AM", "12:07 AM", "12:09 AM"], "yes")
    two = bodies(["12:31 AM", "12:31 AM", "12:40 AM"], "no")
    sent = {"one": [], "two": []}  # type: dict[str, list[Body]]
    for turn in range(3):
        sent["one"].append(send(rules, one[turn], memory=memory)[0])
        sent["two"].append(send(rules, two[turn], memory=memory)[0])
    assert ["12:31" in body["messages"][0]["content"] for body in sent["two"]] == [True] * 3
    assert all("12:31" not in body["messages"][0]["content"] for body in sent["one"])
    assert extends(sent["one"][1], sent["one"][2])


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("Generate a concise, 3-5 word title with an emoji", "title"),
        ("Generate 1-3 broad tags categorizing the main themes", "tags"),
        ("Suggest 3-5 relevant follow-up questions", "follow-up"),
    ],
)
def test_fr_17_open_webui_side_requests(rules: RuleSet, task: str, label: str) -> None:
    """FR-17: a request that quotes the chat in a task is told from the chat itself."""
    text = f"### Task:\n{task}\n<chat_history>\nUSER: hi\n</chat_history>"
    body = {"messages": [message("user", text)], "max_tokens": 1000}
    assert send(rules, body)[1].side == label
    assert send(rules, body | {"tools": [{"type": "function", "function": {"name": "f"}}]})[1].side is None


@pytest.mark.parametrize(
    ("clock", "day"),
    [
        ("Friday, 12 June 2026 14:03:55 CEST", "Friday, 12 June 2026"),
        ("2026-06-12T14:03:55+02:00", "2026-06-12"),
        ("06/12/2026, 2:03:55 PM", "06/12/2026"),
    ],
)
def test_fr_18_clock_variables(rules: RuleSet, ruled: Ruled, clock: str, day: str) -> None:
    """FR-18: clocks in system texts are counted, and coarsened to the day on demand; in user texts they are words."""
    text = f"You help. The current date is {clock}. Be kind."
    body = {"messages": [message("system", text), message("user", text)]}
    sent, result = send(rules, body)
    assert sent == body
    assert [(hit.rule, hit.path) for hit in result.hits] == [("open-webui.clock", "messages[0].content")]
    active = ruled(added=(RulePatch(name="open-webui.clock", action="coarsen"),))
    sent, _ = send(active, body)
    assert [said["content"] for said in sent["messages"]] == [f"You help. The current date is {day}. Be kind.", text]


def test_fr_19_window_trimming_is_named() -> None:
    """FR-19: when the oldest messages are gone, that is what is said."""
    turns = [message("user" if n % 2 else "assistant", f"turn {n}") for n in range(40)]
    one = json.dumps({"messages": [message("system", "s"), *turns]}).encode()
    two = json.dumps(
        {"messages": [message("system", "s"), *turns[2:], message("assistant", "x"), message("user", "y")]}
    ).encode()
    found = difference_of_bodies(one, two, CHAT)
    assert found is not None
    assert (found.difference.cause, found.difference.path) == (Cause.TRIMMED, "messages[1].content")


def test_fr_20_directory_before_the_tools() -> None:
    """FR-20: a directory in the system text is a change of the system text, with what it costs."""
    bodies = [
        json.dumps({"messages": [message("system", f"cwd: {name}\n" + "rule\n" * 99), message("user", "hi")]}).encode()
        for name in ("proj-a", "proj-b")
    ]
    found = difference_of_bodies(*bodies, CHAT)
    assert found is not None
    assert (found.difference.cause, found.old, found.new) == (Cause.SYSTEM_CHANGED, "proj-a", "proj-b")
    assert found.lost > 400


@pytest.mark.parametrize(
    ("key", "sent_key"),
    [({"cache_prompt": False}, {"cache_prompt": True}), ({}, {}), ({"cache_prompt": True}, {"cache_prompt": True})],
)
def test_fr_21_cache_prompt_is_forced(rules: RuleSet, ruled: Ruled, key: Body, sent_key: Body) -> None:
    """FR-21: a native completion never reuses anything if its client says so; that is overridden, and counted."""
    body = {"prompt": "abc", **key, "n_predict": 16}
    sent, result = send(rules, body, "/completion")
    assert sent == {"prompt": "abc", **sent_key, "n_predict": 16}
    assert any(hit.rule == "cache-prompt" for hit in result.hits) is (key == {"cache_prompt": False})
    assert send(ruled(force_cache_prompt=False), body, "/completion")[0] == body


def test_fr_22_one_character_in_eight_thousand() -> None:
    """FR-22: the message, the offset and the text around it are named on both sides."""
    turns = [message("system", "s"), *(message("user" if n % 2 else "assistant", f"t{n}") for n in range(1, 4))]
    text = "word " * 1600
    one = json.dumps({"messages": [*turns, message("assistant", text)]}).encode()
    two = json.dumps(
        {"messages": [*turns, message("assistant", text[:4000] + "W" + text[4001:]), message("user", "y")]}
    ).encode()
    found = difference_of_bodies(one, two, CHAT)
    assert found is not None
    assert (found.difference.path, found.difference.offset) == ("messages[4].content", 4000)
    assert found.before == text[3970:4030]
    assert found.after == text[3970:4000] + "W" + text[4001:4030]


def test_fr_23_same_tools_in_another_order() -> None:
    """FR-23: the same set in another order, and the same JSON with other key order, are told apart from a change."""

    def body(*tools: Body) -> bytes:
        return json.dumps({"tools": tools, "messages": [message("user", "hi")]}).encode()

    a, b, c = ({"name": name, "parameters": {"type": "object", "properties": {}, "required": []}} for name in "abc")
    swapped = {"name": "a", "parameters": {"type": "object", "required": [], "properties": {}}}
    causes = [
        difference_of_bodies(body(a, b, c), other, CHAT) for other in (body(a, c, b), body(swapped, b, c), body(a, b))
    ]
    assert [found.difference.cause for found in causes if found] == [
        Cause.TOOLS_REORDERED,
        Cause.KEYS_REORDERED,
        Cause.TOOLS_CHANGED,
    ]


def test_fr_24_a_date_that_does_not_change_is_not_blamed() -> None:
    """FR-24: a timestamp in history with the same value is no difference."""
    one = {"messages": [message("system", "s"), message("user", "[Tue 2026-02-17 10:00 UTC] earlier")]}
    two = {"messages": [*one["messages"], message("assistant", "a"), message("user", "[Tue 2026-02-17 10:05 UTC] now")]}
    assert difference_of_bodies(json.dumps(one).encode(), json.dumps(two).encode(), CHAT) is None
