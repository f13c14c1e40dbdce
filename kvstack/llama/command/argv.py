"""
The command that starts a llama-server: from a config and a build's capabilities to an argv.

One logical setting becomes whatever this build calls it, and a flag that the build does not know is never passed.  What
is lost by that is said in a notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvstack.config.model import Config, Server
from kvstack.errors import ConfigError, StartFailed
from kvstack.llama.command.capabilities import Capabilities
from kvstack.llama.command.reserved_flags import MASK, effective_arguments, judge_env, judge_extra_args, masked

SIMILARITY_OF_ONE_SLOT_RATIO = 0.95
"""Between 0.5 and 1 it makes no difference to a conversation that comes back, and none to one that only grows."""


@dataclass(frozen=True, slots=True)
class Command:
    """
    A command to run, and what to say about it.

    Attributes:
        argv: The command.
        display: The same with its secrets masked, for people.
        notices: What the person should know: settings that this build cannot follow, losses.
        env: Variables that belong to it: the key, which a command line would show to every user of the machine.
    """

    argv: tuple[str, ...]
    display: tuple[str, ...]
    notices: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


def server_argv(
    config: Config,
    capabilities: Capabilities,
    binary: str,
    model: str | None,
    *,
    source: str | None = None,
    snapshot_dir: str | None = None,
) -> Command:
    """
    Build the command for a config.

    Args:
        config: The stack; not one that attaches to a running server.
        capabilities: What the binary can do.
        binary: Path of the binary.
        model: Path of the model file; None if llama-server fetches it (`hf`).
        source: Name of the config file, for error messages.
        snapshot_dir: Where prefix snapshots are kept, if there are to be some.

    Raises:
        ConfigError: `extra_args` or `env` would undo a flag that kvstack needs.
        StartFailed: This build cannot do what the config asks.
    """
    server = config.server
    judge_arguments(config, capabilities, source=source)
    _check_binary(capabilities, binary)
    if server.hf is not None and capabilities.has_tls is False:
        raise StartFailed(
            f"This llama-server cannot download {server.hf}",
            f"{binary} (build {capabilities.build}) was built without TLS: it answers 'HTTPS is not supported'.",
            "Download the GGUF file yourself and set server.model to its path, or use a build with TLS.",
        )
    _check_device(server, capabilities, binary)
    notices: list[str] = []
    argv = [binary, *_arguments(config, capabilities, model, notices, snapshot_dir), *server.extra_args]
    variable = _key_variable(capabilities)
    env = {variable: server.api_key} if variable is not None and server.api_key is not None else {}
    return Command(tuple(argv), masked(argv), tuple(notices), env)


def judge_arguments(config: Config, capabilities: Capabilities | None, *, source: str | None = None) -> None:
    """
    Refuse what would undo a flag that kvstack needs.

    Args:
        config: The stack; one that attaches to a running server has no arguments.
        capabilities: What the binary can do; None if there is none to ask.
        source: Name of the config file, for error messages.

    Raises:
        ConfigError: `extra_args` or `env` has such an item.
    """
    server = config.server
    problems = [*judge_extra_args(server, capabilities), *judge_env(server, capabilities)]
    if problems and not config.attached:
        raise ConfigError(source or config.name, problems, "Remove what is named above, or use the key it names.")


def child_environment(config: Config, inherited: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    The environment for llama-server: the inherited one without its flags, and `[server.env]` on top.

    Every flag of llama-server has a twin in the environment; one that a shell happens to export must not change what
    the config says.

    Args:
        config: The stack.
        inherited: The environment of this process.

    Returns:
        The environment, and notices about what was dropped (names only, values may be secret).
    """
    env = {name: value for name, value in inherited.items() if not _is_flag_twin(name)}
    dropped = sorted(set(inherited) - set(env))
    env.update(config.server.env)
    if not dropped:
        return env, ()
    count = "variable" if len(dropped) == 1 else "variables"
    notice = (
        f"Dropped the inherited {count} {', '.join(dropped)}: "
        "the config alone decides llama-server's flags ([server.env] passes)."
    )
    return env, (notice,)


