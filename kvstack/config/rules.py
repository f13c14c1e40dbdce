"""
The grammar of rule packs and of the user's own rules: what a TOML file may say.

This module checks shapes only; patterns are compiled by `kvstack.prompt`, which reports its findings under the same
key paths.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from kvstack.config.toml_lines import key_lines
from kvstack.errors import ConfigError, Problem

Where = Literal["system", "tools", "first user", "user head", "user tail", "message"]
Action = Literal["drop", "constant", "freeze", "coarsen", "tail", "sticky", "place", "observe"]
Switch = Literal["strip_message_ids", "strip_timestamps"]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
NonEmpty = Annotated[str, Field(min_length=1)]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[tuple[NonEmpty, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
Literals = Annotated[tuple[NonEmpty, ...], BeforeValidator(_one_or_more)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DetectSpec(_Spec):
    """One sign of a client; everything that it names must be there, and any one sign is enough."""

    header: NonEmpty | None = None
    """Name of a request header, any case."""

    starts: str = ""
    """What that header's value begins with; empty: its presence is enough."""

    system: Literals = ()
    """Literal texts that all stand in the system texts."""

    tools: Literals = ()
    """Names of tools that are all offered."""

    @model_validator(mode="after")
    def _consistent(self) -> DetectSpec:
        if self.header is None and not self.system and not self.tools:
            raise ValueError("needs `header`, `system` or `tools`")
        return self


class BlockSpec(_Spec):
    """A block that a client writes at the head (or tail) of user texts, or as a message of its own."""

    name: Name
    """What rules call it."""

    pattern: Patterns
    """How it reads; the first pattern that matches counts."""

    where: Literal["user head", "user tail", "message"] = "user head"
    """Where it stands."""

    repeat: bool = False
    """It may stand more than once in a row."""

    alone: bool = False
    """The client gives it a content part of its own: with other words in the same part it is the user's."""

    not_behind: Literals = ()
    """Blocks that the client never writes in front of it: their names, or those of rules with a `pattern`."""


class SideSpec(_Spec):
    """How to tell a request that is not the main conversation."""

    label: NonEmpty
    """What it is called: title, memory, heartbeat, cron, ..."""

    where: Literal["system", "first user", "last user"] = "last user"
    """Which text gives it away."""

    pattern: Patterns | None = None
    """How that text begins, behind the blocks at its head (for `system`: a line in it)."""

    tools: bool | None = None
    """False: only a request without tools; true: only one with tools."""

    lacks: Literals = ()
    """Tools that the main conversation always has, and this request has not."""

    any_client: bool = False
    """It applies whether or not its client was detected."""

    @model_validator(mode="after")
    def _consistent(self) -> SideSpec:
        if self.pattern is None and not self.lacks:
            raise ValueError("needs `pattern` or `lacks`")
        return self


class RuleSpec(_Spec):
    """One rule, complete."""

    name: Name
    """Unique name; users extend a rule or switch it off by it."""

    summary: str = ""
    """One sentence: what it does and why."""

    where: Where
    """Where its block stands."""

    action: Action
    """What happens to the target."""

    block: Name | None = None
    """A block of the pack that the rule works on."""

    pattern: Patterns | None = None
    """How to recognise the block, if it is not a named one."""

    at: Literal["line", "start", "any"] = "line"
    """In system, tools and first user texts: a match begins a line, begins the text, or stands anywhere."""

    has: Mapping[str, str] = Field(default_factory=dict)
    """For JSON blocks: keys that must be there, with what their string value begins with."""

    keys: Literals = ()
    """For JSON blocks: the target is these keys, at any depth."""

    constant: str = ""
    """For `constant`: what takes the target's place."""

    text: str = ""
    """What `tail`, `sticky`, `coarsen` and announcements append; `{value}` is the target (for `coarsen`: its line)."""

    announce: bool = False
    """For `freeze`: append the live value once to the newest user text when it changes."""

    unless_in_first_user: bool = False
    """For `sticky`: simply drop the block if its target stands in the first user item already."""

    inside: Name | None = None
    """For first user texts: a block at the head of the user text in which the pattern is searched."""

    same: Patterns | None = None
    """For `place`: what is equal in all carriers of one conversation, to keep conversations apart."""

    stable: bool = False
    """For `drop` in user texts: the client keeps the target in its history, so it keeps conversations apart."""

    dialects: tuple[str, ...] = ()
    """The APIs where it applies; none for all."""

    switch: Switch | None = None
    """The setting that governs it."""

    any_client: bool = False
    """It applies whether or not its client was detected."""

    enabled: bool = True
    """Off: it does nothing."""

    @model_validator(mode="after")
    def _consistent(self) -> RuleSpec:
        if (self.block is None) == (self.pattern is None):
            raise ValueError("needs either `block` or `pattern`")
        if self.action == "place" and self.where != "message":
            raise ValueError("`place` works on a whole message only")
        if self.where == "message" and self.action not in ("place", "sticky", "drop", "observe"):
            raise ValueError("a whole message can be placed, appended (`sticky`), dropped or observed")
        if self.action == "constant" and not self.constant:
            raise ValueError("`constant` needs the key `constant`")
        if self.action in ("tail", "sticky") and self.where == "tools":
            raise ValueError("text of tools cannot move to a user text")
        if self.where == "first user" and self.inside is None and self.at != "start":
            raise ValueError('in the first user text a rule needs `inside`, or `at = "start"`: the rest is the user\'s')
        if self.announce and "{value}" not in self.text:
            raise ValueError("`announce` needs a `text` with {value}")
        if self.keys and self.where == "message":
            raise ValueError("`keys` are cut in system texts and in blocks of user texts, not in whole messages")
        if self.keys and self.action not in ("drop", "sticky", "tail", "observe"):
            raise ValueError("`keys` can be dropped, moved or observed")
        return self


