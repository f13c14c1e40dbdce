"""The invariants of the rules, over generated conversations in every dialect."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.prompt.conversation import ConversationMemory
from kvstack.prompt.dialects import Api, read_document
from kvstack.prompt.rendering import common_prefix, render
from kvstack.prompt.rules import apply_rules
from tests.property.prompt.packed import RULES, compiled
from tests.property.prompt.requests import PATHS, Body, Client, Turn, body, conversations, requests, spelled

many = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
Talk = tuple[Client, list[Turn], list[int]]


def items_of(value: Body) -> list[Body]:
    """The list of messages or input items."""
    found: list[Body] = value.get("messages") or value["input"]
    return found


def is_carrier(item: Body) -> bool:
    """Tell whether an item is a carrier message."""
    content = item.get("content")
    text = content[0].get("text", "") if isinstance(content, list) and content else content
    return item.get("role") == "user" and isinstance(text, str) and text.startswith("<<<BEGIN_OPENCLAW")


def tail_of(item: Body) -> str:
    """The end of an item's text."""
    content = item.get("content")
    return str(content[-1].get("text", "") if isinstance(content, list) else content)


@many
@given(talk=conversations)
def test_prefix(talk: Talk) -> None:
    """Each request after the rules is the beginning of the next one of its conversation."""
    client, said, days = talk
    memory, path = ConversationMemory(), PATHS[client.dialect]
    sent = [apply_rules(json.dumps(r).encode(), path, RULES, memory).body for r in requests(client, said, days)]
    for one, two in pairwise(render(raw, path) for raw in sent):
        prefix = common_prefix(one, two)
        assert prefix.shared == prefix.previous


@many
@given(talk=conversations)
def test_history(talk: Talk) -> None:
    """A turn is sent upstream in the same bytes while it is the newest and when it is history."""
    client, said, days = talk
    memory, path = ConversationMemory(), PATHS[client.dialect]
    seen: list[str] = []
    for request in requests(client, said, days):
        result = apply_rules(json.dumps(request).encode(), path, RULES, memory)
        spelled_items = [json.dumps(item) for item in items_of(json.loads(result.body))]
        assert spelled_items[: len(seen)] == seen
        seen = spelled_items


@many
@given(talk=conversations)
def test_idempotence(talk: Talk) -> None:
    """The rules find nothing to do in what they made, with the same memory, another one, or none."""
    client, said, days = talk
    memory, path = ConversationMemory(), PATHS[client.dialect]
    for request in requests(client, said, days):
        once = apply_rules(json.dumps(request).encode(), path, RULES, memory).body
        assert apply_rules(once, path, RULES, memory).body == once
        assert apply_rules(once, path, RULES, ConversationMemory()).body == once
        assert apply_rules(once, path, RULES).body == once


@many
@given(talk=conversations)
def test_locality_and_shape(talk: Talk) -> None:
    """
    Only recognised blocks change: words, answers, calls, results and tools are equal, no role and no order changes,
    and but for carriers no item comes or goes.
    """
    client, said, days = talk
    memory, path = ConversationMemory(), PATHS[client.dialect]
    for request in requests(client, said, days):
        sent = json.loads(apply_rules(json.dumps(request).encode(), path, RULES, memory).body)
        assert {key: sent[key] for key in ("model", "seed", "tools")} == {
            key: request[key] for key in ("model", "seed", "tools")
        }
        before = [item for item in items_of(request) if not is_carrier(item)]
        after = [item for item in items_of(sent) if not is_carrier(item)]
        assert [item.get("role") for item in before] == [item.get("role") for item in after]
        for one, two in zip(before, after, strict=True):
            if one.get("role") in ("user", "system", "developer") and not _is_result(one):
                continue
            assert one == two
        turns = iter(said)
        for one, two in zip(before, after, strict=True):
            if one.get("role") == "user" and not _is_result(one):
                assert next(turns).user in tail_of(two)


def _is_result(item: Body) -> bool:
    content = item["content"]
    return isinstance(content, list) and bool(content) and content[0].get("type") == "tool_result"


