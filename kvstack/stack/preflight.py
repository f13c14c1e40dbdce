"""
A config file and what is part of it: its rules, the prompt that it names, the arguments that it adds.

Each is checked in a layer of its own.  A fault in one must not hide those in another, so that a person who corrects
what is named is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.config.salvage import Salvaged, salvage
from kvstack.errors import ConfigError
from kvstack.stack.plan import load_rules, load_warmup, pattern_problems, refuse_arguments, with_lines


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
        ConfigError: Something cannot be used; all problems are named, wherever they are.
    """
    errors: list[ConfigError] = []
    usable: Salvaged | None
    try:
        config = parse_config(text, source, home, overrides)
        usable = Salvaged(config, tuple(range(len(config.rules.add))), (), ())
    except ConfigError as error:
        errors.append(error)
        usable = salvage(text, source, home, overrides)
    if usable is not None:
        errors += _further(usable, source, errors)
        if errors and usable.is_whole("server.binary"):
            try:
                refuse_arguments(usable.config, source, environ)
            except ConfigError as error:
                errors.append(error)
        if not errors:
            return usable.config
    problems = {(problem.path, problem.message): problem for error in errors for problem in error.problems}
    ordered = sorted(problems.values(), key=lambda problem: (problem.line is None, problem.line or 0))
    steps = dict.fromkeys(line for error in errors for line in error.next_step.splitlines())
    raise ConfigError(str(source), ordered, "\n".join(steps))


def _further(usable: Salvaged, source: Path, errors: Sequence[ConfigError]) -> list[ConfigError]:
    """What is wrong with the rules and with the prompt for the warm-up."""
    found: list[ConfigError] = []
    try:
        load_rules(usable.config, source, usable.rules)
    except ConfigError as error:
        found.append(error)
    # A pattern that is refused for its form says nothing more by its tokens.
    refused = {problem.path for error in errors for problem in error.problems}
    patterns = [
        (path, text) for path, text in usable.patterns if not any(f"{one}.".startswith(f"{path}.") for one in refused)
    ]
    alone = pattern_problems(patterns)
    if alone:
        found.append(with_lines(ConfigError(str(source), alone), source))
    if usable.is_whole("warmup"):
        try:
            load_warmup(usable.config, source)
        except ConfigError as error:
            found.append(error)
    return found
