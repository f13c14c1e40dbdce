"""What shall happen to a request, knowing what happened to the ones before it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstack.prompt.memory.state import Appended, ConversationState, Placed
from kvstack.prompt.rawjson.scan import JsonPath
from kvstack.prompt.request.document import Document
from kvstack.prompt.request.message import Item, Text
from kvstack.prompt.rules.edits import Replacement, changed_text
from kvstack.prompt.rules.matches import Append, Matches
from kvstack.prompt.rules.ruleset import Rule, RuleSet
from kvstack.prompt.rules.trailing_messages import SaidBefore


@dataclass(slots=True)
class Plan:
    """
    What shall happen to a request beside the replacements that rules made on their own.

    Attributes:
        frozen: Values that are replayed from now on.
        announced: Changed values that the model is told with this request or was told before.
        appended: Text appended to turns.
        placed: Trailing messages and their places.
        dropped: Indices in the item list that go.
        inserted: Raw items to insert, by the index in the item list that they follow.
        done: What is to be counted: rule, path, how many things.
    """

    frozen: dict[str, str]
    announced: dict[str, str]
    appended: list[Appended]
    placed: list[Placed]
    dropped: list[int] = field(default_factory=list)
    inserted: dict[int, list[str]] = field(default_factory=dict)
    done: list[tuple[Rule, JsonPath, int]] = field(default_factory=list)


class Planner:
    """
    Decides about one request.

    Args:
        document: The request.
        matches: What the rules found in it.
        ops: Their replacements, settled.
        rules: All rules.
        indices: Indices of the items that count.
        remembers: There is a memory; without one nothing is frozen, placed or announced.
        merges: The template refuses two messages of the user in a row: trailing messages become part of their turn.
    """

    def __init__(
        self,
        document: Document,
        matches: Matches,
        ops: Sequence[Replacement],
        rules: RuleSet,
        indices: Sequence[int],
        remembers: bool,
        merges: bool = False,
    ) -> None:
        self._document = document
        self._matches = matches
        self._ops = ops
        self._rules = rules
        self._indices = indices
        self._counted = [document.items[index] for index in indices]
        self._remembers = remembers
        self._merges = merges

    def decide(self, state: ConversationState, current: Mapping[str, str]) -> Plan:
        """
        Decide what shall happen to the request, knowing what happened to the ones before it.

        Args:
            state: What is remembered of the conversation.
            current: What stands now where values are frozen.
        """
        plan = Plan(dict(state.frozen), dict(state.announced), list(state.appended), list(state.placed))
        newest = self._newest()
        self._freeze(plan)
        self._keep_with_their_turns(plan, newest)
        # What was appended to this turn before is what the server has cached: the same bytes again, nothing new.  But
        # as long as nothing was answered, the same words may come again as a reply to another message.
        if newest is not None and self._is_last(newest):
            self._renew(plan, newest)
        if newest is not None and not any(entry.position == newest for entry in plan.appended):
            last = self._indices[newest]
            wanted = [append for append in self._matches.appends if append.index in (None, last)]
            if self._is_last(newest):
                wanted += self._announcements(plan, current)
            plan.appended += [
                Appended(newest, append.rule.name, append.text, append.rule.spec.action != "tail") for append in wanted
            ]
        users = sum(item.role == "user" for item in self._counted)
        self._place(plan, sent_before=0 < users == state.users)
        return plan

    def _renew(self, plan: Plan, newest: int) -> None:
        """Give a turn that is sent again what it is to have now, in place of what it had."""
        texts: dict[str, Iterator[str]] = {}
        for append in self._matches.appends:
            if append.index is None and append.rule.name not in texts:
                own = [one.text for one in self._matches.appends if one.index is None and one.rule is append.rule]
                texts[append.rule.name] = iter(own)
        for n, entry in enumerate(plan.appended):
            if entry.position == newest and entry.sticky and entry.rule in texts:
                plan.appended[n] = replace(entry, text=next(texts[entry.rule], entry.text))

    def _keep_with_their_turns(self, plan: Plan, newest: int | None) -> None:
        """
        What a client keeps in earlier turns of the user goes to the end of each of them, where it went when the turn
        was the newest; never twice, if it is remembered from then.
        """
        if not self._matches.appends:
            return
        positions = {index: position for position, index in enumerate(self._indices)}
        known = {(entry.position, entry.rule): n for n, entry in enumerate(plan.appended)}
        for append in self._matches.appends:
            position = None if append.index is None else positions.get(append.index)
            if position is None or position == newest:
                continue
            n = known.get((position, append.rule.name))
            if n is None:
                plan.appended.append(Appended(position, append.rule.name, append.text, sticky=True))
            else:
                plan.appended[n] = replace(plan.appended[n], sticky=True)

    def _newest(self) -> int | None:
        """Return the position of the user's newest turn; None if it can have no text, for earlier turns are history."""
        counted = self._counted
        newest = next((n for n in range(len(counted) - 1, -1, -1) if counted[n].role == "user"), None)
        return newest if newest is not None and counted[newest].last_text is not None else None

    def _is_last(self, position: int) -> bool:
        """Tell whether nothing was answered to this turn yet."""
        return all(item.role in ("system", "other") for item in self._counted[position + 1 :])

    def _freeze(self, plan: Plan) -> None:
        if not self._remembers:
            return
        for op in self._ops:
            if op.key:
                op.new = plan.frozen.setdefault(op.key, op.current)

    def _announcements(self, plan: Plan, current: Mapping[str, str]) -> list[Append]:
        """Tell the model once of each frozen value that has changed since it was told last."""
        if not self._remembers:
            return []
        found = []
        for op in self._ops:
            if op.key and op.rule.spec.announce:
                known = plan.announced.get(op.key, plan.frozen[op.key])
                if current[op.key] != known:
                    plan.announced[op.key] = current[op.key]
                    told = Append(op.rule, "\n\n" + op.rule.spec.text.replace("{value}", current[op.key]))
                    found += [told] if told not in found else []
        return found

    def append_ops(self, plan: Plan) -> list[Replacement]:
        """Append to the newest turn what it needs, and to earlier ones what they had."""
        newest = self._newest()
        by_position: dict[int, list[Appended]] = {}
        for entry in plan.appended:
            if (entry.sticky or entry.position == newest) and entry.rule in self._rules.by_name:
                by_position.setdefault(entry.position, []).append(entry)
        own: dict[int, list[Replacement]] = {}
        for op in self._ops:
            own.setdefault(id(op.text), []).append(op)
        ops = []
        for position, entries in by_position.items():
            item = self._counted[position] if position < len(self._counted) else None
            text = _last_text(item, own) if item is not None and item.role == "user" else None
            if text is not None and not changed_text(text, own.get(id(text), ()), normalized=False).endswith(
                "".join(entry.text for entry in entries)
            ):
                end = len(text.value)
                ops += [
                    Replacement(text, end, end, entry.text, "", self._rules.by_name[entry.rule]) for entry in entries
                ]
        return ops

    def _place(self, plan: Plan, *, sent_before: bool) -> None:
        """
        Leave each trailing message where it first stood, and bring back those whose turn is history.

        Args:
            plan: Takes what is decided.
            sent_before: The newest turn was sent before: this is a step of its tool loop, or a repetition.
        """
        if not self._matches.trailing and not plan.placed:
            return
        items = self._document.items
        standing: list[Placed] = []
        known = list(plan.placed)
        kept_before = 0
        turn: int | None = None
        missing = Counter((entry.position, entry.text) for entry in known)
        known_texts = {entry.text for entry in known}
        merged = SaidBefore((entry.position, entry.text, entry.position) for entry in plan.appended if entry.trailing)
        users = [n for n, item in enumerate(self._counted) if item.role == "user"]
        placed = SaidBefore((_before(users, entry.position), entry.text, entry.position) for entry in known)
        by_index = {message.index: message for message in self._matches.trailing}
        newest, last = self._newest(), max(by_index, default=-1)
        for index, item in enumerate(items):
            message = by_index.get(index)
            if message is None:
                if item.role == "user":
                    turn = kept_before if item.last_text is not None else None
                kept_before += item.role != "reasoning"
                continue
            if message.rule is None:
                continue
            if turn is not None:
                merged.move(turn)
            placed.move(_before(users, kept_before))
            is_newest = index == last and turn == newest
            said = placed.said_before(newest=is_newest) or merged.said_before(newest=is_newest)
            # Dropped, as long as no earlier one stands: it tells that what that one says is over.
            if message.rule.spec.action == "drop" and not said:
                plan.dropped.append(index - self._document.before_list)
                plan.done.append((message.rule, item.path, 1))
                continue
            text = item.texts[0].value
            again = turn is not None and merged.is_known(f"\n\n{text}")
            wanted = self._merges or message.rule.spec.action == "sticky"
            # What was done to a trailing message before is done again, also if the template or the rule changed meanwhile.
            if turn is not None and (again or (wanted and text not in known_texts)):
                # One that changed in the tool loop goes behind the former one: the model believes the last.
                if not merged.says_again(f"\n\n{text}", newest=is_newest):
                    merged.add(self._merge(plan, turn, message.rule, text), turn)
                plan.dropped.append(index - self._document.before_list)
                plan.done.append((message.rule, item.path, 1))
                continue
            stands = placed.says_again(text, newest=is_newest)
            here = stands == "here" and placed.place == kept_before
            in_place = (here or (sent_before and is_newest)) and missing[kept_before, text] > 0
            missing[kept_before, text] -= in_place
            if sent_before and is_newest and kept_before < len(self._counted):
                # One dialect writes it behind the user's words, whenever it changed.  What was sent without it or with
                # another one stays as it was; what is new goes to the end.
                if not in_place:
                    plan.dropped.append(index - self._document.before_list)
                    plan.done.append((message.rule, item.path, 1))
                if not stands:
                    start, end = self._document.locate(item.path)
                    standing.append(Placed(len(self._counted), message.rule.name, self._document.text[start:end], text))
                    self._insert(plan, standing[-1])
                    placed.add(text, len(self._counted))
            elif in_place:
                continue
            elif stands:
                plan.dropped.append(index - self._document.before_list)
                plan.done.append((message.rule, item.path, 1))
            elif self._remembers:
                start, end = self._document.locate(item.path)
                standing.append(Placed(kept_before, message.rule.name, self._document.text[start:end], text))
                placed.add(text, kept_before)
        for entry in known:
            if missing[entry.position, entry.text] > 0:
                missing[entry.position, entry.text] -= 1
                self._insert(plan, entry)
        plan.placed = sorted([*known, *standing], key=lambda entry: entry.position)

    def _merge(self, plan: Plan, turn: int, rule: Rule, text: str) -> str:
        """Append a trailing message to the turn that it belongs to, unless the client did so itself."""
        words, merged = self._counted[turn].last_text, f"\n\n{text}"
        if words is not None and not words.value.endswith(text):
            plan.appended.append(Appended(turn, rule.name, merged, sticky=True, trailing=True))
        return merged

    def _insert(self, plan: Plan, entry: Placed) -> None:
        if not 0 < entry.position <= len(self._counted):
            return
        before = self._counted[entry.position - 1]
        if not before.listed:
            return
        index = self._indices[entry.position - 1] - self._document.before_list
        plan.inserted.setdefault(index, []).append(entry.raw)
        if entry.rule in self._rules.by_name:
            plan.done.append((self._rules.by_name[entry.rule], before.path, 1))


def _before(users: Sequence[int], position: int) -> int:
    """Return the position of the user's turn in front of a position; -1 if there is none."""
    n = bisect_left(users, position)
    return users[n - 1] if n else -1


def _last_text(item: Item, ops: Mapping[int, Sequence[Replacement]]) -> Text | None:
    """
    Return the last text of an item that rules leave standing, or one that can be added.

    Args:
        item: The item.
        ops: Replacements, by the identity of their text.
    """
    for text in reversed(item.texts):
        own = ops.get(id(text))
        if not own or changed_text(text, own, normalized=False):
            return text
    return item.added_text or item.last_text
