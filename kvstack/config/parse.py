"""Reading a config file: all problems at once, each with its key path and line; and the manual of its keys."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvstack.config.model import PACKAGED_MODELS, Config, Place, Proxy, Rules, Server, Warmup, is_loopback
from kvstack.config.rules import RulePatch
from kvstack.config.toml_lines import key_lines, line_of
from kvstack.errors import ConfigError, Problem

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def parse_config(text: str, source: Path, home: Path, overrides: Sequence[str] = ()) -> Config:
    """
    Read a config file's text.

    Args:
        text: The TOML document.
        source: The file's path, made absolute by the caller; relative paths in the file are relative to its directory.
        home: What `~` stands for.
        overrides: `key.path=value` items, applied on top; a value is TOML, or else taken as a plain string.

    Raises:
        ConfigError: The file or an override cannot be used; holds all problems found.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(source), [_syntax_problem(error, text)], _CORRECT_THE_LINE) from None
    lines = key_lines(text)
    problems = apply_overrides(raw, overrides, lines)
    raw.setdefault("name", source.stem)
    problems += _cross_problems(raw, lines)
    config: Config | None = None
    try:
        config = Config.model_validate(raw, context=Place(source.parent, home))
    except ValidationError as error:
        problems += [_problem(details, lines) for details in error.errors()]
    if problems or config is None:
        unique = {(problem.path, problem.message): problem for problem in problems}
        ordered = sorted(unique.values(), key=lambda problem: (problem.line is None, problem.line or 0))
        raise ConfigError(str(source), ordered, _next_step(ordered, overrides))
    return config


_CORRECT_THE_LINE = (
    "Correct that line. Below a `[section]` each line is `key = value`, with texts in quotes: "
    '`model = "~/models/m.gguf"`.'
)
_CORRECT_THE_OVERRIDE = (
    "Correct the --set: it is `--set KEY=VALUE` with a key of the config, as in `--set server.port=12346`; "
    "configs/README.md explains every key."
)


def _next_step(problems: Sequence[Problem], overrides: Sequence[str]) -> str:
    """What to correct: the file, the command line, or both."""
    overridden = {override.partition("=")[0].strip() for override in overrides}

    def is_overridden(problem: Problem) -> bool:
        # What is no override at all has no path.
        within = [(f"{problem.path}.", f"{key}.") for key in overridden]
        related = any(one.startswith(other) or other.startswith(one) for one, other in within)
        return problem.line is None and (not problem.path or related)

    given = {is_overridden(problem) for problem in problems}
    steps = ((False, ConfigError.CORRECT_THE_KEYS), (True, _CORRECT_THE_OVERRIDE))
    return "\n".join(step for kind, step in steps if kind in given)


def _syntax_problem(error: tomllib.TOMLDecodeError, text: str) -> Problem:
    message = str(error)
    head, mark, tail = message.rpartition(" (at line ")
    number = tail.split(",", 1)[0]
    if mark and number.isdigit():
        return Problem("", f"invalid TOML: {head}", int(number))
    return Problem("", f"invalid TOML: {message}", text.count("\n") + 1)


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], lines: dict[str, int]) -> list[Problem]:
    """
    Lay `key.path=value` items over a file's table.

    Args:
        raw: The table, which is changed.
        overrides: The items.
        lines: Where each key stands in the file; what is overridden stands there no more.

    Returns:
        What is wrong with them.
    """
    found = (_apply_override(raw, override, lines) for override in overrides)
    return [problem for problem in found if problem is not None]


def _write_list(path: str) -> str:
    return f"write [[{path}]], in double brackets, once for each"


def _apply_override(raw: dict[str, Any], override: str, lines: dict[str, int]) -> Problem | None:
    path, equals, value = override.partition("=")
    path = path.strip()
    keys = path.split(".")
    if not equals or not all(keys):
        return Problem("", f"--set {override}: is not of the form key.path=value")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table = raw
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            return Problem(path, f"--set cannot go into {key}, which is a value and no table")
        table = inner
    table[keys[-1]] = parsed
    lines.pop(path, None)
    for section, alternatives in (("server", _SOURCES), ("warmup", _PROMPTS)):
        # Of these only one may be set: the one that is given here takes the place of the file's.
        if path in {f"{section}.{key}" for key in alternatives}:
            for other in alternatives:
                if path != f"{section}.{other}":
                    table.pop(other, None)
    return None


