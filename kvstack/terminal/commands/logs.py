"""`kvstack logs`: the llama-server's log, its last lines or as it grows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstack.errors import ExitCode, KvstackError, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, StackArgument, app

if TYPE_CHECKING:
    from kvstack.rundir import RunDir, RunFile


POLL_S = 0.2


@app.command()
def logs(
    stack: StackArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the stack ends.")] = False,
    count: Annotated[
        int, typer.Option("-n", "--lines", metavar="N", min=0, help="Number of last lines to print.")
    ] = 50,
    as_json: JsonOption = False,
) -> None:
    """
    Print the llama-server's log.

    The last lines, also of a stack that has ended (the exit code is 4 then).
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client, last_run  # noqa: PLC0415 - only when the verb runs
        from kvstack.terminal.commands.log_follower import Follower, last_lines  # noqa: PLC0415 - only when the verb runs

        if follow and as_json:
            raise UsageError("--follow and --json cannot be combined", "", "Remove one of them.")
        directory, why_not = control_client.find_dir(stack)
        run = directory.read()
        if why_not is None and run is not None and run.attached:
            raise _no_log(run, directory)
        if why_not is None and not directory.log_path.exists():
            output.say(f"{directory.name} has no log yet")
        follower = Follower(directory.log_path)  # before the last lines are read: none is missed in between
        lines = last_lines(directory.log_path, count, follower.position)
        code = ExitCode.OK if why_not is None else ExitCode.NOT_RUNNING
        data = {"name": directory.name, "log_path": str(directory.log_path), "lines": lines}
        if not follow or why_not is not None:
            return output.Result(data, "\n".join(lines), code, why_not)
        for line in lines:
            output.write(line)
        while run is not None:
            living = control_client.alive(run)
            for line in follower.more():
                output.write(line)
            if not living:
                told = last_run.told(run.name, run.pid)
                output.say(f"{run.name} has ended" if told is None else told.how)
                break
            time.sleep(POLL_S)
        return output.Result(data, "")

    output.deliver("logs", as_json, action)


def _no_log(run: RunFile, directory: RunDir) -> KvstackError:
    fact = "it is attached to a llama-server that it did not start, which keeps its own log"
    if directory.log_path.exists():
        fact += f"\n{directory.log_path} is from an earlier run"
    return KvstackError(
        f"The stack {run.name!r} has no log",
        fact,
        f"See where that server writes its log; `kvstack status {run.name}` shows what is known about it.",
    )
