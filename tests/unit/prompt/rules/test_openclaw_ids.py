"""OpenClaw 2026.2.17: ids in the system block and in user blocks, timestamps at the start of the user's words."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.request.apis import Api
from kvstack.prompt.rules.ruleset import RuleSet

SYSTEM = (
    'You help.\n\n```json\n{{\n  "schema": "openclaw.inbound_meta.v1",\n{keys}  "channel": "web"\n}}\n```\n# More\n'
)
USER = 'Conversation info (untrusted metadata):\n```json\n{\n  "message_id": "m-1",\n  "sender": "cli"\n}\n```\n\n'
USER_BARE = 'Conversation info (untrusted metadata):\n```json\n{\n  "sender": "cli"\n}\n```\n\n'


def system(**keys: object) -> str:
    """An OpenClaw system text with these keys in its block."""
    return SYSTEM.format(keys="".join(f'  "{key}": {json.dumps(value)},\n' for key, value in keys.items()))


def chat(user: object, system_text: str | None = None) -> dict[str, object]:
    """A chat body with one user turn."""
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": system(message_id="m-1") if system_text is None else system_text},
            {"role": "user", "content": user},
        ],
    }


def strip(body: object, rules: RuleSet, path: str = "/v1/chat/completions") -> RewriteResult:
    """Send a body through the rules, spelled compactly."""
    return apply_rules(json.dumps(body).encode(), path, rules)


def test_system_ids_go_and_the_rest_of_the_block_stays(rules: RuleSet) -> None:
    """The per-message keys are cut as whole lines, nested flags included; routing keys stay."""
    keys = {
        "message_id": "4821",
        "message_id_full": "-100/4821",
        "sender_id": "77",
        "chat_id": "telegram:77",
        "reply_to_id": "4820",
        "flags": {"history_count": 3},
    }
    result = strip(chat("hi", system(**keys)), rules)
    text = json.loads(result.body)["messages"][0]["content"]
    assert text == system(chat_id="telegram:77")
    assert result.client == "openclaw"
    assert result.msg_ids_removed == 1
    assert result.items_modified >= 1


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ('{"schema":"openclaw.inbound_meta.v1","message_id":"4"}', '{"schema":"openclaw.inbound_meta.v1"}'),
        ('{"message_id":4821,"schema":"openclaw.inbound_meta.v2"}', '{"schema":"openclaw.inbound_meta.v2"}'),
        (
            '{\r\n  "message_id": "4",\r\n  "schema": "openclaw.inbound_meta.v1"\r\n}',
            '{\r\n  "schema": "openclaw.inbound_meta.v1"\r\n}',
        ),
        (
            '{"schema": "openclaw.inbound_meta.v1", "at": {"message_id": "1"}, "list": [{"x": 1, "message_id": 2}]}',
            '{"schema": "openclaw.inbound_meta.v1", "at": {}, "list": [{"x": 1}]}',
        ),
    ],
    ids=["compact, last key", "number, first key, v2", "CRLF", "nested"],
)
def test_every_spelling_of_the_system_block(rules: RuleSet, block: str, expected: str) -> None:
    """No dangling comma remains, wherever the key stands and however the JSON is written (FR-01)."""
    newline = "\r\n" if "\r\n" in block else "\n"
    frame = f"Intro.{newline}```json{newline}%s{newline}```{newline}# Rest"
    result = strip(chat("hi", frame % block), rules)
    assert json.loads(result.body)["messages"][0]["content"] == frame % expected


@pytest.mark.parametrize("parts", [False, True], ids=["string", "parts"])
@pytest.mark.parametrize("zone", ["UTC", "PST", "GMT+8", "GMT+5:30", "CET"])
def test_user_head_is_read_block_then_bracket(rules: RuleSet, zone: str, parts: bool) -> None:
    """The id leaves the Conversation info block and the bracket goes, in any zone, whatever the content form."""
    text = f"{USER}[Wed 2026-02-18 20:48 {zone}] Hello."
    content: object = [{"type": "text", "text": text}] if parts else text
    result = strip(chat(content), rules)
    found = json.loads(result.body)["messages"][1]["content"]
    assert (found[0]["text"] if parts else found) == USER_BARE + "Hello."
    assert (result.ts_removed, result.msg_ids_removed, result.items_modified) == (1, 2, 2)


@pytest.mark.parametrize(
    "suffix", [" (untrusted metadata):", " (untrusted, for context):", ": \u27e6openclaw:ctx\u27e7"]
)
@pytest.mark.parametrize(
    "block", ["Replied message", "Reply target of current user message", "Thread starter", "Location"]
)
def test_the_cursor_passes_every_block_of_the_client(rules: RuleSet, block: str, suffix: str) -> None:
    """What else the client tells of a message stays, and the bracket behind it goes; lists are blocks as well."""
    quoted = f'{block}{suffix}\n```json\n{{"sender": "Ann", "message_id": "m-0"}}\n```\n\n'
    chats = f'Chat history since last reply{suffix}\n```json\n[\n  {{"body": "a"}}\n]\n```\n\n'
    text = f"{USER}{quoted}{chats}[Wed 2026-02-18 20:48 UTC] Hello."
    result = strip(chat(text), rules)
    assert json.loads(result.body)["messages"][1]["content"] == USER_BARE + quoted + chats + "Hello."
    assert result.ts_removed == 1


def test_bracket_with_seconds_and_without_a_detected_client(rules: RuleSet) -> None:
    """The weekday bracket is distinctive enough to go without knowing the client."""
    result = strip(chat("[Sun 2026-01-18 00:19:42 PST] text", "You help."), rules)
    assert json.loads(result.body)["messages"][1]["content"] == "text"
    assert result.client is None


@pytest.mark.parametrize(
    "text",
    [
        "see [Wed 2026-02-18 20:48 UTC] Hello",
        "[2026-02-18 20:48 UTC] no weekday",
        "[Wed 2026-13-18 20:48 UTC] no such month",
        "[Wed 2026-02-18 25:48 UTC] no such hour",
        "[Wed 2026-02-18 20:48 UTC]no space",
        "\n[Wed 2026-02-18 20:48 UTC] after a blank line",
        'pasted:\nConversation info (untrusted metadata):\n```json\n{"message_id": "1"}\n```\n\nend',
        '{"message_id": "0b6f2f0e-1111-4222-8333-444455556666"}',
        "[Wed 2026-02-18 20:48 UTC] [Tue 2026-02-17 10:00 UTC] pasted log line",
    ],
)
def test_what_the_user_wrote_stays(rules: RuleSet, text: str) -> None:
    """Look-alikes that are not at their position, or not certainly the client's, are user data."""
    body = json.dumps(chat(text, system())).encode()
    assert apply_rules(body, "/v1/chat/completions", rules).body is body


