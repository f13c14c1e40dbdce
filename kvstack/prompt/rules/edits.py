"""From matches to edits of the raw body: spans inside literals, parts and items that go, items that come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstack.prompt.rawjson.offsets import raw_offsets
from kvstack.prompt.rawjson.scan import Edit, JsonPath, escape, removal, walk_array
from kvstack.prompt.request.document import Document
from kvstack.prompt.request.message import Text
from kvstack.prompt.rules.ruleset import Rule

# Names of rules, each with the path at which it counts as a hit.
By = tuple[tuple[str, JsonPath], ...]

# The same for list elements that go, and for those behind which something is inserted, by index.
ByItem = tuple[Mapping[int, By], Mapping[int, By]]


@dataclass(slots=True)
class Replacement:
    """
    One replacement inside a text, in decoded offsets.

    Attributes:
        text: The text.
        start: Offset of the first character that goes.
        end: Offset behind the last one.
        new: What takes its place; None until the conversation is known, or if nothing changes.
        normalized: What it counts as when conversations are compared.
        rule: The rule.
        key: For `freeze`: the name of the value in the conversation's memory.
        counted: It is reported as a hit.
        rules: All rules that had a part in it, if there may be several.
    """

    text: Text
    start: int
    end: int
    new: str | None
    normalized: str
    rule: Rule
    key: str = ""
    counted: bool = True
    rules: tuple[Rule, ...] = ()

    @property
    def current(self) -> str:
        """What stands there now."""
        return self.text.value[self.start : self.end]

    @property
    def by(self) -> By:
        """Names of the rules that want this, each with the path at which it counts as a hit."""
        if len(self.rules) < 2:
            return ((self.rule.name, self.text.path),)
        # Keys are cut for several rules at once; which ones had a part in this cut its keys tell.
        current = self.current
        return tuple(
            (rule.name, self.text.path) for rule in self.rules if any(f'"{key}"' in current for key in rule.spec.keys)
        )


def settle(ops: Sequence[Replacement]) -> list[Replacement]:
    """Order the replacements of each text; of two that overlap the first stays."""
    if len(ops) < 2:
        return list(ops)
    settled: list[Replacement] = []
    ends: dict[JsonPath, int] = {}
    for op in sorted(ops, key=lambda op: (op.text.base + op.start, op.text.base + op.end)):
        start, end = op.text.base + op.start, op.text.base + op.end
        if start >= ends.get(op.text.path, 0):
            settled.append(op)
            ends[op.text.path] = end
    return settled


def number_keys(found: Iterable[Replacement], settled: Iterable[Replacement]) -> None:
    """
    Number the frozen values of one rule in one place, in the order of the document.

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


def changed_text(text: Text, ops: Sequence[Replacement], *, normalized: bool) -> str:
    """Return a text after its replacements, or as it counts when conversations are compared."""
    out: list[str] = []
    done = 0
    for op in ops:
        out.append(text.value[done : op.start])
        out.append(op.normalized if normalized else op.current if op.new is None else op.new)
        done = op.end
    out.append(text.value[done:])
    return "".join(out)


def body_edits(
    document: Document,
    ops: Sequence[Replacement],
    dropped: Sequence[int],
    inserted: Mapping[int, Sequence[str]],
    by_item: ByItem | None = None,
) -> list[Edit]:
    """
    Make the edits of a body.

    Args:
        document: The request.
        ops: Settled replacements.
        dropped: Indices of list elements that go.
        inserted: Raw items to insert, by the index of the list element that they follow.
        by_item: Who drops an element of the list, or inserts behind it, by the index of that element.

    Returns:
        The edits; those at one place in the order in which they belong.
    """
    by_path: dict[JsonPath, list[Replacement]] = {}
    for op in ops:
        if op.new is not None and op.new != op.current:
            by_path.setdefault(op.text.path, []).append(op)
    parts: dict[JsonPath, list[int]] = {}
    edits: list[Edit] = []
    for path, group in by_path.items():
        if len(group) > 1:
            group.sort(key=lambda op: (op.text.base + op.start, op.text.base + op.end))
        text = group[0].text
        if text.absent:
            edits.append(_added_part(document, path, group))
            continue
        if text.part is not None and _empties(text, group):
            parts.setdefault(path[:-2], []).append(text.part)
            continue
        edits += _inside_literal(document, path, group)
    for path, indices in parts.items():
        edits += _without_parts(document, path, indices, by_path)
    return [*edits, *_item_edits(document, dropped, inserted, by_item or ({}, {}))]


