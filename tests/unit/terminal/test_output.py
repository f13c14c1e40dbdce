"""Tests of where output goes and in which form."""

from __future__ import annotations

import io
import json

import pytest
import typer

from kvstack.errors import ConfigError, ExitCode, NotReady, Problem
from kvstack.terminal import output


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "plain"),
    [
        ({"TERM": "xterm"}, False),
        ({"TERM": "dumb"}, True),
        ({"NO_COLOR": "1"}, True),
        ({"NO_COLOR": ""}, False),
        ({"CI": "true"}, True),
        ({"CI": "false"}, False),
    ],
)
def test_plain_or_not_on_a_terminal(environ: dict[str, str], plain: bool) -> None:
    """A terminal gets the dashboard unless the environment says otherwise."""
    assert output.is_plain(_Terminal(), environ) is plain


def test_no_terminal_is_plain() -> None:
    """A pipe gets plain lines, and so does a stream that is closed."""
    pipe = io.StringIO()
    assert output.is_plain(pipe, {"TERM": "xterm"})
    pipe.close()
    assert output.is_plain(pipe, {"TERM": "xterm"})


def test_error_in_three_parts_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """In plain mode an error is three parts on stderr, and stdout stays empty."""
    error = ConfigError("box.toml", [Problem("server.port", "must be an integer", 3), Problem("", "odd \x1b[2J text")])

    def action() -> output.Result:
        raise error

    with pytest.raises(typer.Exit) as leaving:
        output.deliver("check", False, action)
    assert leaving.value.exit_code == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: box.toml has 2 problems\n"
        "  line 3: server.port: must be an integer\n"
        "  odd  [2J text\n"
        "next:  Correct the keys named above; configs/README.md explains every key.\n"
    )


def test_error_as_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is an envelope on stdout, and stderr stays empty."""

    def action() -> output.Result:
        raise NotReady("what", "fact", "next")

    with pytest.raises(typer.Exit) as leaving:
        output.deliver("status", True, action)
    captured = capsys.readouterr()
    assert leaving.value.exit_code == 3
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "kvstack_result_version": 2,
        "command": "status",
        "status": "error",
        "exit_code": 3,
        "data": None,
        "errors": [{"what": "what", "fact": "fact", "next_step": "next"}],
    }


def test_success_as_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a result is an envelope with its data and no errors."""
    with pytest.raises(typer.Exit) as leaving:
        output.deliver("status", True, lambda: output.Result({"name": "ü\ud800"}, "text"))
    assert leaving.value.exit_code == 0
    assert json.loads(capsys.readouterr().out) == {
        "kvstack_result_version": 2,
        "command": "status",
        "status": "success",
        "exit_code": 0,
        "data": {"name": "ü\ud800"},
        "errors": [],
    }


def test_data_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A result may carry data and an error: the data is printed, the error is said, the code is the error's."""
    result = output.Result({"state": "loading"}, "loading", ExitCode.START_FAILED, NotReady("not ready", "loading", ""))
    with pytest.raises(typer.Exit) as leaving:
        output.deliver("status", False, lambda: result)
    captured = capsys.readouterr()
    assert (leaving.value.exit_code, captured.out, captured.err) == (3, "loading\n", "error: not ready\n  loading\n")
    with pytest.raises(typer.Exit):
        output.deliver("status", True, lambda: result)
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["status"], envelope["exit_code"], envelope["data"]) == ("error", 3, {"state": "loading"})


def test_a_fault_of_our_own_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected exception is said in three parts; only --debug shows the traceback."""

    def action() -> output.Result:
        raise ZeroDivisionError("by zero")

    with pytest.raises(typer.Exit) as leaving:
        output.deliver("status", False, action)
    assert leaving.value.exit_code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "ZeroDivisionError: by zero" in said
    monkeypatch.setattr(output, "_debug", True)
    with pytest.raises(typer.Exit):
        output.deliver("status", False, action)
    assert "Traceback" in capsys.readouterr().err
