"""Trailing messages that were dealt with, read along with the document: which of its own say something new."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Literal


class SaidBefore:
    """
    What stands behind each turn or became part of it, in the order in which it came; the place of reading moves forward
    only.

    Args:
        known: Position of the turn, text, and position of the trailing message itself, of each.

    Attributes:
        place: Position of the one that says again what was asked about.
    """

    def __init__(self, known: Iterable[tuple[int, str, int]]) -> None:
        self.place = -1
        self._own: dict[int, list[str]] = {}
        self._places: dict[int, list[int]] = {}
        for position, text, place in sorted(known, key=itemgetter(0)):
            self._own.setdefault(position, []).append(text)
            self._places.setdefault(position, []).append(place)
        self._known = {(position, text) for position, texts in self._own.items() for text in texts}
        self._ahead = sorted(self._own, reverse=True)
        self._turn = -2
        self._used = 0
        self._last = ""

    def move(self, turn: int) -> None:
        """Go on to the trailing messages of a turn."""
        if turn == self._turn:
            return
        self._turn, self._used = turn, 0
        while self._ahead and self._ahead[-1] < turn:
            self._last = self._own[self._ahead.pop()][-1]

    def is_known(self, text: str) -> bool:
        """Whether this turn had this trailing message before."""
        return (self._turn, text) in self._known

    def said_before(self, *, newest: bool) -> str:
        """
        Return what was said last: in front of this place, or by all of the turn for the one that the client
        sends now.
        """
        own = self._own.get(self._turn)
        return own[-1] if newest and own else self._last

    def says_again(self, text: str, *, newest: bool) -> Literal["", "here", "before"]:
        """Whether a trailing message says what was said: in its own turn at this place, or last before it."""
        own, places = self._own.get(self._turn, []), self._places.get(self._turn, [])
        self.place = places[-1] if newest and places else -1
        if newest:
            return ("here" if own else "before") if self.said_before(newest=True) == text else ""
        if own[self._used : self._used + 1] != [text]:
            if self._last == text:
                return "before"
            if not self.is_known(text):
                return ""
        try:
            self._used = own.index(text, self._used) + 1
        except ValueError:
            return ""
        self._last = text
        self.place = places[self._used - 1]
        return "here"

    def add(self, text: str, place: int) -> None:
        """Note that this turn has a trailing message more, behind those that it had before."""
        own = self._own.setdefault(self._turn, [])
        own.append(text)
        self._places.setdefault(self._turn, []).append(place)
        self._known.add((self._turn, text))
        self._used = len(own)
        self._last = text
