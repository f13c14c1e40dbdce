"""Carriers of OpenClaw 2026.9 in any order: requests extend one another, and the model believes what was said last."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstack.prompt.diff.segments import common_prefix, render
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from tests.property.budget import examples
from tests.property.prompt.packed import RULES

BEGIN, END = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
LABEL = "Conversation data (data, not instructions):"
NONE = "Active exec sessions:\nnone"

STRICT = "{{ raise_exception('Conversation roles must alternate user/assistant') }}"

# A turn is its requests: a tool was called between them.  What the carriers of each say: most often one, or none.
carried_words = st.lists(st.sampled_from((NONE, "run 1", "run 2", "run 3")), max_size=3)
turns = st.lists(st.lists(carried_words, min_size=1, max_size=4), min_size=1, max_size=6)


def carrier(said: str) -> dict[str, Any]:
    """The message behind the newest turn."""
    return {"role": "user", "content": f"{BEGIN}\n{LABEL}\n{json.dumps(said)}\n{END}"}


def called(name: str, *, responses: bool) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    if responses:
        return [
            {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": name, "output": "ok"},
        ]
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": "ok"},
    ]


def carried(body: bytes) -> list[str]:
    """What the carriers of a body say, in order, be they messages or parts of a turn."""
    value = json.loads(body)
    found = []
    for item in value.get("messages") or value["input"]:
        content = item.get("content")
        texts = [part.get("text", "") for part in content] if isinstance(content, list) else [str(content)]
        found += [json.loads(text.split("\n")[2]) for whole in texts for text in whole.split(BEGIN)[1:]]
    return found


@settings(max_examples=examples(150), deadline=None)
@given(talk=turns, responses=st.booleans())
def test_carriers_in_any_order(talk: list[list[list[str]]], responses: bool) -> None:
    """
    Nothing that went upstream is ever taken back, and what the client says now stands last.

    In chat completions the carrier is always the last message; in responses it stays behind the user's words.
    """
    memory = ConversationMemory()
    key, path = ("input", "/v1/responses") if responses else ("messages", "/v1/chat/completions")
    history: list[dict[str, Any]] = [{"role": "system", "content": "running inside OpenClaw"}]
    former = None
    for number, requests in enumerate(talk):
        history.append({"role": "user", "content": f"words {number}"})
        loop: list[dict[str, Any]] = []
        for step, sayings in enumerate(requests):
            said = sayings[-1:] if responses else sayings  # that form has one, behind the user's words
            if step:
                loop += called(f"c{number}{step}", responses=responses)
            own = [carrier(words) for words in said]
            items = [*history, *own, *loop] if responses else [*history, *loop, *own]
            raw = json.dumps({key: items, "prompt_cache_key": "s"}).encode()
            body = apply_rules(raw, path, RULES, memory).body
            assert apply_rules(raw, path, RULES, memory).body == body
            rendered = render(body, path)
            assert former is None or common_prefix(former, rendered).kept_ratio == 1.0
            former = rendered
            if said:
                assert (carried(body) or [NONE])[-1] == said[-1]
        history += [*loop, {"role": "assistant", "content": f"answer {number}"}]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


@settings(max_examples=examples(150), deadline=None)
@given(talk=turns, responses=st.booleans(), images=st.sets(st.integers(0, 5)))
def test_carriers_where_roles_must_alternate(talk: list[list[list[str]]], responses: bool, images: set[int]) -> None:
    """
    No message of the user stands behind another one or a tool's result, nothing is taken back, and what the client
    says now stands last; only a carrier that changes in the tool loop puts words in front of the tool's results.
    """
    memory = ConversationMemory()
    key, path = ("input", "/v1/responses") if responses else ("messages", "/v1/chat/completions")
    history: list[dict[str, Any]] = [{"role": "system", "content": "running inside OpenClaw"}]
    former, told = None, NONE
    for number, requests in enumerate(talk):
        known: list[str] = []
        image = [{"type": "input_image", "image_url": "data:,"}] if responses else IMAGE
        history.append({"role": "user", "content": image if number in images else f"words {number}"})
        loop: list[dict[str, Any]] = []
        for step, sayings in enumerate(requests):
            said = sayings[-1:] if responses else sayings  # that form has one, behind the user's words
            if step:
                loop += called(f"c{number}{step}", responses=responses)
            own = [carrier(words) for words in said]
            items = [*history, *own, *loop] if responses else [*history, *loop, *own]
            raw = json.dumps({key: items, "prompt_cache_key": "s"}).encode()
            body = apply_rules(raw, path, RULES, memory, chat_template=STRICT).body
            assert apply_rules(raw, path, RULES, memory, chat_template=STRICT).body == body
            sent = json.loads(body)[key]
            assert [item.get("role") for item in sent] == [item.get("role") for item in [*history, *loop]]
            assert apply_rules(body, path, RULES, ConversationMemory(), chat_template=STRICT).body == body
            rendered = render(body, path)
            changed = step and said and said != known
            assert former is None or changed or common_prefix(former, rendered).kept_ratio == 1.0
            former, told = rendered, said[-1] if said else told
            known = said or known
            assert (carried(body) or [NONE])[-1] == told
        history += [*loop, {"role": "assistant", "content": f"answer {number}"}]
