"""What a config names beside itself: its rules with the packs that come with kvstack, and the prompt to warm up."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from kvstack.config.model import Config
from kvstack.config.toml_lines import key_lines, line_of
from kvstack.errors import ConfigError, Problem
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings
from kvstack.prompt.warmup_request import WarmupRequest, from_recording, from_system_prompt


def load_rules(config: Config, config_path: Path | None = None) -> RuleSet:
    """
    Read the packs that come with kvstack and compile them with the config's switches and rules.

    Args:
        config: The stack.
        config_path: Its file, to say in which line a rule is wrong.

    Raises:
        ConfigError: A rule of the config cannot be used.
    """
    files = sorted(
        (item for item in resources.files("kvstack.packs").iterdir() if item.name.endswith(".toml")),
        key=lambda item: item.name,
    )
    packs = [parse_pack(file.read_text(encoding="utf-8"), file.name) for file in files]
    settings = RuleSettings(
        strip_message_ids=config.proxy.strip_message_ids,
        strip_timestamps=config.proxy.strip_timestamps,
        disabled=frozenset(config.rules.disable),
        added=config.rules.add,
        source=str(config_path or config.name),
    )
    try:
        return compile_rules(packs, settings)
    except ConfigError as error:
        raise with_lines(error, config_path) from None


def with_lines(error: ConfigError, config_path: Path | None) -> ConfigError:
    """The error with the line in the config file of each problem that has none yet."""
    problems = [replace(problem, line=problem.line or _line(problem.path, config_path)) for problem in error.problems]
    return ConfigError(error.source, problems, error.next_step)


def _line(path: str, config_path: Path | None) -> int | None:
    """The line of a key in the config file, or of the nearest table around it."""
    try:
        lines = key_lines(config_path.read_text(encoding="utf-8")) if config_path is not None else {}
    except (OSError, UnicodeDecodeError):
        return None
    return line_of(path, lines)


def load_warmup(config: Config, config_path: Path | None = None) -> WarmupRequest | None:
    """
    Read what is to be warmed, also if that is not wanted at the start: `kvstack warmup` may ask for it.

    Args:
        config: The stack.
        config_path: Its file, to say in which line it names what cannot be used.

    Raises:
        ConfigError: The file that the config names cannot be used.
    """
    warmup = config.warmup

    def problem(key: str, message: str, next_step: str) -> ConfigError:
        return ConfigError(str(config_path or config.name), [Problem(key, message, _line(key, config_path))], next_step)

    def read(key: str, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            correct = "Correct the path; relative paths start at the config file."
            raise problem(key, f"{path}: {reason}", correct) from None

    def system_prompt(key: str, text: str, about: str) -> WarmupRequest:
        if not text.strip():
            raise problem(key, f"{about}is empty", "Set it to the text that your clients send, or remove the key.")
        return from_system_prompt(text)

    if warmup.system_prompt is not None:
        return system_prompt("warmup.system_prompt", warmup.system_prompt, "")
    if warmup.system_prompt_file is not None:
        key, path = "warmup.system_prompt_file", warmup.system_prompt_file
        return system_prompt(key, read(key, path), f"{path} ")
    if warmup.request_file is not None:
        request = from_recording(read("warmup.request_file", warmup.request_file), warmup.path)
        if isinstance(request, Problem):
            about = f"{warmup.request_file} " if request.path == "warmup.request_file" else ""
            raise problem(request.path, f"{about}{request.message}", "Record one: `kvstack capture FILE`.")
        return request
    return None
