"""
`kvstack rules list|test`: what the rules are, and what they do to captured requests.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstack.errors import KvstackError, NotRunning, StartFailed, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, app
from kvstack.terminal.figures import one_line, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvstack.prompt.recorded import Recorded
    from kvstack.prompt.rules import RuleSet, Stripped
    from kvstack.rundir import RunFile

__all__ = ["list_rules", "try_rules"]

rules_app = typer.Typer(help="Show the rules, and try them on captured requests.", no_args_is_help=True)
app.add_typer(rules_app, name="rules")

WIDTH = 100

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
            data = {"stack": run.name, "config_path": run.config_path, "rules": told, "file_differs": changed}
            return output.Result(data, _list_text(told, f" in the running stack {run.name!r}{note}"))
        from kvstack.prompt import inspecting  # noqa: PLC0415 - only when the verb runs

        lines = [asdict(line) | {"hits": None} for line in inspecting.list_rules(_rules(stack))]
        where = " by default; no stack runs" if stack is None else ""
        data = {"stack": None, "config_path": stack, "rules": lines, "file_differs": None}
        return output.Result(data, _list_text(lines, where))

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

    Of consecutive requests it shows which share of the former the next one still begins with, before and after.
    A file is one request body, or JSON Lines: bodies, or objects with `path`, `headers` and `body`.  By the chat
    template of the config's model raw prompts split into turns, and carriers stand where it allows them.
    """

    def action() -> output.Result:
        tried = _try(_read_requests(file), _rules(config), _chat_template(config))
        return output.Result({"requests": [_test_data(one) for one in tried]}, _test_text(tried))

    output.deliver("rules test", as_json, action)


def _running(target: str | None) -> RunFile | None:
    """The running stack that is meant; None if a config file is, or nothing at all while none runs."""
    from kvstack.terminal import client  # noqa: PLC0415 - only when the verb runs

    try:
        return client.find(target)
    except NotRunning:
        if target is not None and not Path(target).expanduser().is_file():
            raise
        return None


def _rules_of(run: RunFile) -> list[dict[str, Any]]:
    """The rules that a running stack applies: `--set` is not in its file, and the file may have changed since."""
    from kvstack.terminal import client  # noqa: PLC0415 - only when the verb runs

    answer = client.fetch(run, "rules")
    lines = answer.data.get("rules") if answer.ok and answer.data is not None else None
    if not isinstance(lines, list):
        raise KvstackError(
            f"The stack {run.name!r} does not tell its rules",
            answer.message,
            f"Is it a kvstack of this version?  It says {run.version}.",
        )
    return lines


def _compare(told: Sequence[Mapping[str, Any]], run: RunFile) -> tuple[list[str] | None, str]:
    """
    Which rules the stack's file would make others, and that in words.

    None if the file cannot be used any more, or the stack does not tell enough.
    """
    from kvstack.prompt import inspecting  # noqa: PLC0415 - only when the verb runs

    file = one_line(run.config_path)
    try:
        written = {line.name: line.digest for line in inspecting.list_rules(_rules(run.config_path))}
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
    from kvstack.plan import load_rules  # noqa: PLC0415 - only when the verb runs
    from kvstack.terminal.loading import load_config  # noqa: PLC0415

    if config is not None:
        return load_rules(*load_config(config, None))
    from importlib import resources  # noqa: PLC0415

    from kvstack.prompt.rules import compile_rules, parse_pack  # noqa: PLC0415

    packs = sorted(
        (item for item in resources.files("kvstack.packs").iterdir() if item.name.endswith(".toml")),
        key=lambda item: item.name,
    )
    return compile_rules([parse_pack(pack.read_text(encoding="utf-8"), pack.name) for pack in packs])


def _chat_template(config: str | None) -> str | None:
    """The chat template of the config's model, by the header of its file; None if that cannot be read here."""
    if config is None:
        return None
    from kvstack.process.facts import look_at_model  # noqa: PLC0415 - only when the verb runs
    from kvstack.process.models import resolve_model  # noqa: PLC0415
    from kvstack.rundir import cache_dir  # noqa: PLC0415
    from kvstack.terminal.loading import load_config  # noqa: PLC0415

    try:
        model = resolve_model(load_config(config, None)[0], cache_dir())
    except StartFailed:
        return None
    shape = look_at_model(model).shape if model is not None else None
    if shape is None:
        return None
    return shape.chat_template or DEFAULT_TEMPLATE


def _list_text(lines: Sequence[Mapping[str, Any]], where: str) -> str:
    out = []
    for line in lines:
        state = "on " if line["active"] else "off"
        facts = [line["where"], line["action"], f"for {line['client']}", f"from {line['origin']}"]
        if line["switch"]:
            facts.append(line["switch"])
        if line["hits"] is not None and line["active"]:
            facts.append(f"acted {line['hits']:,} times")
        out.append(one_line(f"{state}  {line['name']}  ({', '.join(facts)})"))
        out += textwrap.wrap(one_line(line["summary"]), WIDTH, initial_indent="     ", subsequent_indent="     ")
    active = sum(line["active"] for line in lines)
    return "\n".join([*out, "", f"{plural(len(lines), 'rule')}, {active} on{where}"])


