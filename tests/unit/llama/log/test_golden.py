"""The recorded logs of two builds give the facts that are in them, and no drift."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstack.llama.log.reader import LogReader
from kvstack.state import log_facts as facts

GOLDEN = Path(__file__).parents[3] / "golden" / "log"
EXPECTED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


@cache
def recordings() -> dict[str, bytes]:
    """Every excerpt by its name."""
    found: dict[str, bytes] = {}
    for path in sorted(GOLDEN.glob("*.log.gz")):
        for part in gzip.decompress(path.read_bytes()).split(b"=== FILE ")[1:]:
            name, _, text = part.partition(b"\n")
            found[name.decode()] = text
    return found


def read(name: str) -> list[facts.LogFact]:
    """All facts of one excerpt."""
    reader = LogReader()
    found = [*reader.feed(recordings()[name]).facts, *reader.close().facts]
    assert reader.drift == 0
    return found


def test_there_are_all_recordings() -> None:
    """The excerpts and what is expected of them are of one piece."""
    assert len(EXPECTED) == 202
    assert recordings().keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_counts(name: str) -> None:
    """There are as many facts of each kind as records that say so, and not one unknown record."""
    found = Counter(type(fact).__name__ for fact in read(name))
    assert found["UnknownRecord"] == 0
    wanted = EXPECTED[name]["counts"]
    assert {kind: found[kind] for kind in wanted} == wanted
    extra = found.keys() - wanted.keys()
    assert extra <= {"BufferAllocated", "SlotCreated", "CacheRamLimited"}


@pytest.mark.parametrize("name", EXPECTED)
def test_tasks(name: str) -> None:
    """Each task has the slot, figures and end that its records tell."""
    tasks: dict[tuple[int, int], list[Any]] = {}
    chosen: dict[int, facts.SlotSelected] = {}
    for fact in read(name):
        match fact:
            case facts.SlotSelected():
                chosen[fact.slot] = fact
            case facts.TaskLaunched():
                how = chosen.pop(fact.slot, None)
                said = [how.how, how.similarity_ratio, how.keep_ratio] if how else [None] * 3
                tasks[fact.slot, fact.task] = [fact.slot, fact.task, *said, None, None, None, None, None, None, False]
            case facts.PromptStarted():
                tasks[fact.slot, fact.task][5] = fact.prompt_tokens
            case facts.ReusePoint() if tasks[fact.slot, fact.task][6] is None:
                tasks[fact.slot, fact.task][6] = fact.cached_tokens
            case facts.PrefillTimed():
                tasks[fact.slot, fact.task][7:9] = [fact.evaluated_tokens, fact.prefill_ms]
            case facts.DecodeTimed():
                tasks[fact.slot, fact.task][9] = fact.generated_tokens
            case facts.SlotReleased():
                tasks[fact.slot, fact.task][10] = fact.total_tokens
            case facts.FullReprocess():
                assert fact.task is not None
                tasks[fact.slot, fact.task][11] = True
            case _:
                pass
    assert list(tasks.values()) == EXPECTED[name]["tasks"]


@pytest.mark.parametrize(
    ("name", "evaluated"),
    [
        ("b10068-hybrid-growing", [2896, 51, 51, 51]),
        ("b11434-hybrid-growing", [2896, 51, 51, 51]),
        ("b11434-dense-uuid15-lv4", [2941, 2600, 2650, 2700]),
        ("b11434-hybrid-lastmsg-lv4", [3164, 277, 278, 278]),
        ("b10068-dense-parallel4", [1019, 1067, 1115, 1163, 32, 32, 1200, 1248, 32, 32, 32, 32]),
        ("b11434-hybrid-jsonl-lv4", [1916, 12]),
        ("b11434-hybrid-noprefix", [1916, 12]),
    ],
)
def test_evaluated_tokens_of_known_scenarios(name: str, evaluated: list[int]) -> None:
    """The scenarios cost the tokens that were measured by the responses."""
    assert [fact.evaluated_tokens for fact in read(name) if isinstance(fact, facts.PrefillTimed)] == evaluated


def test_a_gpu_is_used_only_where_a_device_line_says_so() -> None:
    """`offloaded 3/3` is printed without a GPU too; the device line and the buffers tell the difference."""
    with_gpu, without = read("b10068-dense-vulkan-lvp-lv4"), read("b10068-dense-vulkan-nodevice-lv4")
    for found in (with_gpu, without):
        assert facts.LayersOffloaded(3, 3) in found
    devices = [fact for fact in with_gpu if isinstance(fact, facts.DeviceUsed)]
    assert devices == [facts.DeviceUsed("Vulkan0", "llvmpipe (LLVM 15.0.6, 256 bits)", 2048 * 1048576)]
    assert not any(isinstance(fact, facts.DeviceUsed) for fact in without)
    buffers = [fact for fact in with_gpu if isinstance(fact, facts.BufferAllocated)]
    assert [(fact.device, fact.size_bytes) for fact in buffers if fact.kind == "kv"] == [("Vulkan0", 1048576)]
