"""What the verbs tell of a stack that an error has ended, and of one that was stopped or killed."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstack.errors import NotRunning
from kvstack.process.identity import identify
from kvstack.rundir import EndFile, RunDir, RunFile
from kvstack.terminal import control_client
from tests.unit.terminal.test_cli import run, write_run_file

VERBS = (("status",), ("down",), ("warmup",), ("logs",), ("explain", "last", "--stack"))
AGO_S = 192.0


def leave_end(name: str = "box", begun_s: float | None = None) -> EndFile:
    """The word that a stack leaves whose server was lost, three minutes ago."""
    ended_s = time.time() - AGO_S
    end = EndFile(
        name, 4711, ended_s - 60.0 if begun_s is None else begun_s, ended_s, f"/etc/{name}.toml",
        "llama-server was killed", "all 3 restarts are used up; SIGKILL\nusually by the kernel", "Lower ctx_size.",
    )  # fmt: skip
    RunDir(name).path.mkdir(parents=True, exist_ok=True)
    RunDir(name).write_end(end)
    return end


@pytest.mark.parametrize("arguments", VERBS)
@pytest.mark.parametrize("named", [True, False])
def test_the_end_is_told_with_time_reason_and_file(
    arguments: tuple[str, ...], named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """When, why in all three parts, where more of it is, and the start with the file's own path."""
    end = leave_end()
    printed = RunDir("box").path / "up.log"
    printed.write_text("error: llama-server was killed\n")
    if not named and arguments[-1] == "--stack":
        arguments = arguments[:-1]
    assert run(*arguments, *(["box"] if named else [])) == 4
    said = capsys.readouterr().err
    assert said.startswith("error: No stack named 'box' is running\n" if named else "error: No stack is running\n")
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.ended_s))
    assert f"the last one: 'box' ended {moment} (3 m 1" in said
    assert "ago): llama-server was killed\n  all 3 restarts are used up; SIGKILL\n  usually by the kernel\n" in said
    assert f"what it printed: {printed}" in said
    assert "next:  Lower ctx_size.\n       Start it again: `kvstack up /etc/box.toml`." in said


def test_the_envelope_has_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read the same parts."""
    leave_end()
    assert run("status", "box", "--json") == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert "all 3 restarts are used up" in error["fact"]
    assert error["next_step"].startswith("Lower ctx_size.\n")


def test_only_files_of_that_run_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A stack in a terminal prints there: what an earlier one printed in the background says nothing of it."""
    end = leave_end()
    for name in ("up.log", "server.log"):
        path = RunDir("box").path / name
        path.write_text("of an earlier run\n")
        os.utime(path, (end.begun_s - 3600, end.begun_s - 3600))
    assert run("status", "box") == 4
    said = capsys.readouterr().err
    assert "the last one: 'box' ended" in said
    assert "up.log" not in said
    assert "server.log" not in said


def test_a_stack_that_was_stopped_since_ends_the_tale(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name the stack is meant that ran last; what ended another one before is told by its name alone."""
    leave_end("old")
    other = RunDir("box")
    other.lock()
    other.clear()
    other.unlock()
    os.utime(RunDir("old").path, (time.time() - AGO_S,) * 2)
    assert run("status") == 4
    assert capsys.readouterr().err == "error: No stack is running\nnext:  Start one: `kvstack up CONFIG`.\n"
    assert run("status", "old") == 4
    assert "'old' ended" in capsys.readouterr().err


def test_a_new_start_forgets_it() -> None:
    """Word of an end is gone with the next start, and a missing one is no error."""
    leave_end()
    directory = RunDir("box")
    directory.forget_end()
    directory.forget_end()
    assert directory.read_end() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "box"}', '{"pid": "x"}'])
def test_a_broken_word_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk or a curious hand must not crash `status`."""
    directory = RunDir("box")
    directory.path.mkdir(parents=True)
    (directory.path / "end.json").write_text(text)
    assert run("status", "box") == 4
    assert "ended" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_it_is_for_the_owner_alone() -> None:
    """It may quote lines of a log, which may hold what users wrote."""
    leave_end()
    assert stat.S_IMODE((RunDir("box").path / "end.json").stat().st_mode) == 0o600


def test_a_killed_stack_names_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Who was killed without giving a reason: what is there is named, and when it was written."""
    killed = write_run_file("box", alive=False)
    RunDir("box").write(replace(killed, begun_s=time.time() - 60))
    printed = RunDir("box").path / "up.log"
    printed.write_text("Fatal Python error\n")
    assert run("status", "box") == 4
    said = capsys.readouterr().err
    assert "ended without cleaning up" in said
    assert "what it printed, last written 20" in said
    assert f"(0 s ago): {printed}" in said


def test_without_a_name_the_last_one_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several that were killed, or of one that was killed and one that an error ended, it is told of the last."""
    for name in ("one", "two"):
        write_run_file(name, alive=False)
    os.utime(RunDir("two").path, (time.time() - AGO_S,) * 2)
    assert run("status") == 4
    assert capsys.readouterr().err.startswith("error: The stack 'one' is not running\n")
    RunDir("one").clear()
    leave_end("box")
    os.utime(RunDir("one").path, (time.time() - AGO_S,) * 2)
    assert run("status") == 4
    assert "the last one: 'box' ended" in capsys.readouterr().err


def test_who_talks_to_a_stack_that_dies_is_told_why(tmp_path: Path) -> None:
    """Its process may still clear up: it is over all the same, and has said how."""
    me = identify(os.getpid())
    assert me is not None
    directory = RunDir("box")
    directory.path.mkdir(parents=True)
    living = RunFile("box", me.pid, me.started_s, "http://127.0.0.1:9", "t", str(tmp_path / "box.toml"), "/x", "1")
    directory.write(living)
    directory.write_end(replace(leave_end(), pid=me.pid))
    with pytest.raises(NotRunning) as caught:
        control_client.fetch_status(living)
    assert caught.value.what == "The stack 'box' has just ended"
    assert "llama-server was killed" in caught.value.fact
