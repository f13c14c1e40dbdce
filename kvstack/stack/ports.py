"""Ports of a stack: taken before anything is started, with the holder's name if somebody has them."""

from __future__ import annotations

import socket

from kvstack.config.model import Config
from kvstack.errors import AlreadyRunning, KvstackError, PortTaken
from kvstack.process.identity import ProcessIdentity, is_alive, port_owners
from kvstack.proxy.serve import bind
from kvstack.rundir import RunDir, names


def take_ports(config: Config) -> socket.socket:
    """
    Take the proxy's port, and see that the server's is free.

    Raises:
        KvstackError: One of them cannot be had; see `take_port`.
    """
    if not config.attached:
        take_port(config.server.host, config.server.port, "server").close()
    return take_port(config.proxy.host, config.proxy.port, "proxy")


def refusal(config: Config) -> KvstackError | None:
    """With what a start would be refused now for its ports; None if it would not be."""
    try:
        take_ports(config).close()
    except KvstackError as error:
        return error
    return None


def take_port(host: str, port: int, section: str) -> socket.socket:
    """
    Take a port now, and say who has it if it is taken.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        section: Whose port it is, `proxy` or `server`, as the config names it.

    Raises:
        AlreadyRunning: Another kvstack holds it.
        PortTaken: Somebody else does.
        KvstackError: It cannot be opened.
    """
    try:
        return bind(host, port, section)
    except PortTaken:
        owners = port_owners(port) or set()
        for name in names():
            run = RunDir(name).read()
            if run is None or not owners & {run.pid, run.server_pid}:
                continue
            if is_alive(ProcessIdentity(run.pid, run.started_s)):
                raise AlreadyRunning(
                    f"The {section}'s port {port} is used by the stack {name!r}",
                    f"pid {run.pid}, {run.proxy_url}, {run.config_path}",
                    f"Stop it with `kvstack down {name}`, or choose another port: `--set {section}.port=...`.",
                ) from None
        raise
