"""Two conversations that say the same, of which the memory has lost parts: neither gets anything of the other one."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from tests.property.budget import examples
from tests.property.prompt.packed import RULES
from tests.property.prompt.requests import PATHS, Client, Turn, requests, turns


def owned(said: list[Turn], name: str) -> list[Turn]:
    """The same words under the ids and at the times of one conversation."""
    hour = {"a": 9, "b": 21}[name]
    return [
        replace(
            turn,
            id=f"id-{name}-{n}",
            reply=f"{name}-reply-{n}" if turn.reply else "",
            clock=f"Wed 2026-02-18 {hour:02}:{n:02} UTC",
            answer=f"{n} {turn.answer}",
        )
        for n, turn in enumerate(said)
    ]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    said=st.lists(turns, min_size=2, max_size=5),
    kind=st.sampled_from(("ids", "carrier")),
    dialect=st.sampled_from(("chat", "responses", "messages")),
    parts=st.booleans(),
    order=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=8, max_size=24),
)
def test_equal_words_do_not_mix(
    said: list[Turn], kind: str, dialect: str, parts: bool, order: list[tuple[bool, bool]]
) -> None:
    """
    Whatever order they come in and whatever was lost before a restart, each request gets what it gets where the other
    conversation does not exist.
    """
    client, path = Client(kind, dialect, parts, "so", ("read",)), PATHS[dialect]
    waiting = {name: [json.dumps(body).encode() for body in requests(client, owned(said, name), [1])] for name in "ab"}
    alone, together = {"a": ConversationMemory(), "b": ConversationMemory()}, ConversationMemory()
    for first, lost in order:
        name = "a" if first else "b"
        if not waiting[name]:
            continue
        raw = waiting[name].pop(0)
        if lost:
            continue
        assert apply_rules(raw, path, RULES, together).body == apply_rules(raw, path, RULES, alone[name]).body


CLOCK = "Wed 2026-02-18 20:48 UTC"


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    said=st.lists(turns, min_size=2, max_size=4),
    kind=st.sampled_from(("carrier", "date", "checksum")),
    dialect=st.sampled_from(("chat", "responses", "messages")),
    order=st.lists(st.booleans(), min_size=4, max_size=24),
    days=st.tuples(
        *(st.lists(st.integers(first, first + 2), min_size=1, max_size=4).map(sorted) for first in (11, 15))
    ),
)
def test_nothing_of_the_other_one_arrives(
    said: list[Turn], kind: str, dialect: str, order: list[bool], days: tuple[list[int], list[int]]
) -> None:
    """
    Two conversations with equal words at equal times, answered in equal words, as scripts have them: what only one
    client said never stands in a request of the other one.
    """
    client = Client(kind, "messages" if kind == "checksum" else dialect, False, "so", ("read",))
    path = PATHS[client.dialect]
    talks = {
        name: [
            json.dumps(body).encode()
            for body in requests(client, [replace(turn, clock=CLOCK) for turn in owned(said, name)], own)
        ]
        for name, own in zip("ab", days, strict=True)
    }
    days_of = {name: {f"2026-11-{day:02}" for day in own} for name, own in zip("ab", days, strict=True)}
    memory = ConversationMemory()
    for first in order:
        name, other = "ab" if first else "ba"
        if talks[name]:
            sent = apply_rules(talks[name].pop(0), path, RULES, memory).body.decode()
            assert f"id-{other}-" not in sent
            assert not any(day in sent for day in days_of[other])
