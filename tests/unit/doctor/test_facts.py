"""What the doctor can see of a machine, and how a running stack is examined."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstack.llama.model.memory import Kind
from kvstack.process.machine import (
    LastLog,
    last_run,
    look_at_log,
    look_at_machine,
    look_at_model,
    port_answers,
    telling_kernel_lines,
)
from kvstack.rundir import EndFile, RunDir
from kvstack.terminal.app import app
from kvstack.terminal.cli import main  # noqa: F401 - registers the verbs

MODELS = Path(__file__).parents[2] / "models"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


def write(root: Path, path: str, text: str) -> None:
    """A file of a make-believe system."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@linux_only
def test_strix_halo_is_seen(tmp_path: Path) -> None:
    """Memory, carve-out, GTT, kernel, watchdog and drivers are read from /proc and /sys."""
    write(tmp_path, "proc/meminfo", "MemTotal:       130547712 kB\nMemAvailable:   120000000 kB\nCmaFree:  2048 kB")
    write(tmp_path, "proc/sys/kernel/osrelease", "7.0.12-300.fc44.x86_64")
    device = "sys/class/drm/card1/device"
    write(tmp_path, f"{device}/vendor", "0x1002")
    write(tmp_path, f"{device}/mem_info_vram_total", "536870912")
    write(tmp_path, f"{device}/mem_info_gtt_total", "103079215104")
    write(tmp_path, "sys/class/drm/card1-HDMI-A-1/device/vendor", "0x1002")
    write(tmp_path, "sys/class/drm/card0/device/vendor", "0x10de")
    write(tmp_path, "sys/module/amdgpu/parameters/lockup_timeout", "")
    write(tmp_path, "etc/vulkan/icd.d/amd_icd64.json", "{}")
    write(tmp_path, "usr/share/vulkan/icd.d/radeon_icd.x86_64.json", "{}")
    seen = look_at_machine(tmp_path)
    assert (seen.system, seen.kernel) == ("linux", "7.0.12-300.fc44.x86_64")
    assert seen.ram_bytes == 130547712 * 1024
    assert seen.available_bytes == 120000000 * 1024
    assert seen.contiguous_free_bytes == 2048 * 1024
    assert (seen.carve_out_bytes, seen.gtt_bytes) == (536870912, 103079215104)
    assert seen.lockup_timeout == ""
    assert seen.amd_gpu
    assert seen.vulkan_drivers == (
        "/etc/vulkan/icd.d/amd_icd64.json",
        "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json",
    )


@linux_only
def test_machine_without_such_files(tmp_path: Path) -> None:
    """Without those files memory comes from the system, and the GPU is unknown."""
    seen = look_at_machine(tmp_path)
    assert seen.ram_bytes is not None
    assert seen.ram_bytes > 0
    assert (seen.carve_out_bytes, seen.gtt_bytes, seen.amd_gpu, seen.vulkan_drivers) == (None, None, False, ())


def test_this_machine_can_be_looked_at() -> None:
    """Whatever this machine is, looking at it does not fail."""
    assert look_at_machine().ram_bytes


def test_model_that_is_no_gguf(tmp_path: Path) -> None:
    """A file of another kind is a problem, not a crash; a missing one has missing parts."""
    path = tmp_path / "m.gguf"
    path.write_text("hello")
    assert "starts with" in (look_at_model(path).problem or "")
    assert look_at_model(tmp_path / "none.gguf").missing_parts == ("none.gguf",)
    shape = look_at_model(MODELS / "tiny-hybrid.gguf").shape
    assert shape is not None
    assert shape.kind == Kind.HYBRID


