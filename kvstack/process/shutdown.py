"""How a child is ended (asked, asked again, ended), tidied up after, and what is said of its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from kvstack.process.cancellation import Waiting
from kvstack.process.child import ExitInfo
from kvstack.process.contract import Process
from kvstack.process.exit_report import Death, explain, is_error_line

SECOND_TERM_S = 2.0
"""How long a child gets after the second SIGTERM, at which a llama-server ends at once."""

NOTICE_S = 1.2
"""How long a child gets to notice that its clients have gone: llama-server looks once a second, and if the SIGTERM
comes before that look, it may wait for them for ever (b11434: one time in three)."""

KILL_S = 5.0
CLOSE_S = 2.0


async def end_child(
    child: Process,
    waiting: Waiting,
    release: Callable[[], Awaitable[bool]],
    *,
    release_timeout_s: float,
    patience_s: float,
) -> bool:
    """
    End a child and all that it has started.

    Args:
        child: Whom.
        waiting: Tells when somebody loses patience: then nobody is asked any more.
        release: Closes the connections to it, and tells whether any was cut off.  Comes before the first signal: with
            a request in flight, a llama-server that is asked to end waits for that client.
        release_timeout_s: How long *release* may take, in seconds.
        patience_s: How long the child gets after the first SIGTERM, in seconds.

    Returns:
        Whether it has ended; if not, the kernel holds it.
    """
    await waiting.within(child.refresh(), CLOSE_S)
    if not waiting.kill_asked():
        if await drain(waiting, release, release_timeout_s):
            await waiting.within(child.gone(), NOTICE_S)
        for wait_s in (patience_s, SECOND_TERM_S):
            child.terminate()
            if await waiting.within(child.gone(), wait_s):
                return True
            if waiting.kill_asked():
                break
    child.kill()
    return await waiting.within(child.gone(), KILL_S, killable=False)


async def drain(waiting: Waiting, release: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """
    Close the connections to the server.

    Args:
        waiting: Tells when somebody loses patience.
        release: Does it, and tells whether any was cut off.
        timeout_s: How long that may take, in seconds.

    Returns:
        Whether any was cut off, or may have been.
    """
    cut_off = True

    async def close() -> None:
        nonlocal cut_off
        cut_off = await release()

    await waiting.within(close(), timeout_s)
    return cut_off


def not_run(program: str, error: OSError) -> Death:
    """
    The end of a server that did not even begin.

    Args:
        program: Its path.
        error: What the system said.
    """
    return Death(
        "llama-server could not be started",
        f"{program}: {error.strerror or error}",
        "Check server.binary: it must be a program for this machine, with its executable bit set.",
    )


def hung(what: str) -> Death:
    """
    The end of a server that hung while it served.

    Args:
        what: In what way.
    """
    return Death(what, "", "If it happens again, check `kvstack logs` and the kernel log.")


def troubles(pid: int, exit_info: ExitInfo) -> list[tuple[Literal["warning", "error"], str]]:
    """
    What a person should know of a child's end besides its cause: level and text.

    Args:
        pid: The child's process id.
        exit_info: What was found when it was tidied up after.
    """
    found: list[tuple[Literal["warning", "error"], str]] = []
    if exit_info.returncode is None:
        text = f"llama-server (pid {pid}) does not exit: it is stuck in the kernel, perhaps in a driver"
        found.append(("error", text))
    others = [survivor for survivor in exit_info.survivors if survivor != pid]
    if others:
        found.append(("error", f"These processes could not be stopped: {', '.join(map(str, others))}"))
    if exit_info.dropped_bytes:
        text = f"{exit_info.dropped_bytes} bytes of log came too fast to be shown: see the raw log"
        found.append(("warning", text))
    return found


def explain_end(exit_info: ExitInfo, *, served: bool) -> Death:
    """
    Say why a child ended by itself.

    Args:
        exit_info: What it left.
        served: It was ready: what it complained about long ago is not what it died of.
    """
    telling = tuple(line for line in exit_info.last_lines if is_error_line(line)) if served else exit_info.error_lines
    return explain(
        exit_info.returncode,
        exit_info.last_lines,
        telling,
        out_of_memory=exit_info.out_of_memory,
        left_behind=exit_info.left_behind,
    )
