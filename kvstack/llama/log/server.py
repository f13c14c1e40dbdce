"""Log patterns of the server as a whole: loading, devices, slots, readiness, warnings, fatal errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from kvstack.llama.log.pattern import Pattern, mib, pattern
from kvstack.state import log_facts as facts


def _warned(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact:
    return facts.ServerWarned(m.group(0).strip())


_BUFFERS: Mapping[str, Literal["model", "kv", "recurrent", "compute", "output"]] = {
    "model": "model",
    "KV": "kv",
    "RS": "recurrent",
    "compute": "compute",
    "output": "output",
}


def _buffer(m: re.Match[str], slot: int, task: int | None) -> facts.LogFact | None:
    kind = _BUFFERS.get(m.group(2))
    return None if kind is None else facts.BufferAllocated(m.group(1), kind, mib(m.group(3)))


def _device(text: str) -> facts.LogFact | None:
    # `Vulkan0 (NAME) (BUS) - N MiB free`, where the name may hold brackets too.  Builds of 2025 leave the bus out.
    name, _, rest = text.partition(" ")
    description, _, free = rest.rpartition(" - ")
    amount = free.split(" ")[0]
    described, bracket, _ = description.rpartition(") (")
    description = (described if bracket else description.removesuffix(")")).removeprefix("(")
    return facts.DeviceUsed(name, description, int(amount) * 1048576 if amount.isdecimal() else None) if name else None


SLOTS: tuple[Pattern, ...] = (
    pattern(
        "slot made",
        "new slot, n_ctx = <INT>",
        lambda m, slot, task: facts.SlotCreated(slot, int(m.group(1))),
        "b9093 on; from b9847 trace level",
        "new slot, n_ctx = 32768",
    ),
    pattern(
        "slot made",
        "new slot n_ctx_slot = <INT>",
        lambda m, slot, task: facts.SlotCreated(slot, int(m.group(1))),
        "2025",
        "new slot n_ctx_slot = 32768",
    ),
)
"""Messages behind `slot FUNCTION: id S | task -1 | `."""

SERVER: tuple[Pattern, ...] = (
    pattern(
        "cancelled",
        "cancel task, id_task = <INT>",
        lambda m, slot, task: facts.TaskCancelled(int(m.group(1))),
        "2025 on",
        "cancel task, id_task = 205",
    ),
    pattern(
        "refused",
        "task id = <INT>, error: <ANY>",
        lambda m, slot, task: facts.RequestRejected(int(m.group(1)), m.group(2)),
        "2025 on",
        "task id = 0, error: request (4776 tokens) exceeds the available context size (2048 tokens), try increasing it",
    ),
    pattern(
        "slots",
        "initializing slots, n_slots = <INT>",
        lambda m, slot, task: facts.SlotsInitialised(int(m.group(1))),
        "2025 to b9785",
        "initializing slots, n_slots = 4",
    ),
    pattern(
        "slots",
        "initializing, n_slots = <INT>, n_ctx_slot = <INT>, kv_unified = '<ANY>'",
        lambda m, slot, task: facts.SlotsInitialised(int(m.group(1)), int(m.group(2)), m.group(3) == "true"),
        "b9847 on",
        "initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'false'",
    ),
    pattern(
        "asleep",
        "entering sleeping state",
        lambda m, slot, task: facts.ServerSlept(asleep=True),
        "2026",
        "entering sleeping state",
    ),
    pattern(
        "awake",
        "exiting sleeping state",
        lambda m, slot, task: facts.ServerSlept(asleep=False),
        "2026",
        "exiting sleeping state",
    ),
    pattern(
        "warning",
        "cache_reuse is not supported by <*>",
        _warned,
        "2025 on",
        "cache_reuse is not supported by this context, it will be disabled",
    ),
    pattern(
        "warning",
        "the slot context (<INT>) exceeds the training context <*>",
        _warned,
        "2025 on",
        "the slot context (131072) exceeds the training context of the model (32768) - capping",
    ),
    pattern(
        "warning",
        "capping per-slot context <*>",
        _warned,
        "b10798 on",
        "capping per-slot context (131072) to --kv-unified-per-slot (32768)",
    ),
    pattern(
        "warning",
        "--kv-unified-per-slot (<INT>) exceeds <*>",
        _warned,
        "b10798 on",
        "--kv-unified-per-slot (65536) exceeds the per-slot pool capacity (32768) - cap has no effect",
    ),
    pattern(
        "warning",
        "failed to find free space in the KV cache<*>",
        # Its numbers change with every batch; the warning is one.
        lambda m, slot, task: facts.ServerWarned("failed to find free space in the KV cache"),
        "2025 on",
        "failed to find free space in the KV cache, retrying with smaller batch size, off = 0, n_batch = 1024, ret = 1",
    ),
    pattern(
        "warning",
        "failed to allocate memory for prompt cache state<*>",
        lambda m, slot, task: facts.ServerWarned("failed to allocate memory for the RAM cache"),
        "b6700 (October 2025) on",
        "failed to allocate memory for prompt cache state: std::bad_alloc",
    ),
    pattern(
        "warning",
        "ctx_shift is not supported by <*>",
        _warned,
        "2025 on",
        "ctx_shift is not supported by multimodal, it will be disabled",
    ),
    pattern(
        "warning",
        "--cache-idle-slots requires <*>",
        _warned,
        "2026",
        "--cache-idle-slots requires --cache-ram, disabling",
    ),
    pattern("end", "cleaning up before exit<*>", None, "2025 on", "cleaning up before exit..."),
    pattern("end", "operator(): cleaning up before exit<*>", None, "2025 on", "operator(): cleaning up before exit..."),
)
"""Messages behind `srv FUNCTION: ` (and behind `main: ` to b9093).  Most others there say nothing of the cache."""

LOADING: tuple[Pattern, ...] = (
    pattern(
        "device",
        "using device <ANY>",
        lambda m, slot, task: _device(m.group(1)),
        "2025 on; from b9246 trace level",
        "using device Vulkan0 (llvmpipe (LLVM 15.0.6, 256 bits)) (unknown id) - 2048 MiB free",
    ),
    pattern(
        "offload",
        "offloaded <INT>/<INT> layers to GPU",
        lambda m, slot, task: facts.LayersOffloaded(int(m.group(1)), int(m.group(2))),
        "2025 on; from b9246 trace level",
        "offloaded 3/3 layers to GPU",
    ),
    Pattern(
        "buffer",
        " buffer size = ",
        re.compile(r" *(\S+) +(model|KV|RS|compute|output) buffer size = +(\d{1,12}(?:\.\d{1,6})?) MiB"),
        _buffer,
        "2025 on; from b9246 trace level",
        "     Vulkan0 model buffer size =     0.21 MiB",
    ),
)
"""Messages behind any other `FUNCTION: `, of the libraries that load the model."""
