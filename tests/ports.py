"""Free ports on loopback; pytest-xdist's workers have ranges of their own, so no two pick the same one."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

RANGE_START = 12_000  # below the ports that systems give out themselves
RANGE_SIZE = 1_000
RANGES = 20


def _candidates() -> Iterator[int]:
    """This worker's ports round and round; the process id spreads runs that share a machine."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % RANGES
    first = RANGE_START + worker * RANGE_SIZE
    for number in itertools.count(os.getpid() * 37):
        yield first + number % RANGE_SIZE


_PORTS = _candidates()


def free_port() -> int:
    """A port that nobody holds and that no other test of this run is given for a while."""
    for port in itertools.islice(_PORTS, RANGE_SIZE):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no free port among this worker's {RANGE_SIZE}")


def free_ports(count: int) -> list[int]:
    """As many free ports, all different."""
    return [free_port() for _ in range(count)]
