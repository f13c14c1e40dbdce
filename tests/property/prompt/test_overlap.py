"""Taking items over from former requests changes nothing but the time that it takes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstack.prompt.recurring import RecentRequests

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rawjson.scan import read_value
from kvstack.prompt.request.document import Api, Document, read_document
from tests.property.budget import examples
from tests.property.prompt.packed import RULES
from tests.property.prompt.requests import CHATML, PATHS, Client, Turn, conversations, requests

many = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

elements = st.one_of(
    st.sampled_from((1, 12, 1.5, "x", "xy", None, [], [1], {})),
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(("system", "user", "assistant", "tool")),
        st.sampled_from(("a", "b", "longer words", [{"type": "text", "text": "a"}])),
    ),
)
# Lists grow from one another: what is drawn is kept, cut, changed or pushed aside.
lists = st.lists(elements, max_size=12).flatmap(
    lambda base: st.lists(
        st.builds(
            lambda at, new, keep: [*base[:at], *new, *base[keep:]],
            st.integers(0, 12),
            st.lists(elements, max_size=2),
            st.integers(0, 12),
        ),
        min_size=2,
        max_size=4,
    )
)


tools = st.sampled_from(
    (
        '[{"name": "read"}]',
        '[{"name": "read"}, {"name": "write"}]',
        '[ {"function": {"name": "read"}}]',
        "[]",
        "[1]",
        '{"name": "read"}',
        "null",
        "12",
    )
)


@many
@given(
    made=lists,
    before=st.lists(st.sampled_from(("", "m", "other model")), min_size=4, max_size=4),
    offered=st.lists(st.lists(tools, max_size=2), min_size=4, max_size=4),
    dense=st.booleans(),
)
def test_documents_are_the_same(
    made: list[list[Any]], before: list[str], offered: list[list[str]], dense: bool
) -> None:
    """A document that overlaps with former ones is equal to one that is read alone, in values, places and roles."""
    formers: list[Document] = []
    for model, items, spelled in zip(before, made, offered, strict=False):
        body = json.dumps({"model": model, "messages": items}, separators=(",", ":") if dense else None)
        text = body[:-1] + "".join(f', "tools":{tool}' for tool in spelled) + "}"
        alone, beside = read_document(text, Api.CHAT), read_document(text, Api.CHAT, formers=formers)
        assert beside.array == alone.array
        assert beside.top == alone.top
        assert beside.tool_names == alone.tool_names
        assert beside.span("tools") == alone.span("tools")
        assert [(i.index, i.role, i.leading, i.value) for i in beside.items] == [
            (i.index, i.role, i.leading, i.value) for i in alone.items
        ]
        assert beside.array is not None
        for values, start, end in zip(*beside.array[:3], strict=True):
            assert read_value(text, start) == (values, end)
        formers.insert(0, beside)


@many
@given(
    talk=conversations,
    other=conversations,
    order=st.lists(st.booleans(), max_size=12),
    changes=st.lists(st.integers(0, 6), max_size=6),
)
def test_results_are_the_same(
    talk: tuple[Client, list[Turn], list[int]],
    other: tuple[Client, list[Turn], list[int]],
    order: list[bool],
    changes: list[int],
) -> None:
    """With former requests at hand, of this conversation and others, everything comes out as without them."""
    mine, theirs = requests(*talk), iter(requests(*other))
    path = PATHS[talk[0].dialect]
    kept, forgetful = ConversationMemory(), ConversationMemory()
    queue: list[tuple[dict[str, Any], str]] = []
    for number, request in enumerate(mine):
        if number < len(order) and order[number]:
            beside = next(theirs, None)
            queue += [(beside, PATHS[other[0].dialect])] if beside is not None else []
        queue.append((request, path))
        if number < len(changes) and "prompt" not in request:
            # The same request with an item left out, as clients prune and retry.
            key = "input" if "input" in request else "messages"
            items = request[key]
            queue.append(({**request, key: items[: changes[number]] + items[changes[number] + 1 :]}, path))
    for request, where in queue:
        raw = json.dumps(request).encode()
        forgetful.recent = RecentRequests()
        found = [apply_rules(raw, where, RULES, memory, chat_template=CHATML) for memory in (kept, forgetful)]
        assert found[0] == found[1]
