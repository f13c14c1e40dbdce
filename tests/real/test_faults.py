"""What goes wrong at and after the start: three-part messages, documented exit codes, no process left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.real.stacks import free_ports, get, post, run_stack, write_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

CONFIGS = Path(__file__).parents[2] / "configs"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def kvstack(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvstack", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
        check=False,
    )


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Whatever a test starts is gone at its end, grandchildren of our children included."""
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
        servers = [
            process.pid
            for process in psutil.process_iter(["name"])
            if process.info["name"] == "llama-server" and os.environ["KVSTACK_STATE_DIR"] in _environment(process)
        ]
        if not left and not servers:
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {left} {servers}")


def _environment(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("KVSTACK_STATE_DIR"))
    except psutil.Error:
        return ""


@pytest.fixture
def server(llama_server: Path, model_path: dict[str, Path]) -> dict[str, Any]:
    """A small server."""
    return {"binary": str(llama_server), "model": str(model_path["dense"]), "ctx_size": 4096, "threads": 1}


def assert_three_parts(result: subprocess.CompletedProcess[str], code: int, *evidence: str) -> None:
    """The exit code, and a message with what, fact and next step; no traceback."""
    assert result.returncode == code, result.stderr
    assert "error: " in result.stderr
    assert "next:" in result.stderr
    assert "Traceback" not in result.stderr
    for text in evidence:
        assert text in result.stderr


def config_on_free_ports(directory: Path, server: dict[str, Any], name: str = "box") -> Path:
    """A config whose ports are free."""
    proxy_port, server_port = free_ports(2)
    return write_config(directory, name, {"port": server_port, **server}, proxy={"port": proxy_port})


def test_a_missing_binary_is_exit_3_with_install_hints(tmp_path: Path, server: dict[str, Any]) -> None:
    """The path that was looked at is the fact; how to get a llama-server is the next step."""
    config = config_on_free_ports(tmp_path, {**server, "binary": str(tmp_path / "no-llama-server")})
    assert_three_parts(kvstack("up", str(config)), 3, "no-llama-server")


def test_a_missing_model_is_exit_3(tmp_path: Path, server: dict[str, Any]) -> None:
    """Found before anything is started."""
    config = config_on_free_ports(tmp_path, {**server, "model": str(tmp_path / "no.gguf")})
    assert_three_parts(kvstack("up", str(config)), 3, "no.gguf")


