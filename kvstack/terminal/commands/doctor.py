"""`kvstack doctor CONFIG`: what is wrong, or will go wrong, and what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstack.errors import ExitCode, KvstackError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, KnownConfigArgument, OverridesOption, app
from kvstack.terminal.format import duration, plural

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from kvstack.config.model import Config
    from kvstack.doctor import Facts, Finding
    from kvstack.doctor.facts import ServerProps
    from kvstack.llama.command.capabilities import Capabilities
    from kvstack.process.machine import LastLog
    from kvstack.rundir import RunFile


@app.command()
def doctor(config: KnownConfigArgument, overrides: OverridesOption = None, as_json: JsonOption = False) -> None:
    """
    Examine a config, its machine and its running stack.

    Names what keeps the cache from working, what does not fit, and what the logs say, each with its evidence and what
    to do. Starts and changes nothing. Exit status 1 if there is an error among the findings.
    """

    def action() -> output.Result:
        from kvstack.doctor import Severity, diagnose  # noqa: PLC0415 - other verbs need none of this
        from kvstack.terminal.config_file import load_checked  # noqa: PLC0415 - see above

        parsed, path = load_checked(_file(config), overrides)
        bare, failed, log = _facts(parsed, path)
        facts = _with_log(bare, log)
        found = (*failed, *_with_source(diagnose(facts), diagnose(bare), log))
        errors = [finding for finding in found if finding.severity is Severity.ERROR]
        data = {
            "name": parsed.name,
            "findings": [
                {
                    "code": finding.code,
                    "severity": finding.severity.value,
                    "what": finding.what,
                    "evidence": finding.evidence,
                    "remedy": finding.remedy,
                }
                for finding in found
            ],
            "checked": _checked(facts, log),
        }
        if not errors:
            return output.Result(data, lambda console: _drawn(console, found, facts, log))
        error = KvstackError(
            f"{plural(len(errors), 'finding')} {'is an error' if len(errors) == 1 else 'are errors'}",
            ", ".join(finding.code for finding in errors),
            f"Apply each remedy, then run `kvstack doctor {config}` again.",
        )
        return output.Result(data, lambda console: _drawn(console, found, facts, log), ExitCode.ERROR, error)

    output.deliver("doctor", as_json, action)


def _file(target: str) -> str:
    """The config file that is meant: a file, or that of the stack of this name."""
    from pathlib import Path  # noqa: PLC0415 - see above

    from kvstack.terminal import control_client  # noqa: PLC0415 - see above

    return target if Path(target).expanduser().is_file() else control_client.config_of(target) or target


def _facts(config: Config, config_path: Path) -> tuple[Facts, list[Finding], LastLog]:
    """What is known without the log, findings about what could not even be looked at, and the log."""
    from kvstack.doctor import Facts  # noqa: PLC0415 - see above
    from kvstack.process.machine import (  # noqa: PLC0415 - see above
        LastLog,
        kernel_lines,
        look_at_log,
        look_at_machine,
        look_at_model,
        port_answers,
    )
    from kvstack.rundir import RunDir  # noqa: PLC0415 - see above
    from kvstack.state.stack_state import StackState  # noqa: PLC0415 - see above
    from kvstack.state.status_json import decode  # noqa: PLC0415 - see above

    failed: list[Finding] = []
    model_path, capabilities, argv = (None, None, ()) if config.attached else _what_would_run(config, failed)
    run, status = _running(config.name)
    server = status.get("server") if status is not None else None
    server_url = server.get("url") if isinstance(server, Mapping) else None
    log_path = RunDir(config.name).log_path
    if config.attached:  # that server keeps its own
        log = LastLog(log_path)
    else:
        model = model_path or config.server.model
        log = look_at_log(log_path, config_path, model, run.config_path if run else None, time.time())
    answers = not config.attached and port_answers(config.server.host, config.server.port)
    is_of_this = run is not None and run.config_path == str(config_path)
    props, unreachable = _props(config) if answers or config.attached else (None, None)
    # A stack that lives but tells nothing may well be the one that answers.
    silent = run is not None and status is None
    facts = Facts(
        config=config,
        machine=look_at_machine(),
        capabilities=capabilities,
        argv=argv,
        model=look_at_model(model_path) if model_path is not None else None,
        props=props,
        running=decode(StackState, status) if status is not None and is_of_this else None,
        last_end=_last_end(config, config_path) if run is None else None,
        unreachable=unreachable,
        lines=kernel_lines(),
        server_port_answers=answers and not silent and server_url != config.upstream_url,
        proxy_port_answers=port_answers(config.proxy.host, config.proxy.port)
        and (run is None or run.proxy_url != config.proxy_url),
        bypassing_requests=_unclaimed(status),
    )
    return facts, failed, log


def _what_would_run(config: Config, failed: list[Finding]) -> tuple[Path | None, Capabilities | None, tuple[str, ...]]:
    """The model, what the binary can do, and the command; what cannot be found out is added to *failed*."""
    from kvstack.doctor import Finding, Severity  # noqa: PLC0415 - see above
    from kvstack.llama.command.argv import child_environment, server_argv  # noqa: PLC0415 - see above
    from kvstack.process.models import resolve_model  # noqa: PLC0415 - see above
    from kvstack.process.probe import find_binary, probe  # noqa: PLC0415 - see above
    from kvstack.rundir import cache_dir  # noqa: PLC0415 - see above

    def failure(code: str, error: KvstackError) -> None:
        failed.append(Finding(code, Severity.ERROR, error.what, error.fact, error.next_step))

    model_path: Path | None = None
    try:
        model_path = resolve_model(config, cache_dir())
    except KvstackError as error:
        failure("model-missing", error)
    try:
        binary = find_binary(config, os.environ)
        env, _ = child_environment(config, os.environ)
        capabilities = probe(binary, env, cache_dir())
    except KvstackError as error:
        failure("binary", error)
        return model_path, None, ()
    try:
        named = str(model_path or config.server.model or "")
        return model_path, capabilities, server_argv(config, capabilities, str(binary), named or None).argv
    except KvstackError as error:
        if "no device" not in error.what:  # which the checks say better
            failure("command", error)
        return model_path, capabilities, ()


def _running(name: str) -> tuple[RunFile | None, Mapping[str, Any] | None]:
    """The run file of the stack of that name if it lives, and what it says of itself."""
    from kvstack.terminal import control_client  # noqa: PLC0415 - see above

    try:
        run = control_client.find(name)
    except KvstackError:
        return None, None
    try:
        return run, control_client.fetch_status(run)
    except KvstackError:
        return run, None


def _with_log(facts: Facts, log: LastLog) -> Facts:
    from kvstack.llama.log.reader import LogReader  # noqa: PLC0415 - see above

    reader = LogReader()
    batches = reader.feed(log.data), reader.close()
    return replace(
        facts,
        log=tuple(fact for batch in batches for fact in batch.facts),
        lines=(*facts.lines, *(line for batch in batches for line in batch.lines)),
    )


def _with_source(found: Iterable[Finding], without_log: Iterable[Finding], log: LastLog) -> list[Finding]:
    """The findings; those that rest on the log say which file that is and how old."""
    own = set(without_log)
    where = f"in {log.path}, last written {duration(log.age_s or 0)} ago"
    return [
        finding if finding in own else replace(finding, evidence=f"{finding.evidence}\n{where}") for finding in found
    ]


def _unclaimed(status: Mapping[str, Any] | None) -> int | None:
    log = status.get("log") if status is not None else None
    count = log.get("unclaimed_tasks") if isinstance(log, Mapping) else None
    return count if isinstance(count, int) else None


def _last_end(config: Config, config_path: Path) -> tuple[str, str, str] | None:
    """How the last run ended, unless the config was changed since: what it was then may be mended."""
    from kvstack.rundir import RunDir  # noqa: PLC0415 - see above

    end = RunDir(config.name).read_end()
    try:
        if end is None or config_path.stat().st_mtime > end.ended_s:
            return None
    except OSError:
        return None
    ago = f"{duration(max(0.0, time.time() - end.ended_s))} ago"
    return f"The stack's last run failed: {end.what}", f"{end.fact}\n{ago}" if end.fact else ago, end.next_step


def _props(config: Config) -> tuple[ServerProps | None, str | None]:
    """What the server says of itself, and why it says nothing if nobody answers."""
    import asyncio  # noqa: PLC0415 - see above
    import json  # noqa: PLC0415 - see above

    from kvstack.doctor.facts import props_of  # noqa: PLC0415 - see above
    from kvstack.upstream import Upstream, UpstreamError  # noqa: PLC0415 - see above

    unreachable: list[str] = []

    async def ask() -> bytes:
        upstream = Upstream(config.upstream_url, config.server.api_key)
        try:
            answer = await upstream.request("GET", "/props", timeout_s=5.0)
            return answer.body if answer.status == 200 else b""
        except UpstreamError as error:
            unreachable.append(str(error))
            return b""
        finally:
            await upstream.close()

    try:
        data: Any = json.loads(asyncio.run(ask()))
    except ValueError:
        data = None
    return props_of(data) if isinstance(data, dict) else None, unreachable[0] if unreachable else None


def _checked(facts: Facts, log: LastLog) -> dict[str, Any]:
    """What the findings rest on: null where it could not be looked at."""
    capabilities, model, props = facts.capabilities, facts.model, facts.props
    needed = facts.memory
    return {
        "build": capabilities.build if capabilities is not None else None,
        "devices": [device.name for device in capabilities.devices]
        if capabilities is not None and capabilities.devices is not None
        else None,
        "model": model.path if model is not None else None,
        "architecture": model.shape.architecture if model is not None and model.shape is not None else None,
        "kind": model.shape.kind.value if model is not None and model.shape is not None else None,
        "gpu_bytes": needed.gpu_bytes if needed is not None else None,
        "host_bytes": needed.host_bytes if needed is not None else None,
        "ram_bytes": facts.machine.ram_bytes,
        "ctx_per_slot": props.ctx_per_slot if props is not None else None,
        "stack": facts.running.state.value if facts.running is not None else None,
        "log_lines": len(facts.lines),
        "log": {"path": str(log.path), "age_s": log.age_s, "left_out": log.left_out},
    }


def _drawn(console: Console, found: tuple[Finding, ...], facts: Facts, log: LastLog) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415 - plain output needs no rich
    from rich.text import Text  # noqa: PLC0415 - see above

    del console
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    parts: list[Text] = []
    for finding in found:
        text = Text(f"{finding.severity.value}: ", style=styles[finding.severity.value])
        text.append(f"{finding.what} [{finding.code}]", style="bold" if finding.severity.rank == 0 else "")
        for line in finding.evidence.splitlines():
            text.append(f"\n  {line.strip()}", style="")
        for number, line in enumerate(finding.remedy.splitlines()):
            text.append(f"\n  {'-> ' if number == 0 else '   '}{line}", style="green")
        parts.append(text)
    unknown = [
        label
        for label, value in (("the binary", facts.capabilities), ("the model", facts.model))
        if value is None and not facts.config.attached
    ]
    if log.left_out is not None:
        unknown.append(f"the log {log.path} ({log.left_out})")
    count = f"{len(found)} finding{'' if len(found) == 1 else 's'}"
    looked = count if found else "no problems found"
    unseen = f"; not checked: {', '.join(unknown)}" if unknown else ""
    parts.append(Text(f"{facts.config.name}: {looked}{unseen}"))
    return Group(*parts)
