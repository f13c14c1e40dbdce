"""
Which remembered conversation a request continues, and what was done to its earlier turns.

Identity is a chain: each item is digested after the rules, with volatile parts masked and ids left out, and each link
holds all links before it.  A request leaves one link behind, its last.  The next request of that conversation has
this link somewhere in its own chain; the longest one wins.  What is remembered is never changed, only superseded, so
requests of one conversation may run at the same time, and a turn that is edited or repeated finds the state before it.

A session key narrows the candidates, the turns decide.  A request that fits more than one conversation starts a new
one, and so does one that has only its first turn in common with a conversation and other current values: a miss costs
one prefill, a mix-up would put one person's words into another's prompt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvstack.prompt.memory.item_memo import ItemMemo
from kvstack.prompt.memory.state import Chain, ConversationState, Hints

# Requests between two remembered ones that the memory may have missed, in turns of the user, as long as no model has
# spoken and nothing but words is known: more than that is rather another conversation that began with the same ones.
_MAX_TURNS_MISSED = 2
_MAX_CANDIDATES = 16


class ConversationMemory:
    """
    What earlier requests left behind, bounded in count and bytes; the oldest goes first.

    Args:
        max_requests: How many requests are remembered.
        max_bytes: How much all of it may take; what states have in common counts once.

    Attributes:
        items: What the rules did to items, by their raw text.
        warned: Warnings that were given.
    """

    def __init__(self, max_requests: int = 4096, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.items = ItemMemo()
        self.warned: set[str] = set()
        self._links: OrderedDict[bytes, tuple[ConversationState, ...]] = OrderedDict()
        # The last link that each conversation left behind.
        self._newest: dict[str, bytes] = {}
        # How many states hold a piece, by its identity, which stays one object's as long as somebody holds it.
        self._holders: Counter[int] = Counter()
        self._bytes = 0
        self._requests = 0
        self._names = 0

    def __len__(self) -> int:
        return self._requests

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that is held."""
        return self._bytes

    def find(self, chain: Chain, hints: Hints) -> ConversationState | None:
        """
        Find the conversation that a request continues.

        Args:
            chain: The request's identity.
            hints: What it says of its conversation beside words.

        Returns:
            The newest state that the request extends; None if there is none or it is not certain.
        """
        if chain.answered is None:
            return None
        last, total = len(chain.links) - 1, chain.users[-1]
        for index in range(last, -1, -1):
            link = chain.links[index]
            if link not in self._links:
                continue
            far = index < chain.answered and total - chain.users[index] > _MAX_TURNS_MISSED
            candidates = [state for state in self._fitting(chain, index, hints) if not far or _is_certain(state, hints)]
            if candidates:
                self._links.move_to_end(link)
                waiting = list(self._waiting(chain, candidates, hints)) if index == last else []
                found = _only_one([*waiting, *candidates], hints)
                return found and _taken_over(found, hints, only_first=_is_first_turn(chain, index))
        return None

    def _fitting(self, chain: Chain, index: int, hints: Hints) -> Iterator[ConversationState]:
        """Yield the states at a link that nothing says to be another conversation's."""
        for state in self._links.get(chain.links[index], ()):
            if not _contradicts(state, hints) and (
                not _is_first_turn(chain, index) or state.current == hints.current or _is_certain(state, hints)
            ):
                yield state

    def _waiting(self, chain: Chain, known: Sequence[ConversationState], hints: Hints) -> Iterator[ConversationState]:
        """
        Yield states of other conversations of which a request may be the next.

        A request that some conversation has sent already need not be its repetition: another one that waits one turn
        before may have come to say the same.
        """
        names = {state.conversation for state in known}
        for index in range(len(chain.links) - 2, -1, -1):
            if chain.users[-1] - chain.users[index] > 1:
                break
            link = chain.links[index]
            for state in self._links.get(link, ()):
                waits = state.conversation not in names and self._newest.get(state.conversation) == link
                if waits and not _contradicts(state, hints):
                    yield state

    def begin(self, hints: Hints) -> ConversationState:
        """Begin a new conversation."""
        self._names += 1
        return ConversationState(
            f"c{self._names}",
            session=hints.session,
            trailing_key=hints.trailing_key,
            dropped_fingerprint=hints.dropped_fingerprint,
        )

    def remember(self, chain: Chain, state: ConversationState) -> None:
        """Keep the state of a conversation after a request."""
        if not chain.links:
            return
        link = chain.links[-1]
        former = self._links.pop(link, ())
        waiting = {one.conversation for one in former if self._newest.get(one.conversation) == link}
        self._forget(former, link)
        kept = (*(one for one in former if not _is_alike(one, state)), state)[-_MAX_CANDIDATES:]
        self._links[link] = kept
        self._newest[state.conversation] = link
        self._newest |= {one.conversation: link for one in kept if one.conversation in waiting}
        self._requests += len(kept)
        for one in kept:
            self._hold(one)
        while self._links and (self._requests > self.max_requests or self._bytes > self.max_bytes):
            link, oldest = self._links.popitem(last=False)
            self._forget(oldest, link)

    def _forget(self, states: Sequence[ConversationState], link: bytes) -> None:
        for state in states:
            if self._newest.get(state.conversation) == link:
                del self._newest[state.conversation]
            self._release(state)
        self._requests -= len(states)

    def _hold(self, state: ConversationState) -> None:
        for piece, cost in state.pieces():
            self._bytes += 0 if self._holders[id(piece)] else cost
            self._holders[id(piece)] += 1

    def _release(self, state: ConversationState) -> None:
        for piece, cost in state.pieces():
            self._holders[id(piece)] -= 1
            if not self._holders[id(piece)]:
                del self._holders[id(piece)]
                self._bytes -= cost


