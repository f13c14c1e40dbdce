"""The dashboard in a pseudo-terminal over a real stack: what a person sees, and what Ctrl-C leaves behind."""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.terminal.pseudo_terminal import PseudoTerminal, run_in_terminal
from tests.real.openclaw import OpenClaw
from tests.real.stacks import free_ports, get, post, write_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

SIZES = [(80, 24), (200, 60)]
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"
CHAT = "/v1/chat/completions"


def _config(tmp_path: Path, server: Path, model: Path) -> tuple[Path, int]:
    proxy_port, server_port = free_ports(2)
    settings = {"binary": str(server), "model": str(model), "port": server_port, "threads": 1, "ctx_size": 32768}
    warmup = {"system_prompt": "You are a helpful assistant."}
    return write_config(tmp_path, "pty-box", settings, proxy={"port": proxy_port}, warmup=warmup), proxy_port


def _up(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kvstack", "up", str(config), *more]


def _ready(lines: list[str]) -> bool:
    return "READY" in lines[0]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _cells(heading: str, line: str) -> dict[str, str]:
    """The cells of a row by their titles: words stand in the order of the titles, none is empty."""
    return dict(zip(heading.split(), line.replace(" %", "%").split(), strict=False))


def _same(cells: dict[str, str], row: dict[str, Any]) -> bool:
    """Whether a row on the screen has the figures of the status."""
    similarity = row["lcp_similarity_ratio"]
    return (
        cells["time"] == datetime.fromtimestamp(row["time_s"]).strftime("%H:%M:%S")
        and cells["api"] == "chat"
        and _number(cells["prompt"]) == row["tokens"]["prompt"]
        and _number(cells["cached"]) == row["tokens"]["cached"]
        and _number(cells["new"]) == row["tokens"]["evaluated"]
        and cells["sim_best"] == ("-" if similarity is None else f"{similarity:.3f}")
        and cells["ids"] == str(row["stripped"]["msg_ids_removed"])
        and cells["ts"] == str(row["stripped"]["ts_removed"])
        and cells["verdict"] == row["verdict"]
        and re.fullmatch(r"[\d.]+(ms|s|m)", cells["prefill"]) is not None
        and re.fullmatch(r"[\d.]+(ms|s|m)", cells["TTFT"]) is not None
        and re.fullmatch(r"[\d.]+k?", cells["t/s"]) is not None
    )


def _rows(lines: list[str]) -> tuple[str, list[str]]:
    heading = next((line for line in lines if line.split()[:2] == ["time", "api"]), "")
    return heading, [line for line in lines if re.match(r" ?\d\d:\d\d:\d\d ", line)]


def _is_well_formed(lines: list[str], width: int, height: int) -> bool:
    """Whether every line of the frame is where it belongs: nothing has wrapped or scrolled."""
    return (
        len(lines) == height
        and lines[0].startswith(" kvstack  pty-box")
        and lines[-1].startswith(" http://127.0.0.1:")
        and lines[-1].endswith("Ctrl-C stops")
        and len(lines[-1]) == width - 1
        and all(len(line) <= width for line in lines)
        and sum("llama-server's log" in line for line in lines) <= 1
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_rows_are_right_and_ctrl_c_restores_the_terminal(
    size: tuple[int, int], llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """While an OpenClaw conversation runs, each request's row shows the status's figures; Ctrl-C leaves no trace."""
    config, port = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), *size) as terminal:
        before = terminal.settings()
        # A frame comes in pieces: what is waited for is a whole one, from its first line to what stands in its middle.
        base_url = f"http://127.0.0.1:{port}/v1"
        terminal.wait_for(
            lambda lines: (
                _ready(lines) and _is_well_formed(lines, *size) and any(base_url in line for line in lines[4:])
            )
        )
        client = OpenClaw(system_characters=6000, tool_characters=8000)
        for turn, words in enumerate(("Hello.", "Read the plan.", "Write a note."), start=1):
            status, data = post(port, CHAT, client.ask(words))
            assert status == 200, data
            client.hear(data["choices"][0]["message"]["content"] or "")
            terminal.wait_for(lambda lines, turn=turn: len(_rows(lines)[1]) == turn and _is_well_formed(lines, *size))
        _wait_for_figures(terminal, port)
        terminal.wait_for(
            lambda lines: (
                "CACHE WORKS" in "\n".join(lines[:4]) and any("llama-server's log" in line for line in lines[4:])
            )
        )
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        assert family
        terminal.press(b"keys that nobody asked for\x03")
        assert terminal.wait() == 130
        assert [child.pid for child in family if child.is_running() and child.status() != "zombie"] == []
        assert terminal.settings() == before
        assert terminal.raw.count(ENTER_SCREEN) == terminal.raw.count(LEAVE_SCREEN) == 1
        last_words = terminal.raw[terminal.raw.rindex(LEAVE_SCREEN) :]
        assert terminal.raw.rindex(SHOW_CURSOR) > terminal.raw.rindex(HIDE_CURSOR)
        assert b"pty-box ended after" in last_words
        assert b"nobody asked for" not in terminal.raw


def _wait_for_figures(terminal: PseudoTerminal, port: int) -> list[str]:
    """Wait until the rows on the screen are the rows of the status, the newest first."""

    def same(lines: list[str]) -> bool:
        _, data = get(port, "/kvstack/status")
        heading, rows = _rows(lines)
        wanted = list(reversed(data["requests"]))
        shown = [_cells(heading, line) for line in rows]
        return len(shown) == len(wanted) and all(map(_same, shown, wanted))

    return terminal.wait_for(same)


def test_a_terminal_may_change_its_size(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """After a resize the frame has the new size, with nothing left of the old one."""
    config, _ = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), 100, 30) as terminal:
        terminal.wait_for(_ready)
        for size in ((80, 24), (140, 45), (60, 15)):
            terminal.resize(*size)
            terminal.wait_for(lambda lines, size=size: _ready(lines) and _is_well_formed(lines, *size))


