"""
File descriptors: as many as the system allows, and how it shows that they are used up.

Each request takes two, the client's connection and the one to the llama-server.
"""

from __future__ import annotations

import contextlib
import errno
import sys

if sys.platform != "win32":
    import resource


WANTED = (65_536, 10_240)
"""Soft limits to try, in this order: a hard limit may be without end, and macOS allows less than it says."""

_USED_UP = {errno.EMFILE, errno.ENFILE}


def limit() -> int | None:
    """How many this process may have; None where that is not limited."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Take as many as the hard limit allows: the soft one is often 1,024, or 256 on macOS."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in WANTED:
        reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= reachable:
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
            return


def ran_out(error: BaseException | None) -> bool:
    """
    Whether an error came from having none left, be it this process or the whole system.

    Args:
        error: What was raised; what it was raised from counts too.
    """
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in _USED_UP:
        return True
    several = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(ran_out(one) for one in (error.__cause__ or error.__context__, *several))