@dataclass(frozen=True, slots=True)
class _Tried:
    """A request after the rules; the ratios compare it with the one before it."""

    captured: Recorded
    stripped: Stripped
    before_ratio: float | None
    after_ratio: float | None


def _read_requests(file: Path) -> list[Recorded]:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read", error.strerror or str(error), "Give a captured request.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text", "", "Give one JSON body, or JSON Lines.") from None
    from kvstack.prompt.recorded import RecordingError, read_recording  # noqa: PLC0415 - only when the verb runs

    try:
        found = read_recording(text)
    except RecordingError as error:
        raise UsageError(f"{file} is no recording", str(error), "Give one JSON body, or JSON Lines.") from None
    if not found:
        raise UsageError(f"{file} holds no request", "", "Record some: `kvstack capture FILE`.")
    return found


def _try(requests: Sequence[Recorded], rules: RuleSet, chat_template: str | None) -> list[_Tried]:
    from kvstack.prompt.conversation import ConversationMemory  # noqa: PLC0415 - only when the verb runs
    from kvstack.prompt.rendering import common_prefix, render  # noqa: PLC0415
    from kvstack.prompt.rules import apply_rules  # noqa: PLC0415

    memory = ConversationMemory()
    tried: list[_Tried] = []
    former = None
    for request in requests:
        body, path = request.body.encode(), request.endpoint
        stripped = apply_rules(body, path, rules, memory, request.headers, chat_template)
        rendered = render(body, path), render(stripped.body, path)
        ratios: tuple[float | None, float | None] = (None, None)
        if former is not None and stripped.side is None:
            ratios = common_prefix(former[0], rendered[0]).kept_ratio, common_prefix(former[1], rendered[1]).kept_ratio
        if stripped.side is None:
            former = rendered
        tried.append(_Tried(request, stripped, *ratios))
    return tried


def _test_data(one: _Tried) -> dict[str, Any]:
    from kvstack.prompt.inspecting import show_edits  # noqa: PLC0415 - only when the verb runs

    stripped = one.stripped
    return {
        "path": one.captured.endpoint,
        "api": stripped.api,
        "client": stripped.client,
        "conversation": stripped.conversation,
        "side": stripped.side,
        "items": stripped.items,
        "stripped": {
            "ts_removed": stripped.ts_removed,
            "msg_ids_removed": stripped.msg_ids_removed,
            "items_modified": stripped.items_modified,
        },
        "hits": [asdict(hit) for hit in stripped.hits],
        "edits": [asdict(shown) for shown in show_edits(one.captured.body.encode(), stripped)],
        "common_prefix_ratio": {"before": one.before_ratio, "after": one.after_ratio},
        "warnings": list(stripped.warnings),
    }


def _test_text(tried: Sequence[_Tried]) -> Callable[[Console], RenderableType]:
    def draw(_: Console) -> RenderableType:
        from rich.text import Text  # noqa: PLC0415 - only when the verb runs

        from kvstack.prompt.inspecting import show_edits  # noqa: PLC0415

        text = Text()
        for number, one in enumerate(tried, start=1):
            text.append(f"{number}. {_headline(one)}\n", style="bold")
            for shown in show_edits(one.captured.body.encode(), one.stripped):
                text.append(f"   @{shown.start:,} ", style="dim")
                text.append(_plain(shown.before[-20:]), style="dim")
                if shown.removed:
                    text.append(f"[-{_plain(shown.removed)}-]", style="red")
                if shown.inserted:
                    text.append(f"{{+{_plain(shown.inserted)}+}}", style="green")
                text.append(_plain(shown.after[:20]) + "\n", style="dim")
            for warning in one.stripped.warnings:
                text.append(f"   {warning}\n", style="yellow")
        text.append(f"{plural(len(tried), 'request')}, {plural(sum(len(one.stripped.edits) for one in tried), 'edit')}")
        return text

    return draw


def _headline(one: _Tried) -> str:
    stripped = one.stripped
    words = [one.captured.endpoint, stripped.client or "unknown client"]
    if any(hit.rule == "raw-prompt" for hit in stripped.hits):
        words.append(
            "a raw prompt, not split into turns: its model's chat template is not known, or has no role markers"
        )
    if _is_empty(one):
        words.append("no prompt in it")
    if stripped.side:
        words.append(f"{stripped.side} request")
    words.append(plural(len(stripped.edits), "edit"))
    if one.before_ratio is not None and one.after_ratio is not None:
        words.append(f"common prefix {one.before_ratio:.3f} -> {one.after_ratio:.3f}")
    return " | ".join(words)


def _is_empty(one: _Tried) -> bool:
    from kvstack.prompt.rendering import render  # noqa: PLC0415 - only when the verb runs

    return not render(one.captured.body.encode(), one.captured.endpoint)


def _plain(text: str) -> str:
    """A piece of a body, shortened, without what would move the cursor."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= 200 else f"{shown[:140]} ... {shown[-40:]}"
