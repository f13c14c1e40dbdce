"""What the doctor knows, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from kvstack.config.model import Config
from kvstack.llama.command.capabilities import Capabilities
from kvstack.llama.command.reserved_flags import effective_arguments
from kvstack.llama.model.memory import MIB, MemorySum, ModelShape
from kvstack.state import log_facts
from kvstack.state.stack_state import StackState

_Fact = TypeVar("_Fact")


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """It will not run, or not do what it is for."""
    WARNING = "warning"
    """It runs, and loses time, memory or cache by it."""
    NOTE = "note"
    """Worth knowing."""

    @property
    def rank(self) -> int:
        """0 for the most severe."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that the doctor found.

    Attributes:
        code: A name to look for, for example `cache-ram-off`; stable.
        severity: How much it matters.
        what: One sentence without a trailing dot.
        evidence: What shows it: a value, a line, a sum.
        remedy: What to do.
    """

    code: str
    severity: Severity
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """
    The model on the disk.

    Attributes:
        path: Of the file, of a split model part 1.
        size_bytes: Of all parts that are there.
        missing_parts: Names of parts that are not.
        problem: Why the header cannot be read, or what is wrong with the file; None if nothing is.
        shape: What the header describes.
    """

    path: str
    size_bytes: int = 0
    missing_parts: tuple[str, ...] = ()
    problem: str | None = None
    shape: ModelShape | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """
    The machine, as far as it can be read without special rights.

    Attributes:
        system: `linux`, `windows` or `darwin`.
        kernel: Release, for example `7.0.12`.
        ram_bytes: RAM that the system sees.
        available_bytes: What programs may still have.
        contiguous_free_bytes: Part of that which GPU drivers cannot use (CmaFree).
        carve_out_bytes: Memory that belongs to the GPU alone.
        gtt_bytes: RAM that the GPU may use besides.
        lockup_timeout: The kernel's `amdgpu.lockup_timeout`, empty if it is at its default.
        amd_gpu: Whether there is an AMD GPU.
        vulkan_drivers: Files of the installed Vulkan drivers.
    """

    system: str = "linux"
    kernel: str | None = None
    ram_bytes: int | None = None
    available_bytes: int | None = None
    contiguous_free_bytes: int | None = None
    carve_out_bytes: int | None = None
    gtt_bytes: int | None = None
    lockup_timeout: str | None = None
    amd_gpu: bool = False
    vulkan_drivers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerProps:
    """What a running server says of itself at `/props`."""

    ctx_per_slot: int | None = None
    slots: int | None = None
    chat_template: str | None = None
    preserves_reasoning: bool | None = None
    """Whether its template can keep the reasoning of earlier turns."""
    model_path: str | None = None


def props_of(data: Mapping[str, Any]) -> ServerProps:
    """Read the JSON of `/props`."""

    def at(key: str, kind: type[_Fact], inside: object = data) -> _Fact | None:
        value = inside.get(key) if isinstance(inside, Mapping) else None
        return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else None

    caps = data.get("chat_template_caps")
    return ServerProps(
        ctx_per_slot=at("n_ctx", int, data.get("default_generation_settings")),
        slots=at("total_slots", int),
        chat_template=at("chat_template", str),
        preserves_reasoning=at("supports_preserve_reasoning", bool, caps),
        model_path=at("model_path", str),
    )


@dataclass(frozen=True)
class Facts:
    """
    Everything that the checks look at.

    Attributes:
        config: The stack.
        machine: Where it runs.
        capabilities: Of the binary, or None.
        argv: The command, or empty.
        model: The model file, or None if there is none to look at.
        props: What the running server says, or None.
        log: Facts from the running server's log.
        lines: Lines of the server's log, and of the kernel's where they can be read.
        server_port_answers: Whether something answers on the server's port that is not this stack's server.
        proxy_port_answers: Whether something answers on the proxy's port that is not this stack's proxy.
        bypassing_requests: Requests in the server's log that did not come through the proxy, or None.
        running: The stack as it runs now, or None.
        last_end: If it does not run: what ended its last run against its will, the fact, and what to do.
        unreachable: Why the server that is attached to does not answer; None if it does.
    """

    config: Config
    machine: Machine = Machine()
    capabilities: Capabilities | None = None
    argv: tuple[str, ...] = ()
    model: ModelFile | None = None
    props: ServerProps | None = None
    log: tuple[log_facts.LogFact, ...] = ()
    lines: tuple[str, ...] = ()
    server_port_answers: bool = False
    proxy_port_answers: bool = False
    bypassing_requests: int | None = None
    running: StackState | None = None
    last_end: tuple[str, str, str] | None = None
    unreachable: str | None = None

    def logged(self, kind: type[_Fact]) -> list[_Fact]:
        """The facts of one kind from the log, in order."""
        return [fact for fact in self.log if isinstance(fact, kind)]

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if its header could be read."""
        return self.model.shape if self.model is not None else None

    @cached_property
    def settings(self) -> Settings:
        """What the command and the environment say in the end."""
        return Settings.of(self.config, self.argv, self.capabilities)

    @cached_property
    def memory(self) -> MemorySum | None:
        """What the configuration needs; None while the model is unknown."""
        if self.shape is None or self.model is None:
            return None
        settings = self.settings
        return MemorySum.of(
            self.shape,
            self.model.size_bytes,
            ctx_tokens=self.config.server.ctx_size,
            slots=self.config.server.parallel,
            unified=settings.unified,
            ubatch_tokens=settings.ubatch_tokens,
            key_type=settings.key_type,
            value_type=settings.value_type,
            checkpoints=settings.checkpoints,
            cache_ram_bytes=settings.cache_ram_bytes,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """
    The settings that matter to the cache, as the server will see them: flags, `[server.env]`, defaults.

    Attributes:
        unified: Slots share one cache.
        ubatch_tokens: Physical batch.
        key_type: Type of the K cache.
        value_type: Type of the V cache.
        checkpoints: Checkpoints per slot.
        checkpoint_min_step: Their least distance, or None for the default.
        cache_ram_bytes: Limit of the host prompt cache; 0 for off, -1 for none.
        cache_reuse: `--cache-reuse`.
        similarity_ratio: `--slot-prompt-similarity`.
        context_shift: On or off.
        sleep_idle_s: `--sleep-idle-seconds`; -1 for never.
        verbosity: `-lv`, or None for the default.
        flash_attention: `on`, `off` or `auto`.
        maps_file: The model file is mapped; None if the build decides.
        swa_full: The window's cache is full-size.
        mlock: The model is locked in memory.
        reasoning_preserved: The reasoning of earlier turns is kept on purpose.
    """

    unified: bool = False
    ubatch_tokens: int = 512
    key_type: str = "f16"
    value_type: str = "f16"
    checkpoints: int = 32
    checkpoint_min_step: int | None = None
    cache_ram_bytes: int = 8192 * MIB
    cache_reuse: int = 0
    similarity_ratio: float | None = None
    context_shift: bool = False
    sleep_idle_s: float = -1
    verbosity: int | None = None
    flash_attention: str = "auto"
    maps_file: bool | None = None
    swa_full: bool = False
    mlock: bool = False
    reasoning_preserved: bool = False

    @classmethod
    def of(cls, config: Config, argv: tuple[str, ...], capabilities: Capabilities | None) -> Settings:
        """Read them from a command; without a binary, from the config alone."""
        server = config.server
        if capabilities is None or not argv:
            return cls(
                unified=bool(server.kv_unified if server.kv_unified is not None else server.parallel > 1),
                ubatch_tokens=server.ubatch_size or 512,
                key_type=server.cache_type_k or "f16",
                value_type=server.cache_type_v or "f16",
                checkpoints=32 if server.ctx_checkpoints is None else server.ctx_checkpoints,
                checkpoint_min_step=server.checkpoint_min_step,
                cache_ram_bytes=8192 * MIB if server.cache_ram_mib is None else server.cache_ram_mib * MIB,
                similarity_ratio=server.slot_prompt_similarity,
                verbosity=server.log_verbosity,
                flash_attention=server.flash_attn or "auto",
                maps_file=None if server.no_mmap is None else not server.no_mmap,
            )
        flags = _Flags(effective_arguments(argv[1:], capabilities), config.server.env, capabilities)
        cache_ram = flags.number("--cache-ram")
        load_mode = flags.value("--load-mode")
        maps = None if capabilities.has("--load-mode") else True
        if load_mode is not None and load_mode != "auto":
            maps = "mmap" in load_mode or load_mode == "mlock"
        if flags.given("--no-mmap"):
            maps = False
        return cls(
            unified=flags.given("--kv-unified"),
            ubatch_tokens=flags.number("--ubatch-size") or 512,
            key_type=flags.value("--cache-type-k") or "f16",
            value_type=flags.value("--cache-type-v") or "f16",
            checkpoints=_or(flags.number("--ctx-checkpoints"), 32),
            checkpoint_min_step=flags.number("--checkpoint-min-step"),
            cache_ram_bytes=_or(cache_ram, 8192 if capabilities.has("--cache-ram") else 0) * MIB,
            cache_reuse=flags.number("--cache-reuse") or 0,
            similarity_ratio=flags.decimal("--slot-prompt-similarity"),
            context_shift=flags.given("--context-shift"),
            sleep_idle_s=_or(flags.number("--sleep-idle-seconds"), -1),
            verbosity=flags.number("--verbosity"),
            flash_attention=flags.value("--flash-attn") or "auto",
            maps_file=maps,
            swa_full=flags.given("--swa-full"),
            mlock=flags.given("--mlock") or "mlock" in (load_mode or ""),
            reasoning_preserved=flags.given("--reasoning-preserve")
            or "preserve" in (flags.value("--chat-template-kwargs") or ""),
        )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class _Flags:
    """Looks flags up by any of their names; a variable counts where no flag says otherwise."""

    arguments: Mapping[str, str | None]
    env: Mapping[str, str]
    capabilities: Capabilities

    def value(self, name: str) -> str | None:
        option = self.capabilities.option(name)
        if option is None:
            return None
        value = self.arguments.get(option.names[0])
        return value if value is not None or option.env is None else self.env.get(option.env)

    def given(self, name: str) -> bool:
        option = self.capabilities.option(name)
        if option is None:
            return False
        if name.startswith("--no-"):
            return name in self.arguments
        if option.names[0] in self.arguments:
            return True
        variable = self.env.get(option.env or "", "")
        return variable.lower() in {"1", "true", "on", "enabled"}

    def number(self, name: str) -> int | None:
        try:
            return int(self.value(name) or "")
        except ValueError:
            return None

    def decimal(self, name: str) -> float | None:
        try:
            return float(self.value(name) or "")
        except ValueError:
            return None