def display_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`[server.env]` as a person may see it: what looks like a secret is masked."""
    marks = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
    return {name: MASK if any(mark in name.upper() for mark in marks) else value for name, value in env.items()}


def _is_flag_twin(name: str) -> bool:
    name = name.upper()
    return name.startswith("LLAMA_ARG_") or name == "LLAMA_API_KEY"


def _check_binary(capabilities: Capabilities, binary: str) -> None:
    missing = [name for name in ("--host", "--port", "--ctx-size", "-ngl") if name not in capabilities.flags]
    if missing:
        raise StartFailed(
            "The binary does not look like a llama-server",
            f"{binary} --help names no {', '.join(missing)}.",
            "Set server.binary to a llama-server, not to another program of llama.cpp.",
        )


def _check_device(server: Server, capabilities: Capabilities, binary: str) -> None:
    if server.device is None or capabilities.devices is None:
        return
    known = {device.name.casefold() for device in capabilities.devices} | {"none"}
    missing = [name for name in server.device.split(",") if name.strip().casefold() not in known]
    if not missing:
        return
    lines = "\n".join(
        f"  {device.name}: {device.description} ({device.total_mib:,} MiB, {device.free_mib:,} MiB free)"
        for device in capabilities.devices
    )
    raise StartFailed(
        f"There is no device {', '.join(missing)} here",
        f"{binary} --list-devices finds:\n{lines}" if lines else f"{binary} --list-devices finds no device at all.",
        "Set server.device to a device of that list"
        + (', or to "none" for the CPU alone.' if lines else ' or to "none" (CPU alone); check driver and groups.'),
    )


def _arguments(
    config: Config, capabilities: Capabilities, model: str | None, notices: list[str], snapshot_dir: str | None
) -> Iterator[str]:
    server = config.server
    has = capabilities.has

    def optional(flag: str, value: object, *other_names: str, loss: str = "the setting has no effect") -> Iterator[str]:
        if value is None:
            return
        name = capabilities.first(flag, *other_names)
        if name is None:
            notices.append(f"This llama-server has no {flag}: {loss}.")
        else:
            yield name
            yield str(value)

    yield from ("--host", server.host, "--port", str(server.port))
    if model is not None:
        yield from ("-m", model)
    elif server.hf is not None:
        yield from ("-hf", server.hf)
    yield from optional("--device", server.device, "-dev", loss="it chooses the device itself")
    yield from ("-ngl", str(server.gpu_layers), "--ctx-size", str(server.ctx_size))
    # Without it newer builds open four slots.
    yield from optional("--parallel", server.parallel, "-np", loss="it chooses the number of slots itself")
    yield from _unified(server, capabilities, notices)
    yield from optional("--slot-prompt-similarity", _similarity_ratio(server, capabilities), "-sps")
    if has("--cache-prompt"):
        yield "--cache-prompt"
    else:
        notices.append("This llama-server has no --cache-prompt: prompt caching is left to its default.")
    if has("--metrics"):
        yield "--metrics"
    else:
        notices.append("This llama-server has no --metrics: its own counters are not available.")
    verbosity = server.log_verbosity or capabilities.log_verbosity
    yield from optional("-lv", verbosity, "--verbosity", "--log-verbosity", loss="checkpoints may not be logged")
    if capabilities.log_verbosity is None and server.log_verbosity is None:
        notices.append("This llama-server has no -lv: checkpoints and the host prompt cache may not be logged.")
    yield from optional("--threads", server.threads, "-t")
    yield from optional("--batch-size", server.batch_size, "-b")
    yield from optional("--ubatch-size", server.ubatch_size, "-ub")
    yield from _flash_attention(server, capabilities, notices)
    yield from _load_mode(server, capabilities, notices)
    yield from optional("--cache-type-k", server.cache_type_k, "-ctk")
    yield from optional("--cache-type-v", server.cache_type_v, "-ctv")
    yield from optional("--cache-ram", server.cache_ram_mib, "-cram", loss="it has no host prompt cache to limit")
    yield from optional("--ctx-checkpoints", server.ctx_checkpoints, "-ctxcp", "--swa-checkpoints")
    yield from optional("--checkpoint-min-step", server.checkpoint_min_step, "--checkpoint-every-n-tokens")
    if server.fit is not None:
        yield from optional("--fit", "on" if server.fit else "off", "-fit", loss="it has nothing to fit")
    yield from optional("--slot-save-path", server.slot_save_path or snapshot_dir)
    if server.api_key is not None and _key_variable(capabilities) is None:
        yield from optional("--api-key", server.api_key)
        if has("--api-key"):
            notices.append(
                "This llama-server takes its key only on the command line: every user of this machine can read it."
            )


def _key_variable(capabilities: Capabilities) -> str | None:
    """The variable from which this build takes the key, `LLAMA_API_KEY`."""
    option = capabilities.option("--api-key")
    return option.env if option is not None and not option.removed else None


def _unified(server: Server, capabilities: Capabilities, notices: list[str]) -> Iterator[str]:
    wanted = server.kv_unified if server.kv_unified is not None else server.parallel > 1
    split = f"{server.parallel} slots split {server.ctx_size:,} tokens: one conversation gets {_share(server):,}"
    if wanted:
        name = capabilities.first("--kv-unified", "-kvu")
        if name is not None:
            yield name
        elif server.parallel > 1:
            notices.append(f"LOSS OF CONTEXT: this llama-server has no --kv-unified, so {split} tokens.")
    else:
        if server.kv_unified is False and (name := capabilities.first("--no-kv-unified", "-no-kvu")) is not None:
            yield name
        if server.parallel > 1:
            notices.append(f"LOSS OF CONTEXT: kv_unified is false, so {split} tokens.")


def _similarity_ratio(server: Server, capabilities: Capabilities) -> float | None:
    """
    How alike a slot must be to be taken for that; None leaves it to llama-server, or to `extra_args`.

    Two conversations with one system prompt are more alike than llama-server's 0.1.  With one slot the second then
    overwrites what the first has beyond the system prompt, and nothing is saved.  Taken by age, the slot's content goes
    to the host prompt cache first, and what the new prompt continues comes back from there.
    """
    if server.slot_prompt_similarity is not None:
        return server.slot_prompt_similarity
    option = capabilities.option("--slot-prompt-similarity")
    if option is None or option.removed or server.parallel > 1 or not _has_ram_cache(server, capabilities):
        return None
    is_given = option.names[0] in effective_arguments(server.extra_args, capabilities)
    return None if is_given else SIMILARITY_OF_ONE_SLOT_RATIO


def _has_ram_cache(server: Server, capabilities: Capabilities) -> bool:
    option = capabilities.option("--cache-ram")
    if option is None or option.removed:
        return False
    if server.cache_ram_mib is not None:
        return server.cache_ram_mib != 0
    given = effective_arguments(server.extra_args, capabilities).get(option.names[0])
    return (given or server.env.get(option.env or "", "")) != "0"


def _share(server: Server) -> int:
    return server.ctx_size // server.parallel


def _flash_attention(server: Server, capabilities: Capabilities, notices: list[str]) -> Iterator[str]:
    if server.flash_attn is None:
        return
    option = capabilities.option("--flash-attn") or capabilities.option("-fa")
    if option is None or option.removed:
        notices.append("This llama-server has no --flash-attn: the setting has no effect.")
    elif option.takes_value:
        yield from ("--flash-attn", server.flash_attn)
    elif server.flash_attn == "on":  # until September 2025 a switch without a value, off by default
        yield "--flash-attn"


def _load_mode(server: Server, capabilities: Capabilities, notices: list[str]) -> Iterator[str]:
    if server.no_mmap is None:
        return
    if capabilities.has("--load-mode"):
        yield from ("--load-mode", "none" if server.no_mmap else "mmap")
    elif server.no_mmap:
        if capabilities.has("--no-mmap"):
            yield "--no-mmap"
        else:
            notices.append("This llama-server has neither --load-mode nor --no-mmap: it maps the model file.")
    elif capabilities.has("--mmap"):  # where only --no-mmap exists, mapping is the default
        yield "--mmap"
