"""
Prefix snapshots on real servers: made at the first start, restored at the next one, and never the wrong one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstack.llama.gguf import read_header
from kvstack.llama.memory import shape_of
from kvstack.llama.snapshots import snapshot_bytes
from tests.real.openclaw import OpenClaw
from tests.real.stacks import RunningStack, post, run_stack
from tests.real.test_main_job import CHAT, server_config, tokens

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

WORDS = ("Hello, what can you do for me?", "Which files are there?", "What is the weather like?")


@pytest.fixture
def recording(tmp_path: Path) -> dict[str, Any]:
    """The warm-up's section: another session's request."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(OpenClaw(session=7).ask("Some other question.")), encoding="utf-8")
    return {"request_file": str(path)}


def snapshot_dir() -> Path:
    """Where the snapshots are."""
    return Path(os.environ["KVSTACK_CACHE_DIR"]) / "snapshots"


def files(ending: str = ".bin") -> list[Path]:
    """The snapshots that there are."""
    return sorted(path for path in snapshot_dir().glob("*") if path.suffix == ending)


def first_turn(stack: RunningStack, session: int, words: str) -> tuple[int, int, int]:
    """Begin a conversation; give cached and evaluated tokens, and those of the user's text."""
    client = OpenClaw(session=session)
    status, data = post(stack.proxy_port, CHAT, client.ask(words))
    assert status == 200, data
    return data["timings"]["cache_n"], data["timings"]["prompt_n"], tokens(stack.server_port, client.user_text)


def wait_until_proved(stack: RunningStack) -> dict[str, Any]:
    """Wait for the judgement of the restored prefix."""
    deadline = time.monotonic() + 10
    warmup: dict[str, Any] = {}
    while time.monotonic() < deadline:
        warmup = stack.status()["warmup"]
        if warmup["is_proved"] or warmup["outcome"] == "failed":
            break
        time.sleep(0.05)
    return warmup


@pytest.mark.parametrize(("kind", "parallel"), [("dense", 1), ("hybrid", 1), ("hybrid", 2)])
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


