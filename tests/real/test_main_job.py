"""The product's claim on real servers: an OpenClaw conversation is prefilled once, without kvstack every turn."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import kinds
from tests.real.openclaw import OpenClaw
from tests.real.stacks import RunningStack, post, run_stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
TURNS = (
    "Hello, what can you do for me?",
    "Read the plan of the project and tell me the next step.",
    "Write a short note about it.",
    "Thank you. What did we do so far?",
)


def server_config(binary: Path, model: Path) -> dict[str, Any]:
    """A small server for a long conversation."""
    return {"binary": str(binary), "model": str(model), "ctx_size": 32768}


def tokens(port: int, text: str) -> int:
    """Length of a text in the model's tokens."""
    _, data = post(port, "/tokenize", {"content": text})
    return len(data["tokens"])


def similarities(log: str) -> list[float]:
    """The LCP similarity of every selection of a slot that held something, from the server's own log."""
    found: list[float] = []
    by_age = False
    for line in log.splitlines():
        if "selected slot by" in line:
            by_age = "by LRU" in line
            found += [float(value) for value in re.findall(r"sim_best = ([\d.]+)", line)]
        elif by_age:  # compared when the host prompt cache is searched; an empty slot has f_keep = -1
            pattern = r"looking for better prompt, base f_keep = [\d.]+, (?:f_)?sim = ([\d.]+)"
            found += [float(value) for value in re.findall(pattern, line)]
    return found


def converse(stack: RunningStack, port: int, client: OpenClaw) -> list[dict[str, Any]]:
    """Go through all turns; give each turn's timings, with the tokens of the user text and of the answer."""
    turns: list[dict[str, Any]] = []
    for words in TURNS:
        status, data = post(port, CHAT, client.ask(words))
        assert status == 200, data
        answer = data["choices"][0]["message"]["content"] or ""
        client.hear(answer)
        turns.append({**data["timings"], "user_n": tokens(stack.server_port, client.user_text)})
    return turns


