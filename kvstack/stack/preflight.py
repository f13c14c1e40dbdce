"""
What is wrong with a config before anything is started: keys, then rules, prompt and arguments, then this machine.

All problems of one layer are named at once; the next layer is checked when the one before has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.doctor.facts import Facts
from kvstack.errors import ConfigError, KvstackError
from kvstack.llama.command.argv import child_environment, judge_arguments, server_argv
from kvstack.llama.command.capabilities import Capabilities
from kvstack.process.machine import look_at_model
from kvstack.process.models import resolve_model
from kvstack.process.probe import find_binary, probe
from kvstack.rundir import cache_dir
from kvstack.stack.plan import check_model
from kvstack.stack.rules_loader import load_rules, load_warmup, with_lines


def check_config(text: str, source: Path, home: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> Config:
    """
    Read a config file's text and check all that can be checked before a binary and a model are looked for.

    Args:
        text: The TOML document.
        source: The file's path, absolute.
        home: What `~` stands for.
        overrides: `key.path=value` items.
        environ: The environment of this process; only where something is wrong already, a binary is asked for its
            flags (else who starts it asks).

    Raises:
        ConfigError: Something cannot be used.
    """
    config = parse_config(text, source, home, overrides)
    errors: list[ConfigError] = []

    def check(load: Callable[[], object]) -> None:
        try:
            load()
        except ConfigError as error:
            errors.append(error)

    check(lambda: load_rules(config, source))
    check(lambda: load_warmup(config, source))
    if not errors:
        return config
    check(lambda: _check_arguments(config, source, environ))
    problems = [problem for error in errors for problem in error.problems]
    steps = dict.fromkeys(line for error in errors for line in error.next_step.splitlines())
    ordered = sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))
    raise ConfigError(str(source), ordered, "\n".join(steps))


def _check_arguments(config: Config, config_path: Path, environ: Mapping[str, str] | None) -> None:
    """
    Refuse arguments and variables in the config that would undo what kvstack needs.

    Args:
        config: The stack.
        config_path: Its file, absolute.
        environ: The environment of this process, in which a binary is looked for that knows all its flags; None to ask
            no binary.

    Raises:
        ConfigError: There are some.
    """
    capabilities: Capabilities | None = None
    if environ is not None and not config.attached:
        with contextlib.suppress(KvstackError):
            env, _ = child_environment(config, environ)
            capabilities = probe(find_binary(config, environ), env, cache_dir())
    try:
        judge_arguments(config, capabilities, source=str(config_path))
    except ConfigError as error:
        raise with_lines(error, config_path) from None


def preflight(config: Config, config_path: Path, environ: Mapping[str, str]) -> list[KvstackError]:
    """
    Look for what the config names and this machine does not have, or not in a usable form.

    Asks the binary what it can do, and starts nothing else.

    Args:
        config: The parsed config.
        config_path: Its file, absolute.
        environ: The environment of this process.

    Returns:
        What `up` would end with: the binary's fault, the model's, a device's.

    Raises:
        ConfigError: An argument in the config cannot be used with this binary.
    """
    found: list[KvstackError] = []
    model = config.server.model
    if config.attached:
        return found
    try:
        binary = find_binary(config, environ)
        env, _ = child_environment(config, environ)
        server_argv(
            config, probe(binary, env, cache_dir()), str(binary), str(model) if model else None, source=str(config_path)
        )
    except ConfigError as error:
        raise with_lines(error, config_path) from None
    except KvstackError as error:
        found.append(error)
        _check_arguments(config, config_path, None)
    try:
        if model is not None and resolve_model(config, cache_dir()) is not None:
            check_model(Facts(config, model=look_at_model(model)))
    except KvstackError as error:
        found.append(error)
    return found