class WarningSpec(_Spec):
    """What a user should hear once when a setting meets a request that it hurts."""

    switch: Switch
    """The setting; the warning is for its value `true`."""

    tool: NonEmpty
    """A tool of this name is offered ..."""

    any_of: Literals
    """... and any of these strings stands in its definition."""

    text: NonEmpty
    """What is said."""


# What users of regular expressions write, and hardly anybody else: without any token beside it, it is one.
_REGULAR = ("\\d{", "\\w{", "\\d", "\\w", "\\s", "\\b", ".*", ".+", "[0-9", "[a-z", "[A-Z", "(?:", "[^")

# Keys that are for some actions alone.  A packed rule may keep one that its new action has no use for; a user's rule
# that says one expects something of it.
_KEYS_OF = {
    "announce": ("freeze",),
    "constant": ("constant",),
    "same": ("place",),
    "stable": ("drop",),
    "unless_in_first_user": ("sticky",),
}


class RulePatch(_Spec):
    """A user's rule: a new one, or changes to a packed one of the same name."""

    name: Name
    """Name of the packed rule to change, or of the new rule."""

    also: Patterns | None = None
    """Patterns that the packed rule, or the block that it names, shall recognise as well."""

    summary: str | None = None
    where: Where | None = None
    action: Action | None = None
    block: Name | None = None
    pattern: Patterns | None = None
    at: Literal["line", "start", "any"] | None = None
    has: Mapping[str, str] | None = None
    keys: Literals | None = None
    constant: str | None = None
    text: str | None = None
    announce: bool | None = None
    unless_in_first_user: bool | None = None
    inside: Name | None = None
    same: Patterns | None = None
    stable: bool | None = None
    dialects: tuple[str, ...] | None = None
    switch: Switch | None = None
    any_client: bool | None = None
    enabled: bool | None = None

    @field_validator("pattern", "also", "same")
    @classmethod
    def _is_no_regular_expression(cls, patterns: Patterns | None) -> Patterns | None:
        for pattern in patterns or ():
            mark = next((mark for mark in _REGULAR if mark in pattern), None)
            if mark is not None and "{" not in pattern.replace(mark, ""):
                raise ValueError(
                    f"{pattern!r} looks like a regular expression ({mark}); a pattern is the text itself, with tokens "
                    "such as {int}, {date} or {line} for what changes"
                )
        return patterns


class PackSpec(_Spec):
    """One rule pack: everything known about one client."""

    name: Name
    """Name of the pack."""

    version: Annotated[int, Field(ge=1)]
    """Counts up with each change of meaning."""

    client: NonEmpty
    """What the client is called in status and request lines."""

    detect: tuple[DetectSpec, ...] = ()
    """How it is recognised."""

    session_headers: Literals = ()
    """Headers that hold the client's own name of the conversation."""

    session_keys: Literals = ()
    """Top-level body keys that do."""

    warning: tuple[WarningSpec, ...] = ()
    """What users should hear once."""

    block: tuple[BlockSpec, ...] = ()
    """Blocks that it writes into user texts."""

    side: tuple[SideSpec, ...] = ()
    """Requests that are not its main conversation."""

    rule: tuple[RuleSpec, ...] = ()
    """What is done."""


def parse_pack_spec(text: str, source: str) -> PackSpec:
    """
    Read a rule pack.

    Raises:
        ConfigError: It cannot be used; holds all problems found, with key paths and lines.
    """
    try:
        return PackSpec.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, [Problem("", f"is not valid TOML: {error}")]) from None
    except ValidationError as error:
        raise ConfigError(source, _problems(error.errors(), key_lines(text))) from None


def merge_rule(base: RuleSpec | None, patch: RulePatch, path: str) -> tuple[RuleSpec | None, list[Problem]]:
    """
    Lay a user's rule over the packed one of the same name, or complete it on its own.

    Args:
        base: The packed rule, if there is one.
        patch: The user's rule.
        path: Key path of the user's rule, for problems.

    Returns:
        The rule and no problems, or None and what is wrong.
    """
    given = patch.model_dump(exclude_none=True, exclude={"also"})
    known: dict[str, Any] = {"any_client": True} if base is None else base.model_dump()
    if "pattern" in given:
        known.pop("block", None)
    if "block" in given:
        known.pop("pattern", None)
    merged = known | given
    # More patterns of a rule with a named block are that block's; who compiles the pack adds them there.
    if patch.also is not None and merged.get("pattern") is not None:
        merged["pattern"] = (*merged["pattern"], *patch.also)
    try:
        spec = RuleSpec.model_validate(merged)
        idle = [
            Problem(f"{path}.{key}", f"is for the action {' or '.join(actions)}; this rule's is {spec.action}")
            for key, actions in _KEYS_OF.items()
            if given.get(key) and spec.action not in actions
        ]
        return (None, idle) if idle else (spec, [])
    except ValidationError as error:
        return None, _problems(error.errors(), {}, prefix=path)


def _problems(errors: Iterable[ErrorDetails], lines: Mapping[str, int], prefix: str = "") -> list[Problem]:
    found = []
    for details in errors:
        path = ".".join(str(part) for part in details["loc"])
        line = lines.get(path, lines.get(path.rpartition(".")[0]))
        match details["type"]:
            case "extra_forbidden":
                message = "unknown key"
            case "missing":
                message = "is missing"
            case _:
                message = details["msg"].removeprefix("Value error, ")
        found.append(Problem(".".join(part for part in (prefix, path) if part), message, line))
    return sorted(found, key=lambda problem: (problem.line is None, problem.line or 0))
