"""What was found in one item and depends on nothing around it becomes edits, which the next request takes over."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kvstack.prompt.memory.fingerprint import digest_item
from kvstack.prompt.rawjson.scan import Edit
from kvstack.prompt.recurring import NO_MARK, Hit, Local, Mark
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


def found_so_far(findings: Matches) -> FoundSoFar:
    """Tell how much was found so far."""
    return FoundSoFar(len(findings.ops), len(findings.done), len(findings.appends), findings.message_ids)


def settle_item(document: Document, findings: Matches, index: int, item: Item, before: FoundSoFar) -> None:
    """
    Turn what was found in an item into edits, if it depends on nothing else.

    Args:
        document: The request.
        findings: Takes them, in place of what was found.
        index: Index of the item.
        item: The item.
        before: What was found in front of it.
    """
    known_ops, known_done, known_appends, known_ids = before
    if len(findings.appends) > known_appends:
        return
    if len(findings.ops) == known_ops and len(findings.done) == known_done:
        findings.digests[index] = digest_item(item, item.words)
        return
    found = findings.ops[known_ops:]
    for op in found:
        if op.new is None or op.rule.spec.action not in ("drop", "constant"):
            return
    ops = settle(found)
    own: dict[int, list[Replacement]] = {}
    for op in ops:
        own.setdefault(id(op.text), []).append(op)
    texts = [changed_text(text, own.get(id(text), ()), bare=True) for text in item.texts]
    if not all(texts):
        return
    start, _ = document.locate(item.path)
    done = findings.done[known_done:]
    hits = [Hit(rule.name, spell_path(path), rule.spec.action, n) for rule, path, n in done]
    hits += [Hit(op.rule.name, spell_path(op.text.path), op.rule.spec.action) for op in ops if op.counted]
    edits = body_edits(document, ops, (), {})
    findings.digests[index] = digest_item(item, texts)
    findings.local[index] = Local(
        tuple([Edit(first - start, last - start, new, by) for first, last, new, by in edits]),
        tuple(hits),
        sum(op.rule.spec.switch == "strip_timestamps" and op.new == "" for op in ops),
        findings.message_ids - known_ids,
        findings.mark if index == findings.opening else NO_MARK,
    )
    del findings.ops[known_ops:], findings.done[known_done:]
    findings.message_ids = known_ids


def mark_of(ops: Iterable[Replacement]) -> Mark:
    """Digest what goes from the first text of the user, though the client keeps it."""
    kept = [op for op in ops if op.rule.spec.stable and op.rule.spec.action == "drop"]
    if not kept:
        return NO_MARK
    dropped = "\0".join(op.live for op in kept).encode("utf-8", "surrogatepass")
    return Mark(blake2b(dropped, digest_size=16).digest(), any(op.rule.spec.keys for op in kept))


def number_keys(found: Iterable[Replacement], settled: Iterable[Replacement]) -> None:
    """
    Tell apart the frozen values of one rule in one place, in the order of the document.

    Args:
        found: What the rules want to replace.
        settled: What of it is replaced: a value inside another one has no number.
    """
    stays = {id(op) for op in settled if op.key}
    seen: dict[str, int] = {}
    for op in found:
        if id(op) in stays:
            number = seen.get(op.key, 0)
            seen[op.key] = number + 1
            op.key = f"{op.key}#{number}"
