"""Looking up what came of an item changes nothing but the time that it takes."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.prompt.memory.item_memo import ItemMemo
from kvstack.prompt.memory.store import ConversationMemory
from tests.property.prompt.packed import RULES
from tests.property.prompt.requests import Client, Turn, conversations, requests, strip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    talk=conversations,
    order=st.lists(st.integers(0, 9), max_size=12),
    left_out=st.integers(0, 2),
    max_bytes=st.sampled_from((1 << 20, 4_000)),
)
def test_known_items_change_nothing(
    talk: tuple[Client, list[Turn], list[int]], order: list[int], left_out: int, max_bytes: int
) -> None:
    """Whatever order requests come in, and with turns left out in front: bodies, hits and conversations are equal."""
    client, said, days = talk
    bodies = [json.dumps(one).encode() for one in requests(client, said, days)]
    if len(said) > left_out:
        bodies += [json.dumps(one).encode() for one in requests(client, said[left_out:], days)]
    known, unknown = ConversationMemory(), ConversationMemory()
    known.items, unknown.items = ItemMemo(max_bytes=max_bytes), ItemMemo(max_items=0)
    for number in (*range(len(bodies)), *order):
        one, two = (strip(bodies[number % len(bodies)], client, RULES, memory) for memory in (known, unknown))
        assert replace(one, hits=()) == replace(two, hits=())
        assert sorted(map(str, one.hits)) == sorted(map(str, two.hits))
