"""What `up` is going to do: everything that can fail before a process is started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from kvstack.config.model import Config
from kvstack.config.toml_lines import key_lines, line_of
from kvstack.doctor import Facts, Finding, Severity, diagnose
from kvstack.errors import ConfigError, KvstackError, ModelNotFound, Problem
from kvstack.llama.command.argv import Command, child_environment, judge_arguments, server_argv
from kvstack.llama.command.capabilities import Capabilities
from kvstack.llama.model.memory import Kind
from kvstack.process.machine import look_at_machine, look_at_model
from kvstack.process.models import make_slot_directory, resolve_model
from kvstack.process.probe import find_binary, probe
from kvstack.prompt.pattern.pattern import PatternError, compile_pattern
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings
from kvstack.prompt.warmup_request import WarmupRequest, from_recording, from_system_prompt, shares_nothing
from kvstack.rundir import cache_dir
from kvstack.warmup.prefix import WarmupContext
from kvstack.warmup.store import make_directory


@dataclass(frozen=True, slots=True)
class Plan:
    """
    What `up` is going to do.

    Attributes:
        config: The parsed config.
        config_path: Its file, absolute.
        rules: The rules, compiled.
        warmup: The warm-up request before the rules, sent at the start or not; None if no prefix is known.
        command: The llama-server's command, or None when attached.
        env: The llama-server's environment.
        notices: What a person should know before the start.
        facts: What the doctor knows of config, machine, binary and model.
        findings: What the doctor says of it.
        snapshot_dir: Where prefix snapshots are kept; None if there are none.
        no_snapshot: Why there are none; empty if they are not wanted.
    """

    config: Config
    config_path: Path
    rules: RuleSet
    warmup: WarmupRequest | None
    facts: Facts
    command: Command | None = None
    env: Mapping[str, str] | None = None
    notices: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    snapshot_dir: Path | None = None
    no_snapshot: str = ""

    @property
    def model_path(self) -> Path | None:
        """The model file, if it is one that can be looked at."""
        return Path(self.facts.model.path) if self.facts.model is not None else None

    @property
    def warmup_context(self) -> WarmupContext:
        """What the warm-up needs to know of all this."""
        return WarmupContext(self.facts, self.snapshot_dir, self.no_snapshot)

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the model is known to rewind to checkpoints only (hybrid, sliding window)."""
        return self.facts.shape is not None and self.facts.shape.needs_checkpoints


