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
        """Whether nothing was answered to this turn yet."""
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
        if self._matches.trailing or plan.placed:
            placement = _Placement(
                plan, self._document, self._matches, self._indices, self._rules, self._remembers, self._merges
            )
            placement.read(self._newest(), sent_before=sent_before)
            placement.bring_back()


class _Placement:
    """
    The trailing messages of one request, read along with its items.

    Args:
        plan: Takes what is decided.
        document: The request.
        matches: What the rules found in it.
        indices: Indices of the items that count.
        rules: All rules.
        remembers: There is a memory.
        merges: Trailing messages become part of their turn.
    """

    def __init__(
        self,
        plan: Plan,
        document: Document,
        matches: Matches,
        indices: Sequence[int],
        rules: RuleSet,
        remembers: bool,
        merges: bool,
    ) -> None:
        self._plan = plan
        self._document = document
        self._by_index = {message.index: message for message in matches.trailing}
        self._indices = indices
        self._counted = [document.items[index] for index in indices]
        self._rules = rules
        self._remembers = remembers
        self._merges = merges
        self._known = list(plan.placed)
        self._known_texts = {entry.text for entry in self._known}
        self._missing = Counter((entry.position, entry.text) for entry in self._known)
        self._standing: list[Placed] = []
        self._users = [n for n, item in enumerate(self._counted) if item.role == "user"]
        self._merged = SaidBefore(
            (entry.position, entry.text, entry.position) for entry in plan.appended if entry.trailing
        )
        self._placed = SaidBefore(
            (_before(self._users, entry.position), entry.text, entry.position) for entry in self._known
        )
        # Where reading is: how many items that count stand before, and the position of the turn.
        self._position = 0
        self._turn: int | None = None

    def read(self, newest: int | None, *, sent_before: bool) -> None:
        """
        Decide about each trailing message that the client sent.

        Args:
            newest: Position of the user's newest turn.
            sent_before: The newest turn was sent before.
        """
        last = max(self._by_index, default=-1)
        for index, item in enumerate(self._document.items):
            message = self._by_index.get(index)
            if message is None:
                if item.role == "user":
                    self._turn = self._position if item.last_text is not None else None
                self._position += item.role != "reasoning"
            elif message.rule is not None:
                if self._turn is not None:
                    self._merged.move(self._turn)
                self._placed.move(_before(self._users, self._position))
                is_newest = index == last and self._turn == newest
                if not self._says_nothing(item, index, message.rule, is_newest) and not self._joins_its_turn(
                    item, index, message.rule, is_newest
                ):
                    self._stand(item, index, message.rule, is_newest, sent_before=sent_before)

    def bring_back(self) -> None:
        """Insert what stood in earlier requests and is missing in this one."""
        for entry in self._known:
            if self._missing[entry.position, entry.text] > 0:
                self._missing[entry.position, entry.text] -= 1
                self._insert(entry)
        self._plan.placed = sorted([*self._known, *self._standing], key=lambda entry: entry.position)

    def _says_nothing(self, item: Item, index: int, rule: Rule, is_newest: bool) -> bool:
        """Drop what says nothing, as long as no earlier one stands: then it says that what that one says is over."""
        if rule.spec.action != "drop":
            return False
        if self._placed.said_before(newest=is_newest) or self._merged.said_before(newest=is_newest):
            return False
        self._drop(item, index, rule)
        return True

    def _joins_its_turn(self, item: Item, index: int, rule: Rule, is_newest: bool) -> bool:
        """Make it part of its turn, if it is to be, or was before: also if template or rule changed meanwhile."""
        turn, text = self._turn, item.texts[0].value
        if turn is None:
            return False
        wanted = (self._merges or rule.spec.action == "sticky") and text not in self._known_texts
        if not wanted and not self._merged.is_known(f"\n\n{text}"):
            return False
        # One that changed in the tool loop goes behind the former one: the model believes the last.
        if not self._merged.says_again(f"\n\n{text}", newest=is_newest):
            self._merged.add(self._merge(turn, rule, text), turn)
        self._drop(item, index, rule)
        return True

    def _stand(self, item: Item, index: int, rule: Rule, is_newest: bool, *, sent_before: bool) -> None:
        """Leave it as a message where it first stood."""
        position, text = self._position, item.texts[0].value
        stands = self._placed.says_again(text, newest=is_newest)
        is_here = (stands == "here" and self._placed.place == position) or (sent_before and is_newest)
        in_place = is_here and self._missing[position, text] > 0
        self._missing[position, text] -= in_place
        if sent_before and is_newest and position < len(self._counted):
            # One API's client writes it behind the user's words, whenever it changed.  What was sent without it or with
            # another one stays as it was; what is new goes to the end.
            if not in_place:
                self._drop(item, index, rule)
            if not stands:
                self._insert(self._note(item, rule, len(self._counted)))
        elif in_place:
            return
        elif stands:
            self._drop(item, index, rule)
        elif self._remembers:
            self._note(item, rule, position)

    def _note(self, item: Item, rule: Rule, position: int) -> Placed:
        start, end = self._document.locate(item.path)
        text = item.texts[0].value
        self._standing.append(Placed(position, rule.name, self._document.text[start:end], text))
        self._placed.add(text, position)
        return self._standing[-1]

    def _drop(self, item: Item, index: int, rule: Rule) -> None:
        self._plan.dropped.append(index - self._document.before_list)
        self._plan.done.append((rule, item.path, 1))

    def _merge(self, turn: int, rule: Rule, text: str) -> str:
        """Append a trailing message to the turn that it belongs to, unless the client did so itself."""
        words, merged = self._counted[turn].last_text, f"\n\n{text}"
        if words is not None and not words.value.endswith(text):
            self._plan.appended.append(Appended(turn, rule.name, merged, sticky=True, trailing=True))
        return merged

    def _insert(self, entry: Placed) -> None:
        if not 0 < entry.position <= len(self._counted):
            return
        before = self._counted[entry.position - 1]
        if not before.listed:
            return
        index = self._indices[entry.position - 1] - self._document.before_list
        self._plan.inserted.setdefault(index, []).append(entry.raw)
        if entry.rule in self._rules.by_name:
            self._plan.done.append((self._rules.by_name[entry.rule], before.path, 1))


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
