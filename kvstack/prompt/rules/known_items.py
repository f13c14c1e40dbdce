"""From what was found in one item to what the memo keeps of it, and back to edits where the item stands now."""

from __future__ import annotations

from typing import NamedTuple

from kvstack.prompt.memory.fingerprint import digest_item
from kvstack.prompt.memory.item_memo import KnownItem
from kvstack.prompt.memory.state import NOTHING_DROPPED
from kvstack.prompt.rawjson.scan import Edit
from kvstack.prompt.request.document import Document, spell_path
from kvstack.prompt.request.message import Item
from kvstack.prompt.rules.edits import Replacement, body_edits, changed_text, settle
from kvstack.prompt.rules.matches import Matches


class FoundSoFar(NamedTuple):
    """How much was found in front of an item."""

    ops: int
    done: int
    appends: int
    message_ids: int


def found_so_far(matches: Matches) -> FoundSoFar:
    """Return how much was found so far."""
    return FoundSoFar(len(matches.ops), len(matches.done), len(matches.appends), matches.message_ids)


def known_item(
    document: Document, matches: Matches, item: Item, before: FoundSoFar, *, is_first: bool
) -> KnownItem | None:
    """
    Turn what was found in an item into edits, if it depends on nothing else; the matches then hold it no longer.

    Args:
        document: The request.
        matches: What was found in it so far.
        item: The item that was read last.
        before: What was found in front of it.
        is_first: It is the first item of the user.
    """
    found, done = matches.ops[before.ops :], matches.done[before.done :]
    if len(matches.appends) > before.appends:
        return None
    if any(op.new is None or op.rule.spec.action not in ("drop", "constant") for op in found):
        return None
    ops = settle(found)
    own: dict[int, list[Replacement]] = {}
    for op in ops:
        own.setdefault(id(op.text), []).append(op)
    texts = [changed_text(text, own.get(id(text), ()), normalized=True) for text in item.texts]
    if found and not all(texts):
        return None
    start, _ = document.locate(item.path)
    steps = len(item.path)
    begins = len(spell_path(item.path))
    hits = [(rule.name, spell_path(path)[begins:], rule.spec.action, n) for rule, path, n in done]
    hits += [(op.rule.name, spell_path(op.text.path)[begins:], op.rule.spec.action, 1) for op in ops if op.counted]
    known = KnownItem(
        digest_item(item, texts),
        tuple(
            [
                Edit(first - start, last - start, new, tuple([(rule, path[steps:]) for rule, path in by]))
                for first, last, new, by in body_edits(document, ops, (), {})
            ]
        ),
        tuple(hits),
        sum(op.rule.spec.switch == "strip_timestamps" and op.new == "" for op in ops),
        matches.message_ids - before.message_ids,
        matches.dropped_fingerprint if is_first else NOTHING_DROPPED,
    )
    del matches.ops[before.ops :], matches.done[before.done :]
    matches.message_ids = before.message_ids
    return known


def edits_of(document: Document, item: Item, known: KnownItem) -> list[Edit]:
    """Return the edits of a known item where it stands now."""
    path = item.path
    start, _ = document.locate(path)
    return [
        Edit(start + first, start + last, new, tuple([(rule, path + steps) for rule, steps in by]))
        for first, last, new, by in known.edits
    ]
