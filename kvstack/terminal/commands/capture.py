"""`kvstack capture`: record the model requests that come to a running stack."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from kvstack.errors import KvstackError, NotRunning, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import app
from kvstack.terminal.format import memory, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstack.rundir import RunFile


STDOUT = "-"


@app.command()
def capture(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME|CONFIG] FILE",
            help="A stack's name, or its config file (default: the only running one); and the file to write, "
            "- for stdout.",
            show_default=False,
        ),
    ],
    count: Annotated[
        int | None, typer.Option("-n", "--count", metavar="N", min=1, help="Stop after N requests.")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append to FILE if it exists; otherwise an existing FILE is an error.")
    ] = (False),
) -> None:
    """
    Record the model requests that come in, until Ctrl-C.

    One JSON object a line, with the body as the client sent it: for `kvstack rules test` and for warmup.request_file.
    A body holds all that was said; FILE is for its owner alone. Credentials are left out of headers and query.
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

        stack, file = _told_apart(arguments)
        run = control_client.find(stack)
        with _sink(file, append) as sink, control_client.follow(run, "capture") as lines:
            written = _Written(sink)
            try:
                whom = f"{run.name} ({run.proxy_url})"
                output.say(f"capturing the requests to {whom} into {sink.name}; Ctrl-C ends the capture")
                return _record(run, lines, written, count)
            finally:
                output.say(f"wrote {plural(written.count, 'request')} to {sink.name}")

    output.deliver("capture", False, action)


def _told_apart(arguments: list[str]) -> tuple[str | None, str]:
    from kvstack.rundir import names  # noqa: PLC0415 - only when the verb runs

    if len(arguments) > 2:
        raise UsageError("Too many arguments", " ".join(arguments), "See `kvstack capture --help`.")
    *stack, file = arguments
    if not stack and (file.endswith(".toml") or file in names()):
        raise UsageError(
            "The file to write is missing", f"{file} names a stack", f"Specify one: `kvstack capture {file} FILE`."
        )
    return stack[0] if stack else None, file


class _Sink(Protocol):
    """Where lines go."""

    name: str

    def write(self, line: bytes) -> None:
        """Take a line, whole or not at all."""


class _Written:
    """Counts what a sink took."""

    def __init__(self, sink: _Sink) -> None:
        self.count = 0
        self._sink = sink

    def add(self, line: bytes) -> None:
        """Write one request and say so."""
        self._sink.write(line)
        self.count += 1
        output.say(f"{self.count:>4}  {_told(line)}")


def _record(run: RunFile, lines: Iterator[bytes], written: _Written, count: int | None) -> output.Result:
    from kvstack.terminal import last_run  # noqa: PLC0415 - only when the verb runs

    for line in lines:
        if line.isspace():
            continue
        if line.startswith(b'{"lost":'):
            lost = json.loads(line)["lost"]
            output.say(f"lost {plural(lost, 'request')} so far: they came faster than they could be written")
            continue
        written.add(line)
        if written.count == count:
            return output.Result(None, "")
    told = last_run.told(run.name, run.pid)
    if count is not None:
        after = f"after {written.count:,} of {plural(count, 'request')}"
        raise NotRunning(
            f"The stack {run.name!r} has ended",
            after if told is None else f"{after}\n{told.how}",
            f"Start it: `kvstack up {run.config_path}`." if told is None else told.next_step,
        )
    output.say(f"{run.name} has ended" if told is None else told.how)
    return output.Result(None, "")


def _told(line: bytes) -> str:
    """A request in a few words, without reading its body, which is the last key."""
    head, _, body = line.partition(b', "body": ')
    try:
        fields = json.loads(head + b"}")
        words = [fields["client"] or "unknown client", f"{fields['method']} {fields['path']}"]
        words += [memory(len(body))] if len(body) > 1024 else []
        words += [fields["note"]] if "note" in fields else []
    except (ValueError, KeyError, TypeError):  # a stack of another version
        return memory(len(line))
    return " | ".join(words)


@contextlib.contextmanager
def _sink(file: str, append: bool) -> Iterator[_Sink]:
    if file == STDOUT:
        yield _Stdout()
        return
    opened = _File(Path(file).expanduser(), append)
    try:
        yield opened
    finally:
        opened.close()


class _Stdout:
    """Lines as data: not a byte of them is changed, but where a person looks at them."""

    name = "stdout"

    def write(self, line: bytes) -> None:
        """
        Write a line.

        Raises:
            BrokenPipeError: The reader left.
            KvstackError: It cannot be written.
        """
        try:
            if sys.stdout.isatty():
                line = _harmless(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError as error:
            output.failed(sys.stdout)
            if isinstance(error, BrokenPipeError):
                raise
            raise output.unwritten(error) from None


def _harmless(line: bytes) -> bytes:
    """The same JSON, with an escape for each character that could move a terminal's cursor or hide what is there."""
    shown = [
        character if character.isprintable() or character == "\n" else json.dumps(character)[1:-1]
        for character in line.decode("utf-8")
    ]
    # DEL is no control character to JSON.
    return "".join(shown).replace("\x7f", "\\u007f").encode()


class _File:
    """A file for its owner alone, which holds whole lines at any time; gone again if nothing came."""

    def __init__(self, path: Path, append: bool) -> None:
        self.name = str(path)
        self._path = path
        self._ours = not append or not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(path, flags if append else flags | os.O_EXCL, 0o600)
        except FileExistsError:
            raise UsageError(
                f"{path} already exists", "", "Choose another name, or append to it with --append."
            ) from None
        except OSError as error:
            raise _unwritable(path, error) from None
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            status = os.fstat(descriptor)
            self._is_regular = stat.S_ISREG(status.st_mode)
            self._size = status.st_size
            if self._is_regular and not self._ours:
                self._take_over()
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from None

    def _take_over(self) -> None:
        if sys.platform != "win32":  # others may have been let in
            os.fchmod(self._file.fileno(), 0o600)
        if self._size:
            self._file.seek(self._size - 1)
            if self._file.read(1) != b"\n":
                self._put(b"\n")

    def write(self, line: bytes) -> None:
        """
        Add a line.

        Raises:
            KvstackError: It cannot be written; the file is as it was.
        """
        try:
            self._put(line)
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def _put(self, data: bytes) -> None:
        written = 0
        try:
            view = memoryview(data)
            while written < len(data):  # unbuffered: a nearly full disk takes a part
                written += self._file.write(view[written:])
            self._size += written
        except BaseException:  # Ctrl-C too
            if self._is_regular:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._size)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._ours and self._is_regular and not self._size:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _unwritable(path: Path, error: OSError) -> KvstackError:
    return KvstackError(
        f"{path} cannot be written", error.strerror or str(error), "Choose a writable directory with free space."
    )
