"""The doctor: one test per finding, on facts and on texts of both builds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.doctor import Facts, Finding, Severity, diagnose
from kvstack.doctor.facts import Machine, ModelFile, props_of
from kvstack.llama.command.argv import server_argv
from kvstack.llama.command.capabilities import Capabilities, parse_capabilities
from kvstack.llama.log.reader import LogReader
from kvstack.llama.model.memory import GIB, MIB, Kind, ModelShape

HELP = Path(__file__).parents[2] / "golden" / "help"
BUILDS = pytest.mark.parametrize("build", ["b10068", "b11434"])

CODER_NEXT = ModelShape(
    architecture="qwen3next",
    name="Qwen3-Coder-Next",
    kind=Kind.HYBRID,
    layers=48,
    training_ctx_tokens=262144,
    full_values_per_token=(12 * 512, 12 * 512),
    state_bytes=79_036_416,
    heads=16,
)
GPT_OSS = ModelShape(
    architecture="gpt-oss",
    name="gpt-oss-120b",
    kind=Kind.SLIDING_WINDOW,
    layers=36,
    training_ctx_tokens=131072,
    full_values_per_token=(18 * 512, 18 * 512),
    window_values_per_token=(18 * 512, 18 * 512),
    window_tokens=128,
    heads=64,
)
DENSE = ModelShape("qwen3moe", "Qwen3-30B-A3B", Kind.DENSE, 48, 262144, (48 * 512, 48 * 512), heads=32)
STRIX = Machine(
    system="linux",
    kernel="6.19.4",
    ram_bytes=int(124.5 * GIB),
    available_bytes=118 * GIB,
    contiguous_free_bytes=0,
    carve_out_bytes=GIB // 2,
    gtt_bytes=96 * GIB,
    amd_gpu=True,
)
NO_GPU = Machine(system="linux", kernel="6.19.4", ram_bytes=128 * GIB, available_bytes=118 * GIB)
RADV = "Available devices:\n  Vulkan0: AMD Radeon 8060S (RADV STRIX_HALO) (98816 MiB, 98000 MiB free)\n"
LLVMPIPE = "Available devices:\n  Vulkan0: llvmpipe (LLVM 15.0.6, 256 bits) (15990 MiB, 15990 MiB free)\n"
TWO = (
    "Available devices:\n  Vulkan0: AMD Radeon 8060S (RADV STRIX_HALO) (98816 MiB, 98000 MiB free)\n"
    "  Vulkan1: AMD Radeon RX 7600 (RADV NAVI33) (8176 MiB, 8000 MiB free)\n"
)
NONE = {"b10068": "Available devices:\n", "b11434": "Available devices:\n  (none)\n"}


def case(
    server: str = "",
    *,
    build: str = "b10068",
    devices: str | None = RADV,
    shape: ModelShape | None = CODER_NEXT,
    size_gib: float = 61.0,
    machine: Machine = STRIX,
    source: str = 'model = "m.gguf"',
    log: str = "",
    **more: Any,
) -> Facts:
    """Facts about the reference machine, with what a test changes."""
    config: Config = parse_config(f"[server]\n{source}\n{server}\n", Path("/etc/box.toml"), Path("/home/me"))
    capabilities: Capabilities = parse_capabilities("", (HELP / f"{build}.txt").read_text(), devices)
    # Devices are judged by the doctor here, not refused by the command.
    blind = replace(capabilities, devices=None)
    argv = () if config.attached else server_argv(config, blind, "llama-server", "m.gguf").argv
    batch = LogReader().feed(log.encode())
    return Facts(
        config=config,
        machine=machine,
        capabilities=capabilities,
        argv=argv,
        model=ModelFile("/etc/m.gguf", int(size_gib * GIB), shape=shape) if shape is not None else None,
        log=batch.facts,
        lines=batch.lines,
        **more,
    )


def codes(facts: Facts) -> set[str]:
    """Codes of the findings that want something done."""
    return {finding.code for finding in diagnose(facts) if finding.severity is not Severity.NOTE}


def finding(facts: Facts, code: str) -> Finding:
    """The one finding of this code; it has all its parts."""
    found = [each for each in diagnose(facts) if each.code == code]
    assert len(found) == 1, [each.code for each in diagnose(facts)]
    assert found[0].what
    assert found[0].evidence
    assert found[0].remedy
    return found[0]


REFERENCE = 'device = "Vulkan0"\nflash_attn = "on"\nno_mmap = true\ncache_ram_mib = 8192\nfit = false'


@BUILDS
@pytest.mark.parametrize("shape", [CODER_NEXT, GPT_OSS, DENSE], ids=lambda shape: shape.name)
def test_reference_profile_is_healthy(build: str, shape: ModelShape) -> None:
    """A right configuration on a right machine has no finding but the memory sum."""
    facts = case(REFERENCE, build=build, shape=shape)
    assert codes(facts) == set()
    assert [each.code for each in diagnose(facts)] == ["memory-sum"]


def test_severe_findings_come_first() -> None:
    """Findings are ordered by severity."""
    facts = case("cache_ram_mib = 0\nlog_verbosity = 3", build="b11434")
    ranks = [each.severity.rank for each in diagnose(facts)]
    assert ranks == sorted(ranks)
    assert {"cache-ram-off", "log-level", "memory-sum"} <= {each.code for each in diagnose(facts)}


# --- Cache


@BUILDS
def test_split_context_in_the_plan(build: str) -> None:
    """FR-31: four slots that do not share give a quarter of the context."""
    found = finding(case("parallel = 4\nkv_unified = false", build=build), "ctx-per-slot")
    assert "32,768 tokens" in found.what
    assert found.severity is Severity.ERROR
    assert "ctx-per-slot" not in codes(case("parallel = 4", build=build))


PROPS = {
    "total_slots": 4,
    "model_path": "/etc/m.gguf",
    "chat_template": "{{ messages }}",
    "chat_template_caps": {"supports_preserve_reasoning": False},
}


@BUILDS
def test_split_context_of_a_running_server(build: str) -> None:
    """What /props says of a running server counts more than the flags."""
    props = {**PROPS, "build_info": build, "default_generation_settings": {"params": {}, "n_ctx": 32768}}
    found = finding(case(build=build, props=props_of(props)), "ctx-per-slot")
    assert "n_ctx = 32,768" in found.evidence
    whole = {**props, "default_generation_settings": {"n_ctx": 131072}}
    assert "ctx-per-slot" not in codes(case(build=build, props=props_of(whole)))


@BUILDS
def test_split_context_in_the_log(build: str) -> None:
    """The log of either build tells it too."""
    log = "0.00.125.327 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 32768, kv_unified = 'false'\n"
    assert "32,768 tokens" in finding(case(build=build, log=log), "ctx-per-slot").what


def test_context_beyond_the_training() -> None:
    """A context that the model was not trained for is cut down by the server."""
    found = finding(case("ctx_size = 262144", shape=GPT_OSS), "ctx-beyond-training")
    assert "131072" in found.remedy


@BUILDS
def test_host_prompt_cache_off(build: str) -> None:
    """Without the host prompt cache a side request costs the conversation: an error where checkpoints go with it."""
    assert finding(case("cache_ram_mib = 0", build=build), "cache-ram-off").severity is Severity.ERROR
    assert finding(case("cache_ram_mib = 0", build=build, shape=GPT_OSS), "cache-ram-off").severity is Severity.ERROR
    assert finding(case("cache_ram_mib = 0", build=build, shape=DENSE), "cache-ram-off").severity is Severity.WARNING
    by_hand = case('extra_args = ["--cache-ram", "0"]', build=build)
    assert "cache-ram-off" in codes(by_hand)
    by_variable = case('env = { LLAMA_ARG_CACHE_RAM = "0" }', build=build)
    assert "cache-ram-off" in codes(by_variable)


@BUILDS
def test_checkpoint_distance_zero(build: str) -> None:
    """Checkpoints without a distance push the system prompt's one out, on models that need it."""
    for shape, expected in ((CODER_NEXT, True), (GPT_OSS, True), (DENSE, False)):
        for server in ("checkpoint_min_step = 0", 'extra_args = ["-cms", "0"]'):
            assert ("checkpoint-min-step" in codes(case(server, build=build, shape=shape))) is expected
    assert "checkpoint-min-step" not in codes(case("checkpoint_min_step = 1024", build=build))


