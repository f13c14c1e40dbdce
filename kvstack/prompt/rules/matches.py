"""What the rules found in a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstack.prompt.rawjson.scan import JsonPath
from kvstack.prompt.recurring import NO_MARK, Local, Mark
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.leading_blocks import Head
from kvstack.prompt.rules.ruleset import Rule


@dataclass(frozen=True, slots=True)
class Append:
    """
    Text that a rule wants at the end of a user text.

    Attributes:
        rule: The rule.
        text: What it appends.
        index: Index of the user item that it was taken out of and stays with; None for the newest one.
    """

    rule: Rule
    text: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class TrailingMessage:
    """
    A whole message that the client adds to the newest turn and never keeps.

    Attributes:
        index: Index of its item in the document.
        rule: The rule that deals with it; None if that is switched off.
        same: What is equal in all carriers of one conversation; empty if unknown.
    """

    index: int
    rule: Rule | None
    same: str = ""


@dataclass(slots=True)
class Matches:
    """
    Everything that the rules found in one request.

    Attributes:
        ops: Replacements in texts.
        appends: What goes to the end of user texts.
        carriers: Whole messages that the client adds to the newest turn.
        done: Rules that are counted already: rule, path, how many things.
        message_ids: `message_id` keys removed.
        digests: What settled items count as when conversations are compared, by index.
        local: What was done to settled items, where anything was.
        heads: What was read at the head of the first and the newest item of the user, by index, unless it was settled.
        opening: Index of the first item of the user, for which there are rules of its own; -1 if there is none.
        mark: What was dropped there and tells the conversation apart.
        idle: Rules that matched what is as they want it already: rule, path, why nothing is to be done.
    """

    ops: list[Replacement] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    carriers: list[TrailingMessage] = field(default_factory=list)
    done: list[tuple[Rule, JsonPath, int]] = field(default_factory=list)
    message_ids: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)
    local: dict[int, Local] = field(default_factory=dict)
    heads: dict[int, Head] = field(default_factory=dict)
    opening: int = -1
    mark: Mark = NO_MARK
    idle: list[tuple[Rule, JsonPath, str]] = field(default_factory=list)
