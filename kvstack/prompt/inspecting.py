"""
What rules exist, and what they did to a request, in a form that can be shown.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvstack.prompt.ruleset import Rule, RuleSet
from kvstack.prompt.stripping import Stripped

__all__ = ["RuleLine", "Shown", "list_rules", "show_edits"]

_CONTEXT = 40


@dataclass(frozen=True, slots=True)
class RuleLine:
    """
    One rule, as a list shows it.

    Attributes:
        name: Its name.
        client: The client it is for, or `any`.
        where: Position.
        action: Action.
        origin: The pack and its version, or `config`.
        active: It is in force.
        switch: The setting that governs it, if there is one.
        summary: What it does and why.
        digest: Another one if anything of the rule is another.
    """

    name: str
    client: str
    where: str
    action: str
    origin: str
    active: bool
    switch: str | None
    summary: str
    digest: str


@dataclass(frozen=True, slots=True)
class Shown:
    """
    One edit of a body, with what stands around it.

    Attributes:
        start: Offset in the original body, in characters.
        before: What stands in front of it.
        removed: What went; raw JSON text.
        inserted: What came in its place; raw JSON text.
        after: What stands behind it.
    """

    start: int
    before: str
    removed: str
    inserted: str
    after: str


def list_rules(rules: RuleSet) -> list[RuleLine]:
    """
    List all rules, active or not, in the order of the packs.
    """
    return [
        RuleLine(
            name=rule.name,
            client="any" if rule.spec.any_client or rule.client is None else rule.client,
            where=rule.spec.where,
            action=rule.spec.action,
            origin=rule.origin,
            active=rule.active,
            switch=rule.spec.switch,
            summary=rule.spec.summary,
            digest=_digest(rule),
        )
        for rule in rules.rules
    ]


def _digest(rule: Rule) -> str:
    said = f"{rule.spec.model_dump_json()} {rule.client} {rule.origin} {rule.active}"
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def show_edits(body: bytes, stripped: Stripped) -> list[Shown]:
    """
    Show each edit of a request.

    Args:
        body: The original body.
        stripped: What the rules made of it.
    """
    if not stripped.edits:
        return []
    text = body.decode("utf-8")
    return [
        Shown(
            start=edit.start,
            before=text[max(0, edit.start - _CONTEXT) : edit.start],
            removed=text[edit.start : edit.end],
            inserted=edit.replacement,
            after=text[edit.end : edit.end + _CONTEXT],
        )
        for edit in stripped.edits
    ]