@many
@given(talk=conversations, data=st.data())
def test_every_spelling_is_edited_inside_its_literals(talk: Talk, data: st.DataObject) -> None:
    """However the JSON is spelled, the result means the same, and all bytes outside the edits are the client's."""
    client, said, days = talk
    path = PATHS[client.dialect]
    request = body(client, said, loop=False, day=days[0])
    raw = data.draw(spelled(request))
    plain = apply_rules(json.dumps(request).encode(), path, RULES)
    result = apply_rules(raw.encode("utf-8"), path, RULES)
    assert json.loads(result.body) == json.loads(plain.body)
    rebuilt, done = "", 0
    for edit in result.edits:
        rebuilt += raw[done : edit.start] + edit.replacement
        done = edit.end
    assert result.body.decode() == rebuilt + raw[done:]
    if not result.edits:
        assert json.loads(result.body) == request


@many
@given(talk=conversations, other=conversations, order=st.lists(st.booleans(), max_size=12))
def test_conversations_do_not_mix(talk: Talk, other: Talk, order: list[bool]) -> None:
    """Interleaved with another conversation, one gets the bytes that it gets alone, or misses: never the other's."""
    client, said, days = talk
    path = PATHS[client.dialect]
    mine = [json.dumps(request).encode() for request in requests(client, said, days)]
    theirs = iter(requests(*other))
    alone, together = ConversationMemory(), ConversationMemory()
    marks = {turn.answer for turn in other[1]} - {turn.answer for turn in said}
    for number, raw in enumerate(mine):
        if number < len(order) and order[number]:
            beside = next(theirs, None)
            if beside is not None:
                apply_rules(json.dumps(beside).encode(), PATHS[other[0].dialect], RULES, together)
        expected = apply_rules(raw, path, RULES, alone).body
        found = apply_rules(raw, path, RULES, together).body
        if found != expected:
            text = found.decode()
            assert not any(json.dumps(mark)[1:-1] in text for mark in marks if len(mark) > 8)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ("role", "content", "type", "text", "messages", "input", "system", "tools", "prompt", "output")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(value=values, path=st.sampled_from((*PATHS.values(), "/completion", "/tokenize", "/apply-template", "/other")))
def test_fail_open(value: Any, path: str) -> None:
    """No body of JSON values makes the rules raise, and those without blocks come back as they are."""
    raw = json.dumps(value).encode()
    assert apply_rules(raw, path, RULES, ConversationMemory()).body is raw


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=80), path=st.sampled_from((*PATHS.values(), "/completion")))
def test_any_bytes(raw: bytes, path: str) -> None:
    """No bytes make the rules raise."""
    assert apply_rules(raw, path, RULES, ConversationMemory()).body is raw


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_documents_agree_with_json(dialect: str) -> None:
    """The walk that keeps places reads the same values as a plain JSON reader."""
    client = Client("ids", dialect, True, "so", ("read",))
    turn = Turn("so hi", "1", "Wed 2026-02-18 20:48 UTC", True, "r", "a")
    request = body(client, [turn, turn], loop=True)
    document = read_document(json.dumps(request), Api(dialect))
    assert document.array is not None
    assert document.array.values == items_of(request)


@many
@given(talk=conversations, setting=st.sampled_from((True, "system", False)), stamps=st.booleans())
def test_switches(talk: Talk, setting: object, stamps: bool) -> None:
    """With a switch off its blocks stay, and nothing else depends on it."""
    client, said, days = talk
    request = body(client, said, loop=False, day=days[0])
    rules = compiled(strip_message_ids=setting, strip_timestamps=stamps)
    result = apply_rules(json.dumps(request).encode(), PATHS[client.dialect], rules)
    stamped = client.kind != "date"
    assert result.ts_removed == (len(said) if stamps and stamped else 0)
    ids = {True: len(said) + 1, "system": 1, False: 0}[setting] if client.kind == "ids" else 0  # type: ignore[index]
    assert result.msg_ids_removed == ids