def _is_first_turn(chain: Chain, index: int) -> bool:
    """Return whether a link covers no more than the first turn: one user text, and no answer."""
    return chain.answered is not None and index < chain.answered and chain.users[index] < 2


def _contradicts(state: ConversationState, hints: Hints) -> bool:
    """Return whether both name the conversation, and not by the same name."""
    return any(
        one and other and one != other
        for one, other in (
            (state.session, hints.session),
            (state.trailing_key, hints.trailing_key),
            (state.dropped_fingerprint.digest, hints.dropped_fingerprint.digest),
        )
    )


def _is_certain(state: ConversationState, hints: Hints) -> bool:
    """Return whether more than equal words says that this is the conversation."""
    return (hints.session is not None and state.session == hints.session) or (
        hints.dropped_fingerprint.unique and state.dropped_fingerprint == hints.dropped_fingerprint
    )


def _taken_over(state: ConversationState, hints: Hints, *, only_first: bool) -> ConversationState:
    """
    Return what a request takes over.  Trailing messages, which say who wrote what to whom, are put back under a key or
    after two equal turns only, unless the request holds the same ones.
    """
    if only_first and not _is_certain(state, hints) and not (state.trailing_key and hints.trailing_key):
        placed = tuple(entry for entry in state.placed if entry.text.strip() in hints.trailing)
        own = [entry for entry in state.appended if not entry.trailing or entry.text.strip() in hints.trailing]
        state = replace(state, placed=placed, appended=tuple(own))
    return replace(state, session=state.session or hints.session, trailing_key=state.trailing_key or hints.trailing_key)


def _is_alike(one: ConversationState, other: ConversationState) -> bool:
    """Return whether two states would do the same to a request."""
    return _effect(one) == _effect(other)


def _effect(state: ConversationState) -> tuple[object, ...]:
    # However the trailing messages are spelled.
    placed = [(entry.position, entry.text) for entry in state.placed]
    keys = (state.session, state.trailing_key, state.dropped_fingerprint)
    return (state.frozen, state.announced, state.appended, placed, *keys)


def _only_one(candidates: Sequence[ConversationState], hints: Hints) -> ConversationState | None:
    """
    Return the newest state of the only conversation that fits; None if several do that would get different requests.

    Args:
        candidates: The states, the newest last.
        hints: What the request says of its conversation beside words.
    """
    named = [state for state in candidates if hints.session is not None and state.session == hints.session]
    candidates = named or candidates
    newest = candidates[-1]
    same = all(
        one.conversation == newest.conversation
        or _is_alike(one, newest)
        or (hints.dropped_fingerprint.unique and one.dropped_fingerprint == newest.dropped_fingerprint)
        for one in candidates
    )
    return newest if same else None
