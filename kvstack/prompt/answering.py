"""
What became of the answers that the memory waits for, and whether a request goes on from one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from kvstack.prompt.saying import MAX_SAID_BYTES, NOTHING, Likeness, Said, compare
from kvstack.prompt.splice import Number

__all__ = ["Answer", "likeness", "limit_tokens"]

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


class Answer:
    """
    What the model answers to one request.

    Who relays it says how far it is.  Of a request that is only counted or rendered nothing is said, and nothing
    follows.

    Attributes:
        limit_tokens: The request wants no longer answer: one that is as long was cut off, and says little.
    """

    __slots__ = ("_broken_off", "_said", "_stage", "limit_tokens")

    def __init__(self, limit_tokens: int | None = None) -> None:
        self.limit_tokens = limit_tokens
        self._stage: Literal["none", "due", "started", "over"] = "none"
        self._said: Said | None = None
        self._broken_off = False

    @property
    def is_expected(self) -> bool:
        """
        Whether there is one, or will be.
        """
        return self._stage != "none"

    @property
    def cost_bytes(self) -> int:
        """
        What it may take in memory, whatever comes.
        """
        return 128 + MAX_SAID_BYTES

    def expect(self) -> None:
        """
        The request is to be answered; its client has heard nothing.
        """
        if self._stage == "none":
            self._stage = "due"

    def begin(self) -> None:
        """
        The client hears the first of it, and may know all of it before we do.
        """
        if self._stage == "due":
            self._stage = "started"

    def end(
        self, said: Said | None = NOTHING, generated_tokens: int | None = None, *, broken_off: bool = False
    ) -> None:
        """
        No more comes.

        Args:
            said: What it says; None if some of that was not read.  Nothing, if its client has heard nothing.
            generated_tokens: How many tokens it took, if that is known.
            broken_off: It did not end by itself.
        """
        if self._stage in ("due", "started"):
            heard, self._stage = self._stage == "started", "over"
            limit = self.limit_tokens
            cut_off = generated_tokens is not None and limit is not None and generated_tokens >= limit
            self._said = NOTHING if not heard else None if cut_off else said
            self._broken_off = heard and broken_off

    def compare(self, held: Said) -> Likeness:
        """
        Compare it with what a request holds.
        """
        if self._stage == "due":
            return "other" if held else "open"
        return "open" if self._said is None else compare(self._said, held, broken_off=self._broken_off)


def likeness(answers: Sequence[Answer], held: Collection[Said]) -> Likeness:
    """
    Tell whether a request goes on from one of the answers.

    Args:
        answers: The answers to one request, each time that it was sent.
        held: What the later request holds in their place, in all its readings; none if it holds nothing there.
    """
    found = {answer.compare(one) for answer in answers if answer.is_expected for one in held}
    return "same" if "same" in found else "other" if found == {"other"} else "open"


def limit_tokens(top: Mapping[str, Any]) -> int | None:
    """
    Return how long an answer a request wants at most, given the values under its top keys; None if it says nothing.
    """
    spelled = [top[key] for key in _LIMITS if isinstance(top.get(key), Number)]
    # Not -1, which is none, and nothing as long as to be none.
    return min((int(number) for number in spelled if number.isdigit() and len(number) < 10), default=None)
