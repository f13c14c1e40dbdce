"""
`kvstack logs`: the llama-server's log, its last lines or as it grows.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvstack.errors import ExitCode, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, StackArgument, app

__all__ = ["logs"]

POLL_S = 0.2


@app.command()
def logs(
    stack: StackArgument = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what is written, until the stack ends.")
    ] = False,
    count: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=0, help="How many of the last lines.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """
    Print the llama-server's log.

    The last lines, also of a stack that has ended (the exit code is 4 then).
    """

    def action() -> output.Result:
        from kvstack.terminal import client  # noqa: PLC0415 - only when the verb runs
        from kvstack.terminal.logfile import Follower, last_lines  # noqa: PLC0415 - only when the verb runs

        if follow and as_json:
            raise UsageError("--follow and --json do not go together", "", "Leave one of them out.")
        directory, why_not = client.find_dir(stack)
        if why_not is None and not directory.log_path.exists():
            output.say(f"{directory.name} has no log yet; a server that kvstack is only attached to keeps its own")
        follower = Follower(directory.log_path)  # before the last lines are read: none is missed in between
        lines = last_lines(directory.log_path, count, follower.position)
        code = ExitCode.OK if why_not is None else ExitCode.NOT_RUNNING
        data = {"name": directory.name, "log_path": str(directory.log_path), "lines": lines}
        if not follow or why_not is not None:
            return output.Result(data, "\n".join(lines), code, why_not)
        for line in lines:
            output.write(line)
        run = directory.read()
        while run is not None:
            living = client.alive(run)
            for line in follower.more():
                output.write(line)
            if not living:
                output.say(f"{run.name} has ended")
                break
            time.sleep(POLL_S)
        return output.Result(data, "")

    output.deliver("logs", as_json, action)
