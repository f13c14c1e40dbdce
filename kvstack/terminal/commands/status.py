"""`kvstack status`: what a running stack does, once or as it goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstack.errors import ExitCode, KvstackError, NotReady
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, StackArgument, app

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvstack.rundir import RunFile


WATCH_S = 0.5
PIPE_WIDTH = 140
ROWS = 10


@app.command()
def status(
    stack: StackArgument = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Keep updating until Ctrl-C, which does not stop the stack: the dashboard, or one line per request "
            "in a pipe; with --json one envelope per line (JSON Lines), at once and after each change.",
        ),
    ] = False,
) -> None:
    """
    Show what a running stack does.

    State, cache, last requests. The exit code is 3 while it is not ready.
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

        run = control_client.find(stack)
        if watch:
            return _watch(run, as_json)
        return _result(run, control_client.fetch_status(run))

    output.deliver("status", as_json, action)


def _result(run: RunFile, data: dict[str, Any]) -> output.Result:
    state = data.get("state")
    error = None
    if state != "ready":
        reason = f"state: {state}" + (f" ({data['reason']})" if data.get("reason") else "")
        error = NotReady(f"The stack {run.name!r} is not ready", reason, _next_step(run, data))

    def draw(screen: Console) -> RenderableType:
        return _picture(data, screen)

    return output.Result(data, draw, ExitCode.OK if error is None else ExitCode.START_FAILED, error)


def _next_step(run: RunFile, data: dict[str, Any]) -> str:
    if not run.attached:
        return f"See `kvstack logs -f {run.name}`."
    server = data.get("server")
    url = server.get("url") if isinstance(server, dict) else None
    return f"Check llama-server at {url or 'server.url'}, which keeps its own log; kvstack waits for it."


def _picture(data: dict[str, Any], screen: Console) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415 - JSON output needs no rich

    from kvstack.state.stack_state import StackState  # noqa: PLC0415 - see above
    from kvstack.state.status_json import decode  # noqa: PLC0415 - see above
    from kvstack.terminal.dashboard.frame import summary  # noqa: PLC0415 - see above
    from kvstack.terminal.dashboard.live import glyphs_for  # noqa: PLC0415 - see above

    width = screen.width if sys.stdout.isatty() else PIPE_WIDTH
    lines = summary(decode(StackState, data), width, time.time(), ROWS, glyphs_for(sys.stdout))
    for line in lines:
        line.rstrip()
    return Group(*lines)


def _watch(run: RunFile, as_json: bool) -> output.Result:
    from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

    if as_json:
        _watch_json(run)
    data = control_client.fetch_status(run)
    if output.is_plain(sys.stdout, os.environ):
        _watch_lines(run, data)
    from kvstack.state.stack_state import StackState  # noqa: PLC0415 - only on a terminal
    from kvstack.state.status_json import decode  # noqa: PLC0415 - only on a terminal
    from kvstack.terminal.dashboard.live import Dashboard  # noqa: PLC0415 - only on a terminal

    seen = decode(StackState, data)
    with Dashboard(lambda: seen, watching=True):
        while True:
            time.sleep(WATCH_S)
            seen = decode(StackState, control_client.fetch_status(run))


def _watch_json(run: RunFile) -> None:
    """One envelope per line, whenever something changed; the end of the stack is such a line too."""
    from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

    before = ""
    over = False
    while True:
        try:
            result = _result(run, control_client.fetch_status(run))
        except KvstackError as error:
            result = output.Result(None, "", error.exit_code, error)
            over = not isinstance(error, NotReady)  # it lives, and may answer again
        text = json.dumps(json.loads(output.envelope("status", result.data, result.exit_code, result.error)))
        if text != before:
            before = text
            output.write(text)
        if over:
            raise typer.Exit(int(result.exit_code))
        time.sleep(WATCH_S)


def _watch_lines(run: RunFile, data: dict[str, Any]) -> None:
    """One line per request that is over, and one per change of the state."""
    from kvstack.state.stack_state import StackState  # noqa: PLC0415 - only when the verb runs
    from kvstack.state.status_json import decode  # noqa: PLC0415 - only when the verb runs
    from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs
    from kvstack.terminal.plain_lines import request_line  # noqa: PLC0415 - only when the verb runs

    shown = 0
    state = None
    while True:
        stack_state = decode(StackState, data)
        if stack_state.state is not state:
            state = stack_state.state
            output.say(f"{state.value}: {stack_state.reason}" if stack_state.reason else state.value)
        for row in stack_state.requests:
            if row.id > shown and row.verdict is not None:
                output.write(request_line(row))
                shown = row.id
        time.sleep(WATCH_S)
        data = control_client.fetch_status(run)
