"""
Finding the blocks of rules at their positions.

Every match is a `Replacement`: this span of this text becomes that.  `normalized` is what the span counts as when
conversations are compared, so that a clock that moved on or a block that only the newest turn has makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from kvstack.prompt.memory.fingerprint import digest_item
from kvstack.prompt.memory.item_memo import ItemMemo, Key, KnownItem
from kvstack.prompt.memory.state import NOTHING_DROPPED, DroppedFingerprint
from kvstack.prompt.pattern.pattern import Found, Pattern
from kvstack.prompt.rawjson.keys import cut_keys, fits, plain
from kvstack.prompt.rawjson.scan import NotJson
from kvstack.prompt.request.document import Document
from kvstack.prompt.request.message import Item, Text
from kvstack.prompt.request.tools import tool_name, tool_texts
from kvstack.prompt.rules.edits import Replacement
from kvstack.prompt.rules.known_items import found_so_far, known_item
from kvstack.prompt.rules.leading_blocks import LeadingBlock, LeadingBlocks, match_first
from kvstack.prompt.rules.matches import Append, Matches, TrailingMessage
from kvstack.prompt.rules.ruleset import Client, Rule, SearchTable

# A client says what its newest turns repeat at the beginning of the first one; behind it may stand a whole project.
_OPENING_CHARACTERS = 8192


def find_all(document: Document, client: Client, memo: ItemMemo | None = None) -> Matches:
    """
    Find the blocks of all rules of a client.

    Args:
        document: The request.
        client: Its client.
        memo: What came of items before; without it all are read, and none is kept.
    """
    finder = _Finder(document, client, memo)
    finder.trailing_messages()
    finder.system()
    finder.tools()
    finder.users()
    return finder.matches


Group = tuple[list[Rule], Found]


class _Finder:
    def __init__(self, document: Document, client: Client, memo: ItemMemo | None) -> None:
        self.document = document
        self.client = client
        self.matches = Matches()
        self._memo = memo
        self._context = f"{document.api} {client.name} "
        self._dialect = document.api.value
        self._trailing: set[int] = set()
        # The user item whose own head and tail are being read: what leaves them stays with that turn.
        self._own: int | None = None

    def _rules(self, where: str) -> Sequence[Rule]:
        return self.client.at(where, self._dialect)

    def trailing_messages(self) -> None:
        """
        A trailing message is one block from end to end: of the user, right behind another item of the user or a tool
        result, or a system text in the middle of the conversation.
        """
        if not self.client.messages:
            return
        rules = self._rules("message")
        items = self.document.items
        for index, item in enumerate(items):
            if item.role not in ("user", "system") or not item.listed or item.leading or not index:
                continue
            if (item.role == "user" and items[index - 1].role not in ("user", "tool")) or len(item.texts) != 1:
                continue
            value = item.texts[0].value
            kinds: list[list[Rule]] = []
            for block in self.client.messages:
                found = match_first(block.patterns, value, 0)
                if found is None or value[found.end :].strip():
                    continue
                meant = [rule for rule in self.client.rules if rule.spec.where == "message" and rule.block == block]
                fitting = [rule for rule in meant if _fits(rule, found)]
                if fitting or not meant:
                    kinds.append([rule for rule in fitting if rule in rules])
            if not kinds:
                continue
            # One kind may be a special case of another: if the rule for it is off, the other one's acts.
            rule = next((rule for fitting in kinds for rule in fitting), None)
            if rule is not None and rule.spec.action == "observe":
                self.matches.done.append((rule, item.path, 1))
                rule = None
            same = _first_target(rule.same, value) if rule else ""
            self.matches.trailing.append(TrailingMessage(index, rule, same))
            self._trailing.add(index)

    def system(self) -> None:
        """System texts before the first turn; what a client inserts later on is history."""
        table = self.client.table("system", self._dialect)
        for item in self.document.items:
            if not item.leading:
                break
            if table is not None:
                for text in item.texts:
                    self._search(text, table)

    def tools(self) -> None:
        """The descriptions of tools."""
        table = self.client.table("tools", self._dialect)
        if table is None:
            return
        for text in tool_texts(self.document.top.get("tools")):
            self._search(text, table)

    def users(self) -> None:
        """The head and the tail of each user item, and known blocks at the head of the first one."""
        first = self._rules("first user")
        heads = self.client.heads(self._dialect)
        tails = self._rules("user tail")
        items = self.document.items
        turns = [n for n, item in enumerate(items) if item.role == "user" and n not in self._trailing]
        opening = next((n for n in turns if items[n].texts), -1)
        newest = next((n for n in reversed(turns) if items[n].texts), -1)
        for index in turns:
            item = items[index]
            key = self._memo_key(item, "first" if index == opening else "")
            if self._is_known(index, key) or not item.texts:
                continue
            contextual = index == opening and bool(first)
            before = found_so_far(self.matches)
            head = self.client.head.read(item.texts)
            if not head.words and item.holds_more:
                head = replace(head, words=True)
            if index in (opening, newest):
                self.matches.leading[index] = head
            if contextual:
                self._first_user(item, head, first)
            self._own = index
            for block in head.blocks:
                self._head_block(block, head, heads.get(block.block.name, ()), items[opening])
            for rule in tails:
                self._tail(item.texts[-1], rule)
            self._own = None
            if index == opening:
                self.matches.dropped_fingerprint = _fingerprint_dropped(self.matches.ops[before.ops :])
            if key is not None and self._memo is not None:
                known = known_item(self.document, self.matches, item, before, is_first=index == opening)
                if known is not None:
                    self._memo.put(key, known)
                    self.matches.known[index] = known
        self._fingerprint_others()

    def _memo_key(self, item: Item, where: str) -> Key | None:
        """Return the key of an item that may depend on nothing around it."""
        array = self.document.array
        if self._memo is None or array is None or not item.listed or item.leading:
            return None
        return self._context + where, self.document.text[array.starts[item.index] : array.ends[item.index]]

    def _is_known(self, index: int, key: Key | None) -> bool:
        known = self._memo.get(key) if self._memo is not None and key is not None else None
        if known is None:
            return False
        self.matches.known[index] = known
        if known.dropped_fingerprint.digest:
            self.matches.dropped_fingerprint = known.dropped_fingerprint
        return True

    def _fingerprint_others(self) -> None:
        """Fingerprint what is not the user's: no rule acts in it."""
        if self._memo is None:
            return
        for index, item in enumerate(self.document.items):
            if item.role in ("user", "reasoning") or index in self._trailing:
                continue
            key = self._memo_key(item, item.role)
            if key is not None and not self._is_known(index, key):
                known = self.matches.known[index] = KnownItem(digest_item(item, item.words))
                self._memo.put(key, known)

    def _first_user(self, item: Item, head: LeadingBlocks, rules: Sequence[Rule]) -> None:
        for rule in rules:
            table = SearchTable([rule])
            if rule.spec.inside is None:
                self._search(item.texts[0], table)
            else:
                for block in head.blocks:
                    if block.block.name == rule.spec.inside:
                        self._search(block.text, table, block.found.start, block.found.end)

    def _head_block(self, block: LeadingBlock, head: LeadingBlocks, rules: Iterable[Rule], opening: Item) -> None:
        fitting = [rule for rule in rules if _fits(rule, block.found)]
        # The client's block and the user's copy of it stand in a row: nobody can tell which is whose.
        if block.block.name in head.doubled:
            fitting = [rule for rule in fitting if rule.spec.keys]
        # Without words there is nothing behind which a block could go.
        if not head.words:
            fitting = [rule for rule in fitting if rule.spec.action not in ("sticky", "tail")]
        if fitting:
            self._act((fitting, block.found), block.text, block.end, opening)

    def _tail(self, text: Text, rule: Rule) -> None:
        value = text.value
        for pattern in rule.block.patterns:
            pos = value.rfind(pattern.head)
            if pos > 0 and value[pos - 1] == "\n":
                found = pattern.match(value, pos)
                if found is not None and not value[found.end :].strip() and _fits(rule, found):
                    # The blank line in front of the block goes with it.
                    start = len(value[:pos].rstrip("\r\n"))
                    whole = Found(start, len(value), (start, len(value)), found.json, found.value)
                    self._act(([rule], whole if found.target == (found.start, found.end) else found), text, len(value))
                    return

    def _search(self, text: Text, table: SearchTable, begin: int = 0, end: int | None = None) -> None:
        """Search one text for the blocks of rules; rules that share a block act together."""
        stop = len(text.value) if end is None else end
        matches = [
            (found.start, -found.end, order, rule, found)
            for order, rule, found in table.search(text.value, begin, stop)
            if _fits(rule, found)
        ]
        if not matches:
            return
        matches.sort(key=lambda match: match[:3])
        groups: list[Group] = []
        for _, _, _, rule, found in matches:
            if groups and rule.spec.keys and _same_span(groups[-1][1], found) and groups[-1][0][-1].spec.keys:
                groups[-1][0].append(rule)
            elif not (groups and groups[-1][0][-1] is rule and _same_span(groups[-1][1], found)):
                groups.append(([rule], found))
        for group in groups:
            self._act(group, text, group[1].end)

    def _act(self, group: Group, text: Text, end: int, opening: Item | None = None) -> None:
        rules, found = group
        keyed = [rule for rule in rules if rule.spec.keys]
        if keyed and found.json is not None:
            self._cut_keys(keyed, text, found.json[0])
        for rule in rules:
            if not rule.spec.keys:
                self._act_whole(rule, text, found, end, opening)

    def _cut_keys(self, rules: list[Rule], text: Text, start: int) -> None:
        """Cut the keys of all rules at once: which separators go depends on all of them."""
        acting = [rule for rule in rules if rule.spec.action != "observe"]
        try:
            cuts = cut_keys(text.value, start, {key for rule in acting for key in rule.spec.keys})
            found = cuts
            if len(acting) < len(rules):
                found = cut_keys(text.value, start, {key for rule in rules for key in rule.spec.keys})
        except NotJson:
            return
        if acting:
            self.matches.ops += [_cut(text, span, acting) for span in cuts.spans]
        for rule in rules:
            counts = cuts if rule in acting else found
            n = sum(counts.counts.get(key, 0) for key in rule.spec.keys)
            if n:
                self.matches.done.append((rule, text.path, n))
            if rule in acting and "message_id" in rule.spec.keys:
                self.matches.message_ids += cuts.counts.get("message_id", 0)
            if rule.spec.action in ("sticky", "tail"):
                for key in rule.spec.keys:
                    if key in cuts.values:
                        self._append(rule, plain(cuts.values[key]))

    def _append(self, rule: Rule, value: str) -> None:
        pattern = rule.spec.text or "{value}"
        self.matches.appends.append(Append(rule, "\n\n" + pattern.replace("{value}", value), self._own))

    def _key(self, rule: Rule, text: Text) -> str:
        """Name a frozen value by its rule, and in tools by the tool: others come and go in front of it."""
        if text.path[0] != "tools":
            return rule.name
        return f"{rule.name}@{tool_name(self.document.top['tools'][text.path[1]])}"

    def _act_whole(self, rule: Rule, text: Text, found: Found, end: int, opening: Item | None) -> None:
        spec = rule.spec
        start, stop = found.target
        whole = (start, stop) == (found.start, found.end)
        op = Replacement(text, start, end if whole else stop, "", "", rule)
        match spec.action:
            case "observe":
                self.matches.done.append((rule, text.path, 1))
                return
            case "constant":
                if op.current == spec.constant:
                    self.matches.unchanged.append((rule, text.path, "the constant stands there already"))
                    return
                op.new = op.normalized = spec.constant
            case "freeze":
                op.key = self._key(rule, text)
                op.new, op.normalized = None, f"\0{rule.name}\0"
            case "coarsen":
                if spec.text:
                    self._append(rule, _line_around(text.value, start, stop))
            case "tail" | "sticky":
                # All of the block leaves its place; what arrives is the block, or its target in the words of the rule.
                op.start, op.end = found.start, end
                if not (spec.unless_in_first_user and opening is not None and _stands_in(opening, text, found)):
                    block = text.value[found.start : found.end].strip("\r\n")
                    self._append(rule, text.value[start:stop] if spec.text else block)
            case _:
                pass
        self.matches.ops.append(op)


