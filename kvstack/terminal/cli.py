"""
The command line: importing a verb's module adds the verb.

A verb's module imports what it needs inside its functions, so that `kvstack status` does not pay for `kvstack up`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvstack.errors import ExitCode, UsageError
from kvstack.terminal import (  # noqa: F401 - each registers its verb
    check_cmd,
    doctor_cmd,
    down_cmd,
    explain_cmd,
    logs_cmd,
    output,
    rules_cmd,
    status_cmd,
    up_cmd,
    warmup_cmd,
)
from kvstack.terminal.app import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """
    Run kvstack's command line and leave the process with its exit code.

    Args:
        arguments: Without the program's name; by default the process's own.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a log line must not fail for the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(given))


def _run(arguments: list[str]) -> int:
    try:
        # Not standalone: typer would print a usage error as text even where --json was asked for.
        code = app(args=arguments, prog_name="kvstack", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left; Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except Exception as error:
        if type(error).__name__ == "Abort":  # typer's word for Ctrl-C
            return ExitCode.INTERRUPTED
        return _report(error, arguments)


def _report(error: Exception, arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    format_message = getattr(error, "format_message", None)  # typer's usage errors, of whichever version
    if format_message is None:
        return output.fail(verb, as_json, output.unexpected(error), error)
    context = getattr(error, "ctx", None)
    message = str(format_message()).rstrip(".")
    if type(error).__name__ == "NoArgsIsHelpError":
        output.say(message)
        return ExitCode.USAGE
    usage = "" if context is None else context.get_usage()
    path = "kvstack" if context is None else context.command_path
    return output.fail(verb, as_json, UsageError(message, usage, f"See `{path} --help`."))