def test_port_that_answers() -> None:
    """A port with a listener answers, one without does not."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port_answers("127.0.0.1", port)
        assert port_answers("0.0.0.0", port)
    assert not port_answers("127.0.0.1", port)


MARK = "(adjust with the `-lv N` CLI arg)"


def test_only_the_last_run_of_the_log_counts(tmp_path: Path) -> None:
    """Lines of earlier runs are left out; without a mark the whole log counts; without a log nothing."""
    path = tmp_path / "server.log"
    assert last_run(path) == b""
    path.write_bytes(b"error: invalid argument: --x\n")
    assert last_run(path) == b"error: invalid argument: --x\n"
    path.write_bytes(f"a {MARK}\ndevice lost\n0.00.1 verbosity = 4 {MARK}\nlistening\n".encode())
    assert last_run(path) == f"0.00.1 verbosity = 4 {MARK}\nlistening\n".encode()


def test_end_of_a_long_log(tmp_path: Path) -> None:
    """Of a long log the end is read, from the start of a line."""
    path = tmp_path / "server.log"
    path.write_bytes(b"".join(b"line %05d\n" % number for number in range(1000)))
    assert last_run(path, limit_bytes=25) == b"line 00998\nline 00999\n"


def test_kernel_records() -> None:
    """Records about the GPU and about memory are kept, without their prefix and their dictionary."""
    records = [
        b"4,1234,5678901234,-;amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout\n SUBSYSTEM=pci\n",
        b"6,1,1,-;usb 1-1: new device\n",
        b"3,2,2,-;Out of memory: Killed process 4711 (llama-server)\n",
        b"broken \xff record",
    ]
    assert telling_kernel_lines(records) == (
        "amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout",
        "Out of memory: Killed process 4711 (llama-server)",
    )


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config whose llama-server is a stand-in that answers --help, --version and --list-devices."""
    if sys.platform == "win32":
        pytest.skip("the stand-in is a shell script")
    monkeypatch.setenv("KVSTACK_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVSTACK_CACHE_DIR", str(tmp_path / "cache"))
    help_file = Path(__file__).parents[2] / "golden" / "help" / "b11434.txt"
    binary = tmp_path / "llama-server"
    binary.write_text(
        f'#!/bin/sh\ncase "$1" in\n--help) cat {help_file} ;;\n--list-devices) echo "Available devices:" ;;\n'
        '*) echo "version: 11434 (abcdef0)" ;;\nesac\n'
    )
    binary.chmod(0o755)
    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, proxy_port = free.getsockname()[1], other.getsockname()[1]
    path = tmp_path / "box.toml"
    path.write_text(
        f'[server]\nbinary = "./llama-server"\nmodel = "{MODELS / "tiny-hybrid.gguf"}"\nport = {port}\n'
        'device = "none"\ncache_ram_mib = 64\nctx_size = 4096\n'
        f"[proxy]\nport = {proxy_port}\n"
    )
    return path


def run(*arguments: str) -> tuple[int, str]:
    """Run the verb and give exit status and stdout."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_verb_without_findings(config_file: Path) -> None:
    """A healthy config gives exit status 0 and says that nothing is wrong."""
    code, out = run(str(config_file))
    assert code == 0
    assert "no problems found" in out


def test_verb_with_errors(config_file: Path) -> None:
    """Errors give exit status 1; the envelope holds findings with all their parts, and what they rest on."""
    overrides = ["--set", "server.cache_ram_mib=0", "--set", "server.device=Vulkan0"]
    code, out = run(str(config_file), "--json", *overrides)
    assert code == 1
    envelope = json.loads(out)
    assert (envelope["command"], envelope["status"], envelope["exit_code"]) == ("doctor", "error", 1)
    assert envelope["errors"][0]["what"] == "2 findings are errors"
    findings = {finding["code"]: finding for finding in envelope["data"]["findings"]}
    assert set(findings) == {"cache-ram-off", "device-missing"}
    for finding in findings.values():
        assert finding["severity"] == "error"
        assert finding["what"]
        assert finding["evidence"]
        assert finding["remedy"]
    checked = envelope["data"]["checked"]
    assert (checked["build"], checked["architecture"], checked["kind"]) == ("b11434-abcdef0", "qwen3next", "hybrid")
    code, out = run(str(config_file), *overrides)
    assert code == 1
    assert "[cache-ram-off]" in out
    assert "-> Set server.cache_ram_mib" in out


def test_verb_without_model_and_binary(config_file: Path) -> None:
    """A missing model and a missing binary are findings, not the end of the examination."""
    code, out = run(str(config_file), "--json", "--set", "server.model=none.gguf", "--set", "server.binary=./none")
    assert code == 1
    assert {finding["code"] for finding in json.loads(out)["data"]["findings"]} == {"model-missing", "binary"}


def test_verb_reads_the_last_run_of_the_log(config_file: Path, tmp_path: Path) -> None:
    """What the log of the last run says went wrong is a finding."""
    log = tmp_path / "state" / "box" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        f"0.00.001.000 I x: verbosity = 4 {MARK}\nAMX is not ready to be used!\n"
        f"0.00.001.000 I x: verbosity = 4 {MARK}\nggml_vulkan: device lost on Vulkan0\n"
    )
    _, out = run(str(config_file), "--json")
    codes = {finding["code"] for finding in json.loads(out)["data"]["findings"]}
    assert "gpu-lost" in codes
    assert "processor-mismatch" not in codes


LOADED = "0.00.000.030 I srv    load_model: loading model '{}'\n"


def log_of(tmp_path: Path, model: Path, age_s: float) -> Path:
    """The log of a run that lost its GPU, with the model that it served."""
    log = tmp_path / "state" / "box" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(
        f"0.00.001.000 I x: verbosity = 4 {MARK}\n{LOADED.format(model)}ggml_vulkan: device lost on Vulkan0\n"
    )
    os.utime(log, (time.time() - age_s,) * 2)
    return log


def test_findings_of_a_log_say_which_log(config_file: Path, tmp_path: Path) -> None:
    """An earlier run's log is evidence only with its path and age; other findings have none of it."""
    os.utime(config_file, (time.time() - 9000,) * 2)
    log = log_of(tmp_path, MODELS / "tiny-hybrid.gguf", 7200)
    _, out = run(str(config_file), "--json", "--set", "server.cache_ram_mib=0")
    data = json.loads(out)["data"]
    evidence = {finding["code"]: finding["evidence"] for finding in data["findings"]}
    assert evidence["gpu-lost"].splitlines()[1:] == [f"in {log}, last written 2 h 00 m ago"]
    assert str(log) not in evidence["cache-ram-off"]
    assert data["checked"]["log"]["left_out"] is None


