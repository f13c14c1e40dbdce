"""
What a memory holds, where its parts are shared: the states of one conversation have most of their entries in common.
"""

from __future__ import annotations

from collections.abc import Iterable


class SharedBytes:
    """
    Adds up objects by identity; each counts once, however many hold it.

    Attributes:
        total: Bytes of all that are held.
    """

    def __init__(self) -> None:
        self.total = 0
        # By identity, which stays one object's as long as somebody holds it: how many do, and what it takes.
        self._held: dict[int, tuple[int, int]] = {}

    def take(self, pieces: Iterable[tuple[object, int]]) -> None:
        """Hold objects, each given with its bytes."""
        for piece, cost in pieces:
            holders, known = self._held.get(id(piece), (0, cost))
            self._held[id(piece)] = holders + 1, known
            self.total += 0 if holders else cost

    def give_back(self, pieces: Iterable[tuple[object, int]]) -> None:
        """Hold objects no longer that were taken before."""
        for piece, _ in pieces:
            holders, cost = self._held.pop(id(piece))
            if holders > 1:
                self._held[id(piece)] = holders - 1, cost
            else:
                self.total -= cost
