"""Tests of standard streams that are closed, full, or a terminal that must not get what comes by another process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvstack.rundir import RunDir
from kvstack.terminal import output
from kvstack.terminal.cli import main
from kvstack.terminal.commands.up import _quoted
from tests.real.stacks import free_ports

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a POSIX shell and /dev/full")
HOSTILE = "a\x1b[2Jb\u202ec\x9b2Jd\u2028e\x00"


def shell(arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run one command with its standard streams redirected as a shell does it."""
    command = f"{shlex.quote(sys.executable)} -m kvstack {arguments} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


def write_config(directory: Path) -> Path:
    """The config of a stack that attaches to nothing."""
    upstream, proxy = free_ports(2)
    path = directory / "box.toml"
    path.write_text(f'[server]\nurl = "http://127.0.0.1:{upstream}"\n[proxy]\nport = {proxy}\n')
    return path


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_nobody_reads(redirection: str, tmp_path: Path) -> None:
    """With streams closed, or talk that cannot be written, a verb leaves with its own exit code and no complaint."""
    for arguments, code in ((f"check {write_config(tmp_path)}", 0), ("status", 4), ("nonsense", 2), ("--help", 0)):
        result = shell(arguments, redirection)
        assert result.returncode == code, arguments
        assert "fault" not in result.stderr
        assert "Traceback" not in result.stderr
        assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("arguments", ["check {}", "check {} --json", "doctor {}", "rules list", "--help", "--version"])
def test_data_that_cannot_be_written(arguments: str, tmp_path: Path) -> None:
    """Data on a full disk is lost: exit 1, and three parts say so."""
    result = shell(arguments.format(write_config(tmp_path)), ">/dev/full")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[:2] == ["error: The output could not be written", "  stdout: No space left on device"]
    assert lines[2].startswith("next:  ")
    assert len(lines) == 3


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_stack_that_nobody_reads(redirection: str, tmp_path: Path) -> None:
    """A stack runs, and ends by a signal with its exit code, wherever its output goes."""
    command = f"exec {shlex.quote(sys.executable)} -m kvstack up {write_config(tmp_path)} {redirection}"
    process = subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 30
        while RunDir("box").read() is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=20)[1]
    finally:
        process.kill()
        process.wait(5)
    assert process.returncode == 143
    assert "Traceback" not in said
    assert "fault" not in said
    assert "Exception ignored" not in said


def test_names_from_outside_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model's path with terminal escapes and direction marks is shown without them, and whole in JSON."""
    path = tmp_path / "box.toml"
    path.write_text('[server]\nmodel = "/m/\\u001b[2J\\u202e.gguf"\n', encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["check", str(path)])
    captured = capsys.readouterr()
    assert "/m/ [2J.gguf" in captured.out
    assert "\x1b" not in captured.out + captured.err
    assert "\u202e" not in captured.out + captured.err
    with pytest.raises(SystemExit):
        main(["check", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["data"]["source"] == "/m/\x1b[2J\u202e.gguf"


def test_every_way_out_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    """Text, talk and what rich draws: in none of them acts a text by another process on the terminal."""
    safe = "a [2Jbc\N{REPLACEMENT CHARACTER}2Jd e "

    def draw(screen: Console) -> RenderableType:
        return Group(Text(HOSTILE, style="bold red"), Text("second"))

    for text in (HOSTILE, draw):
        with pytest.raises(Exception, match=r"^0?$"):
            output.deliver("check", False, lambda shown=text: output.Result(None, shown))  # type: ignore[misc]
        assert capsys.readouterr().out.splitlines()[0] == safe
    output.say(f"{HOSTILE}\n{HOSTILE}")
    assert capsys.readouterr().err == f"{safe}\n{safe}\n"


def test_colours_of_our_own_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What rich draws in colour is in colour on a terminal, escapes by another process notwithstanding."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(output, "is_plain", lambda *_: False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    output._draw(lambda _: Text(HOSTILE, style="red"))
    shown = capsys.readouterr().out
    assert "\x1b[31m" in shown
    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown


def test_a_command_for_a_shell_is_exact_and_harmless() -> None:
    """A word with escapes and marks is spelled so that a shell gives it back and a terminal shows it."""
    for word in ("plain", "two words", "it's", HOSTILE.replace("\0", ""), "quote'\\\u202e"):
        spelled = _quoted(word)
        assert spelled.isprintable()
        back = subprocess.run(["bash", "-c", f"printf %s {spelled}"], capture_output=True, check=True).stdout
        assert back == os.fsencode(word)
