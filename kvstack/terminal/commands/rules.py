"""`kvstack rules list|test`: what the rules are, and what they do to captured requests."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstack.errors import KvstackError, NotRunning, StartFailed, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, app
from kvstack.terminal.format import one_line, plural

if TYPE_CHECKING:
    from kvstack.prompt.recording import Recorded
    from kvstack.prompt.rules.ruleset import RuleSet
    from kvstack.rundir import RunFile


rules_app = typer.Typer(help="Show the rules, and try them on captured requests.", no_args_is_help=True)
app.add_typer(rules_app, name="rules")

WIDTH = 79

NAMES_SHOWN = 5

DEFAULT_TEMPLATE = "<|im_start|>"
"""Enough of what llama-server uses for a model without a chat template, ChatML, to know its role markers."""

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="CONFIG", help="A stack's config file, for its switches, rules and model's chat template."
    ),
]


@rules_app.command("list")
def list_rules(
    stack: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|CONFIG]", help="A stack. Default: the only running one, else the packed rules."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """
    List all rules: what each does, where it comes from, whether it is in force.

    Of a running stack its rules as it applies them, and how often each acted since its start; if its config file says
    otherwise by now, that is said.
    """

    def action() -> output.Result:
        run = _running(stack)
        if run is not None:
            told = _rules_of(run)
            changed, note = _compare(told, run)
            clients = _clients_without_rules(told)
            data = {
                "stack": run.name,
                "config_path": run.config_path,
                "rules": told,
                "file_differs": changed,
                "clients_without_rules": clients,
            }
            return output.Result(data, _list_text(told, clients, f" in the running stack {run.name!r}{note}"))
        from kvstack.prompt.report import listing  # noqa: PLC0415 - only when the verb runs

        lines = [asdict(line) | {"hits": None} for line in listing.list_rules(_rules(stack))]
        where = " by default; no stack runs" if stack is None else f" in {one_line(stack)}"
        clients = _clients_without_rules(lines)
        data = {
            "stack": None,
            "config_path": stack,
            "rules": lines,
            "file_differs": None,
            "clients_without_rules": clients,
        }
        return output.Result(data, _list_text(lines, clients, where))

    output.deliver("rules list", as_json, action)


@rules_app.command("test")
def try_rules(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `kvstack capture` wrote, or one request body (JSON).")
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Apply the rules to captured requests and show every edit.

    A file is one request body, or JSON Lines: bodies, or objects with `path`, `headers` and `body`.  By the chat
    template of the config's model raw prompts split into turns, and carriers stand where it allows them.

    `@10,296` is an offset: characters from the start of the body (of an edit) or of the text that is named behind it.
    `[-...-]` is what goes there, `{+...+}` what comes in its place.  An edit that the request it is compared with had
    as well is only counted; `--json` has all.

    "Evaluated anew" compares a request with the last one of its conversation, or with the one that it is most like:
    so many of its characters stand behind the place where the two part, so that they are evaluated although the
    earlier one was; without the rules -> with them.

    `common_prefix_ratio` in the JSON is the share of the earlier request with which this one still begins.  The rules
    change the length of both, so `before` and `after` are shares of different wholes: a smaller one need not be worse.
    """

    def action() -> output.Result:
        from kvstack.prompt.report.replay import try_requests, unmatched_rules  # noqa: PLC0415 - only when the verb runs
        from kvstack.terminal.commands import rules_test  # noqa: PLC0415

        rules = _rules(config)
        tried = try_requests(_read_requests(file), rules, _chat_template(config))
        unmatched = unmatched_rules(rules, tried)
        return output.Result(rules_test.data(tried, unmatched), rules_test.text(tried, unmatched))

    output.deliver("rules test", as_json, action)


def _running(target: str | None) -> RunFile | None:
    """The running stack that is meant; None if a config file is, or nothing at all while none runs."""
    from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

    file = Path(target).expanduser() if target is not None else None
    try:
        run = control_client.find(target)
    except NotRunning:
        if file is not None and not file.is_file():
            raise
        return None
    # A stack may have the name that a file gives, and run by another one.
    return None if file is not None and file.is_file() and file.resolve() != Path(run.config_path).resolve() else run


def _rules_of(run: RunFile) -> list[dict[str, Any]]:
    """The rules that a running stack applies: `--set` is not in its file, and the file may have changed since."""
    from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

    answer = control_client.fetch(run, "rules")
    lines = answer.data.get("rules") if answer.ok and answer.data is not None else None
    if not isinstance(lines, list):
        raise KvstackError(
            f"The stack {run.name!r} does not report its rules",
            answer.message,
            f"Is it this version of kvstack?  It reports {run.version}.",
        )
    return lines


