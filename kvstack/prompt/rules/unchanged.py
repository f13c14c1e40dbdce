"""
Rules that matched a request and had nothing to do there.

What a rule says nothing about looks the same in the body, but not to the one who wrote it: a pattern that does not
match wants to be changed, a value that is frozen from now on does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstack.prompt.memory.state import ConversationState
from kvstack.prompt.request.document import spell_path
from kvstack.prompt.request.message import Item
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.matches import Hit, Matches
from kvstack.prompt.rules.planner import Plan


@dataclass(frozen=True, slots=True)
class Unchanged:
    """
    What a rule found at one place and left as it is.

    Attributes:
        rule: The rule's name.
        path: Where, for example `messages[0].content`.
        action: Its action.
        why: Why nothing changed.
    """

    rule: str
    path: str
    action: str
    why: str


def find_unchanged(
    matches: Matches,
    ops: Sequence[Replacement],
    state: ConversationState,
    plan: Plan,
    items: Sequence[Item],
    hits: Sequence[Hit],
    *,
    remembers: bool,
    starts: bool,
) -> tuple[Unchanged, ...]:
    """
    Find the rules that matched and changed nothing.

    Args:
        matches: What was found.
        ops: The replacements among it, settled.
        state: What was remembered of the conversation.
        plan: What was decided.
        items: The items of the request.
        hits: What the rules did; those that only count are among it.
        remembers: There is a memory.
        starts: The request starts a conversation.
    """
    found = [Unchanged(hit.rule, hit.path, hit.action, "it only counts") for hit in hits if hit.action == "observe"]
    found += [Unchanged(rule.name, spell_path(path), rule.spec.action, why) for rule, path, why in matches.unchanged]
    settled = {id(op) for op in ops}
    for op in matches.ops:
        path = spell_path(op.text.path)
        if id(op) not in settled:
            found.append(Unchanged(op.rule.name, path, op.rule.spec.action, _overlap(op, ops)))
        elif op.key and (op.new is None or op.new == op.current):
            found.append(Unchanged(op.rule.name, path, op.rule.spec.action, _frozen(op, state, remembers, starts)))
    found += _trailing(matches, plan, items)
    return tuple(found)


def _overlap(op: Replacement, ops: Sequence[Replacement]) -> str:
    start, end = op.text.base + op.start, op.text.base + op.end
    for other in ops:
        if other.text.path != op.text.path:
            continue
        if other.text.base + other.start < end and start < other.text.base + other.end:
            return f"the rule {other.rule.name} acts on the same text"
    return "another rule acts on the same text"


def _frozen(op: Replacement, state: ConversationState, remembers: bool, starts: bool) -> str:
    if not remembers:
        return "without a memory nothing is frozen"
    if op.key in state.frozen:
        return "still the first value of its conversation"
    if starts:
        return "first value of a new conversation, kept for its next requests"
    return "first value in this conversation, kept for its next requests"


def _trailing(matches: Matches, plan: Plan, items: Sequence[Item]) -> Iterator[Unchanged]:
    acted = {path for _, path, _ in plan.done}
    for message in matches.trailing:
        path = items[message.index].path
        if message.rule is not None and path not in acted:
            why = "it stands where it first stood"
            yield Unchanged(message.rule.name, spell_path(path), message.rule.spec.action, why)
