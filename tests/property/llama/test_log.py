"""Whatever a server prints: reading never raises, chunks do not matter, and ratios are ratios."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstack.llama.log.lines import LineSplitter
from kvstack.llama.log.reader import LogReader
from kvstack.llama.log.server import LOADING
from kvstack.llama.log.table import SERVER, SLOT
from tests.property.budget import examples

NUMBERS = st.sampled_from(["0", "-1", "2404", "0.915", "1.0", "-nan", "nan", "inf", "1e400", "9" * 30, "-nan(ind)"])


@st.composite
def mutated_samples(draw: st.DrawFn) -> str:
    """A real message with other numbers, or cut, behind some prefix."""
    pattern = draw(st.sampled_from((*SLOT, *SERVER, *LOADING)))
    parts: list[str] = []
    number = ""
    for character in pattern.sample + " ":
        if character.isdigit():
            number += character
            continue
        if number:
            parts.append(draw(NUMBERS) if draw(st.booleans()) else number)
            number = ""
        parts.append(character)
    message = "".join(parts)
    if draw(st.integers(0, 9)) == 0:
        message = message[: draw(st.integers(0, len(message)))]
    column = "slot update_slots: id  0 | task 3 | " if pattern in SLOT else "srv  f: " if pattern in SERVER else "f_g: "
    stamp = draw(st.sampled_from(["", "0.00.161.319 I ", "[58983] 0.00.161.319 W ", "Mar 13 13:59:39 h p[1]: "]))
    line = stamp + column + message
    if draw(st.integers(0, 5)) == 0:
        line = json.dumps({"type": "log", "level": draw(st.sampled_from(["info", "debug", 3, None])), "msg": line})
    return line


LOGS = st.lists(
    st.one_of(
        mutated_samples().map(str.encode),
        st.binary(max_size=60),
        st.sampled_from([b"\x1b[31m", b"slot print_timing: id  0 | task 3 | ", b"{", b"0.00.161.319 I ", b"\xe6\xa8"]),
    ),
    max_size=12,
).flatmap(lambda parts: st.sampled_from([b"\n", b"\r\n", b"\r", b""]).map(lambda end: end.join(parts)))


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(LOGS, st.lists(st.integers(0, 5000), max_size=20))
@settings(max_examples=examples(300), deadline=None)
def test_the_same_facts_for_every_chunking(data: bytes, cuts: list[int]) -> None:
    """Lines, facts and drift do not depend on how the pipe cut the bytes."""
    whole = LogReader()
    batches = [whole.feed(data), whole.close()]
    pieces = LogReader()
    parts = [*(pieces.feed(piece) for piece in chunked(data, cuts)), pieces.close()]
    for name in ("lines", "facts"):
        assert [x for part in parts for x in getattr(part, name)] == [x for b in batches for x in getattr(b, name)]
    assert pieces.drift == whole.drift


@given(LOGS)
@settings(max_examples=examples(300), deadline=None)
def test_ratios_and_counts_are_in_range(data: bytes) -> None:
    """No fact has a ratio outside 0 to 1, a time that is not finite, or a character that moves a cursor."""
    reader = LogReader()
    first, last = reader.feed(data), reader.close()
    for fact in (*first.facts, *last.facts):
        for field in dataclasses.fields(fact):
            value = getattr(fact, field.name)
            if field.name.endswith("_ratio") and value is not None:
                assert 0.0 <= value <= 1.0
            if isinstance(value, float):
                assert 0.0 <= value < float("inf")
    for line in (*first.lines, *last.lines):
        assert line == line.rstrip(" ")
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line)


@given(st.lists(st.binary(max_size=40), max_size=30))
@settings(deadline=None)
def test_memory_is_bounded(chunks: list[bytes]) -> None:
    """The splitter never holds more than it may keep."""
    splitter = LineSplitter(keep_bytes=32)
    for chunk in chunks:
        for line in splitter.feed(chunk):
            assert len(line) <= 32
        assert len(splitter._partial) <= 32
