"""Stalled or not, hung or not: judgements over samples."""

from __future__ import annotations

import json

import pytest

from kvstack.process.watchdog import IDLE, HangWatch, Progress, Sample, slots_mark

MIB = 1024 * 1024


def test_nothing_moves() -> None:
    """Silence becomes a stall exactly at the timeout."""
    progress = Progress(600.0, 1000.0)
    assert not progress.observe(1002.0, 10, Sample(50 * MIB, 0))
    assert not progress.observe(1601.9, 10, Sample(50 * MIB, 0))
    assert progress.observe(1602.0, 10, Sample(50 * MIB, 0))


def test_each_kind_of_movement_counts() -> None:
    """Log, memory either way, and reads each start the time again."""
    progress = Progress(10.0, 0.0)
    assert not progress.observe(9.0, 1, None)
    assert not progress.observe(18.0, 1, Sample(5 * MIB, 0))
    assert not progress.observe(27.0, 1, Sample(3 * MIB, 0))
    assert not progress.observe(36.0, 1, Sample(3 * MIB, MIB))
    assert not progress.observe(45.0, 1, Sample(3 * MIB, MIB))
    assert progress.observe(46.0, 1, Sample(3 * MIB, MIB))


def test_noise_is_no_movement() -> None:
    """A few pages more or less are none, but a slow growth adds up."""
    progress = Progress(10.0, 0.0)
    progress.observe(0.0, 0, Sample(100 * MIB))
    assert not progress.observe(5.0, 0, Sample(100 * MIB + 4096))
    assert progress.observe(10.0, 0, Sample(100 * MIB - 4096))
    creeping = Progress(10.0, 0.0)
    creeping.observe(0.0, 0, Sample(100 * MIB))
    for step in range(1, 20):
        assert not creeping.observe(5.0 * step, 0, Sample(100 * MIB + step * MIB * 6 // 10))


def test_a_sample_may_fail() -> None:
    """Without samples the log alone decides."""
    progress = Progress(10.0, 0.0)
    assert not progress.observe(8.0, 1, None)
    assert not progress.observe(16.0, 2, None)
    assert progress.observe(26.0, 2, None)


def test_the_words() -> None:
    """The silence is described: how long, and what the processor does meanwhile."""
    busy = Progress(600.0, 0.0)
    busy.observe(10.0, 5, Sample(50 * MIB, 0, cpu_s=1.0))
    busy.observe(110.0, 5, Sample(50 * MIB, 0, cpu_s=100.0))
    assert busy.describe(110.0) == "no output for 100 s, no movement of memory or disk for 100 s, one core busy"
    busy.observe(210.0, 5, Sample(50 * MIB, 0, cpu_s=401.0))
    assert busy.describe(210.0).endswith(", 2 cores busy")
    idle = Progress(600.0, 0.0)
    idle.observe(10.0, 5, Sample(50 * MIB, 0, cpu_s=1.0))
    idle.observe(110.0, 5, Sample(50 * MIB, 0, cpu_s=1.0))
    assert idle.describe(110.0).endswith(", almost idle")
    stopped = Progress(600.0, 0.0)
    stopped.observe(10.0, 5, Sample(50 * MIB, 0, suspended=True))
    assert stopped.describe(110.0).endswith("the process is stopped by a signal (SIGSTOP)")
    assert Progress(600.0, 0.0).describe(7.0) == "no output for 7 s, no movement of memory or disk for 7 s"


def test_hang() -> None:
    """A mark that stands still for the timeout is a hang, and stays one until it moves."""
    watch = HangWatch(60.0)
    assert watch.observe(0.0, ("task", 1)) is None
    assert watch.observe(59.0, ("task", 1)) is None
    trouble = watch.observe(60.0, ("task", 1))
    assert trouble == "llama-server answers, but a busy slot has made no progress for 60 s"
    assert watch.observe(70.0, ("task", 1)) is not None
    assert watch.observe(71.0, ("task", 2)) is None
    assert watch.observe(130.0, ("task", 2)) is None


def test_no_answer_is_a_hang() -> None:
    """No answer for the timeout is one as well; an answer in between starts it again."""
    watch = HangWatch(60.0)
    assert watch.observe(0.0, None) is None
    assert watch.observe(50.0, None) is None
    assert watch.observe(55.0, ("task", 1)) is None
    assert watch.observe(100.0, None) is None
    assert watch.observe(159.0, None) is None
    assert watch.observe(160.0, None) == "llama-server is alive but has not answered for 60 s"


def test_idle_is_no_hang() -> None:
    """An idle server may stand still for ever, and time from before the work does not count."""
    watch = HangWatch(60.0)
    for now_s in range(0, 100_000, 1000):
        assert watch.observe(float(now_s), IDLE) is None
    assert watch.observe(200_000.0, ("task", 1)) is None


def test_mark_of_busy_slots() -> None:
    """Progress in a busy slot changes the mark; what idle slots hold does not."""

    def mark(decoded: int, idle_tokens: int) -> object:
        busy = {"id": 1, "id_task": 7, "is_processing": True, "next_token": [{"n_decoded": decoded}]}
        idle = {"id": 0, "is_processing": False, "n_prompt_tokens": idle_tokens}
        return slots_mark(200, json.dumps([idle, busy]).encode())

    assert mark(1, 5) == mark(1, 6)
    assert mark(1, 5) != mark(2, 5)
    assert IDLE not in {mark(1, 5), mark(2, 5)}


@pytest.mark.parametrize(
    ("status", "body", "mark"),
    [
        (200, b'[{"id": 0, "is_processing": false}]', IDLE),
        (200, b"[]", IDLE),
        (501, b'{"error": {"message": "This server does not support slots endpoint."}}', IDLE),
        (401, b"{}", IDLE),
        (200, b"<html>", IDLE),
        (200, b'{"is_processing": true}', IDLE),
        (200, b'[null, 3, {"is_processing": "yes"}]', IDLE),
        (503, b'{"error": {"message": "Loading model"}}', None),
        (500, b"", None),
    ],
)
def test_mark_of_other_answers(status: int, body: bytes, mark: object) -> None:
    """Who does not tell is not accused; a server error is no answer."""
    assert slots_mark(status, body) == mark