_SOURCES = ("model", "package", "hf", "url")
_PROMPTS = ("system_prompt", "system_prompt_file", "request_file")


def _cross_problems(raw: Mapping[str, Any], lines: Mapping[str, int]) -> Iterator[Problem]:
    """Checks that look at more than one key, on the raw table: they must run even where single keys are wrong."""
    name = raw.get("name")
    if isinstance(name, str) and (not set(name) <= _NAME_CHARACTERS or name.startswith(".")):
        yield Problem(
            "name", "may contain letters, digits, '.', '_' and '-' only, and not start with '.'", lines.get("name")
        )
    elif isinstance(name, str) and name.endswith(".toml"):
        yield Problem("name", "may not end in '.toml': the verbs would take it for a file", lines.get("name"))
    server = raw.get("server")
    if isinstance(server, Mapping):
        given = [key for key in _SOURCES if key in server]
        if not given:
            yield Problem(
                "server",
                "no model configured: set one of model, package, hf, or url to attach to a running server",
                lines.get("server"),
            )
        elif len(given) > 1:
            yield Problem(
                f"server.{given[1]}",
                f"conflicts with server.{given[0]}: only one of {', '.join(_SOURCES)} may be set",
                lines.get(f"server.{given[1]}"),
            )
        package = server.get("package")
        if isinstance(package, str) and package not in PACKAGED_MODELS:
            yield Problem(
                "server.package", f"must be {' or '.join(map(_shown, PACKAGED_MODELS))}", lines.get("server.package")
            )
        proxy = raw.get("proxy", {})
        url = server.get("url")
        if isinstance(url, str):
            fault = _url_fault(url) or (_own_fault(url, proxy) if isinstance(proxy, Mapping) else None)
            if fault is not None:
                yield Problem("server.url", fault, lines.get("server.url"))
        if isinstance(proxy, Mapping) and "url" not in server:
            ports = server.get("port", 12345), proxy.get("port", 1234)
            if ports[0] == ports[1] and isinstance(ports[0], int):
                where = lines.get("proxy.port") or lines.get("server.port")
                yield Problem("proxy.port", f"is also the server's port ({ports[0]}): they must differ", where)
    yield from _exposed(raw.get("proxy"), lines)
    warmup = raw.get("warmup")
    if isinstance(warmup, Mapping):
        given = [key for key in _PROMPTS if key in warmup]
        if len(given) > 1:
            yield Problem(
                f"warmup.{given[1]}",
                f"conflicts with warmup.{given[0]}: only one of {', '.join(_PROMPTS)} may be set",
                lines.get(f"warmup.{given[1]}"),
            )


def _exposed(proxy: object, lines: Mapping[str, int]) -> Iterator[Problem]:
    """A proxy that other machines reach, and that asks them for nothing."""
    if not isinstance(proxy, Mapping) or "api_key" in proxy or proxy.get("insecure") is True:
        return
    host = proxy.get("host")
    if isinstance(host, str) and not is_loopback(host):
        yield Problem(
            "proxy.host",
            f"{_shown(host)} lets other machines in without a key: set proxy.api_key, or "
            "proxy.insecure = true to let in anyone who reaches the port",
            lines.get("proxy.host"),
        )


def _url_fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return "must look like http://127.0.0.1:12345"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user name or password: set server.api_key if the server asks for a key"
    if parts.query or parts.fragment or parts.path not in {"", "/"}:
        return "must be a base URL, without a path"
    del port
    return None


def _own_fault(url: str, proxy: Mapping[str, Any]) -> str | None:
    parts = urlsplit(url)
    here = {"127.0.0.1", "localhost", "::1", "0.0.0.0", str(proxy.get("host", "127.0.0.1")).lower()}
    if parts.hostname in here and (parts.port or 80) == proxy.get("port", 1234):
        return "is the proxy's own address: it would send every request to itself"
    return None


