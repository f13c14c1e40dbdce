"""Rules as data, compiled: what is ready to be applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvstack.config.rules import DetectSpec, RulePatch, RuleSpec, SideSpec, WarningSpec
from kvstack.prompt.pattern.pattern import Found, Pattern, search_all
from kvstack.prompt.rules.leading_blocks import Block, LeadingBlockReader


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """
    What the user wants of the rules.

    Attributes:
        strip_message_ids: Remove OpenClaw's ids: everywhere, in system texts only, or not at all.
        strip_timestamps: Remove timestamp prefixes at the start of the user's words.
        disabled: Names of rules that are off.
        force_cache_prompt: Set `cache_prompt` to true where a client of the native completion route says false.
        added: The user's own rules, and changes to packed ones.
        source: The file that `added` came from, for error messages.
    """

    strip_message_ids: bool | Literal["system"] = True
    strip_timestamps: bool = True
    force_cache_prompt: bool = True
    disabled: frozenset[str] = frozenset()
    added: tuple[RulePatch, ...] = ()
    source: str = "config"


@dataclass(frozen=True, slots=True)
class Rule:
    """
    One compiled rule.

    Attributes:
        spec: What it says.
        block: How its block is recognised.
        client: The client it is for; None for any.
        origin: The pack and version it comes from, or `config`.
        active: False if a setting or the user switched it off.
        same: What is equal in all trailing messages of one conversation.
    """

    spec: RuleSpec
    block: Block
    client: str | None
    origin: str
    active: bool = True
    same: tuple[Pattern, ...] = ()

    @property
    def name(self) -> str:
        """The rule's unique name."""
        return self.spec.name


class SearchTable:
    """The patterns of rules that are searched for, those with the same beginning together; made once."""

    __slots__ = ("_by_head", "_starts")

    def __init__(self, rules: Sequence[Rule]) -> None:
        groups: dict[str, dict[tuple[str, bool], tuple[Pattern, list[tuple[int, Rule]]]]] = {}
        self._starts: list[tuple[int, Rule, Pattern]] = []
        for order, rule in enumerate(rules):
            for pattern in rule.block.patterns:
                if rule.spec.at == "start":
                    self._starts.append((order, rule, pattern))
                else:
                    group = groups.setdefault(pattern.head, {})
                    entry = group.setdefault((pattern.source, rule.spec.at == "any"), (pattern, []))
                    entry[1].append((order, rule))
        self._by_head = [
            (head, [(pattern, key[1]) for key, (pattern, _) in group.items()], [owners for _, owners in group.values()])
            for head, group in groups.items()
        ]

    def search(self, text: str, begin: int, end: int) -> Iterator[tuple[int, Rule, Found]]:
        """Find the blocks of the rules in a span; each with the rule and its order."""
        for order, rule, pattern in self._starts:
            if text.startswith(pattern.head, begin):
                found = pattern.match(text, begin)
                if found is not None and found.end <= end:
                    yield order, rule, found
        for head, patterns, owners in self._by_head:
            if text.find(head, begin, end) >= 0:
                for number, found in search_all(patterns, text, begin, end):
                    for order, rule in owners[number]:
                        yield order, rule, found


@dataclass(frozen=True, slots=True)
class Side:
    """A compiled sign of a side request."""

    spec: SideSpec
    patterns: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Client:
    """
    Everything about one client, ready for use.

    Attributes:
        name: Its name; empty for a request whose client was not detected.
        detect: Its signs; any one is enough.
        rules: Active rules that apply to it, those for any client included.
        head: Reads the head of its user texts.
        tail: Blocks at their end.
        messages: Blocks that are a message of their own.
        sides: Its side requests.
        session_headers: Headers that hold the client's own name of the conversation, in lower case.
        session_keys: Top-level body keys that do.
        warnings: What the user should hear once.
        positions: The rules by position and dialect.
        tables: Their patterns, where they are searched for.
        by_block: The rules for the head of user texts, by dialect and block.
    """

    name: str
    detect: tuple[DetectSpec, ...]
    rules: tuple[Rule, ...]
    head: LeadingBlockReader
    tail: tuple[Block, ...]
    messages: tuple[Block, ...]
    sides: tuple[Side, ...]
    session_headers: tuple[str, ...] = ()
    session_keys: tuple[str, ...] = ()
    warnings: tuple[WarningSpec, ...] = ()

    positions: Mapping[tuple[str, str], tuple[Rule, ...]] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], SearchTable] = field(default_factory=dict)
    by_block: Mapping[str, Mapping[str, Sequence[Rule]]] = field(default_factory=dict)

    def table(self, where: str, dialect: str) -> SearchTable | None:
        """Return the patterns to search for at one position in one dialect; None if there are none."""
        return self.tables.get((where, dialect))

    def heads(self, dialect: str) -> Mapping[str, Sequence[Rule]]:
        """Return the rules for the head of user texts in one dialect, by the name of their block."""
        return self.by_block.get(dialect, {})

    def at(self, where: str, dialect: str) -> tuple[Rule, ...]:
        """Return the rules of one position in one dialect."""
        return self.positions.get((where, dialect), ())


@dataclass(frozen=True, slots=True)
class RuleSet:
    """
    All rules, compiled.

    Attributes:
        rules: Every rule, active or not, in the order of the packs.
        clients: Known clients, in the order of the packs.
        unknown: What applies where no client was detected.
        settings: The settings that were compiled in.
        by_name: Every rule by its name.
        signs: The signs of all clients, headers first, then tools, then texts.
    """

    rules: tuple[Rule, ...] = field(repr=False)
    clients: tuple[Client, ...] = field(repr=False)
    unknown: Client = field(repr=False)
    settings: RuleSettings
    by_name: Mapping[str, Rule] = field(repr=False)
    signs: tuple[tuple[DetectSpec, Client], ...] = field(repr=False)
