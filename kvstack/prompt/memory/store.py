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
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstack.prompt.answering import Answer, distinct, likeness
from kvstack.prompt.memory.state import Chain, ConversationState, Hints
from kvstack.prompt.recurring import RecentRequests
from kvstack.prompt.sharing import SharedBytes

# Requests between two remembered ones that the memory may have missed, in turns of the user, as long as no model has
# spoken and nothing but words is known: more than that is rather another conversation that began with the same ones.
_MAX_TURNS_MISSED = 2
_MAX_TWINS = 16
_MAX_ANSWERS = 32


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
        self._links: OrderedDict[bytes, tuple[ConversationState, ...]] = OrderedDict()
        # The last link that each conversation left behind.
        self._newest: dict[str, bytes] = {}
        self._requests = 0
        self._names = 0

    def __len__(self) -> int:
        return self._requests

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that is held."""
        return self._bytes.total

    def find(self, chain: Chain, signs: Hints) -> ConversationState:
        """
        Find the conversation that a request continues.

        Args:
            chain: The request's identity.
            signs: What it says of its conversation beside words.

        Returns:
            The newest state that the request extends, or a new one if there is none or it is not certain.
        """
        found, refusals = self._find(chain, signs) if chain.answered is not None else (None, 0)
        if found is None:
            return ConversationState(
                self.name(),
                session=signs.session,
                same=signs.same,
                mark=signs.mark,
                refusals=refusals,
                doubt=_doubt(refusals),
            )
        return replace(found, session=found.session or signs.session, same=found.same or signs.same)

    def _find(self, chain: Chain, signs: Hints) -> tuple[ConversationState | None, int]:
        """
        Look for the longest link that is known.

        Returns:
            The state, and how often its conversation was refused with this request, if it was.
        """
        assert chain.answered is not None
        last, total = len(chain.links) - 1, chain.users[-1] if chain.users else 0
        for index in range(last, -1, -1):
            link = chain.links[index]
            if link not in self._links:
                continue
            far = index < chain.answered and total - chain.users[index] > _MAX_TURNS_MISSED
            twins = [twin for twin in self._links[link] if _may_be(twin, signs) and (not far or _certain(twin, signs))]
            if not twins:
                continue
            self._links.move_to_end(link)
            waiting = self._waiting(chain, twins, signs) if index == last else []
            answered, refusals = _answered(twins, signs, index)
            # Where all are refused nothing older counts either: what this is the next turn of has been lost.
            return _choose(answered, waiting, signs), refusals
        return None, 0

    def _waiting(self, chain: Chain, known: Sequence[ConversationState], signs: Hints) -> list[ConversationState]:
        """
        Find other conversations of which a request may be the next.

        A request that some conversation has sent already need not be its repetition: another one that waits one turn
        before may have come to say the same.
        """
        found: list[ConversationState] = []
        names = {twin.conversation for twin in known}
        for index in range(len(chain.links) - 2, -1, -1):
            link = chain.links[index]
            if chain.users[-1] - chain.users[index] > 1:
                break
            twins = [
                twin
                for twin in self._links.get(link, ())
                if (self._newest.get(twin.conversation) == link or twin.conversation in names) and _may_be(twin, signs)
            ]
            found += [twin for twin in _answered(twins, signs, index)[0] if twin.conversation not in names]
        return found

    def remember(self, chain: Chain, state: ConversationState) -> Answer:
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
        gone = [twin for twin in twins if _alike(twin, state)]
        former = distinct(one for twin in gone for one in twin.answers)
        more = len(former) >= _MAX_ANSWERS or any(twin.more_answers for twin in gone)
        state = replace(state, answers=(*former, answer)[-_MAX_ANSWERS:], more_answers=more, crowded=False)
        kept = (*(twin for twin in twins if twin not in gone), state)
        if len(kept) > _MAX_TWINS or any(twin.crowded for twin in twins):
            kept = tuple(replace(twin, crowded=True) for twin in kept[-_MAX_TWINS:])
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

    def _forget(self, twins: Sequence[ConversationState], link: bytes) -> None:
        for twin in twins:
            if self._newest.get(twin.conversation) == link:
                del self._newest[twin.conversation]
            self._bytes.give_back(twin.pieces())
        self._requests -= len(twins)

    def name(self) -> str:
        """Make the name of a new conversation."""
        self._names += 1
        return f"c{self._names}"


def _may_be(twin: ConversationState, signs: Hints) -> bool:
    """Tell whether nothing that is known says that this is another conversation."""
    return (
        (signs.session is None or twin.session is None or twin.session == signs.session)
        and (not signs.same or not twin.same or twin.same == signs.same)
        and (not signs.mark.digest or not twin.mark.digest or twin.mark == signs.mark)
    )


def _certain(twin: ConversationState, signs: Hints) -> bool:
    """Tell whether more than equal words says that this is the conversation."""
    return (signs.session is not None and twin.session == signs.session) or (
        signs.mark.unique and twin.mark == signs.mark
    )


def _answered(twins: Sequence[ConversationState], signs: Hints, index: int) -> tuple[list[ConversationState], int]:
    """
    Keep the states that a request may go on from, by the answer that it holds behind their last item.

    Returns:
        The states whose answer it is; if there is none, those whose answer it may be.  And how often the others were
        refused, this time included; 0 if none was.
    """
    held = signs.held(index) if any(twin.answers for twin in twins) else ()
    if not held:
        return list(twins), 0
    certain = [twin for twin in twins if _certain(twin, signs)]
    found, may_be, refusals = [], [], 0
    for twin in certain or twins:
        like = likeness(twin.answers, held)
        if like == "same":
            found.append(replace(twin, doubt=max(0, twin.doubt - 1)))
        elif certain or twin.more_answers or twin.doubt or (like == "open" and not twin.crowded):
            may_be.append(twin)
        else:
            refusals = max(refusals, twin.refusals + 1)
    return found or may_be, refusals


def _doubt(refusals: int) -> int:
    """
    Return how many answers have to come back as they went out, after so many refusals: a client that alters some of
    them is refused a few times only, however long it goes on.  The first refusal says nothing of the client: what was
    refused may have begun before a restart.
    """
    return 1 << 2 * min(refusals - 1, 8) if refusals > 1 else 0


def _alike(one: ConversationState, other: ConversationState) -> bool:
    """Tell whether two states would do the same to a request."""
    return (one.frozen, one.announced, one.appended, _said(one), one.session, one.same, one.mark) == (
        other.frozen,
        other.announced,
        other.appended,
        _said(other),
        other.session,
        other.same,
        other.mark,
    )


def _said(state: ConversationState) -> list[tuple[int, str]]:
    """Return what the carriers of a state say, however they are spelled."""
    return [(placed.position, placed.text) for placed in state.placed]


def _choose(
    twins: Sequence[ConversationState], waiting: Sequence[ConversationState], signs: Hints
) -> ConversationState | None:
    """
    Choose among states with equal chains by what only one of them knows; None if several fit, or none is there.

    Args:
        twins: The states, the newest last.
        waiting: States of others that may go on so as well.
        signs: What the request says of its conversation beside words.
    """
    tests: list[Callable[[ConversationState], bool]] = [
        lambda twin: signs.session is not None and twin.session == signs.session
    ]
    if signs.live:
        tests.append(lambda twin: twin.live == signs.live)
        if not waiting:
            tests.append(lambda twin: twin.frozen == signs.live)
    if signs.same:
        tests.append(lambda twin: any(placed.text in signs.carried for placed in twin.placed))
    twins = [*waiting, *twins]
    for test in tests:
        if len(twins) > 1:
            twins = [twin for twin in twins if test(twin)] or twins
    if not twins:
        return None
    # Several states of one conversation: a turn was sent again and had changed.
    one = len({twin.conversation for twin in twins}) == 1 or all(
        signs.mark.unique and twin.mark == signs.mark for twin in twins
    )
    return twins[-1] if one or all(_alike(twins[0], twin) for twin in twins[1:]) else None
