"""What real llama-servers say of themselves, and whether they take the commands that are made for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.doctor import Facts, Severity, diagnose
from kvstack.doctor.facts import ServerProps, props_of
from kvstack.errors import StartFailed
from kvstack.llama.command.argv import child_environment, server_argv
from kvstack.llama.command.capabilities import Capabilities, parse_capabilities
from kvstack.llama.log.reader import LogReader
from kvstack.process.machine import look_at_model
from kvstack.process.probe import probe
from kvstack.state import log_facts

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
HELP = ROOT / "tests" / "golden" / "help"
GOLDEN = {"b1-571d0d5": "b10068", "b0-unknown": "b11434"}
LAVAPIPE_VARIABLE = "KVSTACK_TEST_LAVAPIPE"
START_TIMEOUT_S = 60.0


def config_of(tmp_path: Path, port: int, server: str) -> Config:
    """A config for one server on *port*."""
    return parse_config(f"[server]\nport = {port}\nthreads = 1\n{server}\n", tmp_path / "box.toml", tmp_path)


@dataclass
class Running:
    """A started server: what it said at /props, and its log so far."""

    props: ServerProps
    log_path: Path

    def facts(self, config: Config, capabilities: Capabilities, argv: tuple[str, ...]) -> Facts:
        """What the doctor would know of it."""
        batch = LogReader().feed(self.log_path.read_bytes())
        assert config.server.model is not None
        return Facts(
            config,
            capabilities=capabilities,
            argv=argv,
            model=look_at_model(config.server.model),
            props=self.props,
            log=batch.facts,
            lines=batch.lines,
        )


def ask(port: int, path: str) -> tuple[int, Any]:
    """GET a JSON resource; status 0 while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except OSError:
        return 0, None
    finally:
        connection.close()