@BUILDS
def test_chunk_reuse(build: str) -> None:
    """Chunk reuse is unsafe on hybrid models, useless on sliding-window ones, and nobody's business on dense ones."""
    server = 'extra_args = ["--cache-reuse", "256"]'
    assert finding(case(server, build=build), "cache-reuse").severity is Severity.ERROR
    assert finding(case(server, build=build, shape=GPT_OSS), "cache-reuse").severity is Severity.WARNING
    assert "cache-reuse" not in codes(case(server, build=build, shape=DENSE))


@BUILDS
def test_similarity_threshold_zero(build: str) -> None:
    """A threshold of zero is found in the flags and in the log of either build, where there are several slots."""
    for zero in ('extra_args = ["-sps", "0.0"]', "slot_prompt_similarity = 0"):
        assert "slot-similarity" in codes(case(f"parallel = 2\n{zero}", build=build))
        assert "slot-similarity" not in codes(case(zero, build=build))
    assert "slot-similarity" not in codes(case("parallel = 2\nslot_prompt_similarity = 0.2", build=build))
    word = {"b10068": "sim_best", "b11434": "f_sim_best"}[build]
    line = (
        "slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, {} = 0.915 (> {} thold), f_keep = 0.9\n"
    )
    assert "slot-similarity" in codes(case("parallel = 2", build=build, log=line.format(word, "0.000")))
    assert "slot-similarity" not in codes(case("parallel = 2", build=build, log=line.format(word, "0.100")))


