"""
What the rules do to one request.

The order is always the same: read the body, find the client, find every block at its position, ask the memory which
conversation this continues, then cut.  A body that no rule touches comes back as the same object; one that cannot be
read comes back untouched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstack.core.rulespec import RuleSpec
from kvstack.prompt.conversation import ConversationMemory
from kvstack.prompt.detection import detect_client, side_label
from kvstack.prompt.dialects import Api, Document, Item, Text, api_of, read_document, turn_markers
from kvstack.prompt.head import match_first, read_head
from kvstack.prompt.metadata import KeyCuts, cut_keys, fits
from kvstack.prompt.pattern import Found, Pattern
from kvstack.prompt.ruleset import Client, Rule, RuleSet
from kvstack.prompt.splice import Edit, JsonPath, NotJson, apply_edits, escape, raw_offsets

__all__ = ["Hit", "Stripped", "apply_rules"]


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
class Stripped:
    """
    A request after the rules.

    Attributes:
        body: The bytes to send; the very object that came in if nothing was changed.
        hits: What the rules did.
        api: The dialect, or None for a path that carries no prompt.
        client: The client, if it was recognised.
        conversation: An opaque name of the conversation that this continues or starts.
        items: Number of messages or input items.
        ts_removed: Timestamp prefixes removed.
        msg_ids_removed: `message_id` keys removed.
        items_modified: Number of items changed.
        stream: The client wants a stream.
        side: What kind of side request this is, if it is one.
        warnings: What the user should know.
        edits: The replacements in the decoded body, ascending.
    """

    body: bytes
    hits: tuple[Hit, ...] = ()
    api: Api | None = None
    client: str | None = None
    conversation: str | None = None
    items: int = 0
    ts_removed: int = 0
    msg_ids_removed: int = 0
    items_modified: int = 0
    stream: bool = False
    side: str | None = None
    warnings: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()


@dataclass(slots=True)
class Change:
    """
    One replacement inside a text, in decoded offsets.
    """

    text: Text
    start: int
    end: int
    new: str
    rule: Rule


@dataclass(slots=True)
class Work:
    """
    A request while the rules work on it.
    """

    document: Document
    client: Client
    changes: list[Change] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    ts_removed: int = 0
    msg_ids_removed: int = 0

    def hit(self, rule: Rule, path: JsonPath, n: int = 1) -> None:
        """
        Record what a rule did.
        """
        self.hits.append(Hit(rule.name, spell_path(path), rule.spec.action, n))


def apply_rules(  # noqa: PLR0917
    body: bytes,
    path: str,
    rules: RuleSet,
    memory: ConversationMemory | None = None,
    headers: Sequence[tuple[str, str]] = (),
    chat_template: str | None = None,
) -> Stripped:
    """
    Apply the rules to one request.

    Args:
        body: The request body as the client sent it, without content encoding.
        path: The request path; the query is ignored.
        rules: The compiled rules.
        memory: What earlier requests left; without it nothing is frozen, re-inserted or placed.
        headers: The request's header pairs.
        chat_template: The model's chat template, to split raw prompts into turns.

    Returns:
        The body to send and what was done.  Bytes that are no JSON object come back untouched.
    """
    api = api_of(path)
    if api is None:
        return Stripped(body)
    try:
        text = body.decode("utf-8")
        document = read_document(text, api, turn_markers(chat_template) if api is Api.COMPLETION else None)
    except (UnicodeDecodeError, NotJson):
        return Stripped(body, api=api)
    client = detect_client(document, rules, headers)
    work = Work(document, client)
    for found in _search_system(work):
        _act(work, *found)
    for found in _search_heads(work):
        _act(work, *found)
    edits = _to_edits(document, work.changes)
    return Stripped(
        body=apply_edits(text, edits).encode("utf-8") if edits else body,
        hits=tuple(work.hits),
        api=api,
        client=client.name or None,
        items=document.count,
        ts_removed=work.ts_removed,
        msg_ids_removed=work.msg_ids_removed,
        items_modified=len({change.text.path[:2] for change in work.changes}),
        stream=document.top.get("stream") is True,
        side=side_label(document, client),
        edits=tuple(edits),
    )


Match = tuple[list[Rule], Text, Found, int]


def _search_system(work: Work) -> Iterator[Match]:
    rules = work.client.at("system")
    if rules:
        for item in work.document.items:
            if item.leading:
                for text in item.texts:
                    yield from _search(text, rules)


def _search(text: Text, rules: Sequence[Rule]) -> Iterator[Match]:
    """
    Search one text for the blocks of rules; rules that share a block are given together.
    """
    taken: list[tuple[int, int]] = []
    groups: dict[tuple[int, int], tuple[list[Rule], Found]] = {}
    for rule in rules:
        for found in _occurrences(text.value, rule.spec, rule.block.patterns):
            if rule.spec.has and not fits(found.value, dict(rule.spec.has)):
                continue
            span = (found.start, found.end)
            if span in groups:
                if rule.spec.keys:
                    groups[span][0].append(rule)
            elif not any(start < found.end and found.start < end for start, end in taken):
                taken.append(span)
                groups[span] = ([rule], found)
    for group, found in groups.values():
        yield group, text, found, found.end


def _occurrences(text: str, spec: RuleSpec, patterns: Iterable[Pattern]) -> Iterator[Found]:
    """
    Find the matches of a pattern that is searched for; each character is read a bounded number of times.
    """
    for pattern in patterns:
        if spec.at == "start":
            found = pattern.match(text, 0)
            if found is not None:
                yield found
            continue
        pos = text.find(pattern.head)
        while pos >= 0:
            behind = pos + 1
            if spec.at == "any" or pos == 0 or text[pos - 1] == "\n":
                found = pattern.match(text, pos)
                if found is not None and found.end > pos:
                    yield found
                    behind = found.end
            pos = text.find(pattern.head, behind)


def _search_heads(work: Work) -> Iterator[Match]:
    client = work.client
    rules = client.at("user head")
    if not rules:
        return
    by_block: dict[str, list[Rule]] = {}
    for rule in rules:
        by_block.setdefault(rule.block.name, []).append(rule)
    for item in work.document.items:
        if item.role != "user" or not item.texts:
            continue
        head = read_head(item.texts, client.head)
        for block in head.blocks:
            fitting = [
                rule
                for rule in by_block.get(block.block.name, ())
                if fits(block.found.value, dict(rule.spec.has)) or not rule.spec.has
            ]
            # The client's block and the user's copy of it stand in a row: nobody can tell which is whose.
            if block.block.name in head.doubled:
                fitting = [rule for rule in fitting if rule.spec.keys]
            if fitting:
                yield fitting, block.text, block.found, block.end


def _act(work: Work, rules: list[Rule], text: Text, found: Found, end: int) -> None:
    keyed = [rule for rule in rules if rule.spec.keys]
    if keyed and found.json is not None:
        _cut_keys(work, keyed, text, found.json[0])
    for rule in rules:
        if not rule.spec.keys:
            _act_whole(work, rule, text, found, end)


def _cut_keys(work: Work, rules: list[Rule], text: Text, start: int) -> None:
    acting = [rule for rule in rules if rule.spec.action != "observe"]
    cuts = cut_keys(text.value, start, {key for rule in acting for key in rule.spec.keys})
    for first, last in cuts.spans:
        work.changes.append(Change(text, first, last, "", acting[0]))
    for rule in rules:
        counts = cuts if rule in acting else cut_keys(text.value, start, set(rule.spec.keys))
        n = _count(counts, rule)
        if n:
            work.hit(rule, text.path, n)
            if rule in acting and "message_id" in rule.spec.keys:
                work.msg_ids_removed += counts.counts["message_id"]


def _count(cuts: KeyCuts, rule: Rule) -> int:
    return sum(cuts.counts[key] for key in rule.spec.keys)


def _act_whole(work: Work, rule: Rule, text: Text, found: Found, end: int) -> None:
    start, stop = found.target
    if (start, stop) == (found.start, found.end):
        stop = end
    match rule.spec.action:
        case "drop":
            work.changes.append(Change(text, start, stop, "", rule))
            if rule.spec.switch == "strip_timestamps":
                work.ts_removed += 1
        case "constant":
            if text.value[start:stop] == rule.spec.constant:
                return
            work.changes.append(Change(text, start, stop, rule.spec.constant, rule))
        case "observe":
            pass
        case _:
            return
    work.hit(rule, text.path)


def _to_edits(document: Document, changes: list[Change]) -> list[Edit]:
    by_path: dict[JsonPath, list[Change]] = {}
    for change in changes:
        by_path.setdefault(change.text.path, []).append(change)
    edits = []
    for path, group in by_path.items():
        group.sort(key=lambda change: (change.text.base + change.start, change.text.base + change.end))
        offsets = [change.text.base + offset for change in group for offset in (change.start, change.end)]
        raw = raw_offsets(document.text, document.locate(path)[0], offsets)
        for index, change in enumerate(group):
            edits.append(Edit(raw[2 * index], raw[2 * index + 1], escape(change.new)))
    return sorted(edits, key=lambda edit: (edit.start, edit.end))


def spell_path(path: JsonPath) -> str:
    """
    Spell a JSON path: `messages[0].content`.
    """
    out = ""
    for step in path:
        out += f"[{step}]" if isinstance(step, int) else f".{step}" if out else step
    return out


def last_user(items: Sequence[Item]) -> Item | None:
    """
    Return the newest item of the user that holds text.
    """
    return next((item for item in reversed(items) if item.role == "user" and item.texts), None)


__all__ += ["last_user", "match_first", "spell_path"]
