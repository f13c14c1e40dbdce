"""
Finds a running stack by its run file and talks to its control routes.

A stack lives if the process that its run file names lives: pid and start time.  The lock is never tried, for a try
would be in the way of an `up` that begins at the same moment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from kvstack.errors import KvstackError, NotReady, NotRunning, UsageError
from kvstack.process.identity import ProcessIdentity, is_alive
from kvstack.rundir import RunDir, RunFile, last_used, names, names_with_log
from kvstack.terminal import last_run

STATUS_TIMEOUT_S = 5.0
SILENCE_S = 30.0
"""A route that goes on says every second that it does."""
END_S = 2.0
"""Connections of a stack that is killed break before its process is gone."""
_HOST = re.compile(r"[^\s\x00-\x1f\x7f]+")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a control route answered."""

    ok: bool
    message: str
    data: dict[str, Any] | None


def stack_name(target: str) -> str:
    """
    The name that a command line's argument means: a config file's, or the argument itself.

    The file is read without checking it: a config that was broken after the start must not keep its stack from
    being seen and stopped.
    """
    path = Path(target)
    looks_like_path = target.endswith(".toml") or any(mark in target for mark in "/\\")
    if not looks_like_path:
        return target
    try:
        name = tomllib.loads(path.expanduser().read_text(encoding="utf-8")).get("name")
    except (OSError, ValueError):
        name = None
    return name if isinstance(name, str) and name else path.stem


def config_of(name: str) -> str | None:
    """The config file of the stack of that name, if one runs, or one was ended by an error or killed."""
    if not _safe(name):
        return None
    known = RunDir(name).read() or RunDir(name).read_end()
    return known.config_path if known is not None else None


def alive(run: RunFile) -> bool:
    """Whether the kvstack process of a run file lives."""
    return is_alive(ProcessIdentity(run.pid, run.started_s))


def find(target: str | None) -> RunFile:
    """
    The running stack that is meant.

    Args:
        target: A name, a config file's path, or None for the only running one.

    Raises:
        NotRunning: There is none; it says how the last one ended, if an error ended it.
        UsageError: None is named and several run.
    """
    if target is not None:
        name = stack_name(target)
        run = _read(name)
        if run is None:
            raise _none_named(name)
        if not alive(run):
            raise _stale(run)
        return run
    runs = [run for run in map(_read, names()) if run is not None]
    living = [run for run in runs if alive(run)]
    if len(living) > 1:
        listed = "\n".join(f"{run.name}  {run.proxy_url}  pid {run.pid}" for run in living)
        raise UsageError("Several stacks are running", listed, "Specify a name.")
    if living:
        return living[0]
    last = last_used() or ""
    killed = runs if len(runs) == 1 else [run for run in runs if run.name == last]
    told = last_run.told(last)
    if killed and told is None:
        raise _stale(killed[0])
    if told is None:
        raise NotRunning("No stack is running", "", "Start one: `kvstack up CONFIG`.")
    raise NotRunning("No stack is running", f"the last one: {told.how}", told.next_step)


def find_dir(target: str | None) -> tuple[RunDir, NotRunning | None]:
    """
    The directory of the stack that is meant, running or not: its log outlives it.

    Returns:
        The directory, and the reason why its stack does not run, if it does not.

    Raises:
        NotRunning: There is no trace of such a stack; it names the stacks whose logs are there.
        UsageError: None is named and several run.
    """
    try:
        return RunDir(find(target).name), None
    except NotRunning as error:
        candidates = [stack_name(target)] if target is not None else names()
        if len(candidates) == 1 and _safe(candidates[0]):
            directory = RunDir(candidates[0])
            if directory.log_path.exists():
                return directory, error
        logged = names_with_log()
        if not logged:
            raise
        there = f"available logs: {', '.join(logged)}"
        fact = f"{error.fact}\n{there}" if error.fact else there
        commands = ", ".join(f"`kvstack logs {name}`" for name in logged[:3])
        raise NotRunning(error.what, fact, f"To read the log of a stack that has ended, name it: {commands}.") from None


def fetch_status(run: RunFile) -> dict[str, Any]:
    """
    The stack's own account of itself, `GET /kvstack/status`, with the run file's token.

    Raises:
        NotReady: It does not answer.
        NotRunning: It ended meanwhile.
    """
    status, body = _talk(run, "GET", "/kvstack/status", STATUS_TIMEOUT_S, _token(run))
    data = _json_object(body)
    if status != http.client.OK or data is None:
        raise KvstackError(
            f"{run.name!r} did not report its status",
            f"HTTP {status} from {run.proxy_url}/kvstack/status",
            f"Is it this version of kvstack?  It reports {run.version}.",
        )
    return data


def act(run: RunFile, action: str, timeout_s: float) -> Answer:
    """
    Ask for an action, `POST /kvstack/<action>`, with the run file's token.

    Raises:
        NotReady: It does not answer in time.
        NotRunning: It ended meanwhile.
    """
    return _answer(run, action, *_talk(run, "POST", f"/kvstack/{action}", timeout_s, _token(run)))


def fetch(run: RunFile, path: str) -> Answer:
    """
    Read a control route, `GET /kvstack/<path>`, with the run file's token.

    Raises:
        NotReady: It does not answer in time.
        NotRunning: It ended meanwhile.
    """
    # A person typed a part of it.
    path = quote(path, safe="/?=&", errors="surrogateescape")
    return _answer(run, path, *_talk(run, "GET", f"/kvstack/{path}", STATUS_TIMEOUT_S, _token(run)))


