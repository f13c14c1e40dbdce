"""Prefix snapshots on real servers: made at the first start, restored at the next one, and never the wrong one."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstack.llama.model.gguf import read_header
from kvstack.llama.model.memory import shape_of
from kvstack.warmup.identity import snapshot_bytes
from tests.conftest import kinds
from tests.real.openclaw import OpenClaw
from tests.real.prefix_files import WORDS, files, first_turn, snapshot_dir, wait_until_proved
from tests.real.stacks import RunningStack, post, run_stack
from tests.real.test_main_job import CHAT, server_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("kind", "parallel"), [pytest.param("dense", 1, marks=pytest.mark.deep), ("hybrid", 1), ("hybrid", 2)]
)
def test_a_second_start_restores_the_prefix_and_every_new_conversation_finds_it(
    kind: str,
    parallel: int,
    llama_server: Path,
    model_path: dict[str, Path],
    recording: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Cold start: evaluated and saved; next start: restored; both: only the user's text is new, three times."""
    config = {**server_config(llama_server, model_path[kind]), "parallel": parallel}
    for start, how in enumerate(("saved", "restored")):
        with run_stack(tmp_path, config, warmup=recording) as stack:
            warmup = stack.status()["warmup"]
            assert (warmup["outcome"], warmup["snapshot"], warmup["is_proved"]) == ("done", how, False)
            boundary = warmup["boundary_tokens"]
            assert 15_000 < boundary == warmup["prompt_tokens"]
            assert warmup["evaluated_tokens"] == (boundary if how == "saved" else 0)
            for number, words in enumerate(WORDS):
                cached, evaluated, user = first_turn(stack, 10 * start + number, words)
                assert cached >= boundary - 4
                assert evaluated <= user + 64
            assert wait_until_proved(stack)["is_proved"]
            rows = stack.wait_for_requests(3)
            assert [row["verdict"] for row in rows] == ["WARM"] * 3
            # What the warm-up had evaluated is nobody's traffic.
            status = stack.status()
            assert status["totals"]["requests"] == 3
            assert status["log"]["unclaimed_tasks"] == 0
        (snapshot,) = files()
        (note,) = files(".json")
        with model_path[kind].open("rb") as file:
            shape = shape_of(read_header(file.read))
        assert shape is not None
        assert snapshot.stat().st_size == pytest.approx(snapshot_bytes(shape, boundary, "f16", "f16"), abs=1000)
        assert stat.S_IMODE(snapshot_dir().stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in (snapshot, note)] == [0o600, 0o600]
        assert len(list(snapshot_dir().iterdir())) == 2