@BUILDS
def test_context_shift(build: str) -> None:
    """Context shift is found as a flag, and in the log when it happened."""
    assert "context-shift" in codes(case('extra_args = ["--context-shift"]', build=build))
    assert "context-shift" not in codes(case('extra_args = ["--no-context-shift"]', build=build))
    log = (
        "1.00.000.000 W slot update_slots: id  0 | task 5 | slot context shift, n_keep = 0, n_left = 2047, "
        "n_discard = 1023\n"
    )
    assert "1,023 tokens" in finding(case(build=build, log=log), "context-shift").evidence


@BUILDS
def test_sleep(build: str) -> None:
    """A server that may sleep forgets its cache."""
    assert "sleep" in codes(case('extra_args = ["--sleep-idle-seconds", "600"]', build=build))
    assert "sleep" not in codes(case('extra_args = ["--sleep-idle-seconds", "-1"]', build=build))


@BUILDS
def test_conversation_too_large_for_the_host_cache(build: str) -> None:
    """A skipped entry is found in the log."""
    log = (
        "0.10.000.000 W srv         alloc:  - prompt state size 4700.000 MiB exceeds cache size limit 2048.000 MiB, "
        "skipping\n"
    )
    assert "2,048 MiB" in finding(case("cache_ram_mib = 2048", build=build, log=log), "cache-ram-small").evidence


# --- Memory


@pytest.mark.parametrize(
    ("machine", "largest_safe_mib"),
    [
        (STRIX, 32768),
        (replace(STRIX, ram_bytes=62 * GIB, carve_out_bytes=64 * GIB), 24576),
        (replace(STRIX, ram_bytes=30 * GIB, carve_out_bytes=96 * GIB, gtt_bytes=15 * GIB), 4096),
        (Machine("windows", ram_bytes=int(63.65 * GIB), carve_out_bytes=64 * GIB), 16384),
        (Machine("windows", ram_bytes=int(95.78 * GIB), carve_out_bytes=32 * GIB), 16384),
        (Machine("windows", ram_bytes=int(31.78 * GIB), carve_out_bytes=96 * GIB), 4096),
    ],
    ids=["linux 0.5", "linux 64", "linux 96", "windows 64", "windows 32", "windows 96"],
)
def test_host_cache_against_the_memory(machine: Machine, largest_safe_mib: int) -> None:
    """FR-30: the reference table's largest safe value passes, far more is an error, and the remedy passes too."""
    devices = "Available devices:\n  Vulkan0: AMD Radeon(TM) 8060S (114000 MiB, 108600 MiB free)\n"
    safe = case(f"no_mmap = true\ncache_ram_mib = {largest_safe_mib}", machine=machine, devices=devices)
    assert "cache-ram" not in codes(safe)
    found = finding(case("cache_ram_mib = 160000", machine=machine, devices=devices), "cache-ram")
    assert found.severity is Severity.ERROR
    suggested = int(found.remedy.split("= ")[1].split(" ")[0])
    assert suggested >= largest_safe_mib
    assert "cache-ram" not in codes(case(f"cache_ram_mib = {suggested}", machine=machine, devices=devices))
    assert finding(case("cache_ram_mib = -1", machine=machine, devices=devices), "cache-ram").severity is Severity.ERROR


def test_host_cache_a_little_too_large_is_a_warning() -> None:
    """Between what is left and twice of it there is a warning, with the sum as evidence."""
    found = finding(case("cache_ram_mib = 45000"), "cache-ram")
    assert found.severity is Severity.WARNING
    assert "weights: 61.0 GiB" in found.evidence
    assert "KV cache: 3.0 GiB" in found.evidence
    assert "checkpoints: 2.4 GiB" in found.evidence


def test_model_beside_a_gpu_of_its_own_takes_no_ram() -> None:
    """A GPU with memory of its own does not count against the system's RAM."""
    machine = Machine("linux", ram_bytes=64 * GIB)
    devices = "Available devices:\n  CUDA0: NVIDIA (98000 MiB, 97000 MiB free)\n"
    assert "cache-ram" not in codes(case("cache_ram_mib = 16384", machine=machine, devices=devices))
    assert "cache-ram" in codes(case('device = "none"\ncache_ram_mib = 16384', machine=machine, devices=devices))


