"""Records are found behind any wrapper, continued where they continue, and counted where they are not understood."""

from __future__ import annotations

import json

import pytest

from kvstack.llama.log.reader import LogReader
from kvstack.state import log_facts as facts

LAUNCH = "slot launch_slot_: id  3 | task 42 | processing task, is_child = 0"
LAUNCHED = facts.TaskLaunched(3, 42)


def read(text: str | bytes) -> tuple[facts.LogFact, ...]:
    """The facts of some log."""
    reader = LogReader()
    data = text if isinstance(text, bytes) else text.encode()
    return (*reader.feed(data).facts, *reader.close().facts)


@pytest.mark.parametrize(
    "line",
    [
        LAUNCH,
        f"0.00.161.319 I {LAUNCH}",
        f"736.46.933.316 W {LAUNCH}",
        f"[58983] 0.33.810.930 I {LAUNCH}",
        f"[57130] {LAUNCH}",
        f"Mar 13 13:59:39 host llama-server[811]: {LAUNCH}",
        f"Mar 13 13:59:39 host llama-server[811]: 0.33.810.930 I {LAUNCH}",
        f"2026-05-17 11:04:29.650 | 1.12.726.836 I {LAUNCH}",
        f"llama-Qwen: {LAUNCH}",
        f"2026-05-17T11:04:29.650Z stderr F 1.12.726.836 I {LAUNCH}",
        f"\x1b[32m0.00.161.319\x1b[0m \x1b[36mI \x1b[0m{LAUNCH}\x1b[0m",
        json.dumps({"type": "log", "time": 251298, "level": "info", "msg": f"{LAUNCH}\n"}),
        json.dumps({"log": f"0.00.161.319 I {LAUNCH}\n", "stream": "stderr", "time": "2026-05-17T11:04:29Z"}),
        json.dumps({"MESSAGE": LAUNCH, "_PID": "811"}),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", ""])
def test_wrappers_and_line_ends(line: str, end: str) -> None:
    """What stands before and behind a record does not matter."""
    assert read(line + end) == (LAUNCHED,)


def test_glued_records_with_stamps() -> None:
    """A message without its newline (b8227) does not swallow the next record."""
    text = f"0.05.230.001 W No parser definition detected, assuming pure content parser.0.05.230.074 I {LAUNCH}\n"
    reader = LogReader()
    batch = reader.feed(text.encode())
    assert batch.facts == (LAUNCHED,)
    assert batch.lines == (
        "0.05.230.001 W No parser definition detected, assuming pure content parser.",
        f"0.05.230.074 I {LAUNCH}",
    )


def test_glued_records_without_stamps() -> None:
    """The same without stamps."""
    assert read(f"No parser definition detected, assuming pure content parser.{LAUNCH}\n") == (LAUNCHED,)


@pytest.mark.parametrize("prefix", ["", "0.12.930.368 I ", "2026-05-17 11:04:29.854 | 1.12.930.368 I "])
@pytest.mark.parametrize("wrapper", ["", "2026-05-17 11:04:29.854 | "])
def test_timings_in_one_block(prefix: str, wrapper: str) -> None:
    """To b9093 one record has the timings of a task on lines of their own."""
    text = (
        f"{prefix}slot print_timing: id  3 | task 42 | \n"
        f"{wrapper}prompt eval time =   16743.45 ms / 33191 tokens (  0.50 ms per token,  1982.33 tokens per second)\n"
        f"{wrapper}       eval time =     161.86 ms /     8 tokens (  20.23 ms per token,    49.43 tokens per second)\n"
        f"{wrapper}      total time =   16905.31 ms / 33199 tokens\n"
        f"{wrapper}draft acceptance rate = 0.37500 (    3 accepted /     8 generated)\n"
        f"{prefix}slot      release: id  3 | task 42 | stop processing: n_tokens = 33198, truncated = 0\n"
    )
    assert read(text) == (
        facts.PrefillTimed(3, 42, 16743.45, 33191),
        facts.DecodeTimed(3, 42, 161.86, 8, 49.43),
        facts.SlotReleased(3, 42, 33198),
    )


def test_timings_without_their_record_are_nobodys() -> None:
    """A block's lines that follow another record are not given to the task before."""
    text = (
        "slot print_timing: id  3 | task 42 | \n"
        "srv  update_slots: all slots are idle\n"
        "prompt eval time =   16743.45 ms / 33191 tokens (    0.50 ms per token,  1982.33 tokens per second)\n"
    )
    assert read(text) == ()


def test_text_of_a_prompt_is_no_record() -> None:
    """Where records have stamps, a line without one continues the record before it, whatever it looks like."""
    forged = f"0.00.000.001 I srv  operator(): prompt:\n{LAUNCH}\nsrv alloc: - cache state: 9 prompts\n"
    assert read(forged) == ()
    in_json = json.dumps({"type": "log", "level": "debug", "msg": f"srv operator(): prompt:\n{LAUNCH}\n"})
    assert read(in_json + "\n") == ()


@pytest.mark.parametrize(
    "message",
    [
        "slot get_availabl: id  3 | task -1 | selected slot by vibes, vibe_best = 0.9",
        "slot update_slots: id  3 | task 42 | stop processing: tokens = twelve",
        "srv         alloc:  - compressing prompt cache entry 7",
        "srv        update:  - cache state: several prompts",
        "load_tensors: offloaded all layers to GPU: offloaded x/y layers",
    ],
)
def test_drift_is_counted_and_shown(message: str) -> None:
    """A record of a known family in an unknown form is a fact of its own."""
    reader = LogReader()
    found = reader.feed(f"0.00.000.001 I {message}\n".encode()).facts
    assert reader.drift == 1
    assert len(found) == 1
    assert isinstance(found[0], facts.UnknownRecord)
    assert found[0].text in message


def test_debug_records_are_no_drift() -> None:
    """Debug records come and go with every build, and may quote prompts."""
    reader = LogReader()
    assert reader.feed(b"0.00.000.001 D slot update_slots: id  3 | task 42 | something private\n").facts == ()
    assert reader.drift == 0


def test_other_lines_are_lines_only() -> None:
    """What says nothing of the cache is shown, not read."""
    batch = LogReader().feed(b"0.00.015.309 I cmn  common_param: verbosity = 3\nhello\n\n")
    assert batch.facts == ()
    assert batch.lines == ("0.00.015.309 I cmn  common_param: verbosity = 3", "hello", "")


def test_router_chatter_is_no_drift() -> None:
    """A router's own lines (FR-34) are neither facts nor drift."""
    reader = LogReader()
    text = b"0.39.213.131 I srv  proxy_reques: proxying request to model x on port 58983\n"
    assert reader.feed(text).facts == ()
    assert reader.drift == 0


def test_full_reprocessing_behind_a_router_port() -> None:
    """The line of FR-34 is read."""
    text = (
        "[57130] 0.33.810.930 W slot update_slots: id  0 | task 20 | forcing full prompt re-processing"
        " due to lack of cache data\n"
    )
    assert read(text) == (facts.FullReprocess(0, 20),)


def test_levels_three_and_four_agree() -> None:
    """FR-33: at level 3 there is less, but nothing else."""
    three = (
        "0.1 \n"
        "0.01.000.000 I slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = -1\n"
        f"0.01.000.001 I {LAUNCH}\n"
    )
    four = three + (
        "0.01.000.002 I slot   operator(): id  3 | task 42 | restored context checkpoint (pos_min = 9675,"
        " pos_max = 9675, n_tokens = 9676, n_past = 9676, size = 81.896 MiB)\n"
    )
    assert read(four)[:2] == read(three)
    assert read(four)[2:] == (facts.CheckpointRestored(3, 42, 9676),)


def test_half_a_line_waits_for_its_end() -> None:
    """A record that is cut by the pipe is read once, when it is whole."""
    reader = LogReader()
    data = f"0.00.161.319 I {LAUNCH}\n".encode()
    assert reader.feed(data[:40]).facts == ()
    assert reader.feed(data[40:]).facts == (LAUNCHED,)


def test_a_json_line_shows_its_message() -> None:
    """People see the text, not the wrapper; several lines stay several."""
    line = json.dumps({"type": "log", "level": "info", "msg": "srv init: a\n\tb\n"})
    assert LogReader().feed(line.encode() + b"\n").lines == ("srv init: a", " b")


@pytest.mark.parametrize("line", ['{"type":"fit_memory_breakdown","x":1}', '{"a":', "{}", "[" * 9999, '{"msg":7}'])
def test_other_json_is_shown_as_it_is(line: str) -> None:
    """What is no log record in JSON is a line like any other."""
    batch = LogReader().feed(line.encode() + b"\n")
    assert batch.lines == (line,)
    assert batch.facts == ()
