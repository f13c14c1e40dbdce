"""One log of requests: bodies while they run, then only those that are to be kept, all of it bounded."""

from __future__ import annotations

from kvstack.prompt.engine import RewriteResult
from kvstack.proxy.request_log import REQUESTS_KEPT, Bodies, LoggedRequest, RequestLog


def add(log: RequestLog, number: int, size_bytes: int = 10) -> None:
    """A request with bodies of so many bytes in all."""
    body = b"x" * (size_bytes // 2)
    log.add(LoggedRequest.of(number, "/completion", Bodies(body, RewriteResult(body, conversation=f"c{number}"))))


def with_bodies(log: RequestLog, last: int) -> list[int]:
    """Numbers of the requests up to *last* whose bodies are there."""
    found = [log.get(number) for number in range(1, last + 1)]
    return [request.number for request in found if request is not None and request.bodies is not None]


def test_bodies_go_when_the_request_ends() -> None:
    """What users wrote is not kept unless they ask for it; the facts stay."""
    log = RequestLog()
    add(log, 1)
    assert with_bodies(log, 1) == [1]
    log.end(1)
    assert with_bodies(log, 1) == []
    request = log.get(1)
    assert request is not None
    assert request.conversation == "c1"


def test_the_newest_bodies_are_kept_within_count_and_bytes() -> None:
    """The newest stays, however large it is."""
    log = RequestLog(keep_bodies=3, max_body_bytes=100)
    for number in range(1, 6):
        add(log, number)
        log.end(number)
    assert with_bodies(log, 5) == [3, 4, 5]
    add(log, 6, 90)
    log.end(6)
    assert with_bodies(log, 6) == [5, 6]
    add(log, 7, 1000)
    log.end(7)
    assert with_bodies(log, 7) == [7]


def test_the_log_is_bounded_in_count_but_keeps_what_runs() -> None:
    """A long request must be found when its answer comes."""
    log = RequestLog()
    add(log, 1)
    for number in range(2, 3 * REQUESTS_KEPT):
        add(log, number)
        log.end(number)
    assert log.get(1) is not None
    assert with_bodies(log, 3 * REQUESTS_KEPT) == [1]
    assert sum(log.get(number) is not None for number in range(3 * REQUESTS_KEPT)) == REQUESTS_KEPT
    log.end(7)  # forgotten long ago
