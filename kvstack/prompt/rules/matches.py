"""What the rules found in a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstack.prompt.memory.item_memo import KnownItem
from kvstack.prompt.memory.state import NOTHING_DROPPED, DroppedFingerprint
from kvstack.prompt.rawjson.scan import JsonPath
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.leading_blocks import LeadingBlocks
from kvstack.prompt.rules.ruleset import Rule


@dataclass(frozen=True, slots=True)
class Hit:
    """
    What one rule did at one place.

    Attributes:
        rule: The rule's name.
        path: Where, for example `messages[0].content`.
        action: What it did there.
        n: How many things it did it to.
    """

    rule: str
    path: str
    action: str
    n: int = 1


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
        trailing_key: What is equal in all trailing messages of one conversation; empty if unknown.
    """

    index: int
    rule: Rule | None
    trailing_key: str = ""


@dataclass(slots=True)
class Matches:
    """
    Everything that the rules found in one request.

    Attributes:
        ops: Replacements in texts.
        appends: What goes to the end of user texts.
        trailing: Whole messages that the client adds to the newest turn.
        done: Rules that are counted already: rule, path, how many things.
        message_ids: `message_id` keys removed.
        known: What came of items that depend on nothing around them, by index; the rest of this does not hold it.
        leading: What was read at the head of the first and the newest item of the user, by index.
        dropped_fingerprint: What was dropped from the first user text.
        unchanged: Rules that matched what is as they want it already: rule, path, why nothing is to be done.
    """

    ops: list[Replacement] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    trailing: list[TrailingMessage] = field(default_factory=list)
    done: list[tuple[Rule, JsonPath, int]] = field(default_factory=list)
    message_ids: int = 0
    known: dict[int, KnownItem] = field(default_factory=dict)
    leading: dict[int, LeadingBlocks] = field(default_factory=dict)
    dropped_fingerprint: DroppedFingerprint = NOTHING_DROPPED
    unchanged: list[tuple[Rule, JsonPath, str]] = field(default_factory=list)
