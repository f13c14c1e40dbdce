"""
The dashboard's frames, compared with what was looked at and found right; and what holds for every frame.

`KVSTACK_GOLDEN=write` writes the frames anew.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from kvstack.state.events import Notice
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from kvstack.terminal.dashboard.frame import frame, render, summary
from kvstack.terminal.dashboard.glyphs import ASCII, UNICODE
from tests.golden.terminal.scenes import NOW_S, clock_changed, row, scenes, stack_state
from tests.property.budget import examples

HERE = Path(__file__).parent
SIZES = [(80, 24), (100, 30), (200, 60)]
NAMES = sorted(scenes())


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not hasattr(time, "tzset"):
        pytest.skip("this platform cannot change its time zone for a test")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_frame_is_the_golden_one(name: str, size: tuple[int, int]) -> None:
    """Each scene at each size is drawn as it was approved."""
    text = "".join(line.plain.rstrip() + "\n" for line in frame(scenes()[name], *size, NOW_S))
    path = HERE / f"{name}-{size[0]}x{size[1]}.txt"
    if os.environ.get("KVSTACK_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def _screen(picture: StackState, width: int, height: int) -> list[str]:
    """What a terminal of that size shows after rich has printed the frame."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, legacy_windows=False, markup=False)
    console.print(render(picture, width, height, NOW_S), end="")
    screen = pyte.Screen(width, height)
    pyte.Stream(screen).feed(stream.getvalue().rstrip("\n").replace("\n", "\r\n"))
    return list(screen.display)