@pytest.mark.parametrize(
    ("model", "age_s", "why"),
    [
        ("tiny-dense.gguf", 0, "it is of a run with another model"),
        ("tiny-hybrid.gguf", 7200, "it is older than the config file"),
    ],
)
def test_a_log_of_another_config_is_left_out(
    model: str, age_s: float, why: str, config_file: Path, tmp_path: Path
) -> None:
    """A stack of the same name may have been another one; what its log says is not this config's fault."""
    log = log_of(tmp_path, MODELS / model, age_s)
    code, out = run(str(config_file))
    assert code == 0
    assert "gpu-lost" not in out
    assert f"the log {log} ({why}" in out
    checked = json.loads(run(str(config_file), "--json")[1])["data"]["checked"]
    assert why in checked["log"]["left_out"]


def test_the_log_of_a_running_stack_counts_if_it_is_this_configs(tmp_path: Path) -> None:
    """What runs now is of interest also where its file was edited since; what another file started is not."""
    log = log_of(tmp_path, tmp_path / "m.gguf", 7200)
    config = tmp_path / "box.toml"
    config.write_text("")
    now_s = time.time()
    assert look_at_log(log, config, tmp_path / "m.gguf", str(config), now_s).data
    assert look_at_log(log, config, None, str(config), now_s).data
    other = look_at_log(log, config, None, "/etc/other.toml", now_s)
    assert (other.data, other.left_out) == (b"", "the stack of this name was started from /etc/other.toml")
    assert look_at_log(tmp_path / "none.log", config, None, None, now_s) == LastLog(tmp_path / "none.log")


@pytest.mark.parametrize("key", ["server.port", "proxy.port"])
def test_verb_sees_another_program_on_the_port(key: str, config_file: Path) -> None:
    """A foreign program on the server's or the proxy's port is an error."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        # It accepts and never answers, so the question for /props must not wait for ever.
        code, out = run(str(config_file), "--json", "--set", f"{key}={port}")
    assert code == 1
    assert "port-taken" in {finding["code"] for finding in json.loads(out)["data"]["findings"]}


def test_verb_sees_that_the_attached_server_does_not_answer(config_file: Path) -> None:
    """Nobody listens at server.url: an error, however right the config is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    config_file.write_text(f'[server]\nurl = "{url}"\n')
    code, out = run(str(config_file), "--json")
    finding = next(one for one in json.loads(out)["data"]["findings"] if one["code"] == "server-unreachable")
    assert code == 1
    assert url in finding["evidence"]


def test_verb_tells_how_the_last_run_ended(config_file: Path) -> None:
    """A stack that gave up is gone; a config that was changed since, or a new start, makes that old news."""
    now = time.time()
    told = ("llama-server died", "all 3 restarts are used up", "Look at its log.")
    end = EndFile("box", 1, now, now + 1, str(config_file), *told)
    RunDir("box").path.mkdir(parents=True)
    RunDir("box").write_end(end)
    code, out = run(str(config_file), "--json")
    (finding,) = json.loads(out)["data"]["findings"]
    assert (code, finding["code"], finding["remedy"]) == (1, "stack-failed", "Look at its log.")
    assert finding["what"] == "The stack's last run failed: llama-server died"
    assert "all 3 restarts are used up" in finding["evidence"]
    RunDir("box").write_end(replace(end, ended_s=config_file.stat().st_mtime - 1))
    assert run(str(config_file))[0] == 0
    RunDir("box").forget_end()
    assert RunDir("box").read_end() is None


def test_doctor_is_listed_in_the_help() -> None:
    """The verb is registered."""
    shown = subprocess.run(
        [sys.executable, "-m", "kvstack", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "doctor" in shown.stdout