@pytest.mark.deep
def test_whatever_changes_the_cache_has_no_snapshot(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """A snapshot of something else would fill the slot with nonsense: it is made anew, after each change."""
    model = tmp_path / "model.gguf"
    shutil.copy(model_path["hybrid"], model)
    config = server_config(llama_server, model)
    changes = ("nothing", "prompt", "model time", "cache type", "template", "slots")
    for change in changes:
        match change:
            case "prompt":
                body = OpenClaw(session=7).ask("x")
                body["messages"][0]["content"] = "Another beginning. " + body["messages"][0]["content"]
                Path(recording["request_file"]).write_text(json.dumps(body), encoding="utf-8")
            case "model time":
                os.utime(model, (1_700_000_000, 1_700_000_000))
            case "cache type":
                config |= {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
            case "template":
                template = tmp_path / "template.jinja"
                text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                template.write_text(text + "<|im_start|>assistant\n", encoding="utf-8")
                config["extra_args"] = ["--chat-template-file", str(template)]
            case "slots":
                config["parallel"] = 2
        with run_stack(tmp_path, config, warmup=recording) as stack:
            warmup = stack.status()["warmup"]
            assert (change, warmup["snapshot"]) == (change, "saved")
            assert warmup["evaluated_tokens"] == warmup["boundary_tokens"]
    assert len(files()) == len(changes)


@pytest.mark.parametrize(
    ("kind", "sections", "why"),
    [
        ("swa", {}, "no snapshot: a sliding-window model's cache cannot be restored"),
        ("hybrid", {"snapshots_max_mib": 1}, "no snapshot: it would take 2 MiB, more than warmup.snapshots_max_mib"),
    ],
)
def test_where_there_is_none_the_chat_form_is_used_and_says_why(
    kind: str,
    sections: dict[str, Any],
    why: str,
    llama_server: Path,
    model_path: dict[str, Path],
    recording: dict[str, Any],
    tmp_path: Path,
) -> None:
    """It is no failure; the reason is in the warm-up's detail."""
    with run_stack(tmp_path, server_config(llama_server, model_path[kind]), warmup={**recording, **sections}) as stack:
        warmup = stack.status()["warmup"]
        assert (warmup["outcome"], warmup["snapshot"], warmup["detail"]) == ("done", None, why)
        assert warmup["evaluated_tokens"] > 5_000
        assert stack.status()["log"]["unclaimed_tasks"] == 0
        given = "--slot-save-path" in psutil.Process(stack.status()["server"]["pid"]).cmdline()
        assert given == ("snapshots_max_mib" in sections)
    assert files() == []


def converse(stack: RunningStack, client: OpenClaw) -> int:
    """Three turns, the second a long one; give the last prompt's length."""
    data: dict[str, Any] = {}
    for words in (WORDS[0], "Tell me more about it. " * 40, WORDS[1]):
        status, data = post(stack.proxy_port, CHAT, client.ask(words))
        assert status == 200, data
        client.hear(data["choices"][0]["message"]["content"] or "")
    length: int = data["timings"]["cache_n"] + data["timings"]["prompt_n"]
    return length


@pytest.mark.parametrize("kind", kinds("dense", "hybrid"))
def test_a_warm_up_leaves_a_conversation_with_the_prefix_alone(
    kind: str, llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """It keeps the prefix in the cache; with the bare prefix in its slot the server would not look for the rest."""
    with run_stack(tmp_path, server_config(llama_server, model_path[kind]), warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        client = OpenClaw(session=1)
        length = converse(stack, client)
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"], ended["evaluated_tokens"]) == ("done", None, 0)
        assert ended["detail"] == "request 3 began with it, so it is in the cache already"
        _, data = post(stack.proxy_port, CHAT, client.ask(WORDS[2]))
        assert data["timings"]["cache_n"] >= length - 8
        cached, evaluated, user = first_turn(stack, 2, WORDS[0])
        assert cached >= boundary - 4
        assert evaluated <= user + 64


@pytest.mark.parametrize("kind", kinds("dense", "hybrid"))
@pytest.mark.parametrize("known", [True, False], ids=["restored", "evaluated"])
def test_another_live_conversation_outlives_a_warm_up(
    known: bool,
    kind: str,
    llama_server: Path,
    model_path: dict[str, Path],
    recording: dict[str, Any],
    tmp_path: Path,
) -> None:
    """What is in the slot moves to the host prompt cache, from where it comes back."""
    with run_stack(tmp_path, server_config(llama_server, model_path[kind]), warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        first_turn(stack, 1, WORDS[2])  # it had the prefix, and loses its slot
        messages: list[dict[str, str]] = [{"role": "system", "content": "You count. " * 300}]
        for words in (WORDS[0], "Count more. " * 100, WORDS[1]):
            messages.append({"role": "user", "content": words})
            status, data = post(stack.proxy_port, CHAT, {"messages": messages, "max_tokens": 8})
            assert status == 200, data
            messages.append({"role": "assistant", "content": data["choices"][0]["message"]["content"] or ""})
        length = data["timings"]["cache_n"] + data["timings"]["prompt_n"]
        if not known:
            for path in snapshot_dir().iterdir():
                path.unlink()
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"]) == ("done", "restored" if known else "saved")
        assert ended["boundary_tokens"] == boundary
        cached, evaluated, user = first_turn(stack, 2, WORDS[0])
        assert cached >= boundary - 4
        assert evaluated <= user + 64
        assert wait_until_proved(stack)["is_proved"]
        messages.append({"role": "user", "content": WORDS[2]})
        _, data = post(stack.proxy_port, CHAT, {"messages": messages, "max_tokens": 8})
        assert data["timings"]["cache_n"] >= length - 8
        stack.wait_for_requests(6)
        status = stack.status()
        assert status["totals"]["requests"] == 6
        assert status["log"]["unclaimed_tasks"] == 0


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"cache_ram_mib": 0}, "the host prompt cache is off"),
        ({"cache_ram_mib": 1}, "is larger than the host prompt cache"),
        ({"parallel": 2}, "there are conversations in several slots"),
    ],
)
def test_a_conversation_that_would_be_lost_is_not_pushed_out_for_a_snapshot(
    setting: dict[str, Any],
    why: str,
    llama_server: Path,
    model_path: dict[str, Path],
    recording: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Then the chat form is sent, as ever."""
    config = {**server_config(llama_server, model_path["hybrid"]), **setting}
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"
        post(stack.proxy_port, CHAT, {"messages": [{"role": "user", "content": "Count. " * 2000}], "max_tokens": 1})
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"]) == ("done", None)
        assert why in ended["detail"]


def test_a_model_that_was_replaced_while_it_is_served_has_no_snapshot(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """The running server's state would be saved in the new file's name."""
    model = tmp_path / "model.gguf"
    shutil.copy(model_path["dense"], model)
    with run_stack(tmp_path, server_config(llama_server, model), warmup=recording) as stack:
        os.utime(model, (1_700_000_000, 1_700_000_000))
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"]) == ("done", None)
        assert "has changed on the disk since it was started" in ended["detail"]
    assert len(files()) == 1


def test_with_an_api_key_it_works_too(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """`/slots` asks for the key; the key is not in the snapshot's identity."""
    config = {**server_config(llama_server, model_path["dense"]), "api_key": "one"}
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"
    with run_stack(tmp_path, {**config, "api_key": "two"}, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "restored"
