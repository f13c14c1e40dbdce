"""A whole stack as a user runs it: `kvstack up` in a process of its own, asked over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_ports

__all__ = ["RunningStack", "free_ports", "post", "run_stack", "write_config"]

START_TIMEOUT_S = 60.0


def post(
    port: int, path: str, body: object, headers: dict[str, str] | None = None, timeout_s: float = 120.0
) -> tuple[int, Any]:
    """Send a JSON request on a connection of its own; give status and decoded answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def get(port: int, path: str, timeout_s: float = 10.0, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Read a JSON resource."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


def write_config(directory: Path, name: str, server: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """Write a config file; values are given as Python's and written as TOML."""
    lines = [f'name = "{name}"']
    for section, values in {"server": server, **sections}.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class RunningStack:
    """A `kvstack up` that runs."""

    def __init__(self, process: subprocess.Popen[str], name: str, proxy_port: int, server_port: int) -> None:
        self.process = process
        self.name = name
        self.proxy_port = proxy_port
        self.server_port = server_port
        self.headers: dict[str, str] = {}

    def status(self) -> dict[str, Any]:
        """What `GET /kvstack/status` says."""
        _, data = get(self.proxy_port, "/kvstack/status", headers=self.headers)
        assert isinstance(data, dict)
        return data

    def wait_for(self, state: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait until the stack is in a state."""
        deadline = time.monotonic() + timeout_s
        last: object = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"kvstack ended with {self.process.returncode}:\n{self.output()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                last = self.status()
                if isinstance(last, dict) and last["state"] == state:
                    return last
            time.sleep(0.05)
        raise AssertionError(f"not {state} after {timeout_s} s: {last}")

    def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Wait until so many requests are settled: the log, which has figures too, may lag behind the answers."""
        deadline = time.monotonic() + timeout_s
        rows: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            rows = [row for row in self.status()["requests"] if row["verdict"] is not None]
            if len(rows) >= count and all(row["settled"] for row in rows):
                break
            time.sleep(0.05)
        return rows

    def log(self) -> str:
        """The llama-server's raw log."""
        return (Path(os.environ["KVSTACK_STATE_DIR"]) / self.name / "server.log").read_text("utf-8", "replace")

    def verb(self, verb: str, *arguments: str) -> dict[str, Any]:
        """Run a verb for this stack; give what it printed as JSON."""
        command = [sys.executable, "-m", "kvstack", verb, self.name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        data = json.loads(done.stdout)
        assert isinstance(data, dict)
        return data

    def output(self) -> str:
        """What kvstack has printed; only after its end."""
        out, err = self.process.communicate(timeout=10)
        return f"--- stdout\n{out}\n--- stderr\n{err}"

    def stop(self, timeout_s: float = 30.0) -> int:
        """Press Ctrl-C and wait for the end; everything that was started must be gone."""
        tree = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout_s)
        left = [pid for pid in tree if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        assert left == [], f"still there: {left}"
        return code


@contextlib.contextmanager
def run_stack(
    directory: Path,
    server: dict[str, Any],
    *,
    name: str = "box",
    ready: bool = True,
    arguments: tuple[str, ...] = (),
    **sections: dict[str, Any],
) -> Iterator[RunningStack]:
    """Start a stack on free ports; stop it, or at least end its processes, on the way out."""
    proxy_port, server_port = free_ports(2)
    sections = {"proxy": {}, **sections}
    sections["proxy"] = {"port": proxy_port, **sections["proxy"]}
    if "url" not in server:
        server = {"port": server_port, "threads": 1, **server}
    config = write_config(directory, name, server, **sections)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstack", "up", str(config), "--no-dashboard", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack = RunningStack(process, name, proxy_port, server_port)
    if "api_key" in sections["proxy"]:
        stack.headers["X-Api-Key"] = sections["proxy"]["api_key"]
    try:
        if ready:
            stack.wait_for("ready")
        yield stack
        if process.poll() is None:
            stack.stop()
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait(10)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
