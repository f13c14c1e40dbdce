"""`kvstack up CONFIG`: start a stack, in this terminal or in the background."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvstack.errors import KvstackError, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import ConfigArgument, OverridesOption, app


@app.command()
def up(
    config: ConfigArgument,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Run in the background.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="With -d: return when the stack is ready, or has failed.")
    ] = False,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="Print plain lines, even on a terminal.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print llama-server's command and start nothing.")] = False,
    overrides: OverridesOption = None,
) -> None:
    """
    Start a stack: llama-server and proxy.

    Starts llama-server, waits for it, warms it up, and serves until Ctrl-C.
    """
    try:
        if wait and not detach:
            raise UsageError("--wait requires -d", "", "Use `up -d --wait`, or remove --wait.")
        code = _dry_run(config, overrides) if dry_run else _start(config, overrides, detach, wait, no_dashboard)
    except KvstackError as error:
        raise typer.Exit(output.fail("up", False, error)) from None
    raise typer.Exit(code)


def _dry_run(config: str, overrides: Sequence[str] | None) -> int:
    from kvstack.stack.plan import make_plan  # noqa: PLC0415 - other verbs must not pay for it
    from kvstack.terminal.config_file import load_checked  # noqa: PLC0415 - see above

    parsed, path = load_checked(config, overrides)
    plan = make_plan(parsed, path, os.environ, dry_run=True)
    for notice in plan.notices:
        output.say(f"notice: {notice}")
    if plan.command is None:
        output.say(f"nothing is started: {parsed.name} attaches to {parsed.upstream_url}")
        return 0
    command = plan.command.display
    output.write(subprocess.list2cmdline(command) if sys.platform == "win32" else " ".join(map(_quoted, command)))
    return 0


def _quoted(word: str) -> str:
    """A word of a command for a shell; what a terminal would act on stands in it as an escape that shells know."""
    if word.isprintable():
        return shlex.quote(word)
    spelled = "".join(
        char if char.isprintable() and char not in "'\\" else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
        for char in word
    )
    return f"$'{spelled}'"


def _start(config: str, overrides: Sequence[str] | None, detach: bool, wait: bool, no_dashboard: bool) -> int:
    from kvstack.terminal.config_file import load_checked  # noqa: PLC0415 - other verbs must not pay for it

    parsed, path = load_checked(config, overrides)
    if detach:
        from kvstack.terminal.background import start_background  # noqa: PLC0415 - see above

        return start_background(parsed.name, path, overrides or (), wait=wait, attached_url=parsed.server.url)
    from kvstack.stack.plan import make_plan  # noqa: PLC0415 - see above
    from kvstack.terminal.foreground import run_foreground  # noqa: PLC0415 - see above

    plain = no_dashboard or output.is_plain(sys.stdout, os.environ)
    if not plain:
        from kvstack.terminal.dashboard.live import in_foreground  # noqa: PLC0415 - plain lines need no rich

        plain = not in_foreground(sys.stdout)
    plan = make_plan(parsed, path, os.environ)
    return run_foreground(plan, dashboard=not plain)
