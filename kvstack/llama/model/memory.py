"""
The memory that a model and its caches need: a model's shape, and sums over it.

The formulas are those of llama.cpp's own sizes (KV cells, recurrent state), checked against its log: 24576 bytes per
token and 75.376 MiB of state for Qwen3-Next 80B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvstack.llama.model.gguf import GgufArray, GgufHeader

MIB = 1024 * 1024
GIB = 1024 * MIB

CACHE_TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes per value of the KV cache, by the name that --cache-type-k takes."""

COMPUTE_BYTES = 700 * MIB
"""Compute buffer and its part in host memory, at a physical batch of 512."""
SERVER_BYTES = int(1.5 * GIB)
"""llama-server's own heap, the tokenizer, and kvstack."""
SYSTEM_BYTES = {"linux": 5 * GIB, "windows": 9 * GIB, "darwin": 5 * GIB}
RESERVE_BYTES = 8 * GIB
"""Page cache, browser, agent.  Out of memory on a unified machine freezes the desktop, so the reserve is a choice."""

# Every n-th layer sees everything, the others a window.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "olmo2": 4, "exaone4": 4}


class Kind(StrEnum):
    """How a model remembers a prompt."""

    DENSE = "dense"
    """Full attention: its cache can be cut at any token."""
    SLIDING_WINDOW = "sliding window"
    HYBRID = "hybrid"
    """Recurrent layers: it can only go back to a checkpoint."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """
    What the sums need to know of a model.

    Attributes:
        architecture: As the file names it.
        name: As the file names it, or empty.
        kind: How it remembers.
        layers: All of them.
        training_ctx_tokens: What it was trained for.
        full_values_per_token: K and V values per token in layers that see everything.
        window_values_per_token: The same in layers that see a window.
        window_tokens: The window's length.
        state_bytes: Recurrent state of one sequence, which is the size of one checkpoint too.
        heads: Attention heads of a layer.
        chat_template: The Jinja text, or None.
        parts: How many files the model is split into.
    """

    architecture: str
    name: str
    kind: Kind
    layers: int
    training_ctx_tokens: int | None
    full_values_per_token: tuple[int, int]
    window_values_per_token: tuple[int, int] = (0, 0)
    window_tokens: int = 0
    state_bytes: int = 0
    heads: int = 0
    chat_template: str | None = None
    parts: int = 1

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the cache cannot simply be cut where a prompt differs."""
        return self.kind != Kind.DENSE


def shape_of(header: GgufHeader) -> ModelShape | None:
    """The shape of a model; None if the header does not describe a language model."""
    architecture = header.text("general.architecture")
    if architecture is None:
        return None

    def number(key: str) -> int:
        return header.integer(f"{architecture}.{key}") or 0

    layers = number("block_count")
    if not 0 < layers <= 4096:
        return None
    heads = max(_per_layer(header, f"{architecture}.attention.head_count", layers), default=0)
    default_width = number("embedding_length") // heads if heads else 0
    key_width = number("attention.key_length") or default_width
    value_width = number("attention.value_length") or default_width
    kv_heads = _per_layer(header, f"{architecture}.attention.head_count_kv", layers) or [heads] * layers
    recurrent = _recurrent_layers(header, architecture, layers, kv_heads)
    window = number("attention.sliding_window")
    sliding = _sliding_layers(header, architecture, layers) if window else [False] * layers
    full = window_heads = 0
    for layer in range(layers):
        if recurrent[layer]:
            continue
        if sliding[layer]:
            window_heads += kv_heads[layer]
        else:
            full += kv_heads[layer]
    kind = Kind.HYBRID if any(recurrent) else Kind.SLIDING_WINDOW if window_heads else Kind.DENSE
    return ModelShape(
        architecture=architecture,
        name=header.text("general.name") or "",
        kind=kind,
        layers=layers,
        training_ctx_tokens=number("context_length") or None,
        full_values_per_token=(full * key_width, full * value_width),
        window_values_per_token=(window_heads * key_width, window_heads * value_width),
        window_tokens=window if window_heads else 0,
        state_bytes=_state_bytes(header, architecture) * sum(recurrent),
        heads=heads,
        chat_template=header.text("tokenizer.chat_template"),
        parts=max(1, header.integer("split.count") or 1),
    )


def _per_layer(header: GgufHeader, key: str, layers: int) -> list[int]:
    value = header.values.get(key)
    if isinstance(value, GgufArray):
        return [int(item) for item in value.items or ()][:layers] if value.count >= layers else []
    single = header.integer(key)
    return [] if single is None else [single] * layers


def _recurrent_layers(header: GgufHeader, architecture: str, layers: int, kv_heads: list[int]) -> list[bool]:
    has_state = (header.integer(f"{architecture}.ssm.state_size") or 0) > 0
    interval = header.integer(f"{architecture}.full_attention_interval")
    if interval and has_state:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if has_state or header.integer(f"{architecture}.shortconv.l_cache"):
        # A layer without KV heads is recurrent; a model that names none has recurrent layers only.
        flags = [count == 0 for count in kv_heads]
        return flags if any(flags) else [True] * layers if _is_purely_recurrent(architecture) else [False] * layers
    return [_is_purely_recurrent(architecture)] * layers


def _is_purely_recurrent(architecture: str) -> bool:
    return architecture.startswith(("mamba", "rwkv", "arwkv"))