def test_blocks_of_an_undetected_client_stay(rules: RuleSet) -> None:
    """A Conversation info block is only stripped where OpenClaw was recognised."""
    body = json.dumps(chat(USER + "hi", "You help.")).encode()
    assert apply_rules(body, "/v1/chat/completions", rules).body is body


def test_responses_dialect(rules: RuleSet) -> None:
    """FR-02: developer item with string content, user item without type, `instructions` beside it."""
    body = {
        "stream": True,
        "instructions": system(message_id="x-9"),
        "input": [
            {"role": "developer", "content": system(message_id="0b6f2f0e-1111-4222-8333-444455556666")},
            {"role": "user", "content": [{"type": "input_text", "text": USER + "[Wed 2026-02-18 20:48 UTC] Hello."}]},
            {"type": "function_call_output", "call_id": "c", "output": "[Wed 2026-02-18 20:48 UTC] log"},
        ],
    }
    result = strip(body, rules, "/v1/responses?x=1")
    found = json.loads(result.body)
    assert found["instructions"] == system()
    assert found["input"][0]["content"] == system()
    assert found["input"][1]["content"][0]["text"] == USER_BARE + "Hello."
    assert found["input"][2] == body["input"][2]  # type: ignore[index]
    assert (result.api, result.stream, result.items, result.msg_ids_removed) == (Api.RESPONSES, True, 3, 3)


def test_messages_dialect(rules: RuleSet) -> None:
    """System as blocks, content as blocks."""
    body = {
        "system": [{"type": "text", "text": system(message_id="1"), "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "[Wed 2026-02-18 20:48 UTC] Hello."}]}],
    }
    found = json.loads(strip(body, rules, "/v1/messages?beta=true").body)
    assert found["system"][0] == {"type": "text", "text": system(), "cache_control": {"type": "ephemeral"}}
    assert found["messages"][0]["content"][0]["text"] == "Hello."


def test_other_bytes_of_the_body_stay(rules: RuleSet) -> None:
    """Escapes, duplicate keys, number spelling, key order, white space and lone surrogates keep their bytes."""
    block = '```json\\n{\\"schema\\": \\"openclaw.inbound_meta.v1\\", \\"message_id\\": \\"\\u0041\\"}\\n```'
    bare = '```json\\n{\\"schema\\": \\"openclaw.inbound_meta.v1\\"}\\n```'
    frame = (
        '{{ "n" : 1.50e+2, "big":123456789012345678901234567890, "n":2,\t"messages":[ '
        '{{"content":'
        '"\\u00e9 \\/ \\ud83d\\ude00 \\ud83d\\n{0}\\r\\n\u00e9", "role":"system"}} ,'
        '{{"role":"user","content":"x"}}] }}\n'
    )
    result = apply_rules(frame.format(block).encode(), "/v1/chat/completions", rules)
    assert result.body == frame.format(bare).encode()


@pytest.mark.parametrize(
    ("setting", "system_bare", "user_bare"), [(True, True, True), ("system", True, False), (False, False, False)]
)
def test_strip_message_ids_switch(
    ruled: Callable[..., RuleSet], setting: object, system_bare: bool, user_bare: bool
) -> None:
    """True: everywhere; "system": the model keeps the ids of user turns; false: nowhere."""
    result = strip(chat(USER + "hi"), ruled(strip_message_ids=setting))
    messages = json.loads(result.body)["messages"]
    assert (messages[0]["content"] == system()) is system_bare
    assert (messages[1]["content"] == USER_BARE + "hi") is user_bare


def test_strip_timestamps_switch(ruled: Callable[..., RuleSet]) -> None:
    """False keeps the bracket, and the ids go all the same."""
    result = strip(chat(f"{USER}[Wed 2026-02-18 20:48 UTC] hi"), ruled(strip_timestamps=False))
    assert json.loads(result.body)["messages"][1]["content"] == f"{USER_BARE}[Wed 2026-02-18 20:48 UTC] hi"
    assert result.ts_removed == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": [}',
        b'{"messages": "x"}',
        b'{"messages": [1, null, {"role": "user"}, {"role": 5, "content": {}}]}',
        b"\xff\xfe",
        b'{"messages": []} x',
        b'{"messages": [' + b"[" * 100_000 + b"]}",
        b'{"messages": [{"role": "user", "content": ' + b"9" * 10_000 + b"}]}",
    ],
)
def test_strange_bodies_come_back_as_they_are(rules: RuleSet, body: bytes) -> None:
    """What cannot be read, or holds no prompt, passes untouched."""
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion"):
        assert apply_rules(body, path, rules).body is body


