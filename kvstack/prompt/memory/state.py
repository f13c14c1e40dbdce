"""What the memory keeps of a conversation, and by what it is known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class DroppedFingerprint(NamedTuple):
    """
    What rules drop from the first text of the user, though the client keeps it: tells apart what begins alike.

    Attributes:
        digest: Its digest; empty if nothing was dropped.
        unique: Ids were among it, so no two conversations have the same.
    """

    digest: bytes = b""
    unique: bool = False


NOTHING_DROPPED = DroppedFingerprint()


@dataclass(frozen=True, slots=True)
class Appended:
    """
    Text that was appended to a turn.

    Attributes:
        position: Index of the turn among the items that count.
        rule: Name of the rule that wanted it.
        text: The text.
        sticky: It comes back when the turn is history; else only while the turn is the newest.
        trailing: It was a trailing message of the client.
    """

    position: int
    rule: str
    text: str
    sticky: bool
    trailing: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """
    A trailing message that stays where it first stood.

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
        placed: Trailing messages, by position.
        session: The client's own name of the conversation, if it gave one.
        current: Current values of what is frozen, at that request.
        trailing_key: What all its trailing messages have in common.
        users: Number of user items that count.
        dropped_fingerprint: What was dropped from its first user text.
    """

    conversation: str
    frozen: Mapping[str, str] = field(default_factory=dict)
    announced: Mapping[str, str] = field(default_factory=dict)
    appended: tuple[Appended, ...] = ()
    placed: tuple[Placed, ...] = ()
    session: str | None = None
    current: Mapping[str, str] = field(default_factory=dict)
    trailing_key: str = ""
    users: int = 0
    dropped_fingerprint: DroppedFingerprint = NOTHING_DROPPED

    def pieces(self) -> Iterator[tuple[object, int]]:
        """Yield what this holds with the estimated bytes of each piece; most are shared with former states."""
        yield self, 1024 + 16 * (len(self.appended) + len(self.placed))
        for values in (self.frozen, self.current, self.announced):
            for text in values.values():
                yield text, 64 + 2 * len(text)
        for appended in self.appended:
            yield appended, 128 + 2 * len(appended.text)
        for placed in self.placed:
            yield placed, 128 + 2 * (len(placed.raw) + len(placed.text))


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
        current: What stands now where values are frozen.
        trailing: Texts of the trailing messages that it holds.
        trailing_key: What all trailing messages of the conversation have in common.
        dropped_fingerprint: What was dropped from its first user text.
    """

    session: str | None = None
    current: Mapping[str, str] = field(default_factory=dict)
    trailing: Collection[str] = ()
    trailing_key: str = ""
    dropped_fingerprint: DroppedFingerprint = NOTHING_DROPPED