def _sliding_layers(header: GgufHeader, architecture: str, layers: int) -> list[bool]:
    pattern = header.values.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray) and pattern.items is not None and pattern.count >= layers:
        return [bool(item) for item in pattern.items[:layers]]
    every = header.integer(f"{architecture}.attention.sliding_window_pattern") or _FULL_EVERY.get(architecture)
    if not every:
        return [False] * layers  # a window that llama.cpp does not use for this architecture, or an upper bound
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _state_bytes(header: GgufHeader, architecture: str) -> int:
    """Of one recurrent layer: the convolution's last inputs and the state itself, as 32-bit floats."""

    def number(key: str) -> int:
        return header.integer(f"{architecture}.ssm.{key}") or 0

    inner, state, groups = number("inner_size"), number("state_size"), number("group_count")
    convolution = max(0, number("conv_kernel") - 1) * (inner + 2 * groups * state)
    return 4 * (convolution + inner * state)


@dataclass(frozen=True, slots=True)
class MemorySum:
    """
    What one configuration needs, in bytes.

    Attributes:
        weights_bytes: The model file, all parts.
        kv_bytes: The KV cache.
        state_bytes: Recurrent state of all slots.
        compute_bytes: Compute buffers.
        checkpoints_bytes: Checkpoints of all slots when their lists are full.
        cache_ram_bytes: The host prompt cache's limit.
        entry_bytes: One entry more, since the limit is checked after saving.
        server_bytes: The processes themselves.
    """

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    compute_bytes: int
    checkpoints_bytes: int
    cache_ram_bytes: int
    entry_bytes: int
    server_bytes: int = SERVER_BYTES

    @property
    def gpu_bytes(self) -> int:
        """What must be reachable by the GPU."""
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.compute_bytes

    @property
    def host_bytes(self) -> int:
        """What lives in the server's own memory."""
        return self.checkpoints_bytes + self.cache_ram_bytes + self.entry_bytes + self.server_bytes

    def lines(self) -> Iterator[str]:
        """The sum, one part per line, in GiB."""
        for label, value in (
            ("weights", self.weights_bytes),
            ("KV cache", self.kv_bytes),
            ("recurrent state", self.state_bytes),
            ("compute buffers", self.compute_bytes),
            ("GPU sum", self.gpu_bytes),
            ("checkpoints", self.checkpoints_bytes),
            ("host prompt cache", self.cache_ram_bytes),
            ("one entry more", self.entry_bytes),
            ("server and kvstack", self.server_bytes),
            ("host sum", self.host_bytes),
        ):
            yield f"{label}: {value / GIB:.1f} GiB"

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        weights_bytes: int,
        *,
        ctx_tokens: int,
        slots: int,
        unified: bool,
        ubatch_tokens: int,
        key_type: str,
        value_type: str,
        checkpoints: int,
        cache_ram_bytes: int,
    ) -> MemorySum:
        """
        Sum up one configuration.

        Args:
            shape: Of the model.
            weights_bytes: Size of the model file, all parts.
            ctx_tokens: `--ctx-size`.
            slots: `--parallel`.
            unified: Whether the slots share one cache.
            ubatch_tokens: `--ubatch-size`.
            key_type: `--cache-type-k`.
            value_type: `--cache-type-v`.
            checkpoints: `--ctx-checkpoints`.
            cache_ram_bytes: `--cache-ram`.
        """
        key_bytes = CACHE_TYPE_BYTES.get(key_type, 2.0)
        value_bytes = CACHE_TYPE_BYTES.get(value_type, 2.0)

        def stored(values: tuple[int, int], tokens: int) -> int:
            return int((values[0] * key_bytes + values[1] * value_bytes) * tokens)

        # A window's cells hold the window of each slot and one batch, in steps of 256.
        cells = -(-(shape.window_tokens * slots + ubatch_tokens) // 256) * 256
        window = stored(shape.window_values_per_token, min(cells, ctx_tokens))
        checkpoint = shape.state_bytes + stored(shape.window_values_per_token, shape.window_tokens)
        per_slot = checkpoint * checkpoints if shape.needs_checkpoints else 0
        conversation_tokens = ctx_tokens if unified or slots == 1 else ctx_tokens // slots
        return cls(
            weights_bytes=weights_bytes,
            kv_bytes=stored(shape.full_values_per_token, ctx_tokens) + window,
            state_bytes=shape.state_bytes * slots,
            compute_bytes=COMPUTE_BYTES * max(1, ubatch_tokens // 512),
            checkpoints_bytes=per_slot * slots,
            cache_ram_bytes=max(0, cache_ram_bytes),
            entry_bytes=stored(shape.full_values_per_token, conversation_tokens) + per_slot if cache_ram_bytes else 0,
        )


def cache_ram_limit_bytes(needed: MemorySum, *, ram_bytes: int, carve_out_bytes: int, system: str) -> int:
    """
    The largest `--cache-ram` that leaves room for the rest of the machine.

    Args:
        needed: What the configuration needs; its own cache and entry do not count.
        ram_bytes: RAM that the system sees.
        carve_out_bytes: Memory that belongs to the GPU alone; 0 if there is none.
        system: `linux`, `windows` or `darwin`.

    Returns:
        In bytes, 0 or more.
    """
    spilled = max(0, needed.gpu_bytes - carve_out_bytes)
    rest = needed.checkpoints_bytes + needed.server_bytes + SYSTEM_BYTES.get(system, 5 * GIB) + RESERVE_BYTES
    return max(0, ram_bytes - spilled - rest - needed.entry_bytes)
