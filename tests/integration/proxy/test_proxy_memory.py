"""Requests of one conversation at the same time, over real sockets: one memory, and no request sees another's turn."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from kvstack.proxy.forward import LARGE_BYTES
from tests.integration.proxy.proxy_rig import CHAT, answer, exchange, http, openclaw_strip, proxy
from tests.integration.stub_upstream import run_stub

# The larger ones are worked on beside the event loop, in threads.
SIZES = {"small": 100, "large": LARGE_BYTES, "both": 0}


def openclaw(name: str, *texts: str, reply: str, padding: int) -> bytes:
    """A chat in which all texts but the newest were answered; the newest one is a reply."""
    keys = {"schema": "openclaw.inbound_meta.v1", "message_id": f"{name}-{texts[-1]}", "reply_to_id": reply}
    info = json.dumps({"message_id": name, "sender": "ann"})
    messages = [{"role": "system", "content": f"{'x' * padding}\n```json\n{json.dumps(keys)}\n```\n"}]
    for number, text in enumerate(texts):
        messages += [{"role": "assistant", "content": f"answer {number}"}] if number else []
        block = "" if number else f"Conversation info (untrusted metadata):\n```json\n{info}\n```\n\n"
        messages.append({"role": "user", "content": block + text})
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize("size", SIZES)
async def test_branches_of_one_conversation(size: str) -> None:
    """
    Two conversations that began with the same words go on in many ways at once, as an agent's parallel calls do: each
    request keeps what its own first turn was given, and has nothing of any other.
    """
    order = random.Random(size)
    padding = {name: SIZES[size] or order.choice((100, LARGE_BYTES)) for name in "ab"}
    async with (
        run_stub(answer(b"{}")) as stub,
        proxy(stub, strip=openclaw_strip, max_body_bytes=4 * LARGE_BYTES) as running,
    ):
        names = {name: f"{size}-{name}" for name in "ab"}
        for name in "ab":
            first = openclaw(names[name], "hi", reply=f"first-{name}", padding=padding[name])
            await exchange(running.port, http("POST", CHAT, first))
        wanted = [(name, f"{name} {number}") for name in "ab" for number in range(10)]
        order.shuffle(wanted)
        bodies = [
            openclaw(names[name], "hi", text, reply=f"reply-{text}", padding=padding[name]) for name, text in wanted
        ]
        statuses = await asyncio.gather(*(exchange(running.port, http("POST", CHAT, body)) for body in bodies))
    assert {status for status, _, _ in statuses} == {200}
    sent = [[item["content"] for item in json.loads(seen.body)["messages"]] for seen in stub.received[2:]]
    info = 'Conversation info (untrusted metadata):\n```json\n{"sender": "ann"}\n```\n\n'
    assert sorted(texts[1:] for texts in sent) == sorted(
        [f"{info}hi\n\n[reply_to_id: first-{name}]", "answer 1", f"{text}\n\n[reply_to_id: reply-{text}]"]
        for name, text in wanted
    )
    assert len({texts[0] for texts in sent}) == len({*padding.values()})
    assert running.forward.rewrite_failures == 0
