"""Is the GPU there, is it the right one, and does it do the work?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.state import log_facts

_SHARED = re.compile(r"shared memory: (\d+)")
_MATRIX = re.compile(r"matrix cores: ([^|]+?)\s*(?:\||$)")


@dataclass(frozen=True, slots=True)
class Driver:
    """
    What the Vulkan backend says of one device's driver.

    Attributes:
        line: The line itself.
        driver: For example `radv`, `AMD open-source driver`.
        shares_memory: Whether the GPU uses the system's RAM.
        shared_memory_bytes: Per workgroup; 65536 with RADV, 32768 with AMD's drivers.
        matrix_cores: For example `KHR_coopmat`, or `none`.
    """

    line: str
    driver: str
    shares_memory: bool
    shared_memory_bytes: int | None
    matrix_cores: str | None


def driver_of(line: str) -> Driver | None:
    """Read the Vulkan backend's line about a device; None if *line* is another one."""
    # ggml_vulkan: 0 = Radeon 8060S Graphics (RADV GFX1151) (radv) | uma: 1 | fp16: 1 | ... | shared memory: 65536 | ...
    found = re.search(r"ggml_vulkan: \d+ = (.*?) \| uma: (\d)", line)
    if found is None:
        return None
    names = re.findall(r"\(([^()]*)\)", found[1])
    shared, matrix = _SHARED.search(line), _MATRIX.search(line)
    return Driver(
        line=line[line.index("ggml_vulkan") :].strip(),
        driver=names[-1] if names else "",
        shares_memory=found[2] == "1",
        shared_memory_bytes=int(shared[1]) if shared else None,
        matrix_cores=matrix[1] if matrix else None,
    )


def uses_gpu(facts: Facts) -> bool:
    """Whether the config wants the GPU."""
    server = facts.config.server
    return server.gpu_layers > 0 and (server.device or "").casefold() != "none" and not facts.config.attached


def device_listed(facts: Facts) -> Iterator[Finding]:
    """The named device does not exist, or none does."""
    devices = facts.capabilities.devices if facts.capabilities is not None else None
    if devices is None or not uses_gpu(facts):
        return
    wanted = facts.config.server.device
    listed = facts.capabilities.named_devices if facts.capabilities is not None else ""
    known = {device.name.casefold() for device in devices}
    if wanted is not None:
        missing = [name for name in wanted.split(",") if name.strip().casefold() not in known]
        if missing:
            yield Finding(
                "device-missing",
                Severity.ERROR,
                f"There is no device {', '.join(missing)}",
                f"--list-devices: {listed}",
                "Set server.device to a listed one. If the GPU is not listed: install its Vulkan driver, and put this "
                "user into the groups render and video.",
            )
    elif not devices:
        yield Finding(
            "device-none",
            # A machine without a GPU is normal, and gpu_layers is 99 by default; a GPU that cannot be used is not.
            Severity.WARNING if facts.machine.amd_gpu else Severity.NOTE,
            "No GPU found: everything runs on the CPU",
            f"--list-devices: {listed}; gpu_layers = {facts.config.server.gpu_layers}"
            + ("; this machine has an AMD GPU" if facts.machine.amd_gpu else ""),
            "If there is a GPU, install its driver and put this user into the groups render and video; else there is "
            "nothing to do.",
        )


def software_device(facts: Facts) -> Iterator[Finding]:
    """The device is a program that plays GPU."""
    seen: dict[str, str] = {}
    for device in (facts.capabilities.devices if facts.capabilities is not None else None) or ():
        if device.is_software and _is_chosen(facts, device.name):
            seen[device.name] = f"--list-devices: {device.name}: {device.description}"
    for used in facts.logged(log_facts.DeviceUsed):
        if re.search(r"llvmpipe|lavapipe|softpipe|SwiftShader", used.description, re.IGNORECASE):
            seen[used.device] = f"log: using device {used.device} ({used.description})"
    for evidence in seen.values():
        yield Finding(
            "device-software",
            Severity.ERROR,
            "The device is a software renderer on the CPU, far slower than the CPU itself",
            evidence,
            "Install the GPU's Vulkan driver (mesa-vulkan-drivers with RADV), check /dev/dri and the groups render and "
            "video.",
        )


def _is_chosen(facts: Facts, name: str) -> bool:
    wanted = facts.config.server.device
    if not uses_gpu(facts):
        return False
    return wanted is None or name.casefold() in {each.strip().casefold() for each in wanted.split(",")}


