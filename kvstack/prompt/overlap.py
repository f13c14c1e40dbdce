"""
Which elements of an array a former body had as well.

A conversation sends all its earlier turns with each request.  Comparing raw text is many times as fast as reading it,
so what is spelled as before is not read again.  Only few elements change from one request to the next: a system text
with a clock, the newest turn, a result that the client cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstack.prompt.rawjson.scan import Array

# Behind more changed elements than this the rest is read: it is rather another conversation.
_MAX_CHANGED = 8


@dataclass(frozen=True, slots=True)
class Overlap:
    """
    What a body has in common with a former one.

    Attributes:
        former: Which one.
        runs: First and one behind the last index of elements that are spelled alike and stand at the same index.
    """

    former: int = -1
    runs: tuple[tuple[int, int], ...] = ()


NOTHING_KNOWN = Overlap()


class OverlapFinder:
    """
    Lays one body beside former ones while it is read.

    Args:
        text: The body, decoded.
        formers: Former bodies with their arrays; one without an array has nothing in common.
    """

    def __init__(self, text: str, formers: Sequence[tuple[str, Array | None]]) -> None:
        self._text = text
        self._formers = formers
        self._former = -1
        self._runs: list[tuple[int, int]] = []
        self._changed = 0

    def found(self) -> Overlap:
        """Return what was found in the array that was read last."""
        return Overlap(self._former, tuple(self._runs))

    def __call__(self, pos: int, index: int) -> Array | None:
        """Return the elements that are known from *index* on, which is at *pos*; None if that one is not."""
        if index == 0:
            # A body may have the key of the array twice; the last one counts.
            self._former, self._runs, self._changed = -1, [], 0
        if self._changed > _MAX_CHANGED:
            return None
        candidates = range(len(self._formers)) if self._former < 0 else (self._former,)
        most, best = 0, -1
        for number in candidates:
            shared = self._shared(number, pos, index)
            if shared > most:
                most, best = shared, number
        if not most:
            self._changed += 1
            return None
        self._former = best
        end = index + most
        self._runs.append((index, end))
        array = self._formers[best][1]
        assert array is not None
        starts, ends = array.starts[index:end], array.ends[index:end]
        moved = pos - starts[0]
        if moved:
            starts, ends = [start + moved for start in starts], [last + moved for last in ends]
        return Array(array.values[index:end], starts, ends, ends[-1])

    def _shared(self, number: int, pos: int, index: int) -> int:
        """Count the elements from *index* on that are spelled alike, in steps that double and then halve."""
        former, array = self._formers[number]
        if array is None or index >= len(array.ends):
            return 0
        text, ends = self._text, array.ends
        moved = pos - array.starts[index]
        count, done, total = index, array.starts[index], len(ends)
        step, grows = 1, True
        while step and count < total:
            upto = min(count + step, total)
            if text.startswith(former[done : ends[upto - 1]], done + moved):
                count, done = upto, ends[upto - 1]
            else:
                grows = False
            step = step * 2 if grows else step // 2
        # Only a bracket tells that an element ends here, whatever follows: a number might go on.
        while count > index and former[ends[count - 1] - 1] != "}":
            count -= 1
        return count - index