def test_model_larger_than_what_the_gpu_reaches() -> None:
    """The kernel's default limit does not hold the reference model; the remedy is the parameter."""
    found = finding(case(machine=replace(STRIX, gtt_bytes=int(62.25 * GIB))), "gpu-memory")
    assert found.severity is Severity.ERROR
    assert "64.8 GiB" in found.what
    assert "62.8 GiB" in found.what
    assert "ttm.pages_limit" in found.remedy
    assert "gpu-memory" not in codes(case('device = "none"', machine=replace(STRIX, gtt_bytes=10 * GIB)))


def test_vulkan_total_is_no_capacity() -> None:
    """A device that counts more than the machine has is not believed."""
    boasting = "Available devices:\n  Vulkan0: AMD Radeon 8060S (RADV STRIX_HALO) (212992 MiB, 200000 MiB free)\n"
    machine = replace(STRIX, ram_bytes=30 * GIB, carve_out_bytes=32 * GIB, gtt_bytes=112 * GIB)
    found = finding(case(machine=machine, devices=boasting), "gpu-memory")
    assert "57.0 GiB" in found.what


def test_memory_of_checkpoints() -> None:
    """Checkpoints of several slots of a hybrid model add up to gigabytes that no flag names."""
    found = finding(case("parallel = 4"), "checkpoint-memory")
    assert "9.4 GiB" in found.what
    assert "75.4 MiB" in found.evidence
    assert "checkpoint-memory" not in codes(case("parallel = 4", shape=DENSE))


def test_buffer_limit_without_flash_attention() -> None:
    """FR-51: without flash attention the score buffer of a long context exceeds the driver's limit."""
    found = finding(case('flash_attn = "off"\nubatch_size = 1024'), "buffer-limit")
    assert "8.0 GiB" in found.what
    assert "buffer-limit" not in codes(case('flash_attn = "on"\nubatch_size = 1024'))


def test_windows_ceiling() -> None:
    """A model near 64 GB on Windows names the driver."""
    machine = Machine("windows", ram_bytes=int(63.65 * GIB), carve_out_bytes=64 * GIB)
    assert "driver" in finding(case(machine=machine), "windows-ceiling").remedy
    assert "windows-ceiling" not in codes(case(machine=machine, size_gib=40))
    assert "windows-ceiling" not in codes(case())


def test_mapped_model() -> None:
    """FR-51: a large model is mapped where the build maps by default, or where it is asked to."""
    assert "mmap" in codes(case(build="b10068"))
    assert "mmap" not in codes(case(build="b11434"))
    assert "mmap" in codes(case("no_mmap = false", build="b11434"))
    for build in ("b10068", "b11434"):
        assert "mmap" not in codes(case("no_mmap = true", build=build))
        assert "mmap" not in codes(case(build=build, size_gib=17))


def test_locked_model() -> None:
    """Locking is found under both names."""
    for build, server in (("b10068", '"--mlock"'), ("b11434", '"--load-mode", "mlock"')):
        facts = case(f"extra_args = [{server}]", build=build)
        assert "mlock" in {each.code for each in diagnose(facts)}


def test_little_memory_for_the_driver() -> None:
    """Memory that the driver cannot use does not count as free."""
    machine = replace(STRIX, available_bytes=6 * GIB, contiguous_free_bytes=3 * GIB)
    assert "3.0 GiB" in finding(case(machine=machine), "memory-low").what
    assert "memory-low" not in codes(case(machine=replace(machine, contiguous_free_bytes=0)))


# --- GPU


@BUILDS
def test_missing_device(build: str) -> None:
    """A device that is not listed is an error; none at all is worth a warning only where there is a GPU."""
    found = finding(case('device = "Vulkan7"', build=build), "device-missing")
    assert "Vulkan0 (AMD Radeon 8060S (RADV STRIX_HALO))" in found.evidence
    assert "device-missing" in codes(case('device = "Vulkan0"', build=build, devices=NONE[build]))
    assert finding(case(build=build, devices=NONE[build]), "device-none").severity is Severity.WARNING
    assert finding(case(build=build, devices=NONE[build], machine=NO_GPU), "device-none").severity is Severity.NOTE
    assert "device-none" not in codes(case('device = "none"', build=build, devices=NONE[build]))


