"""
Judges the arguments and variables that a person adds to llama-server's command.

Of duplicated flags the last one wins, and every flag has a twin in the environment, so one careless item would undo
what kvstack relies on without a word.  Such items are refused with the reason and the key to use instead.  What is
left passes unchanged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstack.config.model import Server
from kvstack.errors import Problem
from kvstack.llama.command.capabilities import Capabilities, spelling

MASK = "****"
SECRET_FLAGS = frozenset({"--api-key", "-hft", "--hf-token"})
"""Flags whose value is shown to nobody."""


@dataclass(frozen=True, slots=True)
class _Guard:
    """
    One flag that is not to be added by hand.

    Attributes:
        names: Spellings, also of builds whose help text is not known here; the help text adds its own.
        reason: Why not.
        key: The config key that does it.
        when: `always`, or `set` if only a key that is set in the config makes it a contradiction.
        env: Variables that do the same and are not named in the help text.
    """

    names: tuple[str, ...]
    reason: str
    key: str | None = None
    when: Literal["always", "set"] = "always"
    env: tuple[str, ...] = ()


_REPLACES_MODEL = "would replace the model that the config names"
_CONTRADICTS = "would be given twice, and the last one wins"

_GUARDS = (
    _Guard(("-m", "--model"), _REPLACES_MODEL, "model", env=("LLAMA_ARG_MODEL",)),
    _Guard(("-mu", "--model-url"), _REPLACES_MODEL, "model", env=("LLAMA_ARG_MODEL_URL",)),
    _Guard(("-dr", "--docker-repo"), _REPLACES_MODEL, "model", env=("LLAMA_ARG_DOCKER_REPO",)),
    _Guard(("-hf", "-hfr", "--hf-repo"), _REPLACES_MODEL, "hf", env=("LLAMA_ARG_HF_REPO",)),
    _Guard(("--host",), "would move the server away from where kvstack talks to it", "host", env=("LLAMA_ARG_HOST",)),
    _Guard(("--port",), "would move the server away from where kvstack talks to it", "port", env=("LLAMA_ARG_PORT",)),
    _Guard(
        ("-c", "--ctx-size"),
        "would change the context behind the config's back",
        "ctx_size",
        env=("LLAMA_ARG_CTX_SIZE",),
    ),
    _Guard(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        "would change the layers on the GPU behind the config's back",
        "gpu_layers",
        env=("LLAMA_ARG_N_GPU_LAYERS",),
    ),
    _Guard(("-np", "--parallel"), "may split the context among more slots", "parallel", env=("LLAMA_ARG_N_PARALLEL",)),
    _Guard(
        ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"),
        "decides whether slots split the context",
        "kv_unified",
        env=("LLAMA_ARG_KV_UNIFIED", "LLAMA_ARG_KV_SPLIT", "LLAMA_ARG_NO_KV_UNIFIED"),
    ),
    _Guard(
        ("--cache-prompt", "--no-cache-prompt"),
        "is kvstack's own: prompt caching is always on",
        env=("LLAMA_ARG_CACHE_PROMPT", "LLAMA_ARG_NO_CACHE_PROMPT"),
    ),
    _Guard(
        ("--metrics", "--no-metrics"),
        "is kvstack's own: the server's metrics are always on",
        env=("LLAMA_ARG_ENDPOINT_METRICS", "LLAMA_ARG_NO_ENDPOINT_METRICS"),
    ),
    _Guard(
        ("--slots", "--no-slots"),
        "is kvstack's own: it watches prefills through the slots endpoint, which is on by default",
        env=("LLAMA_ARG_ENDPOINT_SLOTS", "LLAMA_ARG_NO_ENDPOINT_SLOTS"),
    ),
    _Guard(
        ("-lv", "--verbosity", "--log-verbosity"),
        "kvstack chooses the level at which this build logs what it needs",
        "log_verbosity",
        env=("LLAMA_ARG_LOG_VERBOSITY", "LLAMA_LOG_VERBOSITY"),
    ),
    _Guard(("-v", "--verbose", "--log-verbose"), "would write whole prompts to the log", "log_verbosity"),
    _Guard(("--log-disable",), "kvstack reads the server's log", env=("LLAMA_ARG_LOG_DISABLE",)),
    _Guard(
        ("--embedding", "--embeddings"),
        "would turn the chat endpoints off",
        env=("LLAMA_ARG_EMBEDDINGS",),
    ),
    _Guard(("--rerank", "--reranking"), "would turn the chat endpoints off", env=("LLAMA_ARG_RERANKING",)),
    _Guard(
        ("--api-prefix",), "would move the endpoints away from where kvstack calls them", env=("LLAMA_ARG_API_PREFIX",)
    ),
    _Guard(
        ("--ssl-key-file", "--ssl-cert-file"),
        "kvstack talks plain HTTP to a server on this machine",
        env=("LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"),
    ),
    _Guard(
        ("--models-dir", "--models-preset", "--models-max", "--models-autoload", "--no-models-autoload"),
        "would start a router for many models; kvstack runs one",
        env=("LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_MODELS_MAX", "LLAMA_ARG_MODELS_AUTOLOAD"),
    ),
    _Guard(("--slot-save-path",), "would take kvstack's prefix snapshots elsewhere", "slot_save_path"),
    _Guard(("--reuse-port",), "would let two servers share the port", env=("LLAMA_ARG_REUSE_PORT",)),
    _Guard(
        ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices", "--completion-bash"),
        "would print something and exit instead of serving",
    ),
    _Guard(("-dev", "--device"), _CONTRADICTS, "device", "set", env=("LLAMA_ARG_DEVICE",)),
    _Guard(("-t", "--threads"), _CONTRADICTS, "threads", "set", env=("LLAMA_ARG_THREADS",)),
    _Guard(("-b", "--batch-size"), _CONTRADICTS, "batch_size", "set", env=("LLAMA_ARG_BATCH",)),
    _Guard(("-ub", "--ubatch-size"), _CONTRADICTS, "ubatch_size", "set", env=("LLAMA_ARG_UBATCH",)),
    _Guard(("-fa", "--flash-attn"), _CONTRADICTS, "flash_attn", "set", env=("LLAMA_ARG_FLASH_ATTN",)),
    _Guard(
        ("-lm", "--load-mode", "--mmap", "--no-mmap"),
        _CONTRADICTS,
        "no_mmap",
        "set",
        env=("LLAMA_ARG_MMAP", "LLAMA_ARG_NO_MMAP", "LLAMA_ARG_LOAD_MODE"),
    ),
    _Guard(("-ctk", "--cache-type-k"), _CONTRADICTS, "cache_type_k", "set", env=("LLAMA_ARG_CACHE_TYPE_K",)),
    _Guard(("-ctv", "--cache-type-v"), _CONTRADICTS, "cache_type_v", "set", env=("LLAMA_ARG_CACHE_TYPE_V",)),
    _Guard(("-cram", "--cache-ram"), _CONTRADICTS, "cache_ram_mib", "set", env=("LLAMA_ARG_CACHE_RAM",)),
    _Guard(("-sps", "--slot-prompt-similarity"), _CONTRADICTS, "slot_prompt_similarity", "set"),
    _Guard(
        ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        _CONTRADICTS,
        "ctx_checkpoints",
        "set",
        env=("LLAMA_ARG_CTX_CHECKPOINTS",),
    ),
    _Guard(
        ("-cms", "--checkpoint-min-step", "-cpent", "--checkpoint-every-n-tokens"),
        _CONTRADICTS,
        "checkpoint_min_step",
        "set",
        env=("LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",),
    ),
    _Guard(("-fit", "--fit"), _CONTRADICTS, "fit", "set", env=("LLAMA_ARG_FIT",)),
    _Guard(("--api-key",), "would ask for a key that kvstack does not know", "api_key", env=("LLAMA_API_KEY",)),
)


def judge_extra_args(server: Server, asked: Capabilities | None) -> Iterator[Problem]:
    """
    What is wrong with `server.extra_args`.

    Args:
        server: The config's section.
        asked: Of the binary that would get them; None if there is none, so that only what no build may get is wrong.
    """
    capabilities = asked or Capabilities("unknown")
    for item in _flags(server.extra_args, capabilities):
        name, equals, _ = item.partition("=")
        name = spelling(name)
        guard = _guard_of(name, capabilities)
        if guard is not None and _applies(guard, server):
            yield Problem("server.extra_args", f"{name} {guard.reason}{_instead(guard)}")
        elif equals:
            yield Problem(
                "server.extra_args", f"{name}=...: llama-server takes a flag and its value as two items of the list"
            )
        elif asked is None:
            continue
        elif name not in capabilities.flags:
            yield Problem(
                "server.extra_args", f"{name} is not a flag of this llama-server{_alternative(name, capabilities)}"
            )
        elif _downloads_model(name, capabilities):
            yield Problem("server.extra_args", f"{name} {_REPLACES_MODEL}; set server.hf instead")


def judge_env(server: Server, asked: Capabilities | None) -> Iterator[Problem]:
    """
    What is wrong with `[server.env]`: twins of guarded flags.

    Args:
        server: The config's section.
        asked: Of the binary that would get them, or None if there is none.
    """
    capabilities = asked or Capabilities("unknown")
    twins: dict[str, _Guard] = {}
    for guard in _GUARDS:
        for name in guard.names:
            option = capabilities.option(name)
            if option is not None and option.env is not None:
                twins.setdefault(option.env, guard)
        twins.update(dict.fromkeys(guard.env, guard))
    for name in server.env:
        found = twins.get(name.upper())
        if found is not None and _applies(found, server):
            yield Problem(f"server.env.{name}", f"{found.reason}{_instead(found)}")


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """The command as a person may see it: the values of secret flags are gone."""
    shown: list[str] = []
    secret = False
    for item in argv:
        name, equals, _ = item.partition("=")
        is_secret_flag = spelling(name) in SECRET_FLAGS
        if secret:
            shown.append(MASK)
        elif is_secret_flag and equals:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(item)
        secret = is_secret_flag and not equals and not secret
    return tuple(shown)


def effective_arguments(argv: Iterable[str], capabilities: Capabilities) -> Mapping[str, str | None]:
    """
    What a command says in the end, for the doctor: the last of several wins.

    Returns:
        Values by the first name that the build's help text lists for the option; a flag without a value has None, and
        its negation stands under its own name in place of it.
    """
    found: dict[str, str | None] = {}
    items = list(argv)
    position = 0
    while position < len(items):
        name = spelling(items[position])
        option = capabilities.option(name)
        position += 1
        if option is None:
            continue
        if option.takes_value and position < len(items):
            found[option.names[0]] = items[position]
            position += 1
        elif not option.takes_value:
            for other in option.names:
                found.pop(other, None)
            found[name if _negates(name) else option.names[0]] = None
    return found


def _negates(name: str) -> bool:
    return name.startswith("--no-") or bool(re.fullmatch(r"-no-?\w+|-nkvo|-nr|-ndio|-nocb", name))


def _flags(arguments: Sequence[str], capabilities: Capabilities) -> Iterator[str]:
    """The items that are flags; the value of one may start with a dash too, and is skipped unless it names a flag."""
    value_expected = False
    for item in arguments:
        is_value = value_expected and spelling(item) not in capabilities.flags
        value_expected = False
        if is_value or not item.startswith("-") or re.fullmatch(r"-\d+(\.\d+)?", item):
            continue
        yield item
        option = capabilities.option(item)
        value_expected = option is not None and option.takes_value


def _guard_of(name: str, capabilities: Capabilities) -> _Guard | None:
    option = capabilities.option(name)
    family = set(option.names) if option is not None else set()
    family.add(name)
    return next((guard for guard in _GUARDS if not family.isdisjoint(guard.names)), None)


def _applies(guard: _Guard, server: Server) -> bool:
    return guard.when == "always" or (guard.key is not None and getattr(server, guard.key) is not None)


def _instead(guard: _Guard) -> str:
    return f"; set server.{guard.key} instead" if guard.key is not None else ""


def _alternative(name: str, capabilities: Capabilities) -> str:
    if name in {"--no-mmap", "--mmap", "--mlock", "--direct-io"} and capabilities.has("--load-mode"):
        return "; it has --load-mode"
    close = difflib.get_close_matches(name, capabilities.flags, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def _downloads_model(name: str, capabilities: Capabilities) -> bool:
    option = capabilities.option(name)
    return option is not None and "download weights from the internet" in option.text
