"""The invariants of the rules, over generated conversations in every dialect."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.prompt.diff.segments import common_prefix, render
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.request.apis import Api
from kvstack.prompt.request.document import read_document
from tests.property.budget import examples
from tests.property.prompt.packed import RULES, compiled
from tests.property.prompt.requests import (
    PATHS,
    Body,
    Client,
    Turn,
    body,
    conversations,
    items_of,
    requests,
    spelled,
    strip,
)

many = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
Talk = tuple[Client, list[Turn], list[int]]


def is_carrier(item: Body) -> bool:
    """Tell whether an item is a carrier message."""
    content = item.get("content")
    text = content[0].get("text", "") if isinstance(content, list) and content else content
    opening = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data:"
    return item.get("role") == "user" and isinstance(text, str) and text.startswith(opening)


def tail_of(item: Body) -> str:
    """The end of an item's text."""
    content = item.get("content")
    return str(content[-1].get("text", "") if isinstance(content, list) else content)


@many
@given(talk=conversations)
def test_prefix(talk: Talk) -> None:
    """Each request after the rules is the beginning of the next one of its conversation."""
    client, said, days = talk
    memory = ConversationMemory()
    sent = [strip(json.dumps(r).encode(), client, RULES, memory).body for r in requests(client, said, days)]
    for one, two in pairwise(render(raw, PATHS[client.dialect]) for raw in sent):
        prefix = common_prefix(one, two)
        assert prefix.shared == prefix.previous


@many
@given(talk=conversations)
def test_history(talk: Talk) -> None:
    """A turn is sent upstream in the same bytes while it is the newest and when it is history."""
    client, said, days = talk
    memory = ConversationMemory()
    seen: list[str] = []
    for request in requests(client, said, days):
        result = strip(json.dumps(request).encode(), client, RULES, memory)
        spelled_items = [json.dumps(item) for item in items_of(json.loads(result.body))]
        assert spelled_items[: len(seen)] == seen
        seen = spelled_items


@many
@given(talk=conversations)
def test_idempotence(talk: Talk) -> None:
    """The rules find nothing to do in what they made, with the same memory, another one, or none."""
    client, said, days = talk
    memory = ConversationMemory()
    for request in requests(client, said, days):
        once = strip(json.dumps(request).encode(), client, RULES, memory).body
        assert strip(once, client, RULES, memory).body == once
        assert strip(once, client, RULES, ConversationMemory()).body == once
        assert strip(once, client, RULES).body == once


@many
@given(talk=conversations)
def test_locality_and_shape(talk: Talk) -> None:
    """
    Only recognised blocks change: words, answers, calls, results and tools are equal, no role and no order changes,
    and but for carriers no item comes or goes.
    """
    client, said, days = talk
    memory = ConversationMemory()
    for request in requests(client, said, days):
        sent = json.loads(strip(json.dumps(request).encode(), client, RULES, memory).body)
        beside = request.keys() - {"messages", "input", "system", "prompt"}
        assert {key: sent[key] for key in beside} == {key: request[key] for key in beside}
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
    request = body(client, said, loop=False, day=days[0])
    raw = data.draw(spelled(request))
    plain = strip(json.dumps(request).encode(), client, RULES)
    result = strip(raw.encode("utf-8"), client, RULES)
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
    mine = [json.dumps(request).encode() for request in requests(client, said, days)]
    theirs = iter(requests(*other))
    alone, together = ConversationMemory(), ConversationMemory()
    marks = {turn.answer for turn in other[1]} - {turn.answer for turn in said}
    for number, raw in enumerate(mine):
        if number < len(order) and order[number]:
            beside = next(theirs, None)
            if beside is not None:
                strip(json.dumps(beside).encode(), other[0], RULES, together)
        expected = strip(raw, client, RULES, alone).body
        found = strip(raw, client, RULES, together).body
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


@settings(max_examples=examples(300), deadline=None)
@given(value=values, path=st.sampled_from((*PATHS.values(), "/completion", "/tokenize", "/apply-template", "/other")))
def test_fail_open(value: Any, path: str) -> None:
    """No body of JSON values makes the rules raise, and those without blocks come back as they are."""
    raw = json.dumps(value).encode()
    assert apply_rules(raw, path, RULES, ConversationMemory()).body is raw


@settings(max_examples=examples(300), deadline=None)
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
    """
    With a switch off its blocks stay, and nothing else depends on it.  (Words do not begin with a block of the client:
    then the timestamp stays.)
    """
    client, said, days = talk
    said = [replace(turn, user=f"so {turn.user}") for turn in said]
    request = body(client, said, loop=False, day=days[0])
    rules = compiled(strip_message_ids=setting, strip_timestamps=stamps)
    result = strip(json.dumps(request).encode(), client, rules)
    stamped = client.kind in ("ids", "carrier")
    assert result.ts_removed == (len(said) if stamps and stamped else 0)
    ids = {True: len(said) + 1, "system": 1, False: 0}[setting] if client.kind == "ids" else 0  # type: ignore[index]
    assert result.msg_ids_removed == ids
