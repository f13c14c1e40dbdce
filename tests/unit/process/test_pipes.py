"""From a pipe to the raw log, to the event loop and to the memory of the last lines."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from kvstack.process.pipes import LINE_BYTES, Outbox, Pump, Tail


class Log:
    """A raw log in memory."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Take bytes."""
        self.data += data


async def drained(chunks: list[bytes], pause_s: float = 0.0) -> tuple[bytes, list[bytes], Tail]:
    """Send chunks through a pipe: the raw log, what was delivered, and the tail."""
    reading, writing = os.pipe()
    log, tail, delivered = Log(), Tail(), []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    outbox = Outbox(loop, delivered.append)
    pipe = os.fdopen(reading, "rb", buffering=0)
    pump = Pump(pipe, "pump", log, outbox, tail, lambda: loop.call_soon_threadsafe(ended.set))
    pump.start()
    for chunk in chunks:
        os.write(writing, chunk)
        await asyncio.sleep(pause_s)
    os.close(writing)
    await asyncio.wait_for(ended.wait(), 10)
    outbox.close()
    assert pump.read_bytes == len(b"".join(chunks)) == len(log.data)
    return log.data, delivered, tail


async def test_lines_are_whole() -> None:
    """However the bytes come, what is delivered ends at line ends; the raw log has the bytes as they came."""
    raw, delivered, _ = await drained([b"one\ntw", b"o\nthr", b"ee"], pause_s=0.02)
    assert raw == b"one\ntwo\nthree"
    assert b"".join(delivered) == b"one\ntwo\nthree\n"
    assert all(piece.endswith(b"\n") for piece in delivered)


async def test_a_line_without_end_is_cut() -> None:
    """A line that never ends does not grow in memory: it is passed on in pieces."""
    raw, delivered, tail = await drained([b"x" * 60_000] * 5 + [b"\nafter\n"], pause_s=0.01)
    assert raw.count(b"x") == 300_000
    assert b"".join(delivered).count(b"x") == 300_000
    assert max(len(line) for line in b"".join(delivered).split(b"\n")) <= LINE_BYTES + 64 * 1024
    assert tail.lines()[-1] == "after"
    assert max(map(len, tail.lines())) == 500


async def test_broken_bytes() -> None:
    """Bytes that are no text are delivered as they are, and are readable in the tail."""
    _, delivered, tail = await drained([b"a\xffb\r\n\xc3"])
    assert b"".join(delivered) == b"a\xffb\r\n\xc3\n"
    assert tail.lines() == ("a\ufffdb", "\ufffd")


async def test_outbox_is_bounded() -> None:
    """While the loop stands, whole pieces beyond the limit are dropped and counted, the first ones are kept."""
    delivered: list[bytes] = []
    outbox = Outbox(asyncio.get_running_loop(), delivered.append, limit_bytes=1000, turn_bytes=100)

    def flood() -> None:
        for number in range(50):
            outbox.put(b"%02d" % number + b"." * 97 + b"\n")

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join()  # the loop stands still meanwhile
    assert delivered == []
    await asyncio.sleep(0.1)
    assert [int(piece[:2]) for piece in delivered] == list(range(10))
    assert outbox.dropped_bytes == 40 * 100
    outbox.put(b"later\n")
    await asyncio.sleep(0.02)
    assert delivered[-1] == b"later\n"


async def test_outbox_gives_the_loop_its_turns() -> None:
    """A long queue is delivered in slices, with other work of the loop between them."""
    order: list[str] = []
    outbox = Outbox(asyncio.get_running_loop(), lambda data: order.append("slice"), turn_bytes=100)
    for _ in range(5):
        outbox.put(b"." * 99 + b"\n")

    async def other() -> None:
        for _ in range(4):
            order.append("other")
            await asyncio.sleep(0)

    await other()
    await asyncio.sleep(0.02)
    assert order.count("slice") == 5
    assert order[-1] == "slice"
    assert "other" in order[order.index("slice") :]


async def test_closed_outbox() -> None:
    """Closing delivers what waits, in order; afterwards nothing comes any more."""
    delivered: list[bytes] = []
    outbox = Outbox(asyncio.get_running_loop(), delivered.append, turn_bytes=4)
    for number in range(3):
        outbox.put(b"%d..\n" % number)
    outbox.close()
    outbox.put(b"late\n")
    await asyncio.sleep(0.02)
    assert b"".join(delivered) == b"0..\n1..\n2..\n"


def test_outbox_of_a_closed_loop() -> None:
    """A pump that still reads when the loop is gone is not disturbed by that."""
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop, lambda data: None)
    loop.close()
    outbox.put(b"late\n")


async def test_a_failing_reader_does_not_stop_the_queue() -> None:
    """If the receiver raises, the loop hears of it and the rest is delivered all the same."""
    delivered: list[bytes] = []
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))

    def deliver(data: bytes) -> None:
        delivered.append(data)
        if len(delivered) == 1:
            raise ValueError("no")

    outbox = Outbox(loop, deliver, turn_bytes=1)
    outbox.put(b"a\n")
    outbox.put(b"b\n")
    await asyncio.sleep(0.02)
    loop.set_exception_handler(None)
    assert delivered == [b"a\n", b"b\n"]
    assert len(problems) == 1


def test_tail_keeps_the_cause() -> None:
    """A long text after the error pushes it out of the last lines, not out of the telling ones; both are bounded."""
    tail = Tail()
    tail.put(b"error: invalid argument: --x\n")
    for number in range(10_000):
        tail.put(b"usage line %d\n" % number)
    for number in range(1000):
        tail.put(b"0.00.000.000 E srv  x: trouble %d\n" % number)
    assert tail.error_lines()[0] == "error: invalid argument: --x"
    assert tail.error_lines()[-1].endswith("trouble 999")
    assert len(tail.error_lines()) == 24
    assert len(tail.lines()) == 40


def test_tail_is_fast_enough() -> None:
    """Looking at five megabytes of lines takes the pump no noticeable time."""
    line = b"0.00.001.000 I slot print_timing: id  0 | task 7 | prompt eval time =  232.15 ms /  3164 tokens\n"
    tail = Tail()
    began_s = time.perf_counter()
    tail.put(line * (5_000_000 // len(line)))
    assert time.perf_counter() - began_s < 5