def load_rules(config: Config, config_path: Path | None = None, numbers: Sequence[int] | None = None) -> RuleSet:
    """
    Read the packs that come with kvstack and compile them with the config's switches and rules.

    Args:
        config: The stack.
        config_path: Its file, to say in which line a rule is wrong.
        numbers: Which numbers its rules have in the file, where some of that were left out.

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
        alone = [
            (f"rules.add.{number}.{key}", pattern)
            for number, rule in enumerate(config.rules.add)
            for key, patterns in (("pattern", rule.pattern), ("also", rule.also), ("same", rule.same))
            for pattern in patterns or ()
        ]
        found = [*error.problems, *_unsaid(pattern_problems(alone), error.problems)]
        if numbers is not None:
            found = [replace(problem, path=_renumbered(problem.path, numbers)) for problem in found]
        raise with_lines(ConfigError(error.source, found, error.next_step), config_path) from None


def pattern_problems(patterns: Sequence[tuple[str, str]]) -> list[Problem]:
    """
    What is wrong with patterns alone, whatever the rules are that they belong to.

    Args:
        patterns: Key path and text of each.
    """
    found = []
    for path, pattern in patterns:
        try:
            compile_pattern(pattern)
        except PatternError as error:
            found.append(Problem(path, f"{pattern!r}: {error}"))
    return found


def _unsaid(more: Sequence[Problem], said: Sequence[Problem]) -> list[Problem]:
    """Those that are not among *said* already, be it under another key of their rule."""
    told = {(problem.path.rpartition(".")[0], problem.message) for problem in said}
    return [problem for problem in more if (problem.path.rpartition(".")[0], problem.message) not in told]


def _renumbered(path: str, numbers: Sequence[int]) -> str:
    parts = path.split(".")
    if parts[:2] == ["rules", "add"] and len(parts) > 2:
        parts[2] = str(numbers[int(parts[2])])
    return ".".join(parts)


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


def make_plan(config: Config, config_path: Path, environ: Mapping[str, str], *, dry_run: bool = False) -> Plan:
    """
    Find the binary and the model, ask the binary what it can do, and build its command.

    Args:
        config: The parsed config.
        config_path: Its file, absolute.
        environ: The environment of this process.
        dry_run: Only the command is wanted: a model or a device that is not on this machine is no error.

    Raises:
        KvstackError: Whatever stands in the way.
    """
    rules = load_rules(config, config_path)
    warmup = load_warmup(config, config_path)
    notices = _doubts(config, warmup)
    if config.attached:
        return Plan(
            config, config_path, rules, warmup, Facts(config), notices=notices, no_snapshot="the server is not our own"
        )
    binary = find_binary(config, environ)
    env, env_notices = child_environment(config, environ)
    capabilities = probe(binary, env, cache_dir())
    if dry_run:
        capabilities = replace(capabilities, devices=None)
    if dry_run and config.server.model is not None:
        model: Path | None = config.server.model
    else:
        model = resolve_model(config, cache_dir())
    facts = Facts(config, capabilities=capabilities)
    if model is not None and (not dry_run or model.is_file()):
        facts = replace(facts, model=look_at_model(model))
    snapshot_dir, no_snapshot = _place_snapshots(config, facts, warmup, dry_run=dry_run)
    command = server_argv(
        config,
        capabilities,
        str(binary),
        str(model) if model is not None else None,
        source=str(config_path),
        snapshot_dir=str(snapshot_dir) if snapshot_dir is not None else None,
    )
    facts = replace(facts, argv=command.argv)
    findings: tuple[Finding, ...] = ()
    if not dry_run:
        _check_model(facts)
        facts = replace(facts, machine=look_at_machine())
        make_slot_directory(config)
        findings = tuple(finding for finding in diagnose(facts) if finding.severity is not Severity.NOTE)
    return Plan(
        config,
        config_path,
        rules,
        warmup,
        facts,
        command,
        {**env, **command.env},
        (*notices, *env_notices, *command.notices),
        findings,
        snapshot_dir,
        no_snapshot,
    )


def _doubts(config: Config, warmup: WarmupRequest | None) -> tuple[str, ...]:
    if warmup is None or config.warmup.request_file is None or not shares_nothing(warmup):
        return ()
    return (
        f"warmup.request_file {config.warmup.request_file} has neither system text nor tools: next to nothing of it is "
        "shared by other requests. Record one of the client that should be warm",
    )


def _place_snapshots(
    config: Config, facts: Facts, warmup: WarmupRequest | None, *, dry_run: bool
) -> tuple[Path | None, str]:
    """Where prefix snapshots go, or why there are none; the reason is empty where none are wanted."""
    if warmup is None or not config.warmup.snapshot:
        return None, ""
    if not can_be_rendered(warmup.path):
        return None, f"only chat completions can be rendered, not {warmup.path}"
    assert facts.capabilities is not None
    if not facts.capabilities.has("--slot-save-path"):
        return None, "this llama-server has no --slot-save-path"
    if not dry_run or facts.model is not None:
        if facts.shape is None:
            return None, "what kind of model it is, is not known before llama-server has it"
        if facts.shape.kind is Kind.SLIDING_WINDOW:
            return None, "the window of a sliding-window model is not restored"
    if config.server.slot_save_path is not None:
        return config.server.slot_save_path, ""
    directory = cache_dir() / "snapshots"
    if not dry_run and (problem := make_directory(directory)) is not None:
        return None, f"{directory}: {problem}"
    return directory, ""


def _check_model(facts: Facts) -> None:
    """Refuse a file that no llama-server can load, with the reason; the server's own log does not always have it."""
    model = facts.model
    if model is None or model.problem is None:
        return
    raise ModelNotFound(
        "The model file cannot be used",
        f"{model.path}: {model.problem}",
        "Download it again; a download that broke off leaves such a file.",
    )


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
            raise problem(key, f"{about}is empty", "Give the text that your clients send, or leave the key out.")
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


def refuse_arguments(config: Config, config_path: Path, environ: Mapping[str, str] | None) -> None:
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
        refuse_arguments(config, config_path, None)
    try:
        if model is not None and resolve_model(config, cache_dir()) is not None:
            _check_model(Facts(config, model=look_at_model(model)))
    except KvstackError as error:
        found.append(error)
    return found