@pytest.mark.parametrize("kind", ["not a GGUF at all", "cut off"])
def test_a_bad_model_is_exit_3(kind: str, tmp_path: Path, server: dict[str, Any]) -> None:
    """A text file is seen through at once; a truncated file is what the server itself reports."""
    bad = tmp_path / "bad.gguf"
    data = Path(server["model"]).read_bytes()
    bad.write_bytes(b"not a model" * 100 if kind == "not a GGUF at all" else data[: len(data) // 2])
    config = config_on_free_ports(tmp_path, {**server, "model": str(bad)})
    assert_three_parts(kvstack("up", str(config)), 3, "bad.gguf")


def test_a_bad_config_is_exit_2_and_lists_all_problems(tmp_path: Path, server: dict[str, Any]) -> None:
    """With key path and line."""
    config = write_config(tmp_path, "box", {**server, "ctx-size": 1, "prot": 2})
    assert_three_parts(kvstack("up", str(config)), 2, "server.ctx-size", "server.prot", "did you mean server.port?")


@pytest.mark.parametrize("which", ["proxy", "server"])
def test_a_port_of_a_foreign_program_is_exit_3(which: str, tmp_path: Path, server: dict[str, Any]) -> None:
    """Said in milliseconds, not after the model's load."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        other = free_ports(1)[0]
        ports = (port, other) if which == "proxy" else (other, port)
        config = write_config(tmp_path, "box", {**server, "port": ports[1]}, proxy={"port": ports[0]})
        assert_three_parts(kvstack("up", str(config)), 3, str(port))


def test_a_port_or_name_of_a_running_kvstack_is_exit_4_and_names_it(tmp_path: Path, server: dict[str, Any]) -> None:
    """A second `up` never disturbs the first."""
    with run_stack(tmp_path, server, name="first") as stack:
        same = kvstack("up", str(tmp_path / "first.toml"))
        assert_three_parts(same, 4, "first", str(stack.process.pid))
        other = write_config(tmp_path, "second", {**server, "port": free_ports(1)[0]}, proxy={"port": stack.proxy_port})
        assert_three_parts(kvstack("up", str(other)), 4, "first", str(stack.proxy_port))
        same_server = write_config(
            tmp_path, "third", {**server, "port": stack.server_port}, proxy={"port": free_ports(1)[0]}
        )
        assert_three_parts(kvstack("up", str(same_server)), 4, "first", str(stack.server_port))
        assert stack.status()["state"] == "ready"
        status, _ = post(stack.proxy_port, CHAT, BODY)
        assert status == 200


def test_two_stacks_live_side_by_side(tmp_path: Path, server: dict[str, Any]) -> None:
    """Different names and ports; a verb without a name asks which."""
    with run_stack(tmp_path, server, name="one") as one, run_stack(tmp_path, server, name="two") as two:
        assert one.status()["name"] == "one"
        assert two.status()["name"] == "two"
        both = kvstack("status")
        assert both.returncode == 2
        assert "one" in both.stderr
        assert "two" in both.stderr
        assert kvstack("status", "two").returncode == 0


def test_without_restarts_a_lost_child_is_exit_5(tmp_path: Path, server: dict[str, Any]) -> None:
    """`max_restarts = 0`: the first death after ready ends the stack."""
    with run_stack(tmp_path, {**server, "max_restarts": 0}) as stack:
        psutil.Process(stack.status()["server"]["pid"]).kill()
        assert stack.process.wait(30) == 5
        output = stack.output()
        assert "error: " in output
        assert "next:" in output
        with pytest.raises(OSError, match="refused"):
            get(stack.proxy_port, "/kvstack/status")


def test_a_killed_child_is_restarted_and_served_again(tmp_path: Path, server: dict[str, Any]) -> None:
    """The proxy stays up: a request that comes meanwhile waits and is answered by the new server."""
    with run_stack(tmp_path, {**server, "max_restarts": 3}) as stack:
        first = stack.status()["server"]["pid"]
        psutil.Process(first).kill()
        # A request that the dying server has taken is lost with it; one that comes afterwards waits.
        stack.wait_for("backoff")
        status, _ = post(stack.proxy_port, CHAT, BODY)
        assert status == 200
        after = stack.wait_for("ready")
        assert after["server"]["pid"] != first
        assert after["restarts"] == 1


def test_a_child_that_dies_again_and_again_is_exit_5(tmp_path: Path, server: dict[str, Any]) -> None:
    """The budget is used up, and the message says how often it was tried."""
    with run_stack(tmp_path, {**server, "max_restarts": 2}) as stack:
        last = None
        deadline = time.monotonic() + 60
        while stack.process.poll() is None and time.monotonic() < deadline:
            try:
                status = stack.status()
            except OSError:
                time.sleep(0.05)
                continue
            pid = status["server"]["pid"]
            if status["state"] == "ready" and pid != last:
                last = pid
                psutil.Process(pid).kill()
            time.sleep(0.05)
        assert stack.process.wait(10) == 5


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(sent: signal.Signals, code: int, tmp_path: Path, server: dict[str, Any]) -> None:
    """Ctrl-C and a service manager's TERM: ports free, run file gone, the signal's own exit code."""
    with run_stack(tmp_path, server) as stack:
        assert get(stack.server_port, "/health")[0] == 200
        stack.process.send_signal(sent)
        assert stack.process.wait(30) == code
        for port in (stack.proxy_port, stack.server_port):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", port), 1)
        assert kvstack("status").returncode == 4


def test_attach_uses_a_running_server_and_leaves_it_alone(tmp_path: Path, server: dict[str, Any]) -> None:
    """Nothing is spawned, nothing is stopped; figures come from the answers."""
    with run_stack(tmp_path, server, name="owner") as owner:
        url = f"http://127.0.0.1:{owner.server_port}"
        with run_stack(tmp_path, {"url": url}, name="guest") as guest:
            for _ in range(2):
                status, data = post(guest.proxy_port, CHAT, BODY)
                assert status == 200
            shown = guest.status()
            assert shown["server"]["pid"] is None
            assert shown["server"]["url"] == url
            assert shown["server"]["ctx_per_slot"] == 4096
            assert shown["requests"][-1]["tokens"]["cached"] == data["timings"]["cache_n"] > 0
            assert shown["requests"][-1]["lcp_similarity_ratio"] is None
            assert kvstack("status", "guest", "--json").returncode == 0
            assert kvstack("down", "guest").returncode == 0
            assert guest.process.wait(20) == 0
        assert owner.status()["state"] == "ready"


def test_the_reference_profile_shows_its_command(llama_server: Path, tmp_path: Path) -> None:
    """`--dry-run` needs neither the model file nor the device."""
    config = CONFIGS / "qwen3-coder-next-80b.toml"
    result = kvstack("up", str(config), "--dry-run", "--set", f"server.binary={llama_server}")
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert "--cache-prompt" in words
    for flag, value in (("-ngl", "99"), ("--ctx-size", "131072"), ("--device", "Vulkan0")):
        assert words[words.index(flag) + 1] == value


def test_the_reference_profile_without_its_model_says_where_to_get_it(llama_server: Path) -> None:
    """Exit 3, with a hint."""
    config = CONFIGS / "qwen3-coder-next-80b.toml"
    result = kvstack("up", str(config), "--set", f"server.binary={llama_server}", "--set", "server.device=none")
    assert_three_parts(result, 3, "gguf")


def test_the_reference_profile_runs_on_the_tiny_hybrid_model(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """Every flag of the profile is one that this build takes."""
    shutil.copy(CONFIGS / "qwen3-coder-next-80b.toml", tmp_path)
    proxy_port, server_port = free_ports(2)
    overrides = {
        "server.binary": llama_server,
        "server.model": model_path["hybrid"],
        "server.device": "none",
        "server.threads": 1,
        "server.port": server_port,
        "proxy.port": proxy_port,
    }
    arguments = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    up = kvstack("up", str(tmp_path / "qwen3-coder-next-80b.toml"), "-d", "--wait", *arguments)
    assert up.returncode == 0, up.stderr
    try:
        status, data = get(proxy_port, "/kvstack/status")
        assert (status, data["state"], data["server"]["ctx_per_slot"]) == (200, "ready", 131072)
        assert post(proxy_port, CHAT, BODY)[0] == 200
    finally:
        assert kvstack("down").returncode == 0