@pytest.mark.parametrize("size", [*SIZES, (40, 12), (121, 41)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_shows_line_for_line(name: str, size: tuple[int, int]) -> None:
    """On a real screen nothing wraps and nothing scrolls: line n of the frame is line n of the screen."""
    lines = [line.plain.rstrip() for line in frame(scenes()[name], *size, NOW_S)]
    assert [line.rstrip() for line in _screen(scenes()[name], *size)] == lines


@settings(deadline=None, max_examples=examples(60))
@given(
    name=st.sampled_from(NAMES),
    width=st.integers(1, 230),
    height=st.integers(1, 80),
    glyphs=st.sampled_from([UNICODE, ASCII]),
)
def test_a_frame_fits_any_terminal(name: str, width: int, height: int, glyphs: object) -> None:
    """Every size gets exactly its lines of exactly its cells."""
    lines = frame(scenes()[name], width, height, NOW_S, glyphs)  # type: ignore[arg-type]
    assert len(lines) == height
    assert {line.cell_len for line in lines} == {width}


@settings(deadline=None, max_examples=examples(60))
@given(text=st.text(), verdict=st.sampled_from([None, "HIT", "PARTIAL"]), state=st.sampled_from(list(State)))
def test_a_frame_fits_any_text(text: str, verdict: str | None, state: State) -> None:
    """Names, causes and log lines of any kind stay in their cells and draw nothing of their own."""
    picture = stack_state(
        row(5, verdict, client=text, error=text, api=text, **clock_changed(text)),
        name=text or "?",
        state=state,
        reason=text,
        log_lines=(text,) * 3,
        notices=(Notice(NOW_S, "error", text),),
    )
    lines = frame(picture, 80, 24, NOW_S)
    assert {line.cell_len for line in lines} == {80}
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for line in lines for char in line.plain)


def test_ascii_terminals_get_ascii() -> None:
    """With the ASCII shapes a frame holds nothing else, as long as the names do."""
    for name in ("working", "partial", "first", "loading", "failed"):
        for width, height in SIZES:
            assert all(line.plain.isascii() for line in frame(scenes()[name], width, height, NOW_S, ASCII)), name


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_reason_is_on_the_first_lines(size: tuple[int, int]) -> None:
    """One glance at the top says that the cache fails, why, and what it cost."""
    top = "\n".join(line.plain for line in frame(scenes()["partial"], *size, NOW_S)[:4])
    for words in ("CACHE PARTLY", "clock in the system prompt", "16,180 tokens", "34.5s"):
        assert words in top


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_figure_of_a_request_has_its_place(size: tuple[int, int]) -> None:
    """Each size shows time, API, tokens, similarity, times, speed, what was stripped, and the verdict of a request."""
    lines = [line.plain for line in frame(scenes()["partial"], *size, NOW_S)]
    heading = next(line for line in lines if line.split()[:2] == ["time", "api"])
    mine = next(line for line in lines if line.split()[:1] == ["20:44:11"])
    for title, text in {
        "time": "20:44:11", "api": "resp", "prompt": "18,660", "cached": "2,480", "new": "16,180", "sim_best": "0.151",
        "prefill": "34.5s", "TTFT": "34.5s", "t/s": "40.8", "ids": "3", "ts": "1", "verdict": "PARTIAL",
    }.items():  # fmt: skip
        left = heading.index(title)
        right = left + len(title)
        # A cell stands under its title: at its left edge or at its right one.
        assert mine[left : left + len(text)] == text or mine[right - len(text) : right] == text, title


def test_a_running_prefill_has_a_bar() -> None:
    """A prefill that runs shows how far it is."""
    text = "\n".join(line.plain for line in frame(scenes()["partial"], 80, 24, NOW_S))
    assert "60 %" in text
    assert "11,230/18,780" in text


def test_unknown_figures_are_no_zeros() -> None:
    """Before anything is known the frame shows dashes."""
    picture = StackState("box", ProxyView("http://127.0.0.1:1234"), State.READY)
    text = "\n".join(line.plain for line in frame(picture, 80, 24, NOW_S))
    assert "ctx - " in text
    assert "reuse -  saved -" in text


def test_the_first_frame_says_that_it_starts() -> None:
    """Before anything has happened the stack is about to start, and the frame says so."""
    text = "\n".join(line.plain for line in frame(scenes()["begun"], 80, 24, NOW_S))
    assert "STARTING" in text
    assert "STOPPED" not in text
    assert "nothing runs" not in text
    assert ":12345" in text


@pytest.mark.parametrize("state", list(State))
def test_who_watches_is_told_what_ctrl_c_does_there(state: State) -> None:
    """In another terminal it leaves the view, in whatever state the stack is; in its own it stops or kills."""
    picture = replace(scenes()["working"], state=state)
    there = frame(picture, 80, 24, NOW_S, watching=True)[-1].plain.rstrip()
    here = frame(picture, 80, 24, NOW_S)[-1].plain.rstrip()
    assert there.endswith("  Ctrl-C leaves")
    assert here.endswith("Ctrl-C again kills" if state is State.STOPPING else "  Ctrl-C stops")


def test_a_server_that_refuses_is_named() -> None:
    """Attached to nobody: the frame names the address and what happens there, and claims no load of a model."""
    lines = [line.plain for line in frame(scenes()["refused"], 100, 30, NOW_S)]
    assert "192.168.1.20:8080" in lines[0]
    text = "\n".join(lines)
    assert "http://192.168.1.20:8080: nothing answers (connection refused), trying for up to 10 s" in text
    for words in ("loads the model", "load the model", "start llama-server", "shaders"):
        assert words not in text


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_what_was_lost_stands_beside_what_was_saved(width: int) -> None:
    """No width shows the one without the other."""
    line = next(line.plain for line in frame(scenes()["mixed"], width, 24, NOW_S) if " saved " in line.plain)
    assert " saved 1 m 21 s" in line
    assert " lost 1 m 34 s" in line


def test_where_there_is_no_room_the_difference_is_shown() -> None:
    """A narrow frame shows what is left of the gain, and a loss as one."""
    assert "saved net -13 s" in "\n".join(line.plain for line in frame(scenes()["mixed"], 60, 24, NOW_S))
    assert "saved net 13 m" in "\n".join(line.plain for line in frame(scenes()["partial"], 60, 24, NOW_S))


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
def test_sim_best_is_the_last_requests(size: tuple[int, int]) -> None:
    """A last request that has none (out of the RAM cache, failed) leaves no older figure standing as if it were its."""
    lines = [line.plain for line in frame(scenes()["mixed"], *size, NOW_S)]
    assert next(line for line in lines if line.startswith(" sim_best")).split()[1] == "-"
    running = replace(row(6, None), phase="forwarded", work=None)
    lines = [line.plain for line in frame(stack_state(row(4), running), *size, NOW_S)]
    assert next(line for line in lines if line.startswith(" sim_best")).split()[1] == "1.000"


def test_summary_is_as_long_as_it_must_be() -> None:
    """What `status` prints has the head and the wanted requests, no log and no empty lines."""
    lines = [line.plain.rstrip() for line in summary(scenes()["working"], 120, NOW_S, 3)]
    assert sum("resp" in line for line in lines) == 3
    assert all(lines)
    assert not any("slot update_slots" in line for line in lines)


def test_a_side_request_does_not_say_that_the_cache_fails() -> None:
    """A title request that found nothing cached leaves the main conversation's reading alone."""
    rows = (row(3), replace(row(4, "COLD"), side="title"))
    assert "CACHE WORKS" in frame(stack_state(*rows), 80, 24, NOW_S)[3].plain


def test_wide_characters_keep_the_columns() -> None:
    """A client's name in wide characters is cut by cells, so that the figures behind it stay in their columns."""
    lines = [line.plain for line in frame(scenes()["hostile"], 200, 60, NOW_S)]
    heading = next(line for line in lines if line.split()[:2] == ["time", "api"])
    mine = next(line for line in lines if "14,560" in line and "20:17" in line)
    end = heading.index("new") + len("new")
    assert cell_len(mine[: mine.index("14,560") + 6]) == end
