"""`kvstack down`: stop a running stack, and wait until nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstack.errors import KvstackError, NotReady, NotRunning
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, StackArgument, app

if TYPE_CHECKING:
    from kvstack.rundir import RunFile


POLL_S = 0.05
SECOND_SIGNAL_S = 0.5
KILL_GRACE_S = 10.0


@app.command()
def down(
    stack: StackArgument = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="How long an orderly stop may take, in seconds, before the stack is killed.",
        ),
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """
    Stop a running stack.

    In order: open streams finish, then llama-server stops, then kvstack. Waits until nothing is left.
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

        run = control_client.find(stack)
        begun = time.monotonic()
        try:
            answer = control_client.act(run, "stop", min(5.0, max(0.5, timeout_s)))
            if not answer.ok:
                _signal(run)
        except NotReady:  # it does not answer, but it lives: signals need no answer
            _signal(run)
        except NotRunning:
            return _ended(run, begun, killed=False)
        if _wait(run, timeout_s):
            return _ended(run, begun, killed=False)
        # The second signal kills, if the stop that was asked for was none; two at once would be heard as one.
        _signal(run)
        if _wait(run, SECOND_SIGNAL_S):
            return _ended(run, begun, killed=True)
        _signal(run)
        if _wait(run, KILL_GRACE_S):
            return _ended(run, begun, killed=True)
        raise KvstackError(
            f"The stack {run.name!r} did not stop",
            f"pid {run.pid} is still alive after {timeout_s + KILL_GRACE_S:.0f} s",
            f"Kill the process yourself: `kill -9 {run.pid}`; the next `kvstack up` cleans up what it leaves.",
        )

    output.deliver("down", as_json, action)


def _wait(run: RunFile, timeout_s: float) -> bool:
    from kvstack.terminal.control_client import alive  # noqa: PLC0415 - only when the verb runs

    deadline = time.monotonic() + timeout_s
    while alive(run):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _signal(run: RunFile) -> None:
    from kvstack.terminal.control_client import alive  # noqa: PLC0415 - only when the verb runs

    if alive(run):
        try:
            os.kill(run.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise KvstackError(
                f"The stack {run.name!r} belongs to another user", f"pid {run.pid}", "Stop it as that user."
            ) from None


def _ended(run: RunFile, begun: float, *, killed: bool) -> output.Result:
    took_s = time.monotonic() - begun
    data = {"name": run.name, "pid": run.pid, "took_s": round(took_s, 3), "killed": killed}
    how = "was killed" if killed else "stopped"
    return output.Result(data, f"{run.name} {how} after {took_s:.1f} s")