def _empties(text: Text, group: Sequence[Replacement]) -> bool:
    """Whether replacements leave nothing of a text; those of one text do not overlap."""
    return sum(op.end - op.start for op in group) == len(text.value) and not any(op.new for op in group)


def _inside_literal(document: Document, path: JsonPath, group: Sequence[Replacement]) -> list[Edit]:
    offsets = [op.text.base + offset for op in group for offset in (op.start, op.end)]
    text = group[0].text
    raw = raw_offsets(
        document.text, document.locate(path), len(text.value if text.whole is None else text.whole), offsets
    )
    return [Edit(raw[2 * n], raw[2 * n + 1], escape(op.new or ""), op.by) for n, op in enumerate(group)]


def _added_part(document: Document, path: JsonPath, group: Sequence[Replacement]) -> Edit:
    """Add a text part to an item that has none."""
    array = walk_array(document.text, document.locate(path[:-2])[0])
    words = "".join(op.new or "" for op in group).lstrip("\n")
    part = f'{{"type": "{document.format.text_part}", "text": "{escape(words)}"}}'
    by = tuple(cause for op in group for cause in op.by)
    return Edit(array.end - 1, array.end - 1, f", {part}" if array.values else part, by)


def _without_parts(
    document: Document, path: JsonPath, indices: Sequence[int], by_path: Mapping[JsonPath, Sequence[Replacement]]
) -> list[Edit]:
    """Drop content parts that a rule emptied, as the client would send a turn without them; the last one stays."""
    array = walk_array(document.text, document.locate(path)[0])
    gone = set(indices)
    if len(gone) == len(array.values):
        kept = min(gone)
        gone.discard(kept)
        leftover = _inside_literal(document, (*path, kept, "text"), by_path[*path, kept, "text"])
    else:
        leftover = []
    flags = [index in gone for index in range(len(array.values))]
    spans = array.spans()
    by = {part: tuple(cause for op in by_path[*path, part, "text"] for cause in op.by) for part in gone}
    cuts = removal(spans, flags, (spans[0][0], array.end - 1)) if gone else []
    return leftover + _cuts(cuts, spans, by)


def _cuts(cuts: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], by: Mapping[int, By]) -> list[Edit]:
    """Make the edits that take elements out, each with all who want one of those that stand inside it."""
    edits = []
    gone = deque(sorted(by))
    for first, last in cuts:
        causes: list[tuple[str, JsonPath]] = []
        while gone and spans[gone[0]][1] <= last:
            causes += by[gone.popleft()]
        edits.append(Edit(first, last, "", tuple(causes)))
    return edits


def _item_edits(
    document: Document, dropped: Sequence[int], inserted: Mapping[int, Sequence[str]], by_item: ByItem
) -> list[Edit]:
    array = document.array
    if array is None or (not dropped and not inserted):
        return []
    edits = [
        Edit(array.ends[index], array.ends[index], "".join(f",{raw}" for raw in raws), by_item[1].get(index, ()))
        for index, raws in inserted.items()
    ]
    if dropped:
        gone = set(dropped)
        spans = array.spans()
        flags = [index in gone for index in range(len(spans))]
        # Removal starts at the end of the element before; an insertion there comes first.
        edits += _cuts(removal(spans, flags, (spans[0][0], spans[-1][1])), spans, by_item[0])
    return edits