def test_path_without_a_prompt(rules: RuleSet) -> None:
    """Other routes are none of our business."""
    body = json.dumps(chat(USER)).encode()
    result = apply_rules(body, "/v1/embeddings", rules)
    assert result.body is body
    assert result.api is None


def test_reply_ids_follow_the_newest_words(rules: RuleSet) -> None:
    """The same words sent again as a reply to another message name that one; an image alone gets words for it."""
    memory = ConversationMemory()

    def ask(reply: str | None, *turns: tuple[str, object]) -> list[object]:
        keys = {"message_id": "m"} | ({"reply_to_id": reply} if reply else {})
        said = [{"role": "system", "content": system(**keys)}, *({"role": r, "content": c} for r, c in turns)]
        done = apply_rules(json.dumps({"messages": said}).encode(), "/v1/chat/completions", rules, memory)
        return [message["content"] for message in json.loads(done.body)["messages"]][1:]

    first, answer, image = ("user", "u"), ("assistant", "a"), [{"type": "image_url", "image_url": {"url": "x"}}]
    assert ask(None, first) == ["u"]
    assert ask("42", first, answer, ("user", "ok")) == ["u", "a", "ok\n\n[reply_to_id: 42]"]
    assert ask("43", first, answer, ("user", "ok")) == ["u", "a", "ok\n\n[reply_to_id: 43]"]
    told = [*image, {"type": "text", "text": "[reply_to_id: 44]"}]
    assert ask("44", first, answer, ("user", image)) == ["u", "a", told]
    assert ask(None, first, answer, ("user", image), answer, ("user", "ok")) == ["u", "a", told, "a", "ok"]


def conversation(*texts: str, reply: str | None = None) -> bytes:
    """A chat of the user's texts, all answered but the newest, which may be a reply."""
    keys = {"message_id": f"m-{len(texts)}"} | ({"reply_to_id": reply} if reply else {})
    messages: list[dict[str, str]] = [{"role": "system", "content": system(**keys)}]
    for number, text in enumerate(texts):
        messages += [{"role": "assistant", "content": f"answer {number}"}] if number else []
        messages.append({"role": "user", "content": text})
    return json.dumps({"messages": messages}).encode()


def last_texts(body: bytes, rules: RuleSet, memory: ConversationMemory) -> list[str]:
    """The user's texts after the rules, without their blocks."""
    sent = json.loads(apply_rules(body, "/v1/chat/completions", rules, memory).body)
    return [item["content"].removeprefix(USER_BARE) for item in sent["messages"] if item["role"] == "user"]


def test_many_heartbeats_behind_the_very_first_turn(rules: RuleSet) -> None:
    """The ids of the first message say which conversation it is, however much of it was never seen."""
    memory, first = ConversationMemory(), USER + "hi"
    assert last_texts(conversation(first, reply="r-1"), rules, memory) == ["hi\n\n[reply_to_id: r-1]"]
    beats = [f"beat {number}" for number in range(6)]
    found = last_texts(conversation(first, *beats, USER + "more"), rules, memory)
    assert found == ["hi\n\n[reply_to_id: r-1]", *beats, "more"]
    stranger = conversation(first.replace("m-1", "n-1"), *beats, USER + "more")
    assert last_texts(stranger, rules, memory) == ["hi", *beats, "more"]


def test_equal_first_words_of_another_conversation(rules: RuleSet) -> None:
    """After a restart only one of two is remembered: the other one is not taken for it, whatever words they share."""
    memory, mine, theirs = ConversationMemory(), USER + "hi", USER.replace("m-1", "n-1") + "hi"
    last_texts(conversation(mine, reply="r-1"), rules, memory)
    assert last_texts(conversation(theirs, USER + "more"), rules, memory) == ["hi", "more"]
    assert last_texts(conversation(mine, USER + "more"), rules, memory) == ["hi\n\n[reply_to_id: r-1]", "more"]
