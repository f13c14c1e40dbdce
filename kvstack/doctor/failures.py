"""
Failure messages of llama-server, its Vulkan backend, the GPU driver and the kernel, with their remedies.

A table: the first entry that matches a line speaks for it, and each entry speaks once, with the last line that shows
it.  Most of these were collected on machines with one memory for CPU and GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.doctor.gpu import has_no_gpu
from kvstack.state import log_facts

EVIDENCE_CHARACTERS = 240
LOSS_FROM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """
    One kind of failure.

    Attributes:
        code: Of the finding.
        pattern: What shows it, anywhere in a line.
        what: One sentence.
        remedy: What to do.
        severity: How much it matters.
    """

    code: str
    pattern: re.Pattern[str]
    what: str
    remedy: str
    severity: Severity = Severity.ERROR


def _failure(code: str, pattern: str, what: str, remedy: str, severity: Severity = Severity.ERROR) -> Failure:
    return Failure(code, re.compile(pattern), what, remedy, severity)


FAILURES: tuple[Failure, ...] = (
    _failure(
        "gpu-memory-limit",
        r"Not enough memory for command submission|amdgpu_vm_validate\(\) failed",
        "The GPU reached the limit of memory that the kernel lets it use, or RAM was full",
        "Raise ttm.pages_limit, stop other models, lower server.cache_ram_mib; with a small GTT only, set "
        "server.no_mmap = false.",
    ),
    _failure(
        "gpu-lost",
        r"ErrorDeviceLost|DeviceLostError|device lost on|CS has been cancelled because the context is lost"
        r"|ring \S+ timeout|device wedged",
        "The GPU was lost: its driver reset it during work",
        "Kernel 7.x: amdgpu.lockup_timeout=10000,60000,10000,10000. Then server.ubatch_size = 256 or 128, no "
        "speculation. Restart the process: requests after the reset fail too.",
    ),
    _failure(
        "ram-exhausted",
        r"Failed to allocate a buffer",
        "The GPU driver found no RAM for a buffer",
        "Lower server.cache_ram_mib or server.ctx_size; keep MemAvailable - CmaFree above 4 GiB.",
    ),
    _failure(
        "buffer-too-large",
        r"exceeds device (?:buffer size|memory allocation) limit",
        "One buffer is larger than the driver can allocate (4 GiB RADV, 2 GiB AMD's own driver)",
        'Set server.flash_attn = "on" and a smaller server.ubatch_size; leave the GGML_VK_FORCE variables alone.',
    ),
    _failure(
        "weights-allocation",
        r"unable to allocate \S+ buffer",
        "There was no room for the weights",
        "Use a smaller quantisation, or give the GPU more memory.",
    ),
    _failure(
        "kv-allocation",
        r"failed to allocate buffer for kv cache",
        "There was no room for the KV cache",
        "Lower server.ctx_size, or set server.cache_type_k and cache_type_v to q8_0.",
    ),
    _failure(
        "state-allocation",
        r"failed to allocate buffer for rs cache",
        "There was no room for the recurrent state",
        "Set server.parallel = 1.",
    ),
    _failure(
        "compute-allocation",
        r"failed to allocate compute (?:pp )?buffers",
        "There was no room for the compute buffers",
        "Lower server.ubatch_size.",
    ),
    _failure(
        "gpu-memory-full",
        r"Device memory allocation of size \d+ failed|OutOfDeviceMemory",
        "The GPU's memory is full; on Windows this may be the 64 GB ceiling of an older driver",
        "Use a smaller quantisation or context, another carve-out, or a driver of September 2026 or newer.",
    ),
    _failure(
        "read-error",
        r"read error: Bad address",
        "This build cannot read a model without mapping it (a bug in builds around b7554 to b7574)",
        "Use a newer build.",
    ),
    _failure(
        "mlock-failed",
        r"failed to mlock|Try increasing RLIMIT_MEMLOCK",
        "The model could not be locked in memory",
        "Remove --mlock (or --load-mode mlock) from server.extra_args.",
        Severity.WARNING,
    ),
    _failure(
        "no-vulkan-device",
        r"ggml_vulkan: No devices found",
        "The Vulkan backend found no GPU",
        "Install the driver; put this user into the groups render and video; in a container pass /dev/dri and the "
        "groups by number.",
    ),
    _failure(
        "killed-by-kernel",
        r"Out of memory: Killed process \d+ \(llama|oom-kill:.*llama|oom_reaper: reaped process \d+ \(llama",
        "The kernel killed llama-server: out of memory",
        "Lower server.cache_ram_mib, server.ctx_checkpoints or server.ctx_size, or stop other programs.",
    ),
    _failure(
        "draft-model-memory",
        r"\[spec\] failed to measure draft model memory",
        "The memory of the draft model could not be measured",
        "Set server.fit = false.",
        Severity.WARNING,
    ),
    _failure(
        "processor-mismatch",
        r"AMX is not ready to be used",
        "This llama-server was built for another processor and dies with an illegal instruction",
        "Use a generic build, or one compiled on this machine.",
    ),
    _failure(
        "model-damaged",
        r"data is not within the file bounds|model is corrupted or incomplete",
        "The model file is truncated",
        "Compare its size with the original's, and download it again.",
    ),
    _failure(
        "port-in-use",
        r"couldn't bind (?:HTTP server socket|to server socket)",
        "llama-server's port was taken",
        "Stop the program that uses it, or set server.port to a free one.",
    ),
    _failure(
        "invalid-device",
        r"invalid device: ",
        "llama-server has no device of that name",
        "Set server.device to one that --list-devices names.",
    ),
    _failure(
        "unknown-argument",
        r"error: (?:invalid|unknown) argument: ",
        "llama-server does not know an argument",
        "Remove it from server.extra_args, or use a build that has it.",
    ),
    _failure(
        "no-tls",
        r"HTTPS is not supported",
        "This llama-server cannot download models: it was built without TLS",
        "Download the file yourself and set server.model.",
    ),
    _failure(
        "reuse-unsupported",
        r"cache_reuse is not supported by",
        "Chunk reuse does not work with this model and was switched off",
        "Remove --cache-reuse from server.extra_args.",
        Severity.NOTE,
    ),
)
"""All known failures, the special before the general."""


def failure_lines(facts: Facts) -> Iterator[Finding]:
    """What the logs say went wrong."""
    shown: dict[str, tuple[Failure, str]] = {}
    for line in facts.lines:
        for failure in FAILURES:
            if failure.pattern.search(line):
                shown[failure.code] = (failure, line.strip())
                break
    for failure, line in shown.values():
        severity = failure.severity
        if failure.code == "no-vulkan-device" and has_no_gpu(facts) and not facts.machine.amd_gpu:
            severity = Severity.NOTE  # none is there, and none was asked for
        yield Finding(failure.code, severity, failure.what, line[:EVIDENCE_CHARACTERS], failure.remedy)


def full_reprocessing(facts: Facts) -> Iterator[Finding]:
    """Whole prompts were evaluated again although a slot held their beginning."""
    lost = list(_lost_tokens(facts.log))
    if not lost:
        return
    kind = facts.shape.kind if facts.shape is not None else "hybrid or sliding-window"
    count = "A prompt was" if len(lost) == 1 else f"{len(lost)} prompts were"
    yield Finding(
        "full-reprocessing",
        Severity.WARNING,
        f"{count} evaluated as a whole although a slot held the first {max(lost):,} tokens",
        f"log: forcing full prompt re-processing; a {kind} model goes back to checkpoints only, and there are none "
        "inside the system prompt and tools",
        _stable_prompts(facts),
    )


def _stable_prompts(facts: Facts) -> str:
    """What to do about prompts that change near their front: rules that are off come first."""
    proxy, disabled = facts.config.proxy, facts.config.rules.disable
    off = [f"proxy.{key} = false" for key in ("strip_message_ids", "strip_timestamps") if getattr(proxy, key) is False]
    off += [f"rules.disable = {name}" for name in disabled]
    tell = (
        "`kvstack explain last` names what changed in the last prompt and what to do about it; this is no fault of the "
        "hardware."
    )
    return f"Rules that keep prompts equal are switched off ({', '.join(off)}): switch them on. {tell}" if off else tell


def _lost_tokens(log: Iterable[log_facts.LogFact]) -> Iterator[int]:
    """Of each forced evaluation, the tokens that the slot held already, where they are more than a template's start."""
    similarity: dict[int, float] = {}
    prompt: dict[int, int] = {}
    selected: int | None = None  # what is said of the host prompt cache is about this slot
    for fact in log:
        if isinstance(fact, log_facts.SlotSelected):
            selected = fact.slot
            similarity[fact.slot] = fact.similarity_ratio or 0.0
        elif isinstance(fact, log_facts.RamCacheSearched | log_facts.RamCacheHit) and selected is not None:
            similarity[selected] = fact.similarity_ratio or 0.0
        elif isinstance(fact, log_facts.PromptStarted):
            prompt[fact.slot] = fact.prompt_tokens
        elif isinstance(fact, log_facts.FullReprocess):
            tokens = round(similarity.get(fact.slot, 0.0) * prompt.get(fact.slot, 0))
            if tokens >= LOSS_FROM_TOKENS:
                yield tokens


CHECKS = (failure_lines, full_reprocessing)
"""The checks of this module."""
