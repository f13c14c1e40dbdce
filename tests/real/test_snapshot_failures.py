"""Prefix snapshots on real servers, when something is wrong: a start is never worse off than without one."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.real.prefix_files import WORDS, files, first_turn, wait_until_proved
from tests.real.stacks import RunningStack, post, run_stack
from tests.real.test_main_job import server_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


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
        told = [notice["text"] for notice in status["notices"] if "was damaged" in notice["text"]]
        assert len(told) == (damage == "one byte")
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
        told = "died after it was given a prefix snapshot"
        assert any(told in notice["text"] for notice in status["notices"]) == died
        assert (told in status["warmup"]["detail"]) == died
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
        assert "died after it was given a prefix snapshot, before its first answer" in status["warmup"]["detail"]
        assert files() == []
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached >= boundary - 4
        psutil.Process(status["server"]["pid"]).kill()  # and this one counts
        assert stack.process.wait(30) == 5


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


def test_a_snapshot_that_does_not_hold_is_made_anew_by_the_next_start(
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
    with run_stack(tmp_path, config, warmup=recording) as stack:
        boundary = stack.status()["warmup"]["boundary_tokens"]
        assert stack.status()["warmup"]["snapshot"] == "restored"
        cached, _, _ = first_turn(stack, 1, WORDS[0])
        assert cached < boundary - 4
        warmup = wait_until_proved(stack)
        assert warmup["outcome"] == "failed"
        assert f"found {cached:,} of its {boundary:,} tokens cached" in warmup["detail"]
        assert any("the next start makes a new one" in notice["text"] for notice in stack.status()["notices"])
        assert files() == []
        # That request has evaluated it: the next conversation finds it, but for what is missing to a checkpoint.
        cached, _, _ = first_turn(stack, 2, WORDS[1])
        assert cached >= boundary - 512 - 8
        ended = stack.verb("warmup", "--json")["data"]
        assert (ended["outcome"], ended["snapshot"]) == ("done", None)
        assert "was not valid" in ended["detail"]
    with run_stack(tmp_path, config, warmup=recording) as stack:
        assert stack.status()["warmup"]["snapshot"] == "saved"


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
