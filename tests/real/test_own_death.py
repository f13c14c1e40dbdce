"""What becomes of the llama-server when kvstack itself is killed, loses its terminal, or its disk is full."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstack.rundir import RunDir
from tests.integration.terminal.pseudo_terminal import run_in_terminal
from tests.real.stacks import free_ports, post, run_stack, write_config

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's"),
]

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture
def server(llama_server: Path, model_path: dict[str, Path]) -> dict[str, Any]:
    """A small server."""
    return {"binary": str(llama_server), "model": str(model_path["dense"]), "ctx_size": 4096, "threads": 1}


def lives(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_free(port: int) -> bool:
    """Whether nobody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def test_killed_and_started_again(tmp_path: Path, server: dict[str, Any]) -> None:
    """After `kill -9` of kvstack the server is gone at once, and the same stack starts again."""
    with run_stack(tmp_path, server) as stack:
        pid = stack.status()["server"]["pid"]
        stack.process.kill()
        stack.process.wait(10)
        until(lambda: not lives(pid), 3)
        until(lambda: is_free(stack.server_port), 3)
        assert is_free(stack.proxy_port)
        left = RunDir("box").read()
        assert left is not None
        assert left.server_pid == pid
        with run_stack(tmp_path, {**server, "port": stack.server_port}) as again:
            status = again.status()
            assert status["state"] == "ready"
            assert status["server"]["pid"] != pid
            assert not [notice for notice in status["notices"] if "killed run" in notice["text"]]
        assert RunDir("box").read() is None


def test_what_is_left_is_swept(tmp_path: Path, server: dict[str, Any]) -> None:
    """What the server had started in another session outlives a `kill -9`, and is ended by the next start."""
    script = tmp_path / "wrapper"
    nap = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *--port*) setsid {sys.executable} -c "{nap}" & echo $! > {tmp_path}/left ;; esac\n'
        f'exec {server["binary"]} "$@"\n'
    )
    script.chmod(0o755)
    wrapped = {**server, "binary": str(script), "stop_timeout_s": 1.0}
    with run_stack(tmp_path, wrapped) as stack:
        left = int((tmp_path / "left").read_text())
        stack.process.kill()
        stack.process.wait(10)
        time.sleep(0.3)
        assert lives(left)
        with run_stack(tmp_path, {**wrapped, "port": stack.server_port}) as again:
            assert not lives(left)
            assert [notice for notice in again.status()["notices"] if "killed run" in notice["text"]]
            newer = int((tmp_path / "left").read_text())
            assert lives(newer)
        assert not lives(newer)


def test_closed_terminal(tmp_path: Path, server: dict[str, Any]) -> None:
    """When its terminal is closed, kvstack stops in order: the server ends, the run file goes."""
    proxy_port, server_port = free_ports(2)
    config = write_config(tmp_path, "box", {"port": server_port, **server}, proxy={"port": proxy_port})
    with run_in_terminal([sys.executable, "-m", "kvstack", "up", str(config)], 100, 30) as terminal:
        until(lambda: (run := RunDir("box").read()) is not None and run.server_pid is not None, 20)
        terminal.wait_for(lambda lines: any("READY" in line for line in lines))
        run = RunDir("box").read()
        assert run is not None
        assert run.server_pid is not None
        os.killpg(terminal.process.pid, signal.SIGHUP)  # what the kernel sends when the terminal goes
        assert terminal.process.wait(20) == 143
        assert not lives(run.server_pid)
        assert RunDir("box").read() is None
    assert is_free(server_port)


def test_full_disk(tmp_path: Path, server: dict[str, Any]) -> None:
    """When nothing can be written any more, requests are answered, the loss is told, and the stop is in order."""
    with run_stack(tmp_path, server) as stack:
        resource.prlimit(stack.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        status, _ = post(stack.proxy_port, CHAT, BODY)
        assert status == 200
        until(lambda: any("raw log" in notice["text"] for notice in stack.status()["notices"]), 10)
        pid = stack.status()["server"]["pid"]
        psutil.Process(pid).kill()  # the run file of the next server cannot be written either
        until(lambda: stack.status()["server"]["pid"] not in {pid, None}, 20)
        stack.wait_for("ready")
        status, _ = post(stack.proxy_port, CHAT, BODY)
        assert status == 200
        assert stack.stop() == 130
    assert is_free(stack.server_port)
