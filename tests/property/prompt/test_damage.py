"""Recorded requests with something broken in them: no rule raises, whatever a client sends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.config.rules import RulePatch
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.report.listing import show_edits
from tests.differences import difference_of_bodies
from tests.golden.rules.corpus import load, names
from tests.property.budget import examples
from tests.property.prompt.packed import RULES, compiled

REQUESTS = [request for name in names() for request in load(name, filled=False)]
JUNK: tuple[Any, ...] = (
    None, True, 1, 1.5, "", [], {}, "x" * 50, ["a"], [[]], "\ud83d",
    {"type": "text"}, {"type": "text", "text": None}, {"type": {"a": 1}, "text": "y"}, {"text": "y"},
    [{"type": "text", "text": "[Wed 2026-02-18 20:48 UTC] "}],
    {"role": "user"}, {"role": ["user"]}, {"function": None}, [{"function": {"name": None, "arguments": None}}],
)  # fmt: skip
OBSERVED = {
    "openclaw.active-memory": "sticky",
    "openclaw.event-time": "drop",
    "openclaw.envelope": "drop",
    "openclaw.hint": "sticky",
    "openclaw.channel-context": "sticky",
    "openclaw.carrier": "sticky",
    "claude-code.total-tokens": "drop",
    "home-assistant.clock": "tail",
    "opencode.mode-reminder": "sticky",
}
EVERYTHING = compiled(added=tuple(RulePatch(name=name, action=action) for name, action in OBSERVED.items()))  # type: ignore[arg-type]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
STRICT = "{{ raise_exception('roles must alternate') }}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value; of the tools only the first, there are so many."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner[:1] if key == "tools" and isinstance(inner, list) else inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def damage(value: Any, rng: random.Random) -> None:
    """Replace, remove or insert something somewhere."""
    path = rng.choice(list(places(value)))
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    junk = json.loads(json.dumps(rng.choice(JUNK)))
    kind = rng.random()
    if kind < 0.2 and isinstance(holder, dict):
        del holder[path[-1]]
    elif kind < 0.3 and isinstance(holder, list):
        holder.insert(path[-1], junk)
    else:
        holder[path[-1]] = junk


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    number=st.integers(0, len(REQUESTS) - 1),
    seed=st.integers(0, 2**32),
    path=st.none() | st.sampled_from(PATHS),
    strict=st.booleans(),
    remembers=st.booleans(),
)
def test_damaged_requests(number: int, seed: int, path: str | None, strict: bool, remembers: bool) -> None:
    """What comes out is JSON whenever what went in was, and coming in again it stays as it is."""
    rng = random.Random(seed)
    request = REQUESTS[number]
    body = json.loads(request.body)
    for _ in range(rng.randint(1, 4)):
        damage(body, rng)
    raw = json.dumps(body).encode()
    sent_to = path or request.path
    template = STRICT if strict else None
    for rules in (RULES, EVERYTHING):
        memory = ConversationMemory() if remembers else None
        once = apply_rules(raw, sent_to, rules, memory, request.headers, template)
        json.loads(once.body)
        show_edits(raw, once)
        assert apply_rules(once.body, sent_to, rules, memory, request.headers, template).body == once.body
    difference_of_bodies(request.body, raw, sent_to)
    difference_of_bodies(raw, request.body, sent_to)
