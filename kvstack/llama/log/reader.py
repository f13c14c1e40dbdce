"""
The server's log, read incrementally: bytes in, lines and facts out.

A record is found behind any wrapper (router port, journald, docker, JSON lines) by what the server itself writes: the
elapsed stamp and level letter, or without those the `slot`/`srv` column.  Once a stamp was seen, a line without one
continues the record before it and is never read as a record of its own: at debug levels such lines can hold text of
a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvstack.llama.log.lines import LineSplitter, clean_line, split_glued
from kvstack.llama.log.pattern import Pattern, index
from kvstack.llama.log.server import LOADING
from kvstack.llama.log.table import SERVER, SLOT
from kvstack.llama.log.tasks import TIMING
from kvstack.state.log_facts import LogFact, UnknownRecord

_MESSAGE_KEPT = 1000
"""Longer messages hold prompts or dumps; what the table reads is in their first part."""

_DRIFT_KEPT = 160

# `0.00.161.227 I slot …`: minutes, seconds, milliseconds, microseconds since the start, then the level.
_STAMP = re.compile(r"(?<![\w.])\d{1,6}\.\d\d\.\d{3}\.\d{3} ([A-Z]) ")
_SLOT = re.compile(r"slot +\S{1,24}: id +(\d{1,9}) \| task (-?\d{1,9}) \|(?: |$)")
_SERVER = re.compile(r"(?:srv +\S{1,24}|main): ")
_FUNCTION = re.compile(r"(?:cmn +)?([\w:~()]{3,60}): ")

_SLOT_INDEX = index(SLOT)
_SERVER_INDEX = index(SERVER)
_TIMING_INDEX = index(TIMING)

# Words that only cache records hold: a message with one of them that the table does not know is drift.
_SERVER_FAMILY = re.compile(r"^- |prompt cache|cache state|better prompt|checkpoint", re.IGNORECASE)
_SERVER_HARMLESS = re.compile(
    r"use `--cache-ram|idle slots will be saved|context checkpoints enabled|speculative decoding will use checkpoints"
)


@dataclass(frozen=True, slots=True)
class LogBatch:
    """What a piece of log held: its lines for people, and the facts in them."""

    lines: tuple[str, ...]
    facts: tuple[LogFact, ...]


class LogReader:
    """
    Reader of one server process's log, for one pipe; never raises.

    Attributes:
        drift: How many records of a known family were not understood.
    """

    def __init__(self) -> None:
        self.drift = 0
        self._splitter = LineSplitter()
        self._stamped = False
        self._timing: tuple[int, int] | None = None

    def feed(self, data: bytes) -> LogBatch:
        """Take the next bytes of the pipe."""
        return self._read(self._splitter.feed(data))

    def close(self) -> LogBatch:
        """Read what is left without a line end."""
        return self._read(self._splitter.close())

    def _read(self, raw_lines: list[str]) -> LogBatch:
        lines: list[str] = []
        facts: list[LogFact] = []
        for raw in raw_lines:
            if raw.startswith("{"):
                unwrapped = _unwrap_json(raw)
                if unwrapped is not None:
                    level, message = unwrapped
                    record, *more = message.split("\n")
                    for text in split_glued(clean_line(record)):
                        lines.append(text)
                        self._record(text, facts, level)
                    lines.extend(clean_line(line) for line in more if line)
                    for line in more:
                        self._continuation(line, facts)
                    continue
            lines.append(raw)
            self._record(raw, facts)
        return LogBatch(tuple(lines), tuple(facts))

    def _record(self, line: str, facts: list[LogFact], level: str | None = None) -> None:
        stamp = _STAMP.search(line)
        body = line
        if stamp is not None:
            self._stamped = True
            level = stamp.group(1)
            body = line[stamp.end() :]
        elif self._stamped and level is None:
            self._continuation(line, facts)
            return
        # A stamped record starts with its column; without stamps a wrapper may stand before it.
        sure = level is not None
        slot = _SLOT.match(body) if sure else _SLOT.search(body)
        if slot is not None:
            self._timing = None
            self._slot_record(slot, body[slot.end() :][:_MESSAGE_KEPT], level, facts)
            return
        server = _SERVER.match(body) if sure else _SERVER.search(body)
        if server is not None:
            self._timing = None
            self._server_record(body[server.end() :][:_MESSAGE_KEPT].lstrip(), level, facts)
            return
        if not sure and self._continuation(body, facts):
            return
        function = _FUNCTION.match(body) if sure else _FUNCTION.search(body)
        if function is not None:
            self._loading_record(body[function.end() :][:_MESSAGE_KEPT], level, facts)

    def _slot_record(self, head: re.Match[str], message: str, level: str | None, facts: list[LogFact]) -> None:
        slot = int(head.group(1))
        task_number = int(head.group(2))
        task = task_number if task_number >= 0 else None
        message = message.lstrip()
        if not message:
            # To b9093: an empty `print_timing` record, and its figures on lines of their own.
            if task is not None and "print_timing" in head.group(0):
                self._timing = (slot, task)
            return
        pattern, match = _find(_SLOT_INDEX, message)
        if pattern is None or match is None:
            self._unknown("slot", message, level, facts)
        elif pattern.make is not None:
            fact = pattern.make(match, slot, task)
            if fact is not None:
                facts.append(fact)

    def _server_record(self, message: str, level: str | None, facts: list[LogFact]) -> None:
        pattern, match = _find(_SERVER_INDEX, message)
        if pattern is None or match is None:
            if _SERVER_FAMILY.search(message) and not _SERVER_HARMLESS.search(message):
                self._unknown("server", message, level, facts)
        elif pattern.make is not None:
            fact = pattern.make(match, -1, None)
            if fact is not None:
                facts.append(fact)

    def _loading_record(self, message: str, level: str | None, facts: list[LogFact]) -> None:
        for pattern in LOADING:
            if pattern.head not in message:
                continue
            match = pattern.regex.match(message)
            if match is None:
                self._unknown("loading", message, level, facts)
            elif pattern.make is not None:
                fact = pattern.make(match, -1, None)
                if fact is not None:
                    facts.append(fact)
            return

    def _continuation(self, line: str, facts: list[LogFact]) -> bool:
        """Read a line without a column of its own; tell whether it said something."""
        if self._timing is not None:
            for head in ("prompt eval time", "eval time", "total time", "draft acceptance"):
                start = line.find(head)
                if start >= 0:
                    self._timing_line(line[start:][:_MESSAGE_KEPT], self._timing, facts)
                    return True
        return False

    def _timing_line(self, message: str, owner: tuple[int, int], facts: list[LogFact]) -> None:
        pattern, match = _find(_TIMING_INDEX, message)
        if pattern is None or match is None:
            self._unknown("slot", message, None, facts)
        elif pattern.make is not None:
            fact = pattern.make(match, *owner)
            if fact is not None:
                facts.append(fact)

    def _unknown(self, family: str, message: str, level: str | None, facts: list[LogFact]) -> None:
        if level == "D":
            return  # debug records come and go with every build, and may quote prompts
        self.drift += 1
        facts.append(UnknownRecord(family, message[:_DRIFT_KEPT]))


def _find(table: Mapping[str, tuple[Pattern, ...]], message: str) -> tuple[Pattern | None, re.Match[str] | None]:
    word = message.split(" ", 1)[0]
    for key in (word, ""):
        for pattern in table.get(key, ()):
            match = pattern.regex.match(message)
            if match is not None:
                return pattern, match
    return None, None


_LEVELS = {"debug": "D", "info": "I", "warn": "W", "error": "E"}


def _unwrap_json(line: str) -> tuple[str | None, str] | None:
    """
    The level and message of a JSON line: `--log-jsonl`, docker's json-file, `journalctl -o json`.

    The level is None where the wrapper is not the server's own, as then the message has the usual prefix.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    message = value.get("msg")
    if isinstance(message, str) and value.get("type", "log") == "log":
        level = value.get("level")
        return _LEVELS.get(level, "I") if isinstance(level, str) else "I", message.rstrip("\n")
    for key in ("log", "MESSAGE"):
        message = value.get(key)
        if isinstance(message, str):
            return None, message.rstrip("\n")
    return None
