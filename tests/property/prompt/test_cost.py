"""No input takes more than linear time, however it was made to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from tests.property.budget import examples
from tests.property.prompt.packed import RULES
from tests.property.prompt.requests import LOOKALIKES

CHAT = "/v1/chat/completions"
META = '```json\n{"schema": "openclaw.inbound_meta.v1"}\n```\n'
IDS = '```json\n{"schema": "openclaw.inbound_meta.v1", "message_id": "1"}\n```\n'
EVENT = "System: [2026-02-18 19:59:08 UTC] x\n"
INFO = "Conversation info (untrusted metadata):\n```json\n"
CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nchat {0}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
OPENINGS = (
    "```json\n",
    "```json\n{",
    '```json\n{"a": "',
    "```json\n[[[[",
    "```json\n```json\n{",
    "x```json\n{",
    "<system-reminder>\n",
    "<system-reminder>\nThe current date is: ",
    "Context:\n<active_memory_plugin>\n",
    "System: [2026-02-18 19:59:08 UTC] x\n",
    "Delivery: x\n",
    "[Wed 2026-02-18 20:48 UTC] ",
    "[Telegram Ann ",
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n",
    "Today's date: Sun Mar 22 2026\n",
    "Today's date: ",
    "Current date: 2026-11-30\n",
    "Conversation started: \n",
    "gitStatus: \n",
    "git: Current branch: x\ngit: Status:\n",
    '<context name="gitStatus">',
    "Co-Authored-By: ",
    " - OS Version: x\n",
    "x-anthropic-billing-header: cch=",
    "The current date is ",
    "Context: ⟦openclaw:ctx⟧\n",
    "[message_id: ",
    "1" * 40,
    "\\",
    '"',
    "\n",
    "é\ud83d",
)


def ask(system: str, *user: str) -> dict[str, Any]:
    """A chat body."""
    said = [{"role": "user", "content": text} for text in user]
    return {"messages": [{"role": "system", "content": system}, *said]}


def seconds(body: bytes) -> float:
    """The processor time of one request, of one client and another, the best of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        apply_rules(body, CHAT, RULES, ConversationMemory(), chat_template=STRICT)
        apply_rules(body, CHAT, RULES, ConversationMemory(), QWEN)
        times.append(time.process_time() - start)
    return min(times)


QWEN = [("User-Agent", "QwenCode/0.24")]
STRICT = "{{ raise_exception('Conversation roles must alternate') }}"


def reminders(n: int) -> dict[str, Any]:
    """A Qwen Code conversation that keeps its date reminders, each with another date, behind a long first text."""
    turns = (f"<system-reminder>\nThe current date is: Monday, May 1, {k}. x\n</system-reminder>\nu" for k in range(n))
    return ask(META, "words " * 20 * n, *turns)


def assert_linear(make: Callable[[int], Any], size: int) -> None:
    """Eight times the input takes about eight times as long, not sixty-four times."""
    small, large = (json.dumps(make(n)).encode() for n in (size, 8 * size))
    base = max(seconds(small), 0.0005)
    assert seconds(large) < 8 * base * 3


@pytest.mark.parametrize("opening", OPENINGS)
def test_blocks_that_begin_and_never_end(opening: str) -> None:
    """A text full of beginnings costs no more than its length, in system texts and at the head of user texts."""
    repeats = 20_000 // len(opening)
    assert_linear(lambda n: ask(META + opening * n, opening * n), repeats)


MANY: dict[str, Callable[[int], Any]] = {
    "turns": lambda n: ask(META, *(f"words {k}" for k in range(n))),
    "carriers": lambda n: ask(META, *(CARRIER.format(k) for k in range(n))),
    "stamps": lambda n: ask(META, *("[Wed 2026-02-18 20:48 UTC] x" for _ in range(n))),
    "blocks": lambda n: ask(META + IDS * n, "x"),
    "keys": lambda n: ask(
        '```json\n{"schema": "openclaw.inbound_meta.v1"' + ', "message_id": "1"' * n + "}\n```\n", "x"
    ),
    "nested keys": lambda n: ask(META, INFO + '{"a": [' + '{"message_id": 1},' * n + "1]}\n```\n"),
    "escapes": lambda n: ask(META, '\\n\u2028"' * n + "[Wed 2026-02-18 20:48 UTC] "),
    "parts": lambda n: {"messages": [{"role": "user", "content": [{"text": "Delivery: x\n"}] * n}]},
    "system parts": lambda n: {"messages": [{"role": "system", "content": [{"text": IDS}] * n}]},
    "event parts": lambda n: {"messages": [{"role": "user", "content": [{"text": f"{EVENT}{k}"} for k in range(n)]}]},
    "top keys": lambda n: {f"k{k}": k for k in range(n)} | ask(META, "x"),
    "reminders": reminders,
    "tools": lambda n: ask(META, "x") | {"tools": [{"description": "Co-Authored-By: x"} for _ in range(n)]},
}


@pytest.mark.parametrize("kind", MANY)
def test_many_of_everything(kind: str) -> None:
    """Numbers of turns, parts, blocks, keys and tools cost no more than themselves."""
    assert_linear(MANY[kind], 250)


@pytest.mark.parametrize("size", [400, pytest.param(1500, marks=pytest.mark.deep)])
@pytest.mark.parametrize("answered", [True, False])
def test_very_many_carriers(answered: bool, size: int) -> None:
    """Thousands in one turn, or one in each of thousands of turns: what is cheap for each hides in smaller numbers."""

    def make(n: int) -> dict[str, Any]:
        said = [{"role": "user", "content": "x"}]
        for number in range(n):
            said.append({"role": "user", "content": CARRIER.format(number)})
            if answered:
                said += [{"role": "assistant", "content": "y"}, {"role": "user", "content": f"x {number}"}]
        return {"messages": [{"role": "system", "content": META}, *said]}

    assert_linear(make, size)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(st.sampled_from((*OPENINGS, *LOOKALIKES, " ", "x")), min_size=1, max_size=6), where=st.booleans()
)
def test_any_mixture(pieces: list[str], where: bool) -> None:
    """Repeating any mixture of beginnings and look-alikes never takes long for its size."""
    text = "".join(pieces)
    repeated = text * max(1, 400_000 // len(text))
    body = json.dumps(ask(META + repeated, "x") if where else ask(META, repeated)).encode()
    assert seconds(body) < 1.5