def test_software_renderer() -> None:
    """FR-52: a software renderer is found in the list of devices and in the log."""
    assert finding(case('device = "Vulkan0"', devices=LLVMPIPE), "device-software").severity is Severity.ERROR
    assert "device-software" not in codes(case('device = "none"', devices=LLVMPIPE))
    log = (
        "0.00.318.187 I llama_prepare_model_devices: using device Vulkan0 (llvmpipe (LLVM 15.0.6, 256 bits)) "
        "(unknown id) - 2048 MiB free\n"
    )
    assert "log: using device Vulkan0" in finding(case(devices=None, log=log), "device-software").evidence


USING = "0.00.318.187 I llama_prepare_model_devices: using device {} (Radeon 8060S) (0000:c5:00.0) - 98000 MiB free\n"
OFFLOADED = "0.00.415.549 I load_tensors: offloaded {}/49 layers to GPU\n"
KV = "0.00.466.290 I llama_kv_cache:    {} KV buffer size =  3072.00 MiB\n"


def test_other_gpu_than_named() -> None:
    """The log names another device than the config."""
    assert (
        "Vulkan1" in finding(case('device = "Vulkan0"', devices=TWO, log=USING.format("Vulkan1")), "device-other").what
    )
    assert "device-other" not in codes(case('device = "Vulkan0"', devices=TWO, log=USING.format("Vulkan0")))


def test_several_gpus_and_none_named() -> None:
    """With several GPUs and none named the model is spread over them."""
    assert "Vulkan1" in finding(case(devices=TWO), "device-ambiguous").evidence
    assert "device-ambiguous" not in codes(case('device = "Vulkan0"', devices=TWO))


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (USING.format("Vulkan0") + OFFLOADED.format(49) + KV.format("Vulkan0"), None),
        (OFFLOADED.format(49) + KV.format("CPU"), "gpu-unused"),
        (KV.format("CPU"), "gpu-unused"),
        (USING.format("Vulkan0") + OFFLOADED.format(40) + KV.format("Vulkan0"), "layers-missing"),
        (USING.format("Vulkan0") + OFFLOADED.format(49) + KV.format("CPU"), "kv-on-cpu"),
    ],
    ids=["all", "none", "none, build for the CPU", "some", "kv"],
)
def test_work_on_the_gpu(log: str, code: str | None) -> None:
    """FR-52: `offloaded 49/49` alone proves nothing: device, layers and KV buffer together do."""
    assert codes(case(REFERENCE, log=log)) == ({code} if code else set())


@BUILDS
def test_machine_without_a_gpu_is_said_once(build: str) -> None:
    """Where there is no GPU and none is named, running on the CPU is no fault, whatever the log says of it."""
    log = OFFLOADED.format(49) + KV.format("CPU") + "ggml_vulkan: No devices found.\n"
    plain = "no_mmap = true\ncache_ram_mib = 8192"
    assert codes(case(plain, build=build, devices=NONE[build], log=log, machine=NO_GPU)) == set()
    assert codes(case(plain, build=build, devices=NONE[build], log=log)) == {"device-none", "no-vulkan-device"}
    assert "no-vulkan-device" in codes(case('device = "Vulkan0"', build=build, devices=NONE[build], log=log))
    assert "gpu-unused" in codes(case('device = "Vulkan0"', build=build, devices=NONE[build], log=log))


def test_fewer_layers_on_purpose_are_no_finding() -> None:
    """Layers that the config leaves on the CPU are not missed."""
    log = USING.format("Vulkan0") + OFFLOADED.format(10) + KV.format("CPU")
    assert "layers-missing" not in codes(case("gpu_layers = 10", log=log))


VULKAN_LINE = (
    "ggml_vulkan: 0 = {} | uma: 1 | fp16: 1 | warp size: 64 | shared memory: {} | int dot: 1 | matrix cores: {}"
)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (VULKAN_LINE.format("AMD Radeon 8060S (RADV STRIX_HALO) (radv)", 65536, "KHR_coopmat"), None),
        (VULKAN_LINE.format("AMD Radeon 8060S (AMD open-source driver)", 32768, "KHR_coopmat"), "driver-amdvlk"),
        (VULKAN_LINE.format("AMD Radeon 8060S (RADV GFX1151) (radv)", 65536, "none"), "driver-old"),
    ],
)
def test_driver_in_the_log(line: str, code: str | None) -> None:
    """The backend's line about the device names the driver."""
    assert codes(case(REFERENCE, log=line + "\n")) == ({code} if code else set())


