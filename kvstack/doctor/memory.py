"""Does it fit, with the system and the caches beside it?"""

from __future__ import annotations

from collections.abc import Iterator

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.llama.model.memory import GIB, MIB, SYSTEM_BYTES, cache_ram_limit_bytes

MAPPED_LIMIT_BYTES = 20 * GIB
"""Above this, mapped loads were reported to hang or to read at a third of the speed on machines with one memory."""
WINDOWS_CEILING_BYTES = 60 * GIB
"""Drivers before September 2026 fail a little above it."""
BUFFER_LIMIT_BYTES = {"linux": 4 * GIB, "windows": 2 * GIB}
"""The largest single buffer of RADV, and of AMD's own driver."""
KEEP_FREE_BYTES = 4 * GIB
CHECKPOINTS_NOTE_BYTES = 4 * GIB


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"


def _shares_memory(facts: Facts) -> bool:
    """Whether GPU and system have one RAM: an AMD GPU that may use much of it, or Apple's."""
    machine = facts.machine
    return machine.system == "darwin" or (machine.amd_gpu and (machine.gtt_bytes is not None))


def _uses_gpu(facts: Facts) -> bool:
    server = facts.config.server
    return server.gpu_layers > 0 and (server.device or "").casefold() != "none" and not _without_devices(facts)


def _without_devices(facts: Facts) -> bool:
    return facts.capabilities is not None and facts.capabilities.devices == ()


def gpu_fit(facts: Facts) -> Iterator[Finding]:
    """The model does not fit into what the GPU can reach."""
    needed, machine = facts.memory, facts.machine
    if needed is None or not _uses_gpu(facts) or facts.config.attached:
        return
    limits: list[tuple[int, str]] = []
    if machine.carve_out_bytes is not None and machine.gtt_bytes is not None:
        limits.append((machine.carve_out_bytes + machine.gtt_bytes, "carve-out + GTT"))
    if machine.carve_out_bytes is not None and machine.ram_bytes is not None and _shares_memory(facts):
        usable = machine.carve_out_bytes + machine.ram_bytes - SYSTEM_BYTES.get(machine.system, 0)
        limits.append((usable, "carve-out + RAM - system"))
    devices = facts.capabilities.devices if facts.capabilities is not None else None
    if devices:
        limits.append((sum(device.total_mib for device in devices) * MIB, "the devices' own total"))
    if not limits:
        return
    limit, by = min(limits)
    if needed.gpu_bytes <= limit:
        return
    remedy = "Use a smaller quantisation, a smaller server.ctx_size, or fewer layers on the GPU."
    if _shares_memory(facts) and by == "carve-out + GTT" and machine.system == "linux":
        remedy = (
            "Raise the kernel parameter ttm.pages_limit (25165824 for 96 GiB; the default is half of the RAM), "
            "or use a smaller quantisation."
        )
    yield Finding(
        "gpu-memory",
        Severity.ERROR,
        f"The model needs {_gib(needed.gpu_bytes)} of GPU memory, and there are {_gib(limit)}",
        f"{by} = {_gib(limit)}; " + "; ".join(list(needed.lines())[:5]),
        remedy,
    )


def cache_ram(facts: Facts) -> Iterator[Finding]:
    """The host prompt cache is larger than the memory that is really free beside the model."""
    needed, machine = facts.memory, facts.machine
    if needed is None or machine.ram_bytes is None or facts.config.attached:
        return
    # Where the GPU has memory of its own, the model does not take the system's.
    own = machine.carve_out_bytes or 0
    if machine.carve_out_bytes is None and _uses_gpu(facts) and not _shares_memory(facts):
        own = needed.gpu_bytes
    limit = cache_ram_limit_bytes(needed, ram_bytes=machine.ram_bytes, carve_out_bytes=own, system=machine.system)
    setting = facts.settings.cache_ram_bytes
    if setting == 0 or 0 < setting <= limit:
        return
    shown = "no limit" if setting < 0 else f"{setting // MIB:,} MiB"
    rounded = limit // (512 * MIB) * 512
    yield Finding(
        "cache-ram",
        Severity.ERROR if setting < 0 or setting > 2 * limit else Severity.WARNING,
        f"The host prompt cache ({shown}) is larger than what the machine has left ({limit // MIB:,} MiB)",
        f"RAM {_gib(machine.ram_bytes)}, of the GPU alone {_gib(own)}; " + "; ".join(needed.lines()),
        f"Set server.cache_ram_mib = {rounded} or less."
        if rounded
        else "The model leaves no room for it: use a smaller quantisation or a smaller server.ctx_size.",
    )