@contextlib.contextmanager
def running(
    argv: tuple[str, ...], port: int, log_path: Path, env: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run a command until it is healthy, and end it."""
    with log_path.open("wb") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while ask(port, "/health")[0] != 200:
            assert server.poll() is None, log_path.read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, log_path.read_text(errors="replace")[-2000:]
            time.sleep(0.05)
        yield Running(props_of(ask(port, "/props")[1]), log_path)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)


def codes(facts: Facts) -> set[str]:
    """Codes of the errors and warnings."""
    return {finding.code for finding in diagnose(facts) if finding.severity is not Severity.NOTE}


def test_recorded_help_texts_are_theirs(llama_server: Path) -> None:
    """The help texts that the unit tests use have the very options of the servers that they are named after."""
    capabilities = probe(llama_server, os.environ, None)
    if capabilities.build not in GOLDEN:
        pytest.skip(f"no recorded help text of {capabilities.build}")
    recorded = parse_capabilities("", (HELP / f"{GOLDEN[capabilities.build]}.txt").read_text(), None)
    assert recorded.flags == capabilities.flags
    assert [(option.names, option.takes_value, option.env, option.removed) for option in recorded.options] == [
        (option.names, option.takes_value, option.env, option.removed) for option in capabilities.options
    ]
    assert recorded.log_verbosity == capabilities.log_verbosity


def test_every_setting_is_taken(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int
) -> None:
    """With every key set the server starts, and its context and slots are what was asked for."""
    config = config_of(
        tmp_path,
        free_port,
        f'model = "{model_path["hybrid"]}"\nctx_size = 8192\nparallel = 2\nkv_unified = true\nbatch_size = 1024\n'
        'ubatch_size = 256\nflash_attn = "on"\nno_mmap = true\ncache_type_k = "f16"\ncache_type_v = "f16"\n'
        'cache_ram_mib = 64\nctx_checkpoints = 8\ncheckpoint_min_step = 1024\nfit = false\nslot_save_path = "slots"\n'
        'device = "none"\nextra_args = ["--no-warmup"]',
    )
    (tmp_path / "slots").mkdir()
    capabilities = probe(llama_server, os.environ, None)
    command = server_argv(config, capabilities, str(llama_server), str(config.server.model))
    assert command.notices == ()
    with running(command.argv, free_port, tmp_path / "log") as server:
        assert (server.props.ctx_per_slot, server.props.slots) == (8192, 2)
        facts = server.facts(config, capabilities, command.argv)
    assert codes(facts) == set()


@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid"])
def test_memory_sum_is_what_the_server_allocates(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int, kind: str
) -> None:
    """The KV cache and the recurrent state of the doctor's sum are those that the server's log reports."""
    config = config_of(tmp_path, free_port, f'model = "{model_path[kind]}"\nctx_size = 32768\nfit = false')
    capabilities = probe(llama_server, os.environ, None)
    argv = server_argv(config, capabilities, str(llama_server), str(config.server.model)).argv
    with running(argv, free_port, tmp_path / "log") as server:
        facts = server.facts(config, capabilities, argv)
    needed = facts.memory
    assert needed is not None
    buffers = facts.logged(log_facts.BufferAllocated)
    # The log rounds each buffer to a hundredth of a MiB.
    rounding = 0.01 * 2**20
    kv_bytes = sum(buffer.size_bytes for buffer in buffers if buffer.kind == "kv")
    assert abs(kv_bytes - needed.kv_bytes) <= 2 * rounding
    state_bytes = sum(buffer.size_bytes for buffer in buffers if buffer.kind == "recurrent")
    assert abs(state_bytes - needed.state_bytes) <= rounding


def test_split_context_is_found(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int
) -> None:
    """A context that slots split is found from /props, and from the log alone."""
    config = config_of(
        tmp_path, free_port, f'model = "{model_path["dense"]}"\nctx_size = 8192\nparallel = 4\nkv_unified = false'
    )
    capabilities = probe(llama_server, os.environ, None)
    command = server_argv(config, capabilities, str(llama_server), str(config.server.model))
    assert [notice for notice in command.notices if "2,048 tokens" in notice]
    with running(command.argv, free_port, tmp_path / "log") as server:
        facts = server.facts(config, capabilities, command.argv)
    for seen in (facts, replace(facts, props=None)):
        found = [finding for finding in diagnose(seen) if finding.code == "ctx-per-slot"]
        assert len(found) == 1
        assert "2,048 tokens" in found[0].what


def test_work_on_the_cpu_is_not_taken_for_the_gpu(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int
) -> None:
    """Without a device the server may still say that all layers were offloaded; the doctor does not believe it."""
    capabilities = probe(llama_server, os.environ, None)
    if capabilities.devices:
        pytest.skip("this machine has a GPU")
    config = config_of(tmp_path, free_port, f'model = "{model_path["dense"]}"\nctx_size = 4096')
    argv = server_argv(config, capabilities, str(llama_server), str(config.server.model)).argv
    with running(argv, free_port, tmp_path / "log") as server:
        facts = server.facts(config, capabilities, argv)
    for layers in facts.logged(log_facts.LayersOffloaded):
        assert layers.layers == layers.layers_total
    # A machine without a GPU is normal: a note.
    assert codes(facts) == set()
    assert [finding.severity for finding in diagnose(facts) if finding.code == "device-none"] == [Severity.NOTE]
    # Where a GPU was there to be used, it is an error.
    assert "gpu-unused" in codes(replace(facts, capabilities=replace(capabilities, devices=None)))


def test_refusals_before_the_start(llama_server: Path, tmp_path: Path, free_port: int) -> None:
    """A device that is not there, and a download without TLS, are refused by what the binary says of itself."""
    capabilities = probe(llama_server, os.environ, None)
    config = config_of(tmp_path, free_port, 'model = "m.gguf"\ndevice = "Vulkan7"')
    with pytest.raises(StartFailed, match="no device Vulkan7"):
        server_argv(config, capabilities, str(llama_server), "m.gguf")
    if capabilities.has_tls is None:
        pytest.skip("this build may have TLS")
    with pytest.raises(StartFailed, match="cannot download"):
        server_argv(config_of(tmp_path, free_port, 'hf = "org/repo:Q4_K_M"'), capabilities, str(llama_server), None)


def test_inherited_flags_do_not_reach_the_server(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int
) -> None:
    """Flags that a shell exports would change the server; they are dropped."""
    config = config_of(tmp_path, free_port, f'model = "{model_path["dense"]}"\nctx_size = 4096')
    exported = {"LLAMA_ARG_ENDPOINT_SLOTS": "0", "LLAMA_API_KEY": "secret", "LLAMA_ARG_CACHE_REUSE": "64"}
    env, notices = child_environment(config, {**os.environ, **exported})
    assert len(notices) == 1
    capabilities = probe(llama_server, env, None)
    argv = server_argv(config, capabilities, str(llama_server), str(config.server.model)).argv
    with running(argv, free_port, tmp_path / "log", env):
        status, slots = ask(free_port, "/slots")
    assert (status, len(slots)) == (200, 1)


@pytest.fixture
def lavapipe() -> dict[str, str]:
    """An environment in which the software Vulkan driver is the one device."""
    named = os.environ.get(LAVAPIPE_VARIABLE)
    found = [Path(named)] if named else sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    if not found:
        pytest.skip(f"no lavapipe: install mesa-vulkan-drivers, or name its ICD file in {LAVAPIPE_VARIABLE}")
    driver = str(found[0])
    return {**os.environ, "VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver, "GGML_VK_VISIBLE_DEVICES": "0"}


def test_device_lines_with_a_software_gpu(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, free_port: int, lavapipe: dict[str, str]
) -> None:
    """Vulkan0 is accepted and seen at work; it is reported as the software that it is; another device is refused."""
    capabilities = probe(llama_server, lavapipe, None)
    if not capabilities.devices:
        pytest.skip("this build has no Vulkan backend")
    assert [device.name for device in capabilities.devices] == ["Vulkan0"]
    assert capabilities.devices[0].is_software
    missing = config_of(tmp_path, free_port, 'model = "m.gguf"\ndevice = "Vulkan1"')
    with pytest.raises(StartFailed, match="no device Vulkan1") as caught:
        server_argv(missing, capabilities, str(llama_server), "m.gguf")
    assert "llvmpipe" in caught.value.fact
    # Without --no-warmup it compiles shaders for a minute and a half.
    config = config_of(
        tmp_path,
        free_port,
        f'model = "{model_path["dense"]}"\nctx_size = 4096\ndevice = "Vulkan0"\nextra_args = ["--no-warmup"]',
    )
    argv = server_argv(config, capabilities, str(llama_server), str(config.server.model)).argv
    with running(argv, free_port, tmp_path / "log", lavapipe) as server:
        facts = server.facts(config, capabilities, argv)
    assert [fact.device for fact in facts.logged(log_facts.DeviceUsed)] == ["Vulkan0"]
    assert codes(facts) == {"device-software"}
    idle = config_of(
        tmp_path,
        free_port,
        f'model = "{model_path["dense"]}"\nctx_size = 4096\ndevice = "none"\nextra_args = ["--no-warmup"]',
    )
    argv = server_argv(idle, capabilities, str(llama_server), str(idle.server.model)).argv
    with running(argv, free_port, tmp_path / "log", lavapipe) as server:
        # The same log under a config that wanted the GPU: everything ran on the CPU.
        facts = server.facts(config, capabilities, argv)
    assert "gpu-unused" in codes(facts)