def test_second_driver_installed() -> None:
    """An installed AMDVLK wins silently, unless the config names the driver."""
    icds = ("/etc/vulkan/icd.d/amd_icd64.json", "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json")
    machine = replace(STRIX, vulkan_drivers=icds)
    assert "amd_icd64" in finding(case(machine=machine), "driver-amdvlk").evidence
    named = 'env = { VK_DRIVER_FILES = "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json" }'
    assert "driver-amdvlk" not in codes(case(named, machine=machine))


# --- Model


def test_incomplete_model() -> None:
    """Missing parts and a short file are errors."""
    base = case()
    assert base.model is not None
    parts = replace(base, model=replace(base.model, missing_parts=("m-00002-of-00002.gguf",)))
    assert "m-00002-of-00002.gguf" in finding(parts, "model-parts").evidence
    short = replace(base, model=replace(base.model, problem="has 5 bytes, and its header says at least 9"))
    assert "at least 9" in finding(short, "model-file").evidence
    renamed = replace(base, model=replace(base.model, shape=replace(CODER_NEXT, parts=3)))
    assert "3 parts" in finding(renamed, "model-parts").evidence


def test_other_model_on_the_port() -> None:
    """A server that serves another file is not ours."""
    props = props_of({**PROPS, "model_path": "/srv/other.gguf"})
    assert "/srv/other.gguf" in finding(case(props=props), "model-other").evidence
    assert "model-other" not in codes(case(props=props_of(PROPS)))


QWEN_STYLE = (
    "{%- set ns = namespace(last_query_index=0) %}{%- if loop.index0 > ns.last_query_index %}{{ think }}{%- endif %}"
)
R1_STYLE = "{% set content = content.split('</think>')[-1] %}"


@BUILDS
@pytest.mark.parametrize("template", [QWEN_STYLE, R1_STYLE], ids=["qwen", "r1"])
def test_template_that_drops_reasoning(build: str, template: str) -> None:
    """A template that drops earlier reasoning is found in /props and in the file, with the remedy that it allows."""
    props = props_of({**PROPS, "chat_template": template})
    assert "--chat-template-file" in finding(case(build=build, props=props), "template-reasoning").remedy
    assert "template-reasoning" in codes(case(build=build, shape=replace(DENSE, chat_template=template)))
    able = props_of({**PROPS, "chat_template": template, "chat_template_caps": {"supports_preserve_reasoning": True}})
    assert "--reasoning-preserve" in finding(case(build=build, props=able), "template-reasoning").remedy
    kept = case('extra_args = ["--reasoning-preserve"]', build=build, props=able)
    assert "template-reasoning" not in codes(kept)
    switch = props_of({**PROPS, "chat_template": template + "{% if preserve_thinking %}{% endif %}"})
    assert "preserve_thinking" in finding(case(build=build, props=switch), "template-reasoning").remedy
    assert "template-reasoning" not in codes(case(build=build, props=props_of(PROPS)))


def test_template_with_a_date() -> None:
    """A template that writes the date is a note."""
    props = props_of({**PROPS, "chat_template": 'Current date: {{ strftime_now("%Y-%m-%d") }}'})
    assert finding(case(shape=GPT_OSS, props=props), "template-date").severity is Severity.NOTE


# --- Machine


@BUILDS
def test_log_level(build: str) -> None:
    """A level below the one that the build needs is found."""
    assert "-lv 3" in finding(case("log_verbosity = 3", build=build), "log-level").evidence
    assert "log-level" not in codes(case("log_verbosity = 4", build=build))
    assert "log-level" not in codes(case(build=build))


def test_watchdog_of_new_kernels() -> None:
    """Kernel 7 without the parameter is warned of, with it or with an older kernel not."""
    assert "lockup_timeout" in finding(case(machine=replace(STRIX, kernel="7.0.12-300.fc44")), "gpu-watchdog").remedy
    raised = replace(STRIX, kernel="7.1.3", lockup_timeout="10000,60000,10000,10000")
    assert "gpu-watchdog" not in codes(case(machine=raised))
    assert "gpu-watchdog" not in codes(case())
    assert "gpu-watchdog" not in codes(case('device = "none"', machine=replace(STRIX, kernel="7.0.12")))


def test_other_program_on_the_proxys_port() -> None:
    """Clients would talk to it, and the start would fail; attached or not."""
    found = finding(case(proxy_port_answers=True), "port-taken")
    assert found.severity is Severity.ERROR
    assert "127.0.0.1:1234 " in found.evidence
    assert "proxy.port" in found.remedy
    attached = case(source='url = "http://127.0.0.1:12345"', shape=None, proxy_port_answers=True)
    assert codes(attached) == {"port-taken"}
    both = diagnose(case(server_port_answers=True, proxy_port_answers=True))
    assert [each.code for each in both].count("port-taken") == 2