def _problem(details: ErrorDetails, lines: Mapping[str, int]) -> Problem:
    path = ".".join(str(part) for part in details["loc"])
    line = lines.get(path)
    if line is None and (isinstance(details["loc"][-1], int) or path.startswith("server.env.")):
        line = lines.get(path.rpartition(".")[0], lines.get("server.env") if path.startswith("server.env.") else None)
    if line is None and "." in path:
        line = lines.get(path.rpartition(".")[0]) if details["type"] == "missing" else line
    if line is None and (of := next((one for one in _TABLE_LISTS if path.startswith(f"{one}.")), None)) is not None:
        line = line_of(path, {name: number for name, number in lines.items() if f"{name}.".startswith(f"{of}.")})
    match details["type"]:
        case "extra_forbidden":
            return Problem(path, f"unknown key{_suggestion(path)}", line)
        case "missing":
            return Problem(path, "is missing", line)
        case "value_error":
            return Problem(path, details["msg"].removeprefix("Value error, "), line)
        case _:
            message = _said(details, path)
            if path == "server.cache_prompt":
                message = "cannot be off: kvstack requires --cache-prompt"
            if path.endswith(".api_key"):  # a secret, also when it is none that can be sent
                return Problem(path, "must be visible ASCII characters without spaces", line)
            return Problem(path, f"{message} (it is {_shown(details['input'])})", line)


_FORMS = {
    "server.hf": 'must look like "org/repo:quant"',
    "server.host": "must be an address or a host name",
    "proxy.host": "must be an address or a host name",
    "warmup.path": 'must be a path, as in "/v1/chat/completions"',
}
"""What a text must look like, where the pattern itself would be no help."""


def _said(details: ErrorDetails, path: str) -> str:
    """What a value must be, in the words and the notation of the file."""
    match details["type"]:
        case "string_pattern_mismatch" if path in _FORMS:
            return _FORMS[path]
        case "literal_error":
            expected = str(details.get("ctx", {}).get("expected", ""))
            return "must be " + expected.replace("True", "true").replace("False", "false").replace("'", '"')
        case "bool_type":
            return "must be true or false"
        case "dict_type" | "mapping_type" | "model_type" | "model_attributes_type":
            if isinstance(details["loc"][-1], int):
                return f"must be a table: {_write_list(path.rpartition('.')[0])}"
            if isinstance(details["input"], list) and any(isinstance(one, dict) for one in details["input"]):
                return f"must be one table: write [{path}], in single brackets, and only once"
            return "must be a table"
        case "tuple_type" | "list_type":
            return f"must be a list of tables: {_write_list(path)}" if path in _TABLE_LISTS else "must be a list"
        case _:
            return details["msg"].replace("Input should", "must", 1).replace("String should", "must", 1)


def _shown(value: object) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            text = str(value).lower()
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case Mapping():
            text = "a table"
        case list() | tuple():
            text = f"[{', '.join(map(_shown, value))}]"
        case _:
            text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(path: str) -> str:
    if path.startswith("rules.add."):
        close = difflib.get_close_matches(path.rpartition(".")[2], RulePatch.model_fields, n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""
    known = {known_path for known_path, _ in _fields(Config)}
    if path in {name for name, _ in _fields(Config, tables=True)}:
        return ""
    leaf = path.rpartition(".")[2].replace("-", "_")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"; did you mean {sorted(same_leaf)[0]}?"
    close = difflib.get_close_matches(path, known | {"server", "proxy", "rules", "warmup"}, n=1, cutoff=0.75)
    if not close:
        leaves = {name.rpartition(".")[2]: name for name in sorted(known)}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]}?" if close else ""


def _fields(model: type[BaseModel], prefix: str = "", *, tables: bool = False) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if tables:
                yield f"{prefix}{name}", field
            yield from _fields(annotation, f"{prefix}{name}.", tables=tables)
        else:
            yield f"{prefix}{name}", field


_TABLE_LISTS = tuple(
    path
    for path, field in _fields(Config)
    if get_origin(field.annotation) is tuple
    and all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in get_args(field.annotation)[:1])
)
"""Keys whose value is a list of tables."""


def manual() -> str:
    """The manual of the config file, as Markdown: one table per section, made of the docstrings above."""
    parts: list[str] = []
    for title, model in (("", Config), ("server", Server), ("proxy", Proxy), ("rules", Rules), ("warmup", Warmup)):
        heading = f"`[{title}]`" if title else "Top level"
        introduction = " ".join((model.__doc__ or "").split())
        rows = "\n".join(_rows(model))
        parts.append(f"## {heading}\n\n{introduction}\n\n| key | default | meaning |\n| --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        if field.description is None:
            continue
        default = field.get_default(call_default_factory=True) if not field.is_required() else None
        shown = "" if default is None else f"`{_toml(default)}`"
        text = " ".join(field.description.split()).replace("|", "\\|")
        yield f"| `{name}` | {shown} | {text} |"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple):
        return "[]"
    if isinstance(value, Mapping):
        return "{}"
    return f'"{value}"' if isinstance(value, str) else str(value)
