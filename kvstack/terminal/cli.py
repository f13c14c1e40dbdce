"""
The command line: importing a verb's module adds the verb.

A verb's module imports what it needs inside its functions, so that `kvstack status` does not pay for `kvstack up`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from kvstack.errors import ExitCode, KvstackError, UsageError, unexpected
from kvstack.terminal import output
from kvstack.terminal.app import app
from kvstack.terminal.commands import capture, check, doctor, down, explain, logs, rules, status, up, warmup  # noqa: F401 - each registers its verb


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """
    Run kvstack's command line and leave the process with its exit code.

    Args:
        arguments: Without the program's name; by default the process's own.
    """
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a log line must not fail for the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(given)
    output.give_up()
    sys.exit(code)


def _open_missing_streams() -> None:
    """Whoever closed a standard stream reads nothing: let it be the null device, before a file gets its number."""
    opened = os.open(os.devnull, os.O_RDWR)
    while opened <= 2:  # the lowest number that is free is given
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
    # Never closed: they live as long as the process.
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _run(arguments: list[str]) -> int:
    try:
        # Not standalone: typer would print a usage error as text even where --json was asked for.
        code = app(args=arguments, prog_name="kvstack", standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        output.failed(sys.stdout)
        return ExitCode.ERROR
    except KvstackError as error:  # said in its verb's form already, unless that form could not be written
        return output.fail("", False, error)
    except Exception as error:
        if type(error).__name__ == "Abort":  # typer's word for Ctrl-C
            return ExitCode.INTERRUPTED
        return _report(error, arguments)


def _report(error: Exception, arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    format_message = getattr(error, "format_message", None)  # typer's usage errors, of whichever version
    if format_message is None:
        if isinstance(error, OSError) and traceback.extract_tb(error.__traceback__)[-1].name == "echo":
            # A help text, which typer writes itself.
            output.failed(sys.stdout)
            return output.fail(verb, False, output.unwritten(error))
        return output.fail(verb, as_json, unexpected(error), error)
    context = getattr(error, "ctx", None)
    message = str(format_message()).rstrip(".")
    if type(error).__name__ == "NoArgsIsHelpError":
        output.say(str(format_message()))
        return ExitCode.USAGE
    usage = "" if context is None else context.get_usage()
    path = "kvstack" if context is None else context.command_path
    return output.fail(verb, as_json, UsageError(message, usage, f"See `{path} --help`."))
