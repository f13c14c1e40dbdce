"""What `up` is going to do: everything that can fail before a process is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvstack.config.model import Config
from kvstack.doctor import Facts, Finding, Severity, diagnose
from kvstack.errors import ModelNotFound
from kvstack.llama.command.argv import Command, child_environment, server_argv
from kvstack.llama.model.memory import Kind
from kvstack.process.machine import look_at_machine, look_at_model
from kvstack.process.models import make_slot_directory, resolve_model
from kvstack.process.probe import find_binary, probe
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.prompt.warmup_request import WarmupRequest, shares_nothing
from kvstack.rundir import cache_dir
from kvstack.stack.rules_loader import load_rules, load_warmup
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
        reason = "kvstack did not start this server"
        return Plan(config, config_path, rules, warmup, Facts(config), notices=notices, no_snapshot=reason)
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
        check_model(facts)
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
            return None, "the kind of model is not known before llama-server has loaded it"
        if facts.shape.kind is Kind.SLIDING_WINDOW:
            return None, "a sliding-window model's cache cannot be restored"
    if config.server.slot_save_path is not None:
        return config.server.slot_save_path, ""
    directory = cache_dir() / "snapshots"
    if not dry_run and (problem := make_directory(directory)) is not None:
        return None, f"{directory}: {problem}"
    return directory, ""


def check_model(facts: Facts) -> None:
    """Refuse a file that no llama-server can load, with the reason; the server's own log does not always have it."""
    model = facts.model
    if model is None or model.problem is None:
        return
    raise ModelNotFound(
        "The model file cannot be used",
        f"{model.path}: {model.problem}",
        "Download it again; an interrupted download leaves such a file.",
    )