def _fits(rule: Rule, found: Found) -> bool:
    """Whether a block that reads as a rule says is one that it means."""
    return not rule.spec.has or fits(found.value, dict(rule.spec.has))


def _cut(text: Text, span: tuple[int, int], rules: Sequence[Rule]) -> Replacement:
    return Replacement(text, *span, "", "", rules[0], counted=False, rules=tuple(rules))


def _same_span(one: Found, other: Found) -> bool:
    return (one.start, one.end) == (other.start, other.end)


def _line_around(text: str, start: int, end: int) -> str:
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", end)
    return text[first : last if last >= 0 else len(text)].strip()


def _stands_in(opening: Item, holder: Text, found: Found) -> bool:
    """Whether the target of a block stands at the beginning of the first user item, outside that block."""
    target = holder.value[found.target[0] : found.target[1]]
    room = _OPENING_CHARACTERS
    for text in opening.texts:
        value = text.value[:room]
        if text is holder:
            value = value[: found.start] + "\0" + value[found.end :]
        if target in value:
            return True
        room -= len(value)
        if room <= 0:
            break
    return False


def _first_target(patterns: Iterable[Pattern], text: str) -> str:
    for pattern in patterns:
        for found in pattern.search(text, 0, len(text), anywhere=True):
            return text[found.target[0] : found.target[1]]
    return ""


def _fingerprint_dropped(ops: Iterable[Replacement]) -> DroppedFingerprint:
    """Fingerprint what goes from the first text of the user, though the client keeps it."""
    kept = [op for op in ops if op.rule.spec.stable and op.rule.spec.action == "drop"]
    if not kept:
        return NOTHING_DROPPED
    dropped = "\0".join(op.current for op in kept).encode("utf-8", "surrogatepass")
    return DroppedFingerprint(blake2b(dropped, digest_size=16).digest(), any(op.rule.spec.keys for op in kept))