def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Checkpoints of a hybrid model take memory that no flag names."""
    needed, shape = facts.memory, facts.shape
    if needed is None or shape is None or needed.checkpoints_bytes < CHECKPOINTS_NOTE_BYTES or facts.config.attached:
        return
    slots = facts.config.server.parallel
    yield Finding(
        "checkpoint-memory",
        Severity.WARNING,
        f"Context checkpoints may take {_gib(needed.checkpoints_bytes)} of RAM",
        f"{slots} slots x {facts.settings.checkpoints} checkpoints x {shape.state_bytes / MIB:.1f} MiB "
        f"({shape.kind} model)",
        "Set server.parallel = 1, or lower server.ctx_checkpoints to 16.",
    )


def buffer_limit(facts: Facts) -> Iterator[Finding]:
    """Without flash attention one compute buffer exceeds what the driver gives in one piece."""
    shape, settings = facts.shape, facts.settings
    limit = BUFFER_LIMIT_BYTES.get(facts.machine.system)
    if shape is None or limit is None or not _uses_gpu(facts) or settings.flash_attention != "off":
        return
    scores = facts.config.server.ctx_size * settings.ubatch_tokens * max(1, shape.heads) * 4
    if scores <= limit:
        return
    yield Finding(
        "buffer-limit",
        Severity.ERROR,
        f"Without flash attention one buffer needs {_gib(scores)}, and the driver gives {_gib(limit)} at most",
        f"ctx_size {facts.config.server.ctx_size:,} x ubatch {settings.ubatch_tokens} x {shape.heads} heads x 4 bytes",
        'Set server.flash_attn = "on".',
    )


def windows_ceiling(facts: Facts) -> Iterator[Finding]:
    """Older AMD drivers for Windows fail above 64 GB, whatever the carve-out."""
    needed = facts.memory
    if facts.machine.system != "windows" or needed is None or not _uses_gpu(facts):
        return
    if needed.gpu_bytes <= WINDOWS_CEILING_BYTES:
        return
    yield Finding(
        "windows-ceiling",
        Severity.WARNING,
        "On Windows, AMD drivers older than September 2026 fail near 64 GB of GPU memory",
        f"needed: {_gib(needed.gpu_bytes)}",
        "Use driver 32.0.31041 or newer, with a fixed carve-out of 64 GB (not Auto).",
    )


def mapped_file(facts: Facts) -> Iterator[Finding]:
    """A large file is mapped on a machine with one memory."""
    model = facts.model
    if model is None or model.size_bytes <= MAPPED_LIMIT_BYTES or facts.settings.maps_file is not True:
        return
    if not _uses_gpu(facts) or not _shares_memory(facts):
        return
    yield Finding(
        "mmap",
        Severity.WARNING,
        "A model of more than 20 GiB is mapped: it loads slowly or hangs, and is in memory twice meanwhile",
        f"{_gib(model.size_bytes)}, mapped",
        "Set server.no_mmap = true.",
    )


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Locking the model fails without a raised limit, and gains nothing where it sits in GPU memory."""
    if not facts.settings.mlock or not _uses_gpu(facts):
        return
    yield Finding(
        "mlock",
        Severity.NOTE,
        "Locking the model in memory gains nothing when it is on the GPU, and fails without a raised limit",
        "--mlock",
        "Remove it.",
    )


def free_memory(facts: Facts) -> Iterator[Finding]:
    """Little is free for the driver already now."""
    machine = facts.machine
    if machine.available_bytes is None or not machine.amd_gpu or not _uses_gpu(facts):
        return
    usable = machine.available_bytes - (machine.contiguous_free_bytes or 0)
    if usable >= KEEP_FREE_BYTES:
        return
    yield Finding(
        "memory-low",
        Severity.WARNING,
        f"Only {_gib(max(0, usable))} of RAM are free for the GPU driver, and it fails silently below 4 GiB",
        f"MemAvailable {_gib(machine.available_bytes)} - CmaFree {_gib(machine.contiguous_free_bytes or 0)}",
        "Stop other programs, or lower server.cache_ram_mib.",
    )


CHECKS = (gpu_fit, cache_ram, checkpoints, buffer_limit, windows_ceiling, mapped_file, locked_memory, free_memory)
"""The checks of this module."""
