"""
Which remembered conversation a request continues, and what was done to its earlier turns.

Identity is a chain: each item is digested after the rules, with volatile parts masked and ids left out, and each link
holds all links before it.  A request leaves one link behind, its last.  The next request of that conversation has
this link somewhere in its own chain; the longest one wins.  What is remembered is never changed, only superseded, so
requests of one conversation may run at the same time, and a turn that is edited or repeated finds the state before it.

In doubt nothing is remembered: a miss costs one prefill, a mix-up would put one person's words into another's prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstack.prompt.answering import Answer, differs, fits
from kvstack.prompt.recurring import NO_MARK, Mark, RecentRequests
from kvstack.prompt.sharing import SharedBytes

__all__ = ["Appended", "Chain", "ConversationMemory", "Placed", "Remembered"]

# Requests between two remembered ones that the memory may have missed, in turns of the user, as long as no model has
# spoken and nothing but words is known: more than that is rather another conversation that began with the same ones.
_MAX_TURNS_MISSED = 2
_MAX_TWINS = 4
_MAX_ANSWERS = 8


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
class Remembered:
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
        echoes: The request before it was answered, and held what was answered: its client keeps answers as they are.
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
    echoes: bool = False

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


class ConversationMemory:
    """
    What earlier requests left behind, bounded in count and bytes; the oldest goes first.

    Args:
        max_requests: How many requests are remembered.
        max_bytes: How much all of it may take; what states have in common counts once.
    """

    def __init__(self, max_requests: int = 4096, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self._bytes = SharedBytes()
        self.warned: set[str] = set()
        self.recent = RecentRequests()
        self._links: OrderedDict[bytes, tuple[Remembered, ...]] = OrderedDict()
        # The last link that each conversation left behind.
        self._newest: dict[str, bytes] = {}
        self._requests = 0
        self._names = 0

    def __len__(self) -> int:
        return self._requests

    @property
    def size_bytes(self) -> int:
        """
        Estimate of the memory that is held.
        """
        return self._bytes.total

    def find(
        self,
        chain: Chain,
        session: str | None = None,
        live: Mapping[str, str] | None = None,
        carried: Collection[str] = (),
        same: str = "",
        mark: Mark = NO_MARK,
        held: Callable[[int], str] = lambda index: "",
    ) -> Remembered | None:
        """
        Find the conversation that a request continues.

        Args:
            chain: The request's identity.
            session: The client's own name of the conversation.
            live: What stands now where values are frozen.
            carried: Texts of the carriers that the request holds.
            same: What all carriers of the conversation have in common.
            mark: What was dropped from its first text and tells it apart.
            held: Gives the answer that the request holds behind one of its items, empty if none follows.

        Returns:
            Its newest state that the request extends, or None if there is none or it is not certain.
        """
        if chain.answered is None:
            return None
        total = chain.users[-1] if chain.users else 0
        for index in range(len(chain.links) - 1, -1, -1):
            link = chain.links[index]
            if link not in self._links:
                continue
            far = index < chain.answered and total - chain.users[index] > _MAX_TURNS_MISSED
            twins = [
                twin
                for twin in self._links[link]
                if _may_be(twin, session, same, mark) and (not far or _certain(twin, session, mark))
            ]
            if not twins:
                continue
            self._links.move_to_end(link)
            repeats = index == len(chain.links) - 1
            waiting = self._waiting(chain, twins, session, same, mark) if repeats else []
            if answer := held(index):
                twins = _answered(
                    twins, answer, [_certain(twin, session, mark) for twin in twins], index < chain.answered
                )
                if not twins:
                    # Nothing that is older either: what this is the next turn of has been lost.
                    return None
            return _choose(twins, waiting, session, live or {}, carried if same else (), mark)
        return None

    def _waiting(
        self, chain: Chain, known: Sequence[Remembered], session: str | None, same: str, mark: Mark
    ) -> list[Remembered]:
        """
        Find other conversations of which a request may be the next.

        A request that some conversation has sent already need not be its repetition: another one that waits one turn
        before may have come to say the same.
        """
        found: list[Remembered] = []
        names = {twin.conversation for twin in known}
        for index in range(len(chain.links) - 2, -1, -1):
            if chain.users[-1] - chain.users[index] > 1:
                break
            for twin in self._links.get(chain.links[index], ()):
                newest = self._newest.get(twin.conversation) == chain.links[index]
                if newest and twin.conversation not in names and _may_be(twin, session, same, mark):
                    found.append(twin)
        return found

    def remember(self, chain: Chain, state: Remembered) -> Answer:
        """
        Keep the state of a conversation after a request.

        Returns:
            What is to become known of the answer to it.
        """
        answer = Answer()
        if not chain.links:
            return answer
        link = chain.links[-1]
        twins = self._links.pop(link, ())
        waiting = {twin.conversation for twin in twins if self._newest.get(twin.conversation) == link}
        self._forget(twins, link)
        gone = [twin for twin in twins if twin.conversation == state.conversation or _alike(twin, state)]
        answers = dict.fromkeys(answer for twin in gone for answer in twin.answers)
        state = replace(state, answers=(*answers, answer)[-_MAX_ANSWERS:])
        kept = (*(twin for twin in twins if twin not in gone), state)[-_MAX_TWINS:]
        self._links[link] = kept
        self._newest[state.conversation] = link
        self._newest |= {twin.conversation: link for twin in kept if twin.conversation in waiting}
        self._requests += len(kept)
        for twin in kept:
            self._bytes.take(twin.pieces())
        while self._links and (self._requests > self.max_requests or self.size_bytes > self.max_bytes):
            link, oldest = self._links.popitem(last=False)
            self._forget(oldest, link)
        return answer

    def _forget(self, twins: Sequence[Remembered], link: bytes) -> None:
        for twin in twins:
            if self._newest.get(twin.conversation) == link:
                del self._newest[twin.conversation]
            self._bytes.give_back(twin.pieces())
        self._requests -= len(twins)

    def name(self) -> str:
        """
        Make the name of a new conversation.
        """
        self._names += 1
        return f"c{self._names}"


def _may_be(twin: Remembered, session: str | None, same: str, mark: Mark) -> bool:
    """
    Tell whether nothing that is known says that this is another conversation.
    """
    return (
        (session is None or twin.session is None or twin.session == session)
        and (not same or not twin.same or twin.same == same)
        and (not mark.digest or not twin.mark.digest or twin.mark == mark)
    )


def _certain(twin: Remembered, session: str | None, mark: Mark) -> bool:
    """
    Tell whether more than equal words says that this is the conversation.
    """
    return (session is not None and twin.session == session) or (mark.unique and twin.mark == mark)


def _answered(twins: Sequence[Remembered], held: str, certain: Sequence[bool], first: bool) -> list[Remembered]:
    """
    Keep the states of which a request may hold the answer.

    Args:
        twins: The states.
        held: The answer that the request holds.
        certain: Of each state, whether it is the request's conversation, whatever was answered.
        first: No model has spoken before.

    Returns:
        Those whose answer it is; if there is none, those whose answer it may be.
    """
    found = [replace(twin, echoes=fits(twin.answers, held)) for twin in twins]
    if any(twin.echoes for twin in found):
        return [twin for twin in found if twin.echoes]
    return [
        found[n]
        for n, twin in enumerate(twins)
        # A client that keeps answers in a way of its own is known by the answers before.
        if certain[n] or not differs(twin.answers, held) or not (first or twin.echoes)
    ]


def _alike(one: Remembered, other: Remembered) -> bool:
    """
    Tell whether two states would do the same to a request.
    """
    return (one.frozen, one.announced, one.appended, _said(one), one.session, one.same, one.mark) == (
        other.frozen,
        other.announced,
        other.appended,
        _said(other),
        other.session,
        other.same,
        other.mark,
    )


def _said(state: Remembered) -> list[tuple[int, str]]:
    """
    Return what the carriers of a state say, however they are spelled.
    """
    return [(placed.position, placed.text) for placed in state.placed]


def _choose(
    twins: Sequence[Remembered],
    waiting: Sequence[Remembered],
    session: str | None,
    live: Mapping[str, str],
    carried: Collection[str],
    mark: Mark,
) -> Remembered | None:
    """
    Choose among states with equal chains by what only one of them knows; None if several fit.

    Args:
        twins: The states, the newest last.
        waiting: States of others that may go on so as well.
        session: The client's own name of the conversation.
        live: What stands now where values are frozen.
        carried: Texts of the carriers that the request holds, where they name their conversation.
        mark: What was dropped from the first text.
    """
    tests: list[Callable[[Remembered], bool]] = [lambda twin: session is not None and twin.session == session]
    if live:
        tests.append(lambda twin: twin.live == live)
        if not waiting:
            tests.append(lambda twin: twin.frozen == live)
    if carried:
        tests.append(lambda twin: any(placed.text in carried for placed in twin.placed))
    twins = [*waiting, *twins]
    for test in tests:
        if len(twins) > 1:
            twins = [twin for twin in twins if test(twin)] or twins
    # Several states of one conversation: its first turn was sent again and had changed.
    one = all(mark.unique and twin.mark == mark for twin in twins)
    return twins[-1] if one or all(_alike(twins[0], twin) for twin in twins[1:]) else None
