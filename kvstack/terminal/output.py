"""
Where output goes: data to stdout, talk to stderr; one result, two renderings (text, or the JSON envelope).

```
{"kvstack_result_version": 2, "command": "status", "status": "success", "exit_code": 0, "data": {...}, "errors": []}
```

An envelope with `"status": "error"` has at least one item in `errors`: `{"what": ..., "fact": ..., "next_step": ...}`.
Its `data` is null where there is nothing to show.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kvstack.errors import ExitCode, KvstackError, unexpected
from kvstack.terminal.format import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


RESULT_VERSION = 2
"""Of the envelope; counted up when a field changes its meaning or goes away."""

_debug = False
_failed: set[int] = set()


@dataclass(frozen=True, slots=True)
class Result:
    """
    What a verb found out.

    Attributes:
        data: For the envelope.
        text: For a person: a string, or a function that draws on the console that it is given.
        exit_code: Of the process.
        error: What to say on top of the data, on stderr or in the envelope's `errors`.
    """

    data: Mapping[str, Any] | None
    text: str | Callable[[Console], RenderableType]
    exit_code: int = ExitCode.OK
    error: KvstackError | None = None


def set_debug(wanted: bool) -> None:
    """Show tracebacks from now on."""
    global _debug  # noqa: PLW0603 - one switch of the process, given on its command line
    _debug = wanted


def debug() -> bool:
    """Whether tracebacks are wanted."""
    return _debug


def is_plain(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether *stream* gets plain lines: no terminal, a dumb one, a CI run, or a person who asked for no colour."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return True
    if environ.get("CI", "").lower() not in {"", "0", "false"}:
        return True
    try:
        return not stream.isatty()
    except ValueError:  # closed
        return True


def console(stream: TextIO, width: int | None = None) -> Console:
    """A rich console on *stream* that interprets nothing in the text it prints."""
    from rich.console import Console  # noqa: PLC0415 - costs a tenth of a second that plain output need not wait for

    plain = is_plain(stream, os.environ)
    return Console(
        file=stream,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=plain or None,
        force_terminal=False if plain else None,
    )


def write(text: str) -> None:
    """
    Data for stdout: *text*, made safe for a terminal, and a line end.

    Raises:
        BrokenPipeError: The reader left.
        KvstackError: It cannot be written.
    """
    try:
        sys.stdout.write(_safe(text) + "\n")
        sys.stdout.flush()
    except OSError as error:
        failed(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise unwritten(error) from None


def say(text: str) -> None:
    """Write *text* to stderr, safe for a terminal, with a line end.  A stderr that is gone is no reason to stop."""
    try:
        sys.stderr.write(_safe(text) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        failed(sys.stderr)


def failed(stream: TextIO) -> None:
    """Note that *stream* has text that it cannot write."""
    with contextlib.suppress(OSError, ValueError):  # closed, or none of the system's
        _failed.add(stream.fileno())


def give_up() -> None:
    """
    Let what could not be written go nowhere, now that the process ends.

    Python would try once more, complain, and leave with an exit code of its own.
    """
    for descriptor in _failed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    _failed.clear()


def unwritten(error: OSError) -> KvstackError:
    """The error of a stdout that takes no more."""
    return KvstackError(
        "The output could not be written",
        f"stdout: {error.strerror or error}",
        "Redirect stdout to a place with free space.",
    )


def _safe(text: str) -> str:
    # Here too, and not only where a text is put together: names, paths and errors come from outside in every verb.
    return "\n".join(one_line(line) for line in text.split("\n"))


def _draw(draw: Callable[[Console], RenderableType]) -> None:
    from rich.segment import Segment  # noqa: PLC0415 - see console()

    class Safe:
        """Colours are added when the segments are written: what is in their text comes from outside."""

        def __rich_console__(self, screen: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for part in screen.render(draw(screen), options):
                yield part if part.control else Segment(_safe(part.text), part.style)

    try:
        console(sys.stdout).print(Safe(), soft_wrap=True)
    except OSError as error:
        failed(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise unwritten(error) from None


def envelope(command: str, data: Mapping[str, Any] | None, exit_code: int, error: KvstackError | None) -> str:
    """The JSON text of a result."""
    return json.dumps(
        {
            "kvstack_result_version": RESULT_VERSION,
            "command": command,
            "status": "success" if error is None and exit_code == 0 else "error",
            "exit_code": int(exit_code),
            "data": data,
            "errors": [] if error is None else [_error_item(error)],
        },
        indent=2,
    )


def _error_item(error: KvstackError) -> dict[str, str]:
    return {"what": error.what, "fact": error.fact, "next_step": error.next_step}


def error_text(error: KvstackError) -> str:
    """The three parts of an error, as plain lines."""
    lines = [f"error: {one_line(error.what)}"]
    lines += [f"  {one_line(line).rstrip().removeprefix('  ')}" for line in error.fact.splitlines()]
    if error.next_step:
        first, *rest = error.next_step.splitlines()
        lines.append(f"next:  {one_line(first)}")
        lines += [f"       {one_line(line)}" for line in rest]
    return "\n".join(lines)


def say_error(error: KvstackError) -> None:
    """Put an error on stderr, in colour where a person looks at it."""
    text = error_text(error)
    if is_plain(sys.stderr, os.environ):
        say(text)
        return
    from rich.text import Text  # noqa: PLC0415 - see console()

    shown = Text(text)
    shown.highlight_regex(r"(?m)^error:.*", "bold red")
    shown.highlight_regex(r"(?m)^next:", "bold green")
    try:
        console(sys.stderr).print(shown, soft_wrap=True)
    except (OSError, ValueError):
        failed(sys.stderr)


def deliver(command: str, as_json: bool, action: Callable[[], Result]) -> NoReturn:
    """
    Run a verb's *action*, show its result in the wanted form, and leave with its exit code.

    Args:
        command: The verb's name, for the envelope.
        as_json: Whether stdout gets the envelope instead of text.
        action: What the verb does; a `KvstackError` becomes a shown error, and in debug mode a traceback too.
    """
    import typer  # noqa: PLC0415 - see console()

    try:
        result = action()
    except KvstackError as error:
        raise typer.Exit(fail(command, as_json, error)) from None
    except (BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except Exception as error:
        raise typer.Exit(fail(command, as_json, unexpected(error), error)) from None
    if as_json:
        write(envelope(command, result.data, result.exit_code, result.error))
    else:
        if isinstance(result.text, str):
            if result.text:
                write(result.text)
        else:
            _draw(result.text)
        if result.error is not None:
            say_error(result.error)
    raise typer.Exit(int(result.exit_code))


def fail(command: str, as_json: bool, error: KvstackError, cause: BaseException | None = None) -> int:
    """
    Show an error in the wanted form.

    Returns:
        The exit code to leave with.
    """
    if _debug:
        say("".join(traceback.format_exception(cause or error)).rstrip())
    if as_json:
        write(envelope(command, None, error.exit_code, error))
    else:
        say_error(error)
    return int(error.exit_code)