@contextlib.contextmanager
def follow(run: RunFile, path: str) -> Iterator[Iterator[bytes]]:
    """
    Read a control route that goes on, `GET /kvstack/<path>`, with the run file's token.

    Returns:
        Its lines, each whole and with its end, until the stack ends.

    Raises:
        KvstackError: The stack refuses.
        NotReady: It does not answer, or no longer.
        NotRunning: It ended before it answered.
    """
    connection = _connection(run, SILENCE_S)
    try:
        try:
            connection.request("GET", f"/kvstack/{path}", headers=_token(run))
            response = connection.getresponse()
            refused = b"" if response.status == http.client.OK else response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _silent(run, error) from None
        if response.status != http.client.OK:
            raise KvstackError(
                f"The stack {run.name!r} refuses",
                _answer(run, path, response.status, refused).message,
                f"Is it this version of kvstack?  It reports {run.version}."
                if response.status == http.client.NOT_FOUND
                else "",
            )
        yield _lines(run, response)
    finally:
        connection.close()


def _lines(run: RunFile, response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            line = response.readline()
        except (OSError, http.client.HTTPException) as error:
            deadline = time.monotonic() + END_S
            while alive(run):
                if time.monotonic() > deadline:
                    raise _silent(run, error) from None
                time.sleep(0.05)
            return
        if not line.endswith(b"\n"):  # a line without its end is half a line
            return
        yield line


def _answer(run: RunFile, path: str, status: int, body: bytes) -> Answer:
    data = _json_object(body)
    if data is None:
        return Answer(False, f"HTTP {status} from {run.proxy_url}/kvstack/{path}", None)
    inner = data.get("data")
    return Answer(
        status < 300 and data.get("status") == "success",
        str(data.get("message") or f"HTTP {status}"),
        inner if isinstance(inner, dict) else None,
    )


def _token(run: RunFile) -> dict[str, str]:
    return {"Authorization": f"Bearer {run.token}"}


def _talk(run: RunFile, method: str, path: str, timeout_s: float, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = _connection(run, timeout_s)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _silent(run, error) from None
    finally:
        connection.close()


def _connection(run: RunFile, timeout_s: float) -> http.client.HTTPConnection:
    host, port = _address(run)
    if not _TOKEN.fullmatch(run.token):  # which is a secret: it is not shown
        raise _broken(run, "its token cannot be sent in a header")
    return http.client.HTTPConnection(host, port, timeout=timeout_s)


def _silent(run: RunFile, error: Exception) -> KvstackError:
    told = last_run.told(run.name, run.pid)
    if told is not None:
        return NotRunning(f"The stack {run.name!r} has just ended", told.how, told.next_step)
    if not alive(run):
        return NotRunning(
            f"The stack {run.name!r} has just ended", f"pid {run.pid}", f"Start it: `kvstack up {run.config_path}`."
        )
    return NotReady(
        f"The stack {run.name!r} does not answer",
        f"{run.proxy_url} (pid {run.pid}): {str(error) or type(error).__name__}",
        "It may be starting or stopping" + ("." if run.attached else f"; see `kvstack logs {run.name}`."),
    )


def _address(run: RunFile) -> tuple[str, int]:
    try:
        url = urlsplit(run.proxy_url)
        host, port = url.hostname or "", url.port or 80
        host.encode("idna")
    except ValueError as error:  # a port that is none, half an IPv6 address, a name that cannot be looked up
        raise _broken(run, f"proxy_url {run.proxy_url!r}: {error}") from None
    if url.scheme != "http" or not _HOST.fullmatch(host):
        raise _broken(run, f"proxy_url {run.proxy_url!r} is not an http:// address")
    if host in {"0.0.0.0", "::"}:  # an address to listen on is none to connect to
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return host, port


def _broken(run: RunFile, why: str) -> NotReady:
    # Not ready and no other kind: `kvstack down` then ends it by its pid.
    return NotReady(
        f"The run file of the stack {run.name!r} is broken",
        f"{RunDir(run.name).path / 'run.json'}: {why}",
        f"Stop the stack with `kvstack down {run.name}`, which ends pid {run.pid}, and start it again: "
        f"`kvstack up {run.config_path}`.",
    )


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        data: Any = json.loads(body)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _safe(name: str) -> bool:
    # A name becomes a directory's name: one that leads elsewhere is nobody's stack.
    return bool(name) and not name.startswith(".") and not any(mark in name for mark in "/\\:\0")


def _read(name: str) -> RunFile | None:
    return RunDir(name).read() if _safe(name) else None


def _stale(run: RunFile) -> NotRunning:
    killed = f"its run file names pid {run.pid}, which ended without cleaning up (killed, or the machine restarted)"
    return NotRunning(
        f"The stack {run.name!r} is not running",
        "\n".join([killed, *last_run.last_written(run.name, run.begun_s)]),
        f"Start it again: `kvstack up {run.config_path}`.",
    )


def _none_named(name: str) -> NotRunning:
    told = last_run.told(name) if _safe(name) else None
    facts = [f"the last one: {told.how}"] if told is not None else []
    others = _others(name)
    return NotRunning(
        f"No stack named {name!r} is running",
        "\n".join([*facts, others] if others else facts),
        "Start it: `kvstack up CONFIG`." if told is None else told.next_step,
    )


def _others(name: str) -> str:
    living = [run.name for run in map(_read, names()) if run is not None and run.name != name and alive(run)]
    return f"running: {', '.join(living)}" if living else ""
