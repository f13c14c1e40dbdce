"""What the memory keeps of a conversation, and by what it is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from kvstack.prompt.answering import Answer
from kvstack.prompt.recurring import NO_MARK, Mark
from kvstack.prompt.saying import Said


@dataclass(frozen=True, slots=True)
class Appended:
    """
    Text that was appended to a turn.

    Attributes:
        position: Index of the turn among the items that count.
        rule: Name of the rule that wanted it.
        text: The text.
        sticky: It comes back when the turn is history; else only while the turn is the newest.
    """

    position: int
    rule: str
    text: str
    sticky: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """
    A carrier message that stays where it first stood.

    Attributes:
        position: Number of items that count before it.
        rule: Name of the rule that placed it.
        raw: The item as the client spelled it.
        text: Its text, to recognise it again.
    """

    position: int
    rule: str
    raw: str
    text: str


@dataclass(frozen=True, slots=True)
class ConversationState:
    """
    What is known of a conversation after one of its requests.

    Attributes:
        conversation: Its opaque name.
        frozen: Values that are replayed.
        announced: Changed values that the model was told last.
        appended: Text appended to turns, by position.
        placed: Carriers, by position.
        session: The client's own name of the conversation, if it gave one.
        live: Live values of what is frozen, at that request: they tell twins apart.
        same: What all its carriers have in common.
        users: Number of user items that count.
        mark: What was dropped from its first text and tells it apart.
        answers: What the model answered to that request, each time that it was sent.
        more_answers: There were more of them than are kept.
        crowded: More states were left behind by equal requests than are kept.
        doubt: So many answers have to come back as they went out, before another one tells anything again: its client
            rather keeps them in a way of its own.
        refusals: How often another answer made a new conversation of it.
    """

    conversation: str
    frozen: Mapping[str, str] = field(default_factory=dict)
    announced: Mapping[str, str] = field(default_factory=dict)
    appended: tuple[Appended, ...] = ()
    placed: tuple[Placed, ...] = ()
    session: str | None = None
    live: Mapping[str, str] = field(default_factory=dict)
    same: str = ""
    users: int = 0
    mark: Mark = NO_MARK
    answers: tuple[Answer, ...] = ()
    more_answers: bool = False
    crowded: bool = False
    doubt: int = 0
    refusals: int = 0

    def pieces(self) -> Iterator[tuple[object, int]]:
        """
        Yield what this holds, with an estimate of the bytes that each piece takes; most are shared with former states.
        """
        yield self, 1024 + 16 * (len(self.appended) + len(self.placed))
        for values in (self.frozen, self.live, self.announced):
            for text in values.values():
                yield text, 64 + 2 * len(text)
        for appended in self.appended:
            yield appended, 128 + 2 * len(appended.text)
        for placed in self.placed:
            yield placed, 128 + 2 * (len(placed.raw) + len(placed.text))
        for answer in self.answers:
            yield answer, answer.cost_bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """
    The identity of a request.

    Attributes:
        links: One digest per item that counts; each covers all before it.
        users: For each link, how many user items it covers.
        answered: Index of the first link that covers a model's answer; None if no model has spoken.
    """

    links: tuple[bytes, ...]
    users: tuple[int, ...]
    answered: int | None


@dataclass(frozen=True, slots=True)
class Hints:
    """
    What a request says of its conversation beside the words of its turns.

    Attributes:
        session: The client's own name of the conversation.
        live: What stands now where values are frozen.
        carried: Texts of the carriers that it holds.
        same: What all carriers of the conversation have in common.
        mark: What was dropped from its first text and tells it apart.
        held: Gives the answer that it holds behind one of its items, in all readings; none if no answer follows.
    """

    session: str | None = None
    live: Mapping[str, str] = field(default_factory=dict)
    carried: Collection[str] = ()
    same: str = ""
    mark: Mark = NO_MARK
    held: Callable[[int], Collection[Said]] = lambda index: ()
