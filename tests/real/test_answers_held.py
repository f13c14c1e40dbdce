"""
A conversation goes on from what a real server answered to it, in each dialect, streamed or whole; another one that
began with the same words does not.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.stacks import run_stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

# A random model would not stop by itself.  It is the server's: one dialect takes none.
GRAMMAR = 'root ::= "Good day, what shall be done?"'
OWN, OTHER = "Good day, what shall be done?", "Hello. Which file do you mean?"
DIALECTS = {
    "/v1/chat/completions": ("messages", "max_tokens"),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/messages": ("messages", "max_tokens"),
}


def pi(path: str, day: str, stream: bool, *turns: dict[str, Any]) -> bytes:
    """A request of Pi in a dialect."""
    text = "operating inside pi, a coding agent harness\n" + "Keep the rules in mind. " * 100
    system = f"{text}\nCurrent date: {day}\nCurrent working directory: /x\n{text}"
    key, limit = DIALECTS[path]
    body: dict[str, Any] = {"model": "m", limit: 60, "stream": stream, key: list(turns)}
    match path:
        case "/v1/responses":
            body["instructions"] = system
        case "/v1/messages":
            body["system"] = system
        case _:
            body["messages"] = [{"role": "system", "content": system}, *turns]
    return json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
def test_it_goes_on_from_its_own_answer(
    path: str, stream: bool, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """At midnight the frozen date keeps the cache for the conversation itself, and never reaches the other one."""
    server: dict[str, Any] = {"binary": str(llama_server), "model": str(model_path["hybrid"]), "ctx_size": 16384}
    server["extra_args"] = ["--grammar", GRAMMAR]
    hello, more = ({"role": "user", "content": text} for text in ("hello", "more"))
    with run_stack(tmp_path, server) as stack:

        def send(day: str, *turns: dict[str, Any]) -> str:
            connection = http.client.HTTPConnection("127.0.0.1", stack.proxy_port, timeout=60)
            connection.request("POST", path, pi(path, day, stream, *turns), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
            connection.close()
            assert response.status == 200, text
            return text

        def held(text: str) -> dict[str, Any]:
            if path == "/v1/responses":
                part = {"type": "output_text", "text": text, "annotations": []}
                return {"type": "message", "role": "assistant", "content": [part]}
            return {"role": "assistant", "content": text}

        whole = send("2026-11-29", hello)
        assert stream or OWN in whole, whole
        send("2026-11-30", hello, held(OTHER), more)
        send("2026-11-30", hello, held(OWN), more)
        first, other, own = stack.wait_for_requests(3)
    assert first["generated_tokens"] < 60
    assert own["rules"] == {"pi.date": 2}
    assert other["rules"] == {}
    assert own["cached_tokens"] > 0.9 * first["prompt_tokens"]
    assert other["cached_tokens"] < 0.6 * first["prompt_tokens"]