@pytest.mark.parametrize("kind", kinds("dense", "hybrid"))
def test_raw_every_turn_is_prefilled_and_through_kvstack_only_what_is_new(
    kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """FR-02: 16,500 tokens of system text and tools, changing ids and timestamps; the server's own figures judge."""
    config = server_config(llama_server, model_path[kind])
    with run_stack(tmp_path, config, name="raw") as stack:
        raw = converse(stack, stack.server_port, OpenClaw())
        raw_similarities = similarities(stack.log())
    with run_stack(tmp_path, config, name="stripped") as stack:
        stripped = converse(stack, stack.proxy_port, OpenClaw())
        rows = stack.wait_for_requests(len(TURNS))
        log_similarities = similarities(stack.log())

    prompt = raw[0]["prompt_n"] + raw[0]["cache_n"]
    assert 15_000 < prompt < 18_000
    for turn in raw[1:]:
        whole = turn["prompt_n"] + turn["cache_n"]
        # The ids stand at about a fifth of the rendered prompt: a dense model keeps that much, a hybrid one nothing.
        assert turn["prompt_n"] >= (0.7 if kind == "dense" else 0.999) * whole
    assert max(raw_similarities) < 0.3

    assert len(log_similarities) == len(TURNS) - 1
    assert min(log_similarities) >= 0.94
    for before, turn in itertools.pairwise(stripped):
        assert turn["prompt_n"] <= before["predicted_n"] + turn["user_n"] + 64

    # The status has the same figures: the server's timings for the tokens, the server's log for the similarity.
    assert [row["tokens"]["evaluated"] for row in rows] == [turn["prompt_n"] for turn in stripped]
    assert [row["tokens"]["cached"] for row in rows] == [turn["cache_n"] for turn in stripped]
    assert [row["tokens"]["prompt"] for row in rows] == [turn["prompt_n"] + turn["cache_n"] for turn in stripped]
    assert [row["timing"]["prefill_ms"] for row in rows] == pytest.approx(
        [turn["prompt_ms"] for turn in stripped], abs=0.01
    )
    assert [row["lcp_similarity_ratio"] for row in rows[1:]] == pytest.approx(log_similarities, abs=1e-6)
    assert [row["verdict"] for row in rows] == ["COLD", "HIT", "HIT", "HIT"]
    assert [row["stripped"]["msg_ids_removed"] for row in rows] == [2, 3, 4, 5]
    assert [row["stripped"]["ts_removed"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", kinds("dense", "hybrid", "swa"))
def test_after_a_warm_up_the_first_request_evaluates_its_user_text_alone(
    kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """The recorded request is another session's: only system text and tools are shared."""
    recording = tmp_path / "request.json"
    recording.write_text(json.dumps(OpenClaw(session=7).ask("Some other question.")), encoding="utf-8")
    config = server_config(llama_server, model_path[kind])
    with run_stack(tmp_path, config, warmup={"request_file": str(recording)}) as stack:
        warmup = stack.status()["warmup"]
        assert warmup["outcome"] == "done"
        assert warmup["evaluated_tokens"] > 15_000
        assert warmup["boundary_tokens"] > 15_000
        client = OpenClaw(session=8)
        status, data = post(stack.proxy_port, CHAT, client.ask(TURNS[0]))
        assert status == 200, data
        # All that was called warm was found in the cache: the prefix up to the user's text.
        assert data["timings"]["cache_n"] >= warmup["boundary_tokens"] - 8
        user = tokens(stack.server_port, client.user_text)
        assert data["timings"]["prompt_n"] <= user + 64
        (row,) = stack.wait_for_requests(1)
        assert row["tokens"]["evaluated"] == data["timings"]["prompt_n"]


@pytest.mark.parametrize(
    ("kind", "snapshot"), [("hybrid", True), ("hybrid", False), pytest.param("swa", True, marks=pytest.mark.deep)]
)
def test_the_warm_prefix_outlives_a_conversation(
    kind: str, snapshot: bool, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """A model with checkpoints keeps the one at the end of system text and tools: a second conversation is as cheap."""
    recording = tmp_path / "request.json"
    recording.write_text(json.dumps(OpenClaw(session=7).ask("Some other question.")), encoding="utf-8")
    config = server_config(llama_server, model_path[kind])
    with run_stack(tmp_path, config, warmup={"request_file": str(recording), "snapshot": snapshot}) as stack:
        for session in (8, 9, 10):
            client = OpenClaw(session=session)
            first, *_ = converse(stack, stack.proxy_port, client)[:2]
            assert first["prompt_n"] <= first["user_n"] + 64


def test_without_the_tools_an_agents_prefix_is_not_warm(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """The reason why `request_file` exists: the system prompt alone saves the system prompt alone."""
    request = OpenClaw(session=7).ask("x")
    prompt = tmp_path / "system.txt"
    prompt.write_text(request["messages"][0]["content"], encoding="utf-8")
    config = server_config(llama_server, model_path["dense"])
    with run_stack(tmp_path, config, warmup={"system_prompt_file": str(prompt)}) as stack:
        _, data = post(stack.proxy_port, CHAT, OpenClaw(session=8).ask(TURNS[0]))
        assert data["timings"]["prompt_n"] > 5_000
        assert data["timings"]["cache_n"] > 5_000


def test_enabled_without_a_source_says_so(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """No prefix known is a state, not a failure."""
    with run_stack(tmp_path, server_config(llama_server, model_path["dense"])) as stack:
        assert stack.status()["warmup"]["outcome"] == "no prefix known"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "limit"), [(CHAT, "max_tokens"), ("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")]
)
def test_every_dialect_gets_its_figures(
    path: str, limit: str, stream: bool, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """Two turns of a short chat in each dialect: tokens of the second from the answer, similarity from the log."""
    import http.client

    text = "Keep the rules in mind. " * 60
    key = "input" if path == "/v1/responses" else "messages"
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    with run_stack(tmp_path, server_config(llama_server, model_path["dense"])) as stack:
        for _ in range(2):
            body: dict[str, Any] = {"model": "m", limit: 8, "stream": stream, key: list(turns)}
            if path == "/v1/messages":
                body["system"] = text
            elif path == "/v1/responses":
                body["instructions"] = text
            else:
                body["messages"] = [{"role": "system", "content": text}, *turns]
            connection = http.client.HTTPConnection("127.0.0.1", stack.proxy_port, timeout=60)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            connection.close()
            assert response.status == 200, raw
            said: dict[str, Any] = {"role": "assistant", "content": "Yes."}
            if path == "/v1/responses":
                said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
            turns += [said, {"role": "user", "content": "And then?"}]
        first, second = stack.wait_for_requests(2)
        log = stack.log()
    assert (first["verdict"], second["verdict"]) == ("COLD", "HIT")
    assert (first["path"], second["path"]) == (path, path)
    evaluated = [int(value) for value in re.findall(r"prompt eval time = .*?/ +(\d+) tokens", log)]
    assert [first["tokens"]["evaluated"], second["tokens"]["evaluated"]] == evaluated
    assert second["tokens"]["cached"] > 0.8 * second["tokens"]["prompt"]
    assert second["lcp_similarity_ratio"] == pytest.approx(similarities(log)[0], abs=1e-6)
    for row in (first, second):
        assert row["timing"]["prefill_ms"] > 0
        assert row["timing"]["ttft_ms"] > 0
        assert row["tokens"]["reuse_ratio"] == pytest.approx(row["tokens"]["cached"] / row["tokens"]["prompt"])
