"""What rules exist, and what they did to a request, in a form that can be shown."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass

from kvstack.config.rules import RuleSpec
from kvstack.prompt.engine import CACHE_PROMPT, UNSPLIT, RewriteResult
from kvstack.prompt.request.document import spell_path
from kvstack.prompt.rules.ruleset import Rule, RuleSet

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
        summary: What it finds, and why that is worth a rule.
        digest: Another one if anything of the rule is another.
        effect: What happens to what it finds, by the action in force.
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
    effect: str


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
        rules: Names of the rules that want it.
        paths: The path at which each of them counts it as a hit.
    """

    start: int
    before: str
    removed: str
    inserted: str
    after: str
    rules: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


def list_rules(rules: RuleSet) -> list[RuleLine]:
    """List all rules, active or not, in the order of the packs; what is counted like a rule and is none comes last."""
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
            effect=_effect(rule.spec),
        )
        for rule in rules.rules
    ] + [
        _built_in(
            CACHE_PROMPT,
            "request",
            "constant",
            rules.settings.force_cache_prompt,
            "`cache_prompt: false` in a request to /completion: some clients say so, and then never reuse anything.",
            "It is sent as true.",
        ),
        _built_in(
            UNSPLIT,
            "prompt",
            "observe",
            True,
            "A raw prompt to /completion that cannot be split into turns: its model's chat template is not known, or "
            "has no role markers.",
            "No rule can act in it; it is only counted.",
        ),
    ]


def clients_without_rules(served: Container[str], rules: RuleSet) -> list[str]:
    """
    Name the known clients for which there is no rule, because there is nothing to do for them.

    Args:
        served: The clients that listed rules are for.
        rules: The rules, with all known clients.
    """
    everywhere = {rule.client for rule in rules.rules if rule.spec.any_client}
    return [client.name for client in rules.clients if client.name not in served and client.name not in everywhere]


def _built_in(name: str, where: str, action: str, active: bool, summary: str, effect: str) -> RuleLine:
    digest = hashlib.blake2b(f"{name} {active}".encode(), digest_size=8).hexdigest()
    return RuleLine(name, "any", where, action, "kvstack", active, None, summary, digest, effect)


def _effect(spec: RuleSpec) -> str:
    """Say what happens to what a rule finds; never more than its action makes true."""
    what, goes, moves, stays = "It", "is", "moves", "stays"
    if spec.keys:
        what = f"Its key{'s'[: len(spec.keys) - 1]} {', '.join(spec.keys)}"
    if len(spec.keys) > 1:
        goes, moves, stays = "are", "move", "stay"
    match spec.action:
        case "drop" if spec.where == "message":
            return "It is dropped, as long as no earlier one stands that says something else."
        case "drop":
            return f"{what} {goes} dropped."
        case "constant":
            return f"The text {spec.constant!r} always stands in its place."
        case "freeze":
            told = "; the model is told once of each other one, behind the newest user text" if spec.announce else ""
            return f"The first value of each conversation is repeated{told}."
        case "coarsen":
            told = "; the clock is told behind the newest user text" if spec.text else ""
            return f"A clock is shortened to its day{told}."
        case "tail":
            return f"{what} {moves} to the end of the newest user text, as long as that turn is the newest."
        case "sticky" if spec.where == "message":
            return "It becomes the end of the user text that it follows, and stays there."
        case "sticky":
            end = "the newest user text" if spec.where == "system" else "its user text"
            first = ", or is dropped if the first user text says the same" if spec.unless_in_first_user else ""
            return f"{what} {moves} to the end of {end} and {stays} there{first}."
        case "place":
            return "It stays where it first stood, and comes back when its turn is history."
        case "observe":
            return "Nothing is changed; it is only counted."


def _digest(rule: Rule) -> str:
    said = f"{rule.spec.model_dump_json()} {rule.client} {rule.origin} {rule.active}"
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def show_edits(body: bytes, stripped: RewriteResult) -> list[Shown]:
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
            rules=tuple(name for name, _ in edit.by),
            paths=tuple(spell_path(path) for _, path in edit.by),
        )
        for edit in stripped.edits
    ]