def test_other_server_on_the_port() -> None:
    """A program that answers on the server's port is an error, unless the stack attaches to it."""
    assert "127.0.0.1:12345" in finding(case(server_port_answers=True), "port-taken").evidence
    attached = case(source='url = "http://127.0.0.1:12345"', shape=None, server_port_answers=True)
    assert codes(attached) == set()


def test_proxy_bypassed() -> None:
    """Tasks in the log that the proxy did not send, and a server that listens to the network."""
    assert "3 requests" in finding(case(bypassing_requests=3), "proxy-bypassed").what
    assert "proxy-bypassed" not in codes(case(bypassing_requests=0))
    assert "0.0.0.0" in finding(case('host = "0.0.0.0"'), "server-exposed").evidence
    for host in ("127.0.0.1", "localhost", "::1"):
        assert "server-exposed" not in codes(case(f'host = "{host}"'))


# --- Failures

FAILURE_LINES = [
    ("radv/amdgpu: The CS has been cancelled because the context is lost. This context is guilty.", "gpu-lost"),
    ("terminate called after throwing an instance of 'vk::DeviceLostError'", "gpu-lost"),
    ("  what():  vk::Queue::submit: ErrorDeviceLost", "gpu-lost"),
    ("ggml_vulkan: device lost on Vulkan0", "gpu-lost"),
    ("amdgpu 0000:c5:00.0: amdgpu: ring comp_1.1.0 timeout, signaled seq=1, emitted seq=2", "gpu-lost"),
    ("amdgpu 0000:c5:00.0: [drm] device wedged, but recovered through reset", "gpu-lost"),
    ("radv/amdgpu: Not enough memory for command submission.", "gpu-memory-limit"),
    ("amdgpu: amdgpu_vm_validate() failed.", "gpu-memory-limit"),
    ("radv/amdgpu: Failed to allocate a buffer:", "ram-exhausted"),
    ("ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory", "buffer-too-large"),
    (
        "ggml_vulkan: Requested buffer size exceeds device memory allocation limit: ErrorOutOfDeviceMemory",
        "buffer-too-large",
    ),
    ("ggml_vulkan: Device memory allocation of size 1073741824 failed.", "gpu-memory-full"),
    ("E llama_model_load: error loading model: unable to allocate Vulkan0 buffer", "weights-allocation"),
    (
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "kv-allocation",
    ),
    ("E failed to allocate buffer for rs cache", "state-allocation"),
    ("E failed to allocate compute pp buffers", "compute-allocation"),
    ("E llama_model_load: error loading model: read error: Bad address", "read-error"),
    (
        "warning: failed to mlock 1024-byte buffer (after previously locking 0 bytes): Cannot allocate memory",
        "mlock-failed",
    ),
    ("ggml_vulkan: No devices found.", "no-vulkan-device"),
    ("Out of memory: Killed process 4711 (llama-server) total-vm:1kB", "killed-by-kernel"),
    ("[spec] failed to measure draft model memory", "draft-model-memory"),
    ("AMX is not ready to be used!", "processor-mismatch"),
    (
        "E llama_model_load: error loading model: tensor 'output.weight' data is not within the file bounds, model is "
        "corrupted or incomplete",
        "model-damaged",
    ),
    ("E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", "port-in-use"),
    ('error while handling argument "--device": invalid device: Vulkan7', "invalid-device"),
    ("error: invalid argument: --no-mmap", "unknown-argument"),
    ("HTTPS is not supported. Please rebuild with one of:", "no-tls"),
]


@pytest.mark.parametrize(
    ("line", "code"), FAILURE_LINES, ids=[f"{code}-{n}" for n, (_, code) in enumerate(FAILURE_LINES)]
)
def test_failure_messages(line: str, code: str) -> None:
    """FR-51, FR-52: each known failure message is explained, with the line as evidence."""
    facts = replace(case(REFERENCE), lines=("0.00.000.001 I something else", line))
    assert codes(facts) == {code}
    assert finding(facts, code).evidence == line.strip()[:240]


def test_a_failure_speaks_once() -> None:
    """Many lines of one failure give one finding, with the last line."""
    lines = tuple(f"ggml_vulkan: device lost on Vulkan0 ({number})" for number in range(50))
    assert finding(replace(case(), lines=lines), "gpu-lost").evidence.endswith("(49)")