def test_whatever_changes_the_cache_has_no_snapshot(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """A snapshot of something else would fill the slot with nonsense: it is made anew, after each change."""
    model = tmp_path / "model.gguf"
    shutil.copy(model_path["hybrid"], model)
    config = server_config(llama_server, model)
    changes = ("nothing", "prompt", "model time", "context", "cache type", "template", "slots")
    for change in changes:
        match change:
            case "prompt":
                body = OpenClaw(session=7).ask("x")
                body["messages"][0]["content"] = "Another beginning. " + body["messages"][0]["content"]
                Path(recording["request_file"]).write_text(json.dumps(body), encoding="utf-8")
            case "model time":
                os.utime(model, (1_700_000_000, 1_700_000_000))
            case "context":
                config["ctx_size"] = 30_000
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


def overwrite(position: int, data: bytes, *, vouch: bool) -> None:
    """Change a snapshot in place, its length and time as they were; *vouch*: its note shall fit all the same."""
    (snapshot,), (path,) = files(), files(".json")
    status = snapshot.stat()
    content = bytearray(snapshot.read_bytes())
    content[position : position + len(data)] = data
    snapshot.write_bytes(content)
    os.utime(snapshot, ns=(status.st_atime_ns, status.st_mtime_ns))
    if vouch:
        note = json.loads(path.read_text(encoding="utf-8"))
        note["digest"] = hashlib.blake2b(content).hexdigest()
        path.write_text(json.dumps(note), encoding="utf-8")


@pytest.mark.parametrize("damage", ["one byte", "no note"])
def test_a_damaged_snapshot_is_made_anew(
    damage: str, llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """No server would notice a byte, and newer ones die of a shortened file: they never see one."""
    config = server_config(llama_server, model_path["dense"])
    with run_stack(tmp_path, config, warmup=recording):
        pass
    (snapshot,), (note,) = files(), files(".json")
    size = snapshot.stat().st_size
    if damage == "no note":  # whoever read it last has died
        note.unlink()
    else:
        overwrite(size // 2, bytes([snapshot.read_bytes()[size // 2] ^ 64]), vouch=False)
    with run_stack(tmp_path, config, warmup=recording) as stack:
        status = stack.status()
        assert (status["warmup"]["outcome"], status["warmup"]["snapshot"]) == ("done", "saved")
        assert status["restarts"] == 0
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached >= status["warmup"]["boundary_tokens"] - 4
    (again,) = files()
    assert again.stat().st_size == size


def test_a_snapshot_that_the_server_refuses_is_removed(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """All as noted, but the server says no: the prefix is evaluated."""
    config = server_config(llama_server, model_path["dense"])
    with run_stack(tmp_path, config, warmup=recording):
        pass
    overwrite(0, b"none", vouch=True)
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"


def test_no_start_fails_of_a_snapshot(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """Half a file with a note that fits: newer builds end there, older ones say no; both are ready, and warm."""
    config = {**server_config(llama_server, model_path["dense"]), "max_restarts": 0}
    with run_stack(tmp_path, config, warmup=recording):
        pass
    (snapshot,), (path,) = files(), files(".json")
    note = json.loads(path.read_text(encoding="utf-8"))
    size = note["size_bytes"] // 2
    os.truncate(snapshot, size)
    digest = hashlib.blake2b(snapshot.read_bytes()).hexdigest()
    note |= {"size_bytes": size, "modified_ns": snapshot.stat().st_mtime_ns, "digest": digest}
    path.write_text(json.dumps(note), encoding="utf-8")
    with run_stack(tmp_path, config, warmup=recording) as stack:
        status = stack.status()
        died = status["restarts"] == 1
        assert (status["warmup"]["outcome"], status["warmup"]["snapshot"]) == ("done", None if died else "saved")
        assert any("died with a prefix snapshot" in notice["text"] for notice in status["notices"]) == died
        assert ("died with a prefix snapshot" in status["warmup"]["detail"]) == died
        assert len(files()) == (0 if died else 1)
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached >= status["warmup"]["boundary_tokens"] - 4
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == ("saved" if died else "restored")


def wait_until_restarted(stack: RunningStack) -> dict[str, Any]:
    """Wait until the server was started again."""
    deadline = time.monotonic() + 30
    status = stack.status()
    while time.monotonic() < deadline and (status["restarts"] == 0 or status["state"] != "ready"):
        time.sleep(0.05)
        status = stack.status()
    return status


def test_a_server_that_dies_before_its_first_answer_is_started_again_without_the_snapshot(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """Perhaps it died of that; so it is no restart that counts, and there is none to spare here."""
    config = {**server_config(llama_server, model_path["dense"]), "max_restarts": 0}
    with run_stack(tmp_path, config, warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        psutil.Process(stack.status()["server"]["pid"]).kill()
        status = wait_until_restarted(stack)
        assert (status["warmup"]["outcome"], status["warmup"]["snapshot"]) == ("done", None)
        assert "died with a prefix snapshot, before it had answered anybody" in status["warmup"]["detail"]
        assert files() == []
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached >= boundary - 4
        psutil.Process(status["server"]["pid"]).kill()  # and this one counts
        assert stack.process.wait(30) == 5


@pytest.mark.parametrize(
    ("kind", "sections", "why"),
    [
        ("swa", {}, "no snapshot: the window of a sliding-window model is not restored"),
        ("hybrid", {"snapshot": False}, ""),
        ("hybrid", {"path": "/v1/responses"}, "no snapshot: only chat completions can be rendered, not /v1/responses"),
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
    if "path" in sections:
        body = OpenClaw(session=7).ask("x")
        body["input"] = body.pop("messages")
        body.pop("tools")
        Path(recording["request_file"]).write_text(json.dumps(body), encoding="utf-8")
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


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
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


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
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
        stack.wait_for_requests(5)
        status = stack.status()
        assert status["totals"]["requests"] == 5
        assert status["log"]["unclaimed_tasks"] == 0


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"cache_ram_mib": 0}, "the host prompt cache is off"),
        ({"cache_ram_mib": 1}, "is larger than the host prompt cache takes"),
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


def test_a_restart_after_a_death_restores_too(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """The server had answered, so it did not die of the snapshot: the prefix is back before the next request."""
    with run_stack(tmp_path, server_config(llama_server, model_path["hybrid"]), warmup=recording) as stack:
        first = stack.status()
        first_turn(stack, 1, WORDS[0])
        assert wait_until_proved(stack)["is_proved"]
        psutil.Process(first["server"]["pid"]).kill()
        assert wait_until_restarted(stack)["warmup"]["snapshot"] == "restored"
        cached, _, _ = first_turn(stack, 2, WORDS[0])
        assert cached >= first["warmup"]["boundary_tokens"] - 4


def test_a_snapshot_that_does_not_hold_twice_is_not_made_again(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """The server says 200 to a restore whatever it is worth; the first answer is the judge."""
    config = server_config(llama_server, model_path["hybrid"])
    with run_stack(tmp_path, config, warmup=recording):
        pass
    (snapshot,) = files()
    count = json.loads(files(".json")[0].read_text(encoding="utf-8"))["tokens"].to_bytes(4, "little")
    # Another first token (they stand behind their number): the server finds no prompt that begins so.
    overwrite(snapshot.read_bytes().index(count) + 4, b"\1\0\0\0", vouch=True)
    refusal = snapshot.with_suffix(".refused")
    refusal.write_text(json.dumps({"times": 1, "reason": "it did not hold"}), encoding="utf-8")
    with run_stack(tmp_path, config, warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        assert stack.status()["warmup"]["snapshot"] == "restored"
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached < boundary - 4
        warmup = wait_until_proved(stack)
        assert warmup["outcome"] == "failed"
        assert f"found {cached:,} of its {boundary:,} tokens cached" in warmup["detail"]
        assert any("for some days the chat form is used" in notice["text"] for notice in stack.status()["notices"])
        assert files() == []
        # That request has evaluated it: the next conversation finds it, but for what is missing to a checkpoint.
        cached, _, _ = first_turn(stack, 2, WORDS[1])
        assert cached >= boundary - 512 - 8
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"]) == ("done", None)
        assert "did not hold" in ended["detail"]
    with run_stack(tmp_path, config, warmup=recording) as stack:
        warmup = stack.status()["warmup"]
        assert (warmup["outcome"], warmup["snapshot"]) == ("done", None)
        assert "did not hold" in warmup["detail"]
    with run_stack(tmp_path, {**config, "ctx_size": 30_000}, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"  # that is another one


def test_a_request_past_the_proxy_is_not_the_snapshots_fault(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """It takes the slot, and without a host prompt cache what was there is gone: nothing is proved, nothing removed."""
    config = {**server_config(llama_server, model_path["dense"]), "cache_ram_mib": 0}
    with run_stack(tmp_path, config, warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        post(stack.server_port, "/completion", {"prompt": "Count. " * 50, "n_predict": 1})
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached < boundary - 4
        stack.wait_for_requests(1)
        time.sleep(0.3)
        warmup = stack.status()["warmup"]
        assert (warmup["outcome"], warmup["is_proved"]) == ("done", False)
        assert len(files()) == 1
        first_turn(stack, 2, WORDS[1])
        assert wait_until_proved(stack)["is_proved"]


def test_with_an_api_key_it_works_too(
    llama_server: Path, model_path: dict[str, Path], recording: dict[str, Any], tmp_path: Path
) -> None:
    """`/slots` asks for the key; the key is not in the snapshot's identity."""
    config = {**server_config(llama_server, model_path["dense"]), "api_key": "one"}
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"
    with run_stack(tmp_path, {**config, "api_key": "two"}, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "restored"
