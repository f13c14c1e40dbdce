"""
What the log costs: lines per second that are parsed, reduced and pumped, and what a standing reader does to the child.

    python benchmarks/loglines.py

Prints Markdown.  The last table is the one that matters: a child that floods its pipe must not take longer because
the dashboard, a subscriber or the whole event loop stands; at most parsed lines are lost, never lines of the raw log.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvstack.bus import Bus
from kvstack.llama.log.reader import LogReader
from kvstack.process.child import Child
from kvstack.rundir import RawLog
from kvstack.state.events import LogFactSeen, LogLineSeen
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "log"
CHUNK_BYTES = 65536
FLOOD_LINES = 200_000

FLOOD = """
import os, sys, time
lines = open(sys.argv[1], "rb").read().splitlines(keepends=True)
count = int(sys.argv[2])
began = time.perf_counter()
out = os.fdopen(2, "wb", buffering=0)
block = b"".join(lines[:200])
for _ in range(count // 200):
    out.write(block)
open(sys.argv[3], "w").write(str(time.perf_counter() - began))
"""


def recorded() -> bytes:
    """Records of real servers."""
    parts = [gzip.decompress(path.read_bytes()) for path in sorted(GOLDEN.glob("*.log.gz"))]
    return b"".join(line + b"\n" for part in parts for line in part.splitlines() if not line.startswith(b"=== FILE"))


def chunks(data: bytes) -> list[bytes]:
    """Pieces as a pipe gives them."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]


def best_of(run: Callable[[], int], times: int = 5) -> float:
    """Lines per second of the quickest run."""
    rates = []
    for _ in range(times):
        began = time.perf_counter()
        lines = run()
        rates.append(lines / (time.perf_counter() - began))
    return max(rates)


def parse(data: bytes) -> int:
    """Read a log; give its lines."""
    reader = LogReader()
    return sum(len(reader.feed(piece).lines) for piece in chunks(data))


def reduce_all(data: bytes) -> int:
    """Read a log and reduce every line and fact into the Snapshot, with one subscriber that never reads."""
    bus = Bus(StackState("benchmark", ProxyView("http://127.0.0.1:1")))
    bus.subscribe()
    return sum(deliver(bus, LogReader(), piece) for piece in chunks(data))


def deliver(bus: Bus, reader: LogReader, data: bytes) -> int:
    """What a stack does with a piece of log."""
    batch = reader.feed(data)
    for line in batch.lines:
        bus.publish(LogLineSeen(0.0, line))
    for fact in batch.facts:
        bus.publish(LogFactSeen(0.0, 1, fact))
    return len(batch.lines)


async def flood(
    directory: Path, name: str, sample: Path, *, stand_s: float, subscribers: int
) -> tuple[float, int, int]:
    """
    Let a child flood its pipe.

    Args:
        directory: For the raw log and the child's figure.
        name: Of this run.
        sample: What the child writes, again and again.
        stand_s: How long the event loop stands between two turns, as one does whose terminal takes nothing.
        subscribers: Readers that never read.

    Returns:
        The child's seconds, the lines in the raw log, the lines that were parsed.
    """
    took = directory / f"{name}.took"
    raw = RawLog(directory / f"{name}.log", max_bytes=1 << 30)
    bus = Bus(StackState("benchmark", ProxyView("http://127.0.0.1:1")))
    for _ in range(subscribers):
        bus.subscribe()
    readers: dict[int, LogReader] = {}
    parsed = 0

    def output(data: bytes, run: int) -> None:
        nonlocal parsed
        parsed += deliver(bus, readers.setdefault(run, LogReader()), data)

    argv = [sys.executable, "-c", FLOOD, str(sample), str(FLOOD_LINES), str(took)]
    child = Child(argv, dict(os.environ), 1, raw, output)
    while not child.exited.done():
        if stand_s:
            time.sleep(stand_s)  # noqa: ASYNC251 - the loop shall stand
        await asyncio.sleep(0.001)
    await child.close(10.0)
    written = sum(piece.count(b"\n") for piece in chunks((directory / f"{name}.log").read_bytes()))
    return float(took.read_text()), written, parsed


async def main() -> None:
    """Measure and print."""
    data = recorded()
    lines = data.count(b"\n")
    print("| what | lines/s |\n| --- | --- |")
    print(f"| parsed ({lines:,} recorded lines) | {best_of(lambda: parse(data)):,.0f} |")
    print(f"| parsed and reduced, a subscriber that never reads | {best_of(lambda: reduce_all(data)):,.0f} |")
    print(f"\n{FLOOD_LINES:,} lines by a child that floods its pipe:\n")
    print("| readers | child's time | lines/s | raw log | parsed |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sample = directory / "sample"
        sample.write_bytes(data)
        for title, stand_s, subscribers in (
            ("prompt", 0.0, 0),
            ("three subscribers that never read", 0.0, 3),
            ("the event loop stands 9 tenths of the time", 0.009, 3),
            ("the event loop stands for a second at a time", 1.0, 3),
        ):
            took_s, raw, parsed = await flood(
                directory, f"{stand_s}-{subscribers}", sample, stand_s=stand_s, subscribers=subscribers
            )
            print(f"| {title} | {took_s:.2f} s | {FLOOD_LINES / took_s:,.0f} | {raw:,} | {parsed:,} |")


if __name__ == "__main__":
    asyncio.run(main())
