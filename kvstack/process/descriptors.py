"""How many file descriptors this process may have: each request takes two, the client's and the llama-server's."""

from __future__ import annotations

import contextlib
import sys

WANTED = (65_536, 10_240)
"""Soft limits to try, in this order: a hard limit may be without end, and macOS allows less than it says."""

if sys.platform == "win32":

    def limit() -> int | None:
        """How many this process may have; None where that is not limited."""
        return None

    def raise_limit() -> None:
        """Take as many as the hard limit allows."""

else:
    import resource

    def limit() -> int | None:
        """How many this process may have; None where that is not limited."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft

    def raise_limit() -> None:
        """Take as many as the hard limit allows: the soft one is often 1,024, or 256 on macOS."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for wanted in WANTED:
            reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            if soft == resource.RLIM_INFINITY or soft >= reachable:
                return
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
                return
