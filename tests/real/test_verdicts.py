"""
Each verdict on real servers: what the cache did, told by the server's own figures and seen through the proxy.

The prompts are the reference sequences of the three kinds of memory: a dense model can be cut anywhere, a
sliding-window and a hybrid one only at checkpoints.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.real.stacks import RunningStack, post, run_stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
KINDS = ["dense", "swa", "hybrid"]
UUID = "6f1c2b7a-90d4-4c1e-8a35-{:012d}"


def system(about: str, lines: int = 120, stamp: str = "") -> str:
    """A system prompt of about 24 tokens per line; a stamp stands at 15 % of it."""
    text = [
        f"Rule {number} of {about}: keep answers short, name your sources and never guess." for number in range(lines)
    ]
    if stamp:
        text.insert(lines * 15 // 100, json.dumps({"session": stamp}))
    return "\n".join(text)


class Talk:
    """A conversation with a server."""

    def __init__(self, stack: RunningStack, head: str) -> None:
        self.stack = stack
        self.messages: list[dict[str, str]] = [{"role": "system", "content": head}]

    def say(self, words: str, *, keep: bool = True) -> dict[str, Any]:
        """Send one turn; give the server's timings."""
        messages = [*self.messages, {"role": "user", "content": words}]
        status, data = post(
            self.stack.proxy_port, CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, "seed": 1}
        )
        assert status == 200, data
        if keep:
            answer = data["choices"][0]["message"]["content"] or ""
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        timings = data["timings"]
        assert isinstance(timings, dict)
        return timings


@contextlib.contextmanager
def a_stack(tmp_path: Path, binary: Path, model: Path, **server: Any) -> Any:
    """A stack without warm-up, its context large enough for every scenario."""
    config = {"binary": str(binary), "model": str(model), "ctx_size": 32768, **server}
    with run_stack(tmp_path, config, warmup={"enabled": False}) as stack:
        yield stack


def settled(stack: RunningStack, count: int) -> list[dict[str, Any]]:
    """The rows once nothing more will be said of them."""
    deadline = time.monotonic() + 15
    rows: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        rows = stack.status()["requests"]
        if len(rows) == count and all(row["settled"] for row in rows):
            return rows
        time.sleep(0.05)
    raise AssertionError(f"not settled: {rows}")


def check_figures(rows: list[dict[str, Any]], timings: list[dict[str, Any]]) -> None:
    """The rows have the server's own figures."""
    assert [(row["tokens"]["cached"], row["tokens"]["evaluated"]) for row in rows] == [
        (one["cache_n"], one["prompt_n"]) for one in timings
    ]


