"""The verbs against running stacks, each verb in a process of its own, as a person runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstack.rundir import RunDir
from kvstack.state.explain import reason_words
from kvstack.state.records import ProxyView
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import decode, encode
from tests.real.stacks import free_ports, get, post, run_stack, write_config

pytestmark = pytest.mark.timeout(120)
real = pytest.mark.real
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}


def kvstack(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvstack", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def envelope(*arguments: str) -> dict[str, Any]:
    """Run one command with --json; its stdout must be one envelope, its stderr empty."""
    result = kvstack(*arguments, "--json")
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    assert data["exit_code"] == result.returncode
    return data


def real_config(tmp_path: Path, server: Path, model: Path, name: str = "box") -> tuple[Path, int]:
    """A stack over a real server."""
    proxy_port, server_port = free_ports(2)
    settings = {"binary": str(server), "model": str(model), "port": server_port, "threads": 1, "ctx_size": 8192}
    warmup = {"system_prompt": "You are a helpful assistant."}
    return write_config(tmp_path, name, settings, proxy={"port": proxy_port}, warmup=warmup), proxy_port


@contextlib.contextmanager
def ended_after(name: str) -> Iterator[None]:
    """Whatever happens, the background stack of that name is gone in the end."""
    try:
        yield
    finally:
        run = RunDir(name).read()
        if run is not None and psutil.pid_exists(run.pid):
            process = psutil.Process(run.pid)
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


@real
def test_a_life_in_the_background(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Started with `up -d --wait`, seen, used, followed and stopped by the other verbs; nothing is left."""
    config, port = real_config(tmp_path, llama_server, model_path["dense"])
    with ended_after("box"):
        up = kvstack("up", "-d", "--wait", str(config))
        assert (up.returncode, up.stdout) == (0, "")
        assert f"box is ready after 0 s: http://127.0.0.1:{port}" in up.stderr or "box is ready after" in up.stderr

        follower = subprocess.Popen(
            [sys.executable, "-m", "kvstack", "logs", "-f", "-n", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        time.sleep(1.0)
        assert post(port, CHAT, HELLO)[0] == 200
        time.sleep(1.0)

        status = envelope("status")
        assert (status["kvstack_result_version"], status["command"], status["status"]) == (2, "status", "success")
        assert (status["data"]["state"], len(status["data"]["requests"])) == ("ready", 1)
        assert status["data"] == get(port, "/kvstack/status")[1] | {"server": status["data"]["server"]}
        family = psutil.Process(status["data"]["server"]["pid"])
        for target in ("box", str(config)):
            assert envelope("status", target)["data"]["name"] == "box"
        text = kvstack("status")
        assert (text.returncode, text.stderr) == (0, "")
        assert "\x1b" not in text.stdout
        row = status["data"]["requests"][0]
        for word in ("READY", row["verdict"], f"{row['tokens']['prompt']}", "sim_best"):
            assert word in text.stdout

        warm = envelope("warmup")
        assert warm["data"]["outcome"] == "done"
        tokens = warm["data"]["boundary_tokens"]
        assert f"box: {tokens} tokens restored from a snapshot in " in kvstack("warmup", "box").stdout

        lines = envelope("logs", "-n", "3")["data"]["lines"]
        assert len(lines) == 3
        assert kvstack("logs", "-n", "3").stdout.count("\n") == 3

        second = kvstack("up", "-d", str(config))
        assert second.returncode == 4
        assert "error: A stack named 'box' is already running" in second.stderr
        assert kvstack("status").returncode == 0

        down = kvstack("down")
        assert (down.returncode, down.stderr) == (0, "")
        assert down.stdout.startswith("box stopped after ")
        assert not family.is_running()
        said, talked = follower.communicate(timeout=10)
        assert b"stop processing" in said or b"print_timing" in said
        assert b"box has ended" in talked
        assert follower.returncode == 0
        for verb in ("status", "down", "warmup"):
            gone = kvstack(verb, "box")
            assert (gone.returncode, gone.stderr.splitlines()[1]) == (4, "next:  Start it: `kvstack up CONFIG`.")
        after = kvstack("logs", "box", "-n", "2")
        assert (after.returncode, after.stdout.count("\n")) == (4, 2)


@real
def test_a_death_in_the_background_is_told_afterwards(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """Whoever watches is told why it ended, and whoever asks later too, with the file of what `up` said."""
    config, _ = real_config(tmp_path, llama_server, model_path["dense"])
    with ended_after("box"):
        overrides = ("--set", "server.max_restarts=0", "--set", "warmup.enabled=false")
        assert kvstack("up", "-d", "--wait", str(config), *overrides).returncode == 0
        watching = [
            subprocess.Popen([sys.executable, "-m", "kvstack", *verb], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for verb in (("status", "--watch"), ("logs", "-f", "-n", "0"))
        ]
        time.sleep(1.0)
        run = RunDir("box").read()
        assert run is not None
        assert run.server_pid is not None
        os.kill(run.server_pid, signal.SIGKILL)
        talks = [one.communicate(timeout=30)[1].decode() for one in watching]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(run.pid).wait(30)
        said = RunDir("box").path / "up.log"
        what = said.read_text().rpartition("error: ")[2].splitlines()[0]
        assert "SIGKILL" in said.read_text()
        for verb in (("status",), ("down", "box"), ("logs",), ("warmup", "box")):
            result = kvstack(*verb)
            assert result.returncode == 4
            talks.append(result.stderr)
        for talk in talks:
            assert what in talk
            assert "server.max_restarts is 0" in talk
            assert str(said) in talk
            assert "'box' ended 20" in talk


@real
def test_request_lines_are_the_status(llama_server: Path, model_path: dict[str, Path], tmp_path: Path) -> None:
    """Each request gives one plain line on stdout, with the figures of the status; talk is on stderr alone."""
    settings = {"binary": str(llama_server), "model": str(model_path["dense"]), "ctx_size": 8192}
    with run_stack(tmp_path, settings) as stack:
        for _ in range(2):
            assert post(stack.proxy_port, CHAT, HELLO)[0] == 200
        assert post(stack.proxy_port, "/v1/responses", {"input": "Hello.", "max_output_tokens": 4})[0] == 200
        stack.wait_for_requests(3)
        time.sleep(0.5)
        status = stack.status()
        rows = status["requests"]
        stack.process.send_signal(signal.SIGINT)
        out, err = stack.process.communicate(timeout=20)
    assert stack.process.returncode == 130
    wanted = []
    for row in rows:
        similarity = row["lcp_similarity_ratio"]
        stripped = row["stripped"]
        line = (
            f"POST {row['path']} | items={row['items']} | ts_removed={stripped['ts_removed']}"
            f" | msg_ids_removed={stripped['msg_ids_removed']} | items_modified={stripped['items_modified']}"
            f" | stream={row['stream']} | sim_best={'-' if similarity is None else f'{similarity:.3f}'}"
            f" | cached={row['tokens']['cached']} | evaluated={row['tokens']['evaluated']} | {row['verdict']}"
        )
        known = decode(StackState, status).row(row["id"])
        assert known is not None
        why = reason_words(known)
        wanted.append(line if why is None else f"{line} | why={why}")
    assert out.splitlines() == wanted
    assert len(wanted) == 3
    for word in ("loading", "ready", f"base URL http://127.0.0.1:{stack.proxy_port}/v1", "stopping", "box ended after"):
        assert word in err
    assert "\x1b" not in out + err


@real
def test_a_failure_in_the_background_is_told_in_front(llama_server: Path, tmp_path: Path) -> None:
    """`up -d --wait` of a model that cannot be loaded says what `up` says, with the same exit code."""
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))  # a whole file, of no model
    config, _ = real_config(tmp_path, llama_server, model)
    front = kvstack("up", "--no-dashboard", str(config))
    back = kvstack("up", "-d", "--wait", str(config))
    # Once in a while llama-server ends without having printed its log, so that the two may know different reasons.
    for result in (front, back):
        assert result.returncode == 3
        assert result.stderr.count("error: ") >= 1
        assert "\n  exit status 1\n" in result.stderr
        assert "\nnext:  " in result.stderr
        assert "Traceback" not in result.stderr
    told = back.stderr[back.stderr.index("error: ") :].strip()
    assert (RunDir("box").path / "up.log").read_text("utf-8").strip().endswith(told)
    assert envelope("status")["exit_code"] == 4


def test_an_early_failure_in_the_background(tmp_path: Path) -> None:
    """Without --wait too, a stack that cannot even begin is reported at once."""
    settings = {"binary": str(tmp_path / "nothing"), "model": str(tmp_path / "none.gguf")}
    config = write_config(tmp_path, "box", settings, proxy={"port": free_ports(1)[0]})
    result = kvstack("up", "-d", str(config))
    assert result.returncode == 3
    assert result.stderr.startswith("error: ")
    assert "\nnext:  " in result.stderr
    assert kvstack("status").returncode == 4
    assert not RunDir("box").path.exists(), "a stack that never began has no directory"


def test_what_a_background_stack_says_is_for_its_owner_alone(hanging: _HangingServer, tmp_path: Path) -> None:
    """Its output may hold what users wrote, as the log may; a file of an older run is closed to others too."""
    port = free_ports(1)[0]
    config = write_config(tmp_path, "box", {"url": f"http://127.0.0.1:{hanging.server_port}"}, proxy={"port": port})
    said = RunDir("box").path / "up.log"
    said.parent.mkdir(parents=True)
    said.write_text("earlier\n")
    said.chmod(0o644)
    with ended_after("box"):
        assert kvstack("up", "-d", "--wait", str(config), "--set", "warmup.enabled=false").returncode == 0
        assert stat.S_IMODE(said.stat().st_mode) == 0o600
        assert said.read_text().startswith("earlier\n")
        assert kvstack("down", "box").returncode == 0


def test_waiting_in_front_says_for_what(tmp_path: Path) -> None:
    """Of a server that is not there `loading` would be a riddle: its address is said."""
    upstream, port = free_ports(2)
    config = write_config(tmp_path, "gone", {"url": f"http://127.0.0.1:{upstream}"}, proxy={"port": port})
    with ended_after("gone"):
        up = subprocess.Popen(
            [sys.executable, "-m", "kvstack", "up", "-d", "--wait", str(config)], stderr=subprocess.PIPE, text=True
        )
        assert up.stderr is not None
        line = up.stderr.readline()
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 130
        up.stderr.close()
        assert kvstack("down", "gone").returncode == 0
    assert f"waiting until the llama-server at http://127.0.0.1:{upstream} answers" in line


class _Hanging(BaseHTTPRequestHandler):
    """A server that is healthy and never answers a request for the model."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"status":"ok"}' if self.path.startswith("/health") else b"{}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        assert isinstance(self.server, _HangingServer)
        self.server.asked.set()
        self.server.released.wait(60)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _HangingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hanging)
        self.asked = threading.Event()
        self.released = threading.Event()


@pytest.fixture
def hanging() -> Iterator[_HangingServer]:
    """An upstream that hangs."""
    server = _HangingServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


@contextlib.contextmanager
def request_in_flight(port: int, hanging: _HangingServer) -> Iterator[None]:
    """A client that waits for its answer."""
    body = json.dumps(HELLO).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert hanging.asked.wait(20)
        yield


def test_a_second_ctrl_c_kills(hanging: _HangingServer, tmp_path: Path) -> None:
    """The first Ctrl-C lets an open request go on, the second ends everything at once."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}", "stop_timeout_s": 30}
    with (
        run_stack(tmp_path, settings, warmup={"enabled": False}) as stack,
        request_in_flight(stack.proxy_port, hanging),
    ):
        stack.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            stack.process.wait(2)
        begun = time.monotonic()
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(10) == 130
        assert time.monotonic() - begun < 5


def test_down_kills_after_its_timeout(hanging: _HangingServer, tmp_path: Path) -> None:
    """A stack that is still waiting for its streams when `down --timeout` is over is killed."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}", "stop_timeout_s": 30}
    with (
        run_stack(tmp_path, settings, warmup={"enabled": False}) as stack,
        request_in_flight(stack.proxy_port, hanging),
    ):
        data = envelope("down", "--timeout", "1")["data"]
        assert data["killed"] is True
        assert 1.0 <= data["took_s"] < 10
        stack.process.wait(10)


def test_a_stack_that_is_not_ready(tmp_path: Path) -> None:
    """While there is no server yet, status shows the stack and exits 3; warmup says why not; down ends it."""
    settings = {"url": f"http://127.0.0.1:{free_ports(1)[0]}"}
    with run_stack(tmp_path, settings, ready=False) as stack:
        deadline = time.monotonic() + 20
        while RunDir("box").read() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        data = envelope("status")
        assert (data["status"], data["exit_code"]) == ("error", 3)
        assert data["data"]["state"] in {"starting", "loading", "backoff"}
        assert data["errors"][0]["what"] == "The stack 'box' is not ready"
        text = kvstack("status")
        assert text.returncode == 3
        assert data["data"]["state"].upper() in text.stdout
        assert text.stderr.startswith("error: The stack 'box' is not ready\n")
        assert kvstack("warmup").returncode == 3
        assert kvstack("down").returncode == 0
        assert stack.process.wait(10) == 0


def test_a_stopped_process_is_no_stack_that_answers(hanging: _HangingServer, tmp_path: Path) -> None:
    """A kvstack that is suspended is alive but does not answer: status says so after a few seconds."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    with run_stack(tmp_path, settings, warmup={"enabled": False}) as stack:
        stack.process.send_signal(signal.SIGSTOP)
        try:
            result = kvstack("status")
            assert result.returncode == 3
            assert "does not answer" in result.stderr
        finally:
            stack.process.send_signal(signal.SIGCONT)


def test_watch_in_a_pipe(hanging: _HangingServer, tmp_path: Path) -> None:
    """`status --watch` in a pipe gives lines, with --json one envelope per line, until Ctrl-C."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    with run_stack(tmp_path, settings, warmup={"enabled": False}) as stack:
        command = [sys.executable, "-m", "kvstack", "status", "--watch"]
        lines = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        envelopes = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert envelopes.stdout is not None
        first = json.loads(envelopes.stdout.readline())  # while it goes on: each line is flushed
        assert (first["command"], first["data"]["state"]) == ("status", "ready")
        with request_in_flight(stack.proxy_port, hanging):
            time.sleep(1.0)
        stack.wait_for_requests(1)
        time.sleep(1.5)
        lines.send_signal(signal.SIGINT)
        out, err = lines.communicate(timeout=10)
        assert lines.returncode == 130
        assert out.count("\n") == 1
        assert out.startswith(f"POST {CHAT} | items=1 | ")
        assert "| CANCELLED" in out
        assert err.startswith("ready")
        assert stack.stop() == 130
        out, err = envelopes.communicate(timeout=10)
        assert (envelopes.returncode, err) == (4, "")
        *seen, last = [json.loads(line) for line in out.splitlines()]
        assert [one["data"]["requests"][0]["verdict"] for one in seen if (one["data"] or {}).get("requests")][
            -1
        ] == "CANCELLED"
        assert (last["status"], last["exit_code"], last["data"]) == ("error", 4, None)


def test_rules_of_a_running_stack_are_what_it_applies(hanging: _HangingServer, tmp_path: Path) -> None:
    """Switched off by --set, or in a file that was changed since: what is in force is listed, not what is written."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    switched_off = ("--set", "proxy.strip_timestamps=false", "--set", 'rules.disable=["pi.date"]')
    with run_stack(tmp_path, settings, warmup={"enabled": False}, arguments=switched_off):
        # Its own file is what `--set` made it differ from.
        assert {"openclaw.timestamps", "pi.date"} <= set(envelope("rules", "list", "box")["data"]["file_differs"])
        (tmp_path / "box.toml").write_text("this is no config any more")
        for target in ((), ("box",), (str(tmp_path / "box.toml"),)):
            data = envelope("rules", "list", *target)["data"]
            active = {rule["name"]: rule["active"] for rule in data["rules"]}
            assert data["stack"] == "box"
            assert (active["openclaw.timestamps"], active["pi.date"]) == (False, False)
            assert all(rule["hits"] == 0 for rule in data["rules"])
            assert data["file_differs"] is None
        text = kvstack("rules", "list").stdout
        assert f"has read {tmp_path / 'box.toml'} before: that cannot be used now" in text
        assert "off  openclaw.timestamps" in text
        assert f"{sum(active.values())} on in the running stack 'box'" in text


def test_a_reader_that_leaves_does_not_end_the_stack(hanging: _HangingServer, tmp_path: Path) -> None:
    """With stdout and stderr closed by their readers, the stack serves on."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    with run_stack(tmp_path, settings, warmup={"enabled": False}) as stack:
        assert stack.process.stdout is not None
        assert stack.process.stderr is not None
        stack.process.stdout.close()
        stack.process.stderr.close()
        with request_in_flight(stack.proxy_port, hanging):
            time.sleep(0.2)
        stack.wait_for_requests(1)
        time.sleep(1.5)
        assert stack.status()["state"] == "ready"
        assert stack.stop() == 130


def test_a_full_pipe_does_not_stall_the_stack(hanging: _HangingServer, tmp_path: Path) -> None:
    """Nobody reads the plain lines: the pipe is full, and requests are still served at once."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    with run_stack(tmp_path, settings, warmup={"enabled": False}) as stack:
        path = "/v1/chat/completions?" + "x" * 4000
        hanging.released.set()  # from now on it closes the connection at once: each request fails, with a line each
        for _ in range(40):
            with contextlib.suppress(OSError):
                post(stack.proxy_port, path, HELLO)
        begun = time.monotonic()
        assert len(stack.status()["requests"]) >= 40
        assert time.monotonic() - begun < 2
        stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait(20) == 143


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk(tmp_path: Path) -> None:
    """Data that cannot be written is an error, told without a traceback."""
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvstack", "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr


def test_head_of_a_pipe() -> None:
    """A reader that takes nothing ends the verb quietly."""
    directory = RunDir("box")
    directory.path.mkdir(parents=True)
    directory.log_path.write_bytes(b"line\n" * 200_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstack", "logs", "box", "-n", "200000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) != 0
    assert b"Traceback" not in said
    assert b"Exception ignored" not in said


def test_data_keys_that_others_script_against(hanging: _HangingServer, tmp_path: Path) -> None:
    """The published names are there; what is not known is null."""
    settings = {"url": f"http://127.0.0.1:{hanging.server_port}"}
    with run_stack(tmp_path, settings, warmup={"enabled": False}) as stack:
        with request_in_flight(stack.proxy_port, hanging):
            time.sleep(0.2)
        stack.wait_for_requests(1)
        data = envelope("status", "box")["data"]
        RunDir("box").log_path.write_text("of an earlier run\n")
        for more in ((), ("-f",), ("-f", "-n", "0")):  # at once: there will never be a log
            logs = kvstack("logs", "box", *more, timeout_s=10)
            assert (logs.returncode, logs.stdout) == (1, "")
            assert logs.stderr.startswith("error: The stack 'box' has no log\n")
            assert "attached" in logs.stderr
            assert f"{RunDir('box').log_path} is from an earlier run" in logs.stderr
            assert "\nnext:  " in logs.stderr
    assert data["proxy"]["url"] == f"http://127.0.0.1:{stack.proxy_port}"
    assert {"url", "pid", "build", "ctx_per_slot", "device"} <= data["server"].keys()
    assert data["server"]["pid"] is None
    assert {"requests", "prompt_tokens", "cached_tokens", "evaluated_tokens"} <= data["totals"].keys()
    row = data["requests"][0]
    assert row.keys() >= {"id", "path", "lcp_similarity_ratio", "verdict", "tokens", "timing", "change", "stripped"}
    assert row["tokens"].keys() >= {"prompt", "cached", "evaluated", "reuse_ratio"}
    assert row["timing"].keys() >= {"prefill_ms", "ttft_ms", "decode_tokens_per_s"}
    assert row["stripped"].keys() == {"ts_removed", "msg_ids_removed", "items_modified", "rules"}
    unknown = (row["tokens"]["cached"], row["tokens"]["evaluated"], row["timing"]["prefill_ms"])
    assert (*unknown, row["lcp_similarity_ratio"]) == (None, None, None, None)
    assert data.keys() >= encode(StackState("x", ProxyView("y"))).keys()


def test_environment_of_the_verbs_is_not_the_stack(tmp_path: Path) -> None:
    """State of other directories is other stacks: nothing is found across them."""
    other = {**os.environ, "KVSTACK_STATE_DIR": str(tmp_path / "elsewhere")}
    result = subprocess.run(
        [sys.executable, "-m", "kvstack", "status"], env=other, capture_output=True, text=True, check=False
    )
    assert result.returncode == 4