def test_a_stalled_terminal_stalls_nothing(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """While the terminal reads nothing, requests are served, and the stack still stops when it is told to."""
    config, port = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), 200, 60) as terminal:
        terminal.wait_for(_ready)
        terminal.pause()
        time.sleep(3.0)  # frames of many kilobytes fill the terminal's buffer
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        begun = time.monotonic()
        status, _ = post(port, CHAT, body, timeout_s=20.0)
        assert status == 200
        assert time.monotonic() - begun < 5.0
        terminal.process.terminate()
        assert terminal.process.wait(20) == 143


def test_a_failed_start_restores_the_terminal(llama_server: Path, tmp_path: Path) -> None:
    """A model that cannot be loaded ends the dashboard; the error in three parts is readable after it."""
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF but no more")
    config, _ = _config(tmp_path, llama_server, model)
    with run_in_terminal(_up(config), 100, 30) as terminal:
        before = terminal.settings()
        assert terminal.wait() == 3
        assert terminal.settings() == before
        last_words = terminal.raw.rpartition(LEAVE_SCREEN)[2].decode()
        assert "error:" in last_words
        assert "next:" in last_words
        assert "Traceback" not in last_words


@pytest.mark.parametrize(
    "environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CI": "true"}], ids=["no-color", "dumb", "ci"]
)
def test_plain_lines_on_a_terminal(
    environ: dict[str, str], llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """A terminal that must not be drawn on gets lines without a single escape."""
    config, _ = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), 120, 30, environ) as terminal:
        terminal.wait_for(lambda lines: any(line.startswith("ready") for line in lines))
        terminal.press(b"\x03")
        assert terminal.wait() == 130
        assert b"\x1b" not in terminal.raw


def test_status_watch_draws_the_same_and_ends_with_the_stack(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """`status --watch` is the dashboard in another terminal; it ends, and says so, when the stack does."""
    config, port = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), 100, 30) as terminal:
        terminal.wait_for(_ready)
        post(port, CHAT, {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4})
        watch = [sys.executable, "-m", "kvstack", "status", "--watch", str(config)]
        with run_in_terminal(watch, 100, 30) as other:
            there = other.wait_for(lambda lines: lines[-1].endswith("Ctrl-C leaves") and len(_rows(lines)[1]) == 1)
            here = terminal.wait_for(lambda lines: len(_rows(lines)[1]) == 1)
            assert _rows(there) == _rows(here)
            terminal.press(b"\x03")
            assert terminal.wait() == 130
            assert other.wait() in {3, 4}
            assert LEAVE_SCREEN in other.raw
            assert b"'pty-box'" in other.raw.rpartition(LEAVE_SCREEN)[2]


@pytest.mark.parametrize("environ", [{}, {"NO_COLOR": "1"}], ids=["colour", "no-colour"])
def test_status_fits_the_terminal(
    environ: dict[str, str], llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """What `status` prints is as wide as the terminal, with and without colour; its table does not wrap."""
    config, port = _config(tmp_path, llama_server, model_path["dense"])
    with run_in_terminal(_up(config), 80, 24) as terminal:
        terminal.wait_for(_ready)
        post(port, CHAT, {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4})
        terminal.wait_for(lambda lines: len(_rows(lines)[1]) == 1)
        with run_in_terminal([sys.executable, "-m", "kvstack", "status"], 80, 24, environ) as other:
            assert other.wait() == 0
            lines = other.lines()
            assert lines[0].startswith(" kvstack  pty-box")
            assert "READY" in lines[0]
            assert lines[5].split()[:2] == ["time", "api"]
            assert re.match(r"\d\d:\d\d:\d\d chat ", lines[6])
            assert (b"\x1b" in other.raw) == (not environ)
