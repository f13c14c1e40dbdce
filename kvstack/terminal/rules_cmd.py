"""
`kvstack rules list|test`: what the rules are, and what they do to captured requests.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstack.errors import KvstackError, NotRunning, UsageError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, app
from kvstack.terminal.figures import one_line, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvstack.prompt.rules import RuleSet, Stripped
    from kvstack.rundir import RunFile

__all__ = ["list_rules", "try_rules"]

rules_app = typer.Typer(help="Show the rules, and try them on captured requests.", no_args_is_help=True)
app.add_typer(rules_app, name="rules")

WIDTH = 100

ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="CONFIG", help="A stack's config file, for its switches and rules."),
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

    Of a running stack its rules as it applies them, and how often each acted since its start.
    """

    def action() -> output.Result:
        run = _running(stack)
        if run is not None:
            told = _rules_of(run)
            data = {"stack": run.name, "config_path": run.config_path, "rules": told}
            return output.Result(data, _list_text(told, f" in the running stack {run.name!r}"))
        from kvstack.prompt import inspecting  # noqa: PLC0415 - only when the verb runs

        lines = [asdict(line) | {"hits": None} for line in inspecting.list_rules(_rules(stack))]
        where = " by default; no stack runs" if stack is None else ""
        return output.Result({"stack": None, "config_path": stack, "rules": lines}, _list_text(lines, where))

    output.deliver("rules list", as_json, action)


@rules_app.command("test")
def try_rules(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="One request body (JSON), or a conversation (JSON Lines).")
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Apply the rules to captured requests and show every edit.

    Of consecutive requests it shows which share of the former the next one still begins with, before and after.
    A line of JSON Lines is a body, or an object with `path`, `headers` and `body`.
    """

    def action() -> output.Result:
        tried = _try(_read_requests(file), _rules(config))
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
class _Captured:
    """A request from a file."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Tried:
    """A request after the rules; the ratios compare it with the one before it."""

    captured: _Captured
    stripped: Stripped
    before_ratio: float | None
    after_ratio: float | None


def _read_requests(file: Path) -> list[_Captured]:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read", error.strerror or str(error), "Give a captured request.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text", "", "Give one JSON body, or JSON Lines.") from None
    try:
        value = json.loads(text)
    except ValueError:
        pass
    else:
        return [_captured(value, text)] if _has_body(value) else []
    found = []
    # At line ends alone: other characters that Python ends lines at may stand in a text of a body.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file} is not JSON Lines", f"line {number}: {error}", "One JSON value a line.") from None
        if _has_body(value):
            found.append(_captured(value, line))
    return found


def _has_body(value: Any) -> bool:
    """Whether there is something to try: a request without a body, or with one that was left out, has nothing."""
    return not isinstance(value, dict) or value.get("body", value) is not None


def _captured(value: Any, text: str) -> _Captured:
    """A request with its path and headers, or a bare body whose keys tell the dialect."""
    if not isinstance(value, dict):
        raise UsageError("That is no request", f"a JSON {type(value).__name__}", "A request body is a JSON object.")
    if isinstance(value.get("body"), dict) and isinstance(value.get("path"), str):
        headers = value.get("headers") or {}
        pairs = (
            list(headers.items()) if isinstance(headers, dict) else [(str(name), str(text)) for name, text in headers]
        )
        return _Captured(value["path"], pairs, _raw_body(text))
    if "input" in value:
        path = "/v1/responses"
    elif "prompt" in value:
        path = "/completion"
    elif "system" in value:
        path = "/v1/messages"
    else:
        path = "/v1/chat/completions"
    return _Captured(path, [], text.encode())


def _raw_body(text: str) -> bytes:
    """The body of a recording in its own spelling: what the rules are shown to do, they do to these bytes."""
    from kvstack.prompt.splice import skip_space, walk_object  # noqa: PLC0415 - only when the verb runs

    members, _, _ = walk_object(text, skip_space(text, 0))
    last = next(member for member in reversed(members) if member.key == "body")
    return text[last.start : last.end].encode()


def _try(requests: Sequence[_Captured], rules: RuleSet) -> list[_Tried]:
    from kvstack.prompt.conversation import ConversationMemory  # noqa: PLC0415 - only when the verb runs
    from kvstack.prompt.rendering import common_prefix, render  # noqa: PLC0415
    from kvstack.prompt.rules import apply_rules  # noqa: PLC0415

    memory = ConversationMemory()
    tried: list[_Tried] = []
    former = None
    for request in requests:
        stripped = apply_rules(request.body, request.path, rules, memory, request.headers)
        rendered = render(request.body, request.path), render(stripped.body, request.path)
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
        "path": one.captured.path,
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
        "edits": [asdict(shown) for shown in show_edits(one.captured.body, stripped)],
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
            for shown in show_edits(one.captured.body, one.stripped):
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
    words = [one.captured.path, stripped.client or "unknown client"]
    if stripped.side:
        words.append(f"{stripped.side} request")
    words.append(plural(len(stripped.edits), "edit"))
    if one.before_ratio is not None and one.after_ratio is not None:
        words.append(f"common prefix {one.before_ratio:.3f} -> {one.after_ratio:.3f}")
    return " | ".join(words)


def _plain(text: str) -> str:
    """A piece of a body, shortened, without what would move the cursor."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= 200 else f"{shown[:140]} ... {shown[-40:]}"
