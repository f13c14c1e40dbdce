"""Tests of `kvstack capture` without a stack that captures: its file, a terminal, and who refuses."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvstack import __version__
from kvstack.errors import KvstackError
from kvstack.process.identity import identify
from kvstack.rundir import RunDir, RunFile
from kvstack.terminal.cli import main
from kvstack.terminal.commands.capture import _File, _Stdout, _told


def run(*arguments: str) -> int:
    """Run the command line in this process; give its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


def write_run_file(port: int, token: str = "token") -> None:
    """The run file of a stack in this process, named box."""
    me = identify(os.getpid())
    assert me is not None
    directory = RunDir("box")
    directory.path.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    directory.write(RunFile("box", me.pid, me.started_s, url, token, "/etc/box.toml", "", __version__))


@contextmanager
def answering(status: int, body: bytes, length: int | None = None) -> Iterator[int]:
    """A control port that answers one request so, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/kvstack/capture"
            assert self.headers["authorization"] == "Bearer token"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server.server_port
        thread.join(10)


@pytest.mark.parametrize(
    ("status", "message", "next_step"),
    [
        (429, "4 captures are already running", ""),
        (404, "/kvstack/capture is not a kvstack route", "this version of kvstack?"),
    ],
)
def test_a_stack_that_refuses(
    status: int, message: str, next_step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too many captures, or a kvstack that is too old: said, and no file is left."""
    body = json.dumps({"status": "error", "message": message, "data": None}).encode()
    with answering(status, body) as port:
        write_run_file(port)
        assert run("capture", str(tmp_path / "c.jsonl")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: The stack 'box' refuses\n  {message}\n")
    assert next_step in said
    assert list(tmp_path.iterdir()) == []


def test_a_stack_that_does_not_answer(free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its process lives and its port is closed."""
    write_run_file(free_port)
    assert run("capture", str(tmp_path / "c.jsonl")) == 3
    assert "does not answer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 4, and no file."""
    for arguments in ((), ("box",)):
        assert run("capture", *arguments, str(tmp_path / "c.jsonl")) == 4
    assert list(tmp_path.iterdir()) == []
    assert "No stack is running" in capsys.readouterr().err


def test_a_name_alone_is_no_file(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other verbs take the stack there: a capture into a file of that name is nobody's wish."""
    monkeypatch.chdir(tmp_path)
    write_run_file(free_port)
    assert run("capture", "box") == 2
    assert "kvstack capture box FILE" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_half_a_line_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A connection that breaks within a line leaves the whole ones."""
    file = tmp_path / "c.jsonl"
    lines = b'{"client": null, "body": 1}\n\n{"lost": 2}\n{"client": null, "bo'
    with answering(200, lines) as port:
        write_run_file(port)
        assert run("capture", str(file)) == 0
    assert file.read_bytes() == b'{"client": null, "body": 1}\n'
    said = capsys.readouterr().err
    assert "lost 2 requests so far" in said
    assert said.endswith(f"wrote 1 request to {file}\n")


def test_a_write_that_breaks_off_leaves_whole_lines(tmp_path: Path) -> None:
    """A disk that gets full, or Ctrl-C, in the middle of a line."""

    class Breaking(io.FileIO):
        error: BaseException | None = None

        def write(self, data: object) -> int:
            if self.error is not None and len(bytes(data)) < 8:  # type: ignore[call-overload]
                raise self.error
            return super().write(bytes(data)[:4])  # type: ignore[call-overload]

    path = tmp_path / "c.jsonl"
    file = _File(path, append=False)
    file._file.close()
    breaking = Breaking(path, "a")
    file._file = breaking
    file.write(b"one\n")
    for error, raised in ((OSError(28, "No space left"), KvstackError), (KeyboardInterrupt(), KeyboardInterrupt)):
        breaking.error = error
        with pytest.raises(raised):
            file.write(b"a longer line\n")
        assert path.read_bytes() == b"one\n"
    breaking.error = None
    file.write(b"another line\n")
    file.close()
    assert path.read_bytes() == b"one\nanother line\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")
def test_a_link_is_not_followed_to_a_new_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever laid a link there shall not choose where prompts go."""
    link = tmp_path / "c.jsonl"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KvstackError, match="already exists"):
        _File(link, append=False)
    assert not (tmp_path / "elsewhere").exists()


def test_a_terminal_gets_the_same_json_without_what_moves_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts hold what others wrote."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    line = '{"a": "é \x9b2J \u202e \x7f \N{GRINNING FACE} \U000e0041 \u2028"}\n'
    shown = {}
    for kind in (Terminal, io.TextIOWrapper):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", kind(raw, encoding="utf-8"))
        _Stdout().write(line.encode())
        shown[kind] = raw.getvalue().decode()
        monkeypatch.undo()
    assert shown[io.TextIOWrapper] == line
    assert json.loads(shown[Terminal]) == json.loads(line)
    assert shown[Terminal].removesuffix("\n").isprintable()
    assert "é" in shown[Terminal]


def test_what_is_told_of_a_request() -> None:
    """Not its words; and a line of another version is told too."""
    line = json.dumps({"client": "pi", "method": "POST", "path": "/x", "note": "why", "body": {"a": "hush" * 1000}})
    assert _told(line.encode() + b"\n") == "pi | POST /x | 4 KiB | why"
    assert _told(b'{"other": 1}\n') == "0 KiB"