def wrong_device(facts: Facts) -> Iterator[Finding]:
    """The server uses another device than the config names, or chose among several by itself."""
    wanted = facts.config.server.device
    used = [fact.device for fact in facts.logged(log_facts.DeviceUsed)]
    if wanted is not None and used and uses_gpu(facts):
        names = {each.strip().casefold() for each in wanted.split(",")}
        others = [device for device in used if device.casefold() not in names]
        if others:
            yield Finding(
                "device-other",
                Severity.ERROR,
                f"The server uses {', '.join(others)} instead of {wanted}",
                f"log: using device {', '.join(used)}",
                "Check GGML_VK_VISIBLE_DEVICES and server.extra_args.",
            )
    devices = [
        device
        for device in (facts.capabilities.devices if facts.capabilities is not None else None) or ()
        if not device.is_software
    ]
    if wanted is None and len(devices) > 1 and uses_gpu(facts):
        yield Finding(
            "device-ambiguous",
            Severity.WARNING,
            "There are several GPUs, and the model is spread over all of them",
            "--list-devices: " + ", ".join(f"{device.name} ({device.description})" for device in devices),
            "Name one in server.device, if one is enough.",
        )


def work_on_gpu(facts: Facts) -> Iterator[Finding]:
    """
    The model is on the CPU, in part or as a whole.

    `offloaded K/K layers to GPU` is printed without any GPU too, and not at all by builds for the CPU.  The GPU works
    if a device is used, all layers went to it, and its KV buffer is there.
    """
    layers = facts.logged(log_facts.LayersOffloaded)
    kv_devices = {fact.device for fact in facts.logged(log_facts.BufferAllocated) if fact.kind == "kv"}
    if not uses_gpu(facts) or not (layers or kv_devices):
        return
    used = [fact.device for fact in facts.logged(log_facts.DeviceUsed)]
    last = layers[-1] if layers else None
    evidence = []
    if last is not None:
        evidence.append(f"offloaded {last.layers}/{last.layers_total} layers to GPU")
    if kv_devices:
        evidence.append(f"KV buffer on {', '.join(sorted(kv_devices))}")
    if not used:
        if not has_no_gpu(facts):
            yield Finding(
                "gpu-unused",
                Severity.ERROR,
                "Everything runs on the CPU although layers should be on the GPU",
                f"log: {'; '.join(evidence)}; no `using device` line",
                "Check --list-devices with the same environment, the driver, and that this build has a GPU backend.",
            )
    elif last is not None and last.layers < last.layers_total <= facts.config.server.gpu_layers:
        yield Finding(
            "layers-missing",
            Severity.ERROR,
            f"Only {last.layers} of {last.layers_total} layers are on the GPU",
            f"log: {'; '.join(evidence)}; gpu_layers = {facts.config.server.gpu_layers}",
            "Free GPU memory (ctx_size, cache types, quantisation), and set server.fit = false.",
        )
    elif last is not None and last.layers == last.layers_total and kv_devices and kv_devices.isdisjoint(used):
        yield Finding(
            "kv-on-cpu",
            Severity.ERROR,
            "The KV cache is on the CPU although all layers are on the GPU",
            f"log: {'; '.join(evidence)}",
            "Remove --no-kv-offload from server.extra_args.",
        )


def has_no_gpu(facts: Facts) -> bool:
    """Whether there is no GPU and none is named: another finding says so, and the CPU may well be meant."""
    devices = facts.capabilities.devices if facts.capabilities is not None else None
    return devices == () and facts.config.server.device is None


def driver(facts: Facts) -> Iterator[Finding]:
    """The GPU is driven by the slower of two drivers."""
    if not uses_gpu(facts):
        return
    for known in filter(None, map(driver_of, facts.lines)):
        if known.driver.casefold() == "amd open-source driver" or (
            facts.machine.system == "linux"
            and known.shared_memory_bytes == 32768
            and "radv" not in known.line.casefold()
        ):
            yield _amdvlk(known.line)
            return
        if known.matrix_cores == "none" and "radv" in known.line.casefold():
            yield Finding(
                "driver-old",
                Severity.WARNING,
                "The driver does not offer the GPU's matrix cores, which costs prefill speed",
                known.line,
                "Use Mesa 26 or newer.",
            )
            return
    icds = [path for path in facts.machine.vulkan_drivers if re.search(r"amd_icd|amdvlk", path)]
    if icds and facts.machine.system == "linux" and "VK_DRIVER_FILES" not in facts.config.server.env:
        yield _amdvlk(f"{icds[0]} is installed and wins over RADV")


def _amdvlk(evidence: str) -> Finding:
    return Finding(
        "driver-amdvlk",
        Severity.WARNING,
        "AMDVLK drives the GPU instead of RADV: prefill is a quarter to a third slower",
        evidence,
        'Remove AMDVLK (discontinued), or set VK_DRIVER_FILES under [server.env] to RADV\'s file, "radeon_icd...json".',
    )


CHECKS = (device_listed, software_device, wrong_device, work_on_gpu, driver)
"""The checks of this module."""