def _compare(told: Sequence[Mapping[str, Any]], run: RunFile) -> tuple[list[str] | None, str]:
    """
    Which rules the stack's file would make others, and that in words.

    None if the file cannot be used any more, or the stack does not tell enough.
    """
    from kvstack.prompt.report import listing  # noqa: PLC0415 - only when the verb runs

    file = one_line(run.config_path)
    try:
        written = {line.name: line.digest for line in listing.list_rules(_rules(run.config_path))}
    except KvstackError as error:
        return None, f", which has read {file} before: that cannot be used now ({one_line(error.what)})"
    if any("digest" not in line for line in told):
        return None, f"; whether {file} says the same, a stack of this version ({one_line(run.version)}) does not tell"
    applied = {str(line["name"]): line["digest"] for line in told}
    changed = sorted(name for name in {*written, *applied} if written.get(name) != applied.get(name))
    if not changed:
        return [], f", as {file} has them"
    names = one_line(", ".join(changed[:NAMES_SHOWN])) + (", ..." if len(changed) > NAMES_SHOWN else "")
    return changed, (
        f"\n{file} differs: {plural(len(changed), 'rule')} ({names}). Listed is what the running stack applies; "
        "the file counts at its next start, and `--set` comes on top of it"
    )


def _rules(config: str | None) -> RuleSet:
    from kvstack.stack.rules_loader import load_rules  # noqa: PLC0415 - only when the verb runs
    from kvstack.terminal.config_file import load_config  # noqa: PLC0415

    if config is not None:
        return load_rules(*load_config(config, None))
    from importlib import resources  # noqa: PLC0415

    from kvstack.prompt.rules.compiler import compile_rules, parse_pack  # noqa: PLC0415

    packs = sorted(
        (item for item in resources.files("kvstack.packs").iterdir() if item.name.endswith(".toml")),
        key=lambda item: item.name,
    )
    return compile_rules([parse_pack(pack.read_text(encoding="utf-8"), pack.name) for pack in packs])


def _chat_template(config: str | None) -> str | None:
    """The chat template of the config's model, by the header of its file; None if that cannot be read here."""
    if config is None:
        return None
    from kvstack.process.machine import look_at_model  # noqa: PLC0415 - only when the verb runs
    from kvstack.process.models import resolve_model  # noqa: PLC0415
    from kvstack.rundir import cache_dir  # noqa: PLC0415
    from kvstack.terminal.config_file import load_config  # noqa: PLC0415

    try:
        model = resolve_model(load_config(config, None)[0], cache_dir())
    except StartFailed:
        return None
    shape = look_at_model(model).shape if model is not None else None
    if shape is None:
        return None
    return shape.chat_template or DEFAULT_TEMPLATE


def _clients_without_rules(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The known clients that none of the listed rules is for."""
    from kvstack.prompt.report import listing  # noqa: PLC0415 - only when the verb runs

    return listing.clients_without_rules({str(line.get("client")) for line in lines}, _rules(None))


def _list_text(lines: Sequence[Mapping[str, Any]], clients: Sequence[str], where: str) -> str:
    out = []
    for line in lines:
        state = "on " if line["active"] else "off"
        facts = [line["where"], line["action"], f"for {line['client']}", f"from {line['origin']}"]
        if line["switch"]:
            facts.append(line["switch"])
        if line["hits"] is not None and line["active"]:
            facts.append(f"acted {line['hits']:,} times")
        out += _wrapped(f"{state}  {line['name']}  ({', '.join(facts)})", "")
        out += _wrapped(f"{line['summary']}  {line.get('effect', '')}".strip(), "     ")
    for client in clients:
        out += _wrapped(f"-    {client}  (nothing to do)", "")
        out += _wrapped("A known client that needs no rules of its own; those for any client apply to it.", "     ")
    active = sum(line["active"] for line in lines)
    return "\n".join([*out, "", f"{plural(len(lines), 'rule')}, {active} on{where}"])


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent="     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _read_requests(file: Path) -> list[Recorded]:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read", error.strerror or str(error), "Specify a file with captured requests."
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text", "", "Give one JSON body, or JSON Lines.") from None
    from kvstack.prompt.recording import RecordingError, read_recording  # noqa: PLC0415 - only when the verb runs

    try:
        found = read_recording(text)
    except RecordingError as error:
        raise UsageError(f"{file} is not a recording", str(error), "Give one JSON body, or JSON Lines.") from None
    if not found:
        raise UsageError(f"{file} contains no request", "", "Record some: `kvstack capture FILE`.")
    return found
