"""
The former request of a conversation, and where a request parts from it.

The conversation memory of the rules knows a conversation by everything in front of it, so a client that rewrites its
system text for each request starts a new conversation each time.  That is the very case a person wants explained, so
here a request without a known former one is laid beside the last requests and compared by what was *said*.

One that begins a conversation is laid beside the last requests too: what it could have shared with them is their
*head*, system text and tools, and a head that is nearly theirs was meant to be the same.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from kvstack.prompt.diff.difference import FoundDifference, find_difference, likeness
from kvstack.prompt.diff.segments import Segment

_SPOKEN = frozenset({"user", "assistant", "tool"})
_HEAD = frozenset({"tools", "system"})

_HEADS_COMPARED = 8
_ALIKE_RATIO = 0.75
_ALIKE_CHARACTERS = 256
"""Less than that is not worth a word, cached or not."""


@dataclass(frozen=True, slots=True)
class Compared:
    """
    A request beside its former one.

    Attributes:
        conversation: Name of the conversation; the former request's where it is continued.
        former: Number of the former request, or None if this begins a conversation.
        found_difference: Where they differ first; None if the request extends the former one.  Of one that begins a
            conversation: where its head leaves the most similar recent one; None if it does not, or none is alike.
    """

    conversation: str | None
    former: int | None = None
    found_difference: FoundDifference | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    path: str
    segments: tuple[Segment, ...]
    spoken: tuple[str, ...]
    head: tuple[Segment, ...]
    characters: int


class FormerRequests:
    """
    The newest request of each of the last conversations, as it went out; bounded in count and characters.

    Args:
        max_conversations: How many are remembered; the one that was silent longest goes first.
        max_characters: How much text they may hold.
    """

    def __init__(self, max_conversations: int = 32, max_characters: int = 32 * 1024 * 1024) -> None:
        self._max_conversations = max_conversations
        self._max_characters = max_characters
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._characters = 0

    def compare(self, number: int, segments: tuple[Segment, ...], path: str, conversation: str | None) -> Compared:
        """
        Find the former request, compare, and remember this one in its place.

        Args:
            number: Number of the request.
            segments: What goes to the upstream, after the rules.
            path: Request path.
            conversation: Name that the rules gave its conversation.
        """
        if not segments or conversation is None:
            return Compared(conversation)
        spoken = tuple(segment.text for segment in segments if segment.role in _SPOKEN)
        path = path.partition("?")[0]
        known = conversation if conversation in self._entries else self._alike(spoken, path)
        head = tuple(itertools.takewhile(lambda segment: segment.role in _HEAD, segments))
        entry = _Entry(number, path, segments, spoken, head, sum(len(segment.text) for segment in segments))
        if known is None:
            alike = self._head_like(head, path)
            self._remember(conversation, entry)
            return Compared(conversation, found_difference=find_difference(alike, head))
        former = self._entries[known]
        self._remember(known, entry)
        return Compared(known, former.number, find_difference(former.segments, segments))

    def _alike(self, spoken: tuple[str, ...], path: str) -> str | None:
        """The conversation whose last request said the beginning of what is said here; the longest one, the newest."""
        best, most = None, 0
        for name, entry in self._entries.items():
            said = len(entry.spoken)
            # Equally long is no continuation: a new conversation may begin with the same words.
            if entry.path == path and max(most, 1) <= said < len(spoken) and spoken[:said] == entry.spoken:
                best, most = name, said
        return best

    def _head_like(self, head: tuple[Segment, ...], path: str) -> tuple[Segment, ...]:
        """The most similar head, the newest of several; none if there is an equal one: then all could be shared."""
        heads = [entry.head for entry in reversed(self._entries.values()) if entry.path == path]
        if head in heads:
            return ()
        best: tuple[Segment, ...] = ()
        most = 0.0
        for other in heads[:_HEADS_COMPARED]:
            alike = likeness(other, head)
            if alike.shared >= _ALIKE_CHARACTERS and alike.ratio >= _ALIKE_RATIO and alike.ratio > most:
                best, most = other, alike.ratio
        return best

    def _remember(self, conversation: str, entry: _Entry) -> None:
        old = self._entries.pop(conversation, None)
        self._characters += entry.characters - (old.characters if old is not None else 0)
        self._entries[conversation] = entry
        while len(self._entries) > 1 and (
            len(self._entries) > self._max_conversations or self._characters > self._max_characters
        ):
            _, dropped = self._entries.popitem(last=False)
            self._characters -= dropped.characters