def whole(word: str, similarity: float, prompt_tokens: int) -> str:
    """Log lines of a prompt that is evaluated as a whole although a slot matched."""
    return (
        "0.10.000.000 I slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, "
        f"{word} = {similarity:.3f} "
        "(> 0.100 thold), f_keep = 0.9\n"
        "0.10.000.000 I slot launch_slot_: id  0 | task 7 | processing task, is_child = 0\n"
        "0.10.000.000 I slot update_slots: id  0 | task 7 | new prompt, n_ctx_slot = 131072, n_keep = 0, "
        f"task.n_tokens = {prompt_tokens}\n"
        "0.10.000.000 I slot update_slots: id  0 | task 7 | forcing full prompt re-processing due to lack of cache "
        "data (likely due to SWA or hybrid/recurrent memory, see https://example.org)\n"
    )


@BUILDS
def test_whole_prompts_again(build: str) -> None:
    """Forced full re-processing is counted, with the tokens that were there, unless it is only a template's start."""
    word = {"b10068": "sim_best", "b11434": "f_sim_best"}[build]
    log = whole(word, 0.151, 18310) + whole(word, 0.9, 1000)
    found = finding(case(build=build, log=log), "full-reprocessing")
    assert found.what.startswith("2 prompts")
    assert "first 2,765 tokens" in found.what
    assert "full-reprocessing" not in codes(case(build=build, log=whole(word, 0.241, 29)))


@BUILDS
def test_whole_prompts_again_in_a_slot_that_was_taken_by_age(build: str) -> None:
    """What was lost of them is told where the host prompt cache is searched, or comes out of it."""
    word = {"b10068": "sim", "b11434": "f_sim"}[build]
    head, *lines = whole("sim_best", 0.9, 18310).splitlines(keepends=True)
    by_age = head.partition("selected")[0] + "selected slot by LRU, t_last = 12345\n"
    search = f"0.10.000.000 I srv          load:  - looking for better prompt, base f_keep = 0.1, {word} = 0.151\n"
    better = f"0.10.000.000 I srv          load:  - found better prompt with f_keep = 0.9, {word} = 0.300\n"
    for between, tokens in ((search, "2,765"), (search + better, "5,493")):
        log = "".join((by_age, between, *lines))
        assert f"first {tokens} tokens" in finding(case(build=build, log=log), "full-reprocessing").what
    assert "full-reprocessing" not in codes(case(build=build, log="".join((by_age, *lines))))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("[proxy]\nstrip_message_ids = false", "switched off (proxy.strip_message_ids = false): switch them on"),
        ("[proxy]\nstrip_timestamps = false", "switched off (proxy.strip_timestamps = false): switch them on"),
        ('[rules]\ndisable = ["pi.date"]', "switched off (rules.disable = pi.date): switch them on"),
        ('[proxy]\nstrip_message_ids = "system"', None),
        ("", None),
    ],
)
def test_remedy_of_whole_prompts_again(section: str, says: str | None) -> None:
    """Rules that are off are named first; otherwise the verb that names the cause."""
    remedy = finding(case(section, log=whole("sim_best", 0.151, 18310)), "full-reprocessing").remedy
    assert "`kvstack explain last`" in remedy
    assert "switched off" in remedy if says else "switched off" not in remedy
    assert (says or "") in remedy


# --- Facts that are missing


def test_nothing_known_finds_nothing() -> None:
    """Without binary, model, machine and server there is nothing to say."""
    config = parse_config('[server]\nmodel = "m"', Path("/etc/box.toml"), Path("/"))
    assert diagnose(Facts(config)) == ()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"default_generation_settings": None, "total_slots": "4", "chat_template": 5, "chat_template_caps": []},
        {"default_generation_settings": {"n_ctx": True}, "model_path": None},
    ],
)
def test_odd_props_are_unknown(data: dict[str, Any]) -> None:
    """Whatever /props says, what is not understood is unknown."""
    props = props_of(data)
    assert (props.ctx_per_slot, props.slots, props.chat_template, props.model_path) == (None, None, None, None)
    assert props.preserves_reasoning is None


def test_sizes_are_those_of_the_reference_table() -> None:
    """The sums are those that were measured: KV, state, checkpoints, and the GPU's total."""
    needed = case("cache_ram_mib = 8192").memory
    assert needed is not None
    assert needed.kv_bytes == 3072 * MIB
    assert round(needed.state_bytes / MIB, 2) == 75.38
    assert round(needed.checkpoints_bytes / GIB, 2) == 2.36
    assert round(needed.gpu_bytes / GIB, 1) == 64.8
    quantised = case('cache_type_k = "q8_0"\ncache_type_v = "q8_0"').memory
    assert quantised is not None
    assert quantised.kv_bytes == 1632 * MIB
    for shape, kv_mib in ((DENSE, 12288), (GPT_OSS, 4608 + 27)):
        other = case(shape=shape).memory
        assert other is not None
        assert other.kv_bytes == kv_mib * MIB
