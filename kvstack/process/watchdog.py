"""
Does it still move?  Two judgements over samples: is a start stalled, is a ready server hung.

Nothing here waits or asks the system: samples and times come in.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvstack.process.identity import ProcessIdentity

MEMORY_MOVES_BYTES = 1024 * 1024
DISK_MOVES_BYTES = 64 * 1024
BUSY_CORES = 0.8

IDLE: Hashable = "idle"
"""What a busy mark is while no slot is at work."""


@dataclass(frozen=True, slots=True)
class Sample:
    """
    The child and its descendants at one moment.

    Attributes:
        rss_bytes: Resident memory.
        read_bytes: Bytes read from files since the start; None if the system does not tell.
        cpu_s: Processor time since the start, in seconds.
        suspended: Whether the child is stopped by job control (SIGSTOP).
        family: The descendants.
    """

    rss_bytes: int
    read_bytes: int | None = None
    cpu_s: float = 0.0
    suspended: bool = False
    family: frozenset[ProcessIdentity] = frozenset()


@dataclass(slots=True)
class Progress:
    """
    The deadline of a start: as long as the log grows, memory moves or files are read, it goes on.

    Attributes:
        timeout_s: How long nothing may move, in seconds.
        since_s: When something moved last, on the caller's clock.
        log_since_s: When the log grew last.
    """

    timeout_s: float
    since_s: float
    log_since_s: float = field(init=False)
    suspended: bool = field(default=False, init=False)
    _log_bytes: int = field(default=0, init=False)
    _rss_bytes: int = field(default=0, init=False)
    _read_bytes: int = field(default=0, init=False)
    _cpu: tuple[float, float] | None = field(default=None, init=False)
    _cores: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.log_since_s = self.since_s

    def observe(self, now_s: float, log_bytes: int, sample: Sample | None) -> bool:
        """
        Take in what is seen now.

        Returns:
            Whether the start is stalled.
        """
        moved = False
        if log_bytes != self._log_bytes:
            self._log_bytes = log_bytes
            self.log_since_s = now_s
            moved = True
        if sample is not None:
            self.suspended = sample.suspended
            # Against the last value that counted: memory that creeps still gets there.
            if abs(sample.rss_bytes - self._rss_bytes) >= MEMORY_MOVES_BYTES:
                self._rss_bytes = sample.rss_bytes
                moved = True
            if sample.read_bytes is not None and abs(sample.read_bytes - self._read_bytes) >= DISK_MOVES_BYTES:
                self._read_bytes = sample.read_bytes
                moved = True
            if self._cpu is not None and now_s > self._cpu[0]:
                self._cores = max(0.0, sample.cpu_s - self._cpu[1]) / (now_s - self._cpu[0])
            if moved or self._cpu is None:
                self._cpu = now_s, sample.cpu_s  # the average over the silence is what describes it
        if moved:
            self.since_s = now_s
        return now_s - self.since_s >= self.timeout_s

    def describe(self, now_s: float) -> str:
        """The silence in words."""
        text = (
            f"no output for {now_s - self.log_since_s:.0f} s, "
            f"no movement of memory or disk for {now_s - self.since_s:.0f} s"
        )
        if self.suspended:
            return f"{text}, the process is stopped by a signal (SIGSTOP)"
        if self._cores is None:
            return text
        if self._cores < BUSY_CORES:
            return f"{text}, {'almost idle' if self._cores < 0.1 else f'{self._cores:.1f} cores busy'}"
        cores = round(self._cores)
        return f"{text}, {'one core' if cores == 1 else f'{cores} cores'} busy"


def slots_mark(status: int, body: bytes) -> Hashable | None:
    """
    What an answer of `/slots` says, as a mark for `HangWatch`.

    Whatever changes in a busy slot counts as progress: the task, the tokens read, the tokens made.  Their names differ
    from build to build, so the whole slot is the mark.

    Args:
        status: HTTP status.
        body: The answer's body.

    Returns:
        `IDLE` also where the server does not tell (`--no-slots`): a guess must not end a server that works.  None, no
        answer, for a server error.
    """
    if status >= 500 and status != 501:
        return None
    try:
        slots: Any = json.loads(body)
    except ValueError:
        return IDLE
    if status != 200 or not isinstance(slots, list):
        return IDLE
    busy = [slot for slot in slots if isinstance(slot, dict) and slot.get("is_processing") is True]
    return tuple(json.dumps(slot, sort_keys=True) for slot in busy) if busy else IDLE


@dataclass(slots=True)
class HangWatch:
    """
    Whether a ready server is hung: a slot is busy, and nothing of it moves.

    Attributes:
        timeout_s: How long that may be, in seconds.
    """

    timeout_s: float
    _mark: Hashable | None = field(default=None, init=False)
    _since_s: float | None = field(default=None, init=False)

    def observe(self, now_s: float, mark: Hashable | None) -> str | None:
        """
        Take in what the slots show now.

        Args:
            now_s: The caller's clock.
            mark: `IDLE`; or a value that changes with each token of a busy slot; or None if the server did not answer.

        Returns:
            What is wrong, in words, once it has lasted too long; None as long as all is well.
        """
        if mark == IDLE or self._since_s is None or mark != self._mark:
            self._mark = mark
            self._since_s = now_s
            return None
        silent_s = now_s - self._since_s
        if silent_s < self.timeout_s:
            return None
        if mark is None:
            return f"llama-server is alive but has not answered for {silent_s:.0f} s"
        return f"llama-server answers, but a busy slot has made no progress for {silent_s:.0f} s"