def check_log(stack: RunningStack) -> None:
    """Every line of this build was understood, and nothing came past the proxy."""
    log = stack.status()["log"]
    assert log["facts"] > 0
    assert log["drift"] == 0, log["drift_samples"]
    assert log["unclaimed_tasks"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_growing(kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """A conversation that only grows: cold once, then hits that evaluate what is new."""
    with a_stack(tmp_path, llama_server, model_path[kind]) as stack:
        talk = Talk(stack, system("the house"))
        timings = [talk.say(f"Question {number}: what is next?") for number in range(4)]
        rows = settled(stack, 4)
        check_figures(rows, timings)
        check_log(stack)
    assert [row["verdict"] for row in rows] == ["COLD", "HIT", "HIT", "HIT"]
    assert all(row["tokens"]["evaluated"] < 100 for row in rows[1:])
    assert all(row["lcp_similarity_ratio"] > 0.9 for row in rows[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_id_at_fifteen_percent(kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """A new id in each system prompt: a dense model keeps what stands before it, the others nothing at all."""
    with a_stack(tmp_path, llama_server, model_path[kind]) as stack:
        talk = Talk(stack, "")
        timings = []
        for number in range(3):
            talk.messages[0]["content"] = system("the house", stamp=UUID.format(number * 123_456_789))
            timings.append(talk.say(f"Question {number}: what is next?"))
        rows = settled(stack, 3)
        check_figures(rows, timings)
        check_log(stack)
    assert [row["verdict"] for row in rows] == ["COLD", "PARTIAL", "PARTIAL"]
    for row in rows[1:]:
        assert row["reason"]["kind"] == "client changed"
        difference = row["change"]["difference"]
        assert (difference["cause"], difference["path"]) == (
            "id",
            "messages[0].content",
        )
        assert 0.1 < row["lcp_similarity_ratio"] < 0.2
        assert (row["tokens"]["cached"] > 0) == (kind == "dense")
        assert row["tokens"]["evaluated"] > 0.8 * row["tokens"]["prompt"]


@pytest.mark.parametrize("kind", KINDS)
def test_last_message_changed(kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Only the newest turn is put in other words: all before it is reused, by a checkpoint where one is needed."""
    with a_stack(tmp_path, llama_server, model_path[kind]) as stack:
        talk = Talk(stack, system("the house"))
        timings = [talk.say("Tell me of the garden."), talk.say("Compare it with the neighbour's.", keep=False)]
        timings.append(talk.say("Which trees stand in it, and since when, and who planted them?", keep=False))
        rows = settled(stack, 3)
        check_figures(rows, timings)
    assert [row["verdict"] for row in rows] == ["COLD", "HIT", "HIT"]
    assert rows[2]["tokens"]["evaluated"] < 120


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("ram", [0, None])
def test_side_request(
    kind: str, ram: int | None, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """Another prompt takes the only slot; with a RAM cache the conversation comes back, without it is evicted."""
    server = {} if ram is None else {"cache_ram_mib": ram}
    with a_stack(tmp_path, llama_server, model_path[kind], **server) as stack:
        talk = Talk(stack, system("the house"))
        timings = [talk.say("Tell me of the garden."), talk.say("And of the roof.")]
        timings.append(Talk(stack, "You name chats. Two words, no more, and no dots.").say("Name this chat."))
        timings.append(talk.say("And of the cellar."))
        rows = settled(stack, 4)
        check_figures(rows, timings)
        check_log(stack)
    assert [row["verdict"] for row in rows[:2]] == ["COLD", "HIT"]
    assert rows[2]["verdict"] == "COLD"
    if ram is None:
        assert rows[3]["verdict"] == "RESTORED"
        assert rows[3]["tokens"]["evaluated"] < 100
    else:
        reason = rows[3]["reason"]
        assert (rows[3]["verdict"], reason["kind"]) == ("EVICTED", "slot lost to request")
        assert (reason["request"], reason["client"]) == (3, CHAT)
        assert rows[3]["tokens"]["evaluated"] > 0.9 * rows[3]["tokens"]["prompt"]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_taking_turns(kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Two conversations with one system prompt in one slot come back each turn; at llama-server's 0.1 they do not."""
    evaluated = {}
    for ratio in (None, 0.1):
        server = {} if ratio is None else {"slot_prompt_similarity": ratio}
        with a_stack(tmp_path, llama_server, model_path[kind], **server) as stack:
            talks = [Talk(stack, system("the house", lines=80)) for _ in range(2)]
            timings = [
                talk.say(system(f"{name} and its {name[::-1]}", lines=40))
                for talk, name in zip(talks, ("garden", "cellar"), strict=True)
            ]
            timings += [talks[turn % 2].say(f"Question {turn}: what is next?") for turn in range(6)]
            rows = settled(stack, 8)
            check_figures(rows, timings)
            check_log(stack)
            threshold_ratio = stack.status()["server"]["similarity_threshold_ratio"]
        evaluated[ratio] = [row["tokens"]["evaluated"] for row in rows[2:]]
        assert threshold_ratio == (ratio or 0.95)
        # What the slot held when it was chosen: the other conversation.
        assert all(0.4 < row["lcp_similarity_ratio"] < 0.9 for row in rows[1:])
        if ratio is None:
            assert [row["verdict"] for row in rows[2:]] == ["RESTORED"] * 6
    assert all(tokens < 100 for tokens in evaluated[None])
    assert all(tokens > 500 for tokens in evaluated[0.1])


def test_parallel_conversations(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Six conversations on four slots: cold first turns, then hits, or prompts out of the RAM cache."""
    with a_stack(tmp_path, llama_server, model_path["dense"], parallel=4, kv_unified=False) as stack:
        names = ("apples", "bridges", "clocks", "deserts", "engines", "ferries")
        talks = [
            Talk(stack, "\n".join(f"{name} {name[::-1]} {number * 37}" for number in range(120))) for name in names
        ]
        timings = [talk.say("First.") for talk in talks]
        timings += [talk.say("Second.") for talk in reversed(talks)]
        rows = settled(stack, 12)
        check_figures(rows, timings)
        check_log(stack)
        slots = stack.status()["slots"]
    assert [row["verdict"] for row in rows[:6]] == ["COLD"] * 6
    assert [row["verdict"] for row in rows[6:]] == ["HIT"] * 4 + ["RESTORED"] * 2
    assert {slot["slot"] for slot in slots} == {0, 1, 2, 3}
    for row in rows[6:]:
        assert row["tokens"]["evaluated"] < 64


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_cancelled(kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """A client that leaves during the prefill costs nothing twice: its retry goes on from there."""
    body = {
        "messages": [
            {"role": "system", "content": system("the house", lines=1000)},
            {"role": "user", "content": "Go."},
        ],
        "max_tokens": 4,
        "stream": True,
    }
    with a_stack(tmp_path, llama_server, model_path[kind], ctx_size=65536) as stack:
        connection = http.client.HTTPConnection("127.0.0.1", stack.proxy_port)
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            rows = stack.status()["requests"]
            if rows and (rows[0]["tokens"]["processed"] or 0) > 2000:
                break
            time.sleep(0.02)
        assert rows[0]["tokens"]["prompt"] > rows[0]["tokens"]["processed"] > 2000
        connection.close()
        settled(stack, 1)
        status, data = post(stack.proxy_port, CHAT, {**body, "stream": False})
        assert status == 200, data
        rows = settled(stack, 2)
        check_figures(rows[1:], [data["timings"]])
    assert [row["verdict"] for row in rows] == ["CANCELLED", "HIT"]
    assert rows[0]["tokens"]["evaluated"] > 2000
    assert rows[1]["tokens"]["cached"] >= rows[0]["tokens"]["evaluated"] - 64


def test_every_dialect_has_its_figures(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Streamed or not: tokens from the answer, times from the log where the answer has none."""
    head = system("the house", lines=40)
    user = [{"role": "user", "content": "Go."}]
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "system", "content": head}, *user], "max_tokens": 4}),
        ("/v1/responses", {"instructions": head, "input": "Go.", "max_output_tokens": 4}),
        ("/v1/messages", {"system": head, "messages": user, "max_tokens": 4}),
        ("/completion", {"prompt": head, "n_predict": 4}),
    ]
    with a_stack(tmp_path, llama_server, model_path["dense"]) as stack:
        for path, body in requests:
            for stream in (False, True):
                connection = http.client.HTTPConnection("127.0.0.1", stack.proxy_port, timeout=30)
                data = json.dumps({**body, "stream": stream, "temperature": 0})
                connection.request("POST", path, data, {"Content-Type": "application/json"})
                assert connection.getresponse().read()
                connection.close()
        rows = settled(stack, 8)
        check_log(stack)
        log = stack.log()
    assert [row["api"] for row in rows] == ["chat"] * 2 + ["responses"] * 2 + ["messages"] * 2 + ["completion"] * 2
    printed = [int(line.split("/")[1].split()[0]) for line in log.splitlines() if "prompt eval time" in line]
    assert [row["tokens"]["evaluated"] for row in rows] == printed
    for row in rows:
        assert row["tokens"]["prompt"] == row["tokens"]["cached"] + row["tokens"]["evaluated"]
        assert row["tokens"]["generated"] == 4
        assert row["timing"]["prefill_ms"] > 0
        assert row["timing"]["decode_tokens_per_s"] > 0
        assert row["timing"]["ttft_ms"] > 0
        assert row["verdict"] in {"COLD", "HIT"}
    assert [row["verdict"] for row in rows[1:]] == ["HIT"] * 5 + [rows[6]["verdict"], "HIT"]


def test_context_full_and_prompt_too_long(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """An answer that ends with the context is TRUNCATED; a prompt that does not fit is FAILED and harms nothing."""
    with a_stack(tmp_path, llama_server, model_path["dense"], ctx_size=2048) as stack:
        head = {"role": "system", "content": system("the house", lines=40)}
        small = {"messages": [head, {"role": "user", "content": "Go."}], "max_tokens": 4}
        assert post(stack.proxy_port, CHAT, small)[0] == 200
        status, error = post(
            stack.proxy_port, CHAT, {"messages": [{"role": "user", "content": system("all", lines=200)}]}
        )
        assert (status, error["error"]["type"]) == (400, "exceed_context_size_error")
        assert post(stack.proxy_port, CHAT, small)[0] == 200
        assert post(stack.proxy_port, CHAT, {**small, "max_tokens": 5000, "ignore_eos": True})[0] == 200
        rows = settled(stack, 4)
        slot = stack.status()["slots"][0]
    assert [row["verdict"] for row in rows] == ["COLD", "FAILED", "HIT", "TRUNCATED"]
    assert rows[1]["status"] == 400
    assert "exceeds the available context size" in rows[1]["error"]
    assert slot["request"] == 4


def test_warm_and_past_the_proxy(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """The first request after a warm-up is WARM; a request to the server's own port is counted as bypass."""
    recording = tmp_path / "request.json"
    body = {
        "messages": [{"role": "system", "content": system("the house")}, {"role": "user", "content": "Another one."}],
        "max_tokens": 4,
    }
    recording.write_text(json.dumps(body), encoding="utf-8")
    config = {"binary": str(llama_server), "model": str(model_path["hybrid"]), "ctx_size": 32768, "parallel": 2}
    with run_stack(tmp_path, config, warmup={"request_file": str(recording)}) as stack:
        talk = Talk(stack, system("the house"))
        timings = [talk.say("Good morning.")]
        assert settled(stack, 1)[0]["verdict"] == "WARM"
        check_log(stack)
        assert (
            post(stack.server_port, CHAT, {"messages": [{"role": "user", "content": "Psst."}], "max_tokens": 4})[0]
            == 200
        )
        # Two answers to one prompt: a child task, which is no request of its own.
        two = {"messages": [{"role": "user", "content": system("twins", lines=20)}], "max_tokens": 4, "n": 2}
        status, data = post(stack.proxy_port, CHAT, two)
        assert status == 200, data
        timings.append(data["timings"])
        rows = settled(stack, 2)
        check_figures(rows[:1], timings[:1])
        log = stack.status()["log"]
    assert log["unclaimed_tasks"] == 1
    assert log["drift"] == 0, log["drift_samples"]
