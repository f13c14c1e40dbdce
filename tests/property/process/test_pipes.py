"""The pump under arbitrary bytes in arbitrary pieces."""

from __future__ import annotations

import asyncio
from typing import IO, cast

from hypothesis import given
from hypothesis import strategies as st

from kvstack.process.pipes import LINE_BYTES, Outbox, Pump, Tail

PIECES = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=40),
        st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\xff\xfe", b"error: x\n"]),
        st.integers(1, 3).map(lambda count: b"x" * (count * LINE_BYTES // 2)),
    ),
    max_size=30,
)


class Pieces:
    """A pipe that gives one piece after the other."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [*pieces, b""]

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        """The next piece."""
        assert len(self._pieces[0]) <= size * 2
        return self._pieces.pop(0)


class Log:
    """A raw log in memory."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Take bytes."""
        self.data += data


@given(pieces=PIECES)
def test_nothing_is_lost_or_mixed(pieces: list[bytes]) -> None:
    """The raw log is what came; what is delivered is the same, but for ends of lines where there were none."""

    async def drain() -> tuple[bytes, list[bytes], Tail]:
        log, tail, delivered = Log(), Tail(), []
        outbox = Outbox(asyncio.get_running_loop(), delivered.append, limit_bytes=1 << 30)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        pipe = cast("IO[bytes]", Pieces(pieces))
        Pump(pipe, "pump", log, outbox, tail, lambda: loop.call_soon_threadsafe(ended.set)).start()
        await asyncio.wait_for(ended.wait(), 10)
        outbox.close()
        return log.data, delivered, tail

    raw, delivered, tail = asyncio.run(drain())
    assert raw == b"".join(pieces)
    assert all(piece.endswith(b"\n") for piece in delivered)
    whole = b"".join(delivered)
    if all(len(line) <= LINE_BYTES // 2 for line in raw.split(b"\n")):
        assert whole == raw + (b"" if raw.endswith(b"\n") or not raw else b"\n")
    assert whole.replace(b"\n", b"") == raw.replace(b"\n", b"")
    assert len(tail.lines()) <= 40
    assert ("error: x" in tail.error_lines()) <= (b"error: x" in raw)
