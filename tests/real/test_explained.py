"""`kvstack explain` on a real server: what the client changed, what the server did, what it cost, what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import kinds
from tests.real.stacks import post, run_stack

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the verb."""
    command = [sys.executable, "-m", "kvstack", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_rules_list_counts_what_a_running_stack_did(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """Each rule's count is the one of the status, and of the request that it acted on."""
    server: dict[str, Any] = {"binary": str(llama_server), "model": str(model_path["dense"]), "ctx_size": 4096}
    with run_stack(tmp_path, server) as stack:
        text = "[Wed 2026-02-18 20:48 UTC] hello"
        for _ in range(2):
            post(stack.proxy_port, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        (first, _) = stack.wait_for_requests(2)
        assert first["stripped"]["rules"] == {"openclaw.timestamps": 1}
        assert stack.status()["totals"]["rules"] == {"openclaw.timestamps": 2}
        command = [sys.executable, "-m", "kvstack", "rules", "list", "--json"]
        listed = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
        hits = {rule["name"]: rule["hits"] for rule in listed["data"]["rules"]}
        assert hits.pop("openclaw.timestamps") == 2
        assert set(hits.values()) == {0}


@pytest.mark.parametrize("kind", kinds("dense", "hybrid"))
def test_an_unknown_clients_id_in_the_system_text_is_named(
    kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """FR-22: the place, the kind of change, sixty characters if asked for, the cost in tokens, and a remedy."""
    filler = "Keep the rules in mind and answer in plain words. " * 60
    server: dict[str, Any] = {"binary": str(llama_server), "model": str(model_path[kind]), "ctx_size": 16384}
    messages: list[dict[str, str]] = []
    with run_stack(tmp_path, server) as stack:
        for nonce in ("0b6f2f0e-1111-4222-8333-444455556666", "9c7a1d2b-2222-4333-9444-555566667777"):
            messages.append({"role": "user", "content": "And then?"})
            system = {"role": "system", "content": f"You are an agent.\nTrace {nonce}\n{filler}"}
            status, data = post(stack.proxy_port, CHAT, {"messages": [system, *messages], "max_tokens": 4})
            assert status == 200, data
            messages.append({"role": "assistant", "content": data["choices"][0]["message"]["content"] or ""})
        rows = stack.wait_for_requests(2)
        assert rows[1]["verdict"] == "PARTIAL"
        difference = rows[1]["change"]["difference"]
        assert (difference["cause"], difference["path"]) == ("id", "messages[0].content")
        assert rows[1]["tokens"]["evaluated"] > 500
        shown = explain()
        assert shown.returncode == 0, shown.stderr
        assert "Request 2: PARTIAL" in shown.stdout
        assert "`drop` for this id" in " ".join(shown.stdout.split())
        assert "messages[0].content" in shown.stdout
        assert "Trace" not in shown.stdout
        with_text = explain("2", "--show-text")
        assert "0b6f2f0e" in with_text.stdout
        assert "9c7a1d2b" in with_text.stdout
        envelope = json.loads(explain("1", "--json").stdout)
        assert (envelope["status"], envelope["data"]["explanation"]["verdict"]) == ("success", "COLD")
        unknown = explain("77")
        assert unknown.returncode == 1
        assert "known are 1 to 2" in unknown.stderr


@pytest.mark.parametrize("kind", kinds("dense", "hybrid"))
def test_single_turns_with_a_new_id_are_told_of_the_id(
    kind: str, llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """An agent that begins a conversation with each request: a warm-up would not help it."""
    filler = "Keep the rules in mind and answer in plain words. " * 60
    server: dict[str, Any] = {"binary": str(llama_server), "model": str(model_path[kind]), "ctx_size": 16384}
    with run_stack(tmp_path, server) as stack:
        for number, nonce in enumerate((f"{digit * 8}-1111-4222-8333-444455556666" for digit in "abc"), start=1):
            messages = [
                {"role": "system", "content": f"{nonce}\n{filler}"},
                {"role": "user", "content": f"Task {number}: say something."},
            ]
            status, data = post(stack.proxy_port, CHAT, {"messages": messages, "max_tokens": 1})
            assert status == 200, data
        rows = stack.wait_for_requests(3)
        assert [row["verdict"] for row in rows] == ["COLD", "PARTIAL", "PARTIAL"]
        assert rows[0]["reason"]["kind"] == "first request"
        for row in rows[1:]:
            difference = row["change"]["difference"]
            assert (difference["cause"], difference["path"]) == (
                "id",
                "messages[0].content",
            )
        shown = explain()
        assert "of another conversation, but not quite: id in messages[0].content @" in " ".join(shown.stdout.split())
        assert "warmup" not in shown.stdout
        assert "4444" not in shown.stdout
        assert "cccccccc-1111" in explain("3", "--show-text").stdout
