"""What a stack writes of itself for other terminals, and how that reads as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class RunFile:
    """
    What another terminal needs to find and to trust a running stack.

    Attributes:
        name: The stack's name.
        pid: Process id of kvstack.
        started_s: Start time of that process as `kvstack.process.identity` gives it, in seconds: a pid alone may be
            somebody else's by now.
        proxy_url: Base URL of the proxy and the control routes.
        token: Secret for the routes that act.
        config_path: The config file, absolute.
        log_path: The raw log of the llama-server.
        version: Version of kvstack.
        server_pid: Process id of the llama-server, or None (attached, or between two starts).
        server_started_s: Its start time.
        server_argv0: Its program, as it was started.
        attached: Whether the llama-server is somebody else's, which keeps its own log.
        begun_s: When the stack was started, in seconds since the epoch; None if an older kvstack wrote the file.
    """

    name: str
    pid: int
    started_s: float
    proxy_url: str
    token: str
    config_path: str
    log_path: str
    version: str
    server_pid: int | None = None
    server_started_s: float | None = None
    server_argv0: str | None = None
    attached: bool = False
    begun_s: float | None = None

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunFile | None:
        """
        Read a run file's text.

        Returns:
            None if the text is none that any kvstack wrote (half written by a full disk, edited by hand).
        """
        return _from_json(cls, text)


@dataclass(frozen=True, slots=True)
class EndFile:
    """
    How a stack ended that an error ended: for who asks for it later, in another terminal.

    Attributes:
        name: The stack's name.
        pid: Process id that kvstack had.
        begun_s: When it was started, in seconds since the epoch.
        ended_s: When it ended, in seconds since the epoch.
        config_path: The config file, absolute.
        what: The error's first part.
        fact: Its second.
        next_step: Its third.
    """

    name: str
    pid: int
    begun_s: float
    ended_s: float
    config_path: str
    what: str
    fact: str
    next_step: str

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> EndFile | None:
        """
        Read such a file's text.

        Returns:
            None if the text is none that any kvstack wrote.
        """
        return _from_json(cls, text)


_File = TypeVar("_File", RunFile, EndFile)
_KINDS: dict[str, tuple[type, ...]] = {
    "pid": (int,),
    "started_s": (int, float),
    "begun_s": (int, float, type(None)),
    "ended_s": (int, float),
    "server_pid": (int, type(None)),
    "server_started_s": (int, float, type(None)),
    "server_argv0": (str, type(None)),
    "attached": (bool,),
}


def _from_json(cls: type[_File], text: str) -> _File | None:
    try:
        data: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    # A newer kvstack may add fields; a missing or mistyped one is no file of ours.
    known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
    if not all(isinstance(value, _KINDS.get(name, (str,))) for name, value in known.items()):
        return None
    try:
        return cls(**known)
    except TypeError:
        return None
