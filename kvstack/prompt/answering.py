"""What became of the answers that the memory waits for, and whether a request goes on from one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from kvstack.prompt.rawjson.scan import Number
from kvstack.prompt.saying import MAX_SAID_BYTES, NOTHING, Likeness, Said, compare

# Who wants no more than that asks for no answer: a probe, or a recording that is played again.
_PROBE_TOKENS = 16

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


class Answer:
    """
    What the model answers to one request.

    Who relays it says how far it is.  Of a request that is only counted or rendered nothing is said, and nothing
    follows.

    Attributes:
        limit_tokens: The request wants no longer answer: one that is as long was cut off.
    """

    __slots__ = ("_broken_off", "_said", "_so_far", "_stage", "limit_tokens")

    def __init__(self, limit_tokens: int | None = None) -> None:
        self.limit_tokens = limit_tokens
        self._stage: Literal["none", "due", "started", "over"] = "none"
        self._said: Said | None = None
        self._so_far: Callable[[], Said | None] | None = None
        self._broken_off = False

    @property
    def is_expected(self) -> bool:
        """Whether there is one, or will be."""
        return self._stage != "none"

    @property
    def identity(self) -> object:
        """Equal for answers that say the same."""
        return (self._said, self._broken_off) if self._stage == "over" and self._said is not None else id(self)

    @property
    def cost_bytes(self) -> int:
        """What it may take in memory, whatever comes."""
        return 128 + MAX_SAID_BYTES

    def expect(self) -> None:
        """The request is to be answered; its client has heard nothing."""
        if self._stage == "none":
            self._stage = "due"

    def begin(self, so_far: Callable[[], Said | None] | None = None) -> None:
        """
        The client hears the first of it, and may know all of it before we do.

        Args:
            so_far: Gives what it says so far; None if that is not known.
        """
        if self._stage == "due":
            self._stage, self._so_far = "started", so_far

    def end(
        self, said: Said | None = NOTHING, generated_tokens: int | None = None, *, broken_off: bool = False
    ) -> None:
        """
        No more comes.

        Args:
            said: What it says; None if some of that was not read.  Nothing, if its client has heard nothing.
            generated_tokens: How many tokens it took, if that is known.
            broken_off: It did not end by itself, or only its beginning was read.
        """
        if self._stage in ("due", "started"):
            heard, self._stage = self._stage == "started", "over"
            limit = self.limit_tokens
            cut_off = generated_tokens is not None and limit is not None and generated_tokens >= limit
            is_probe = cut_off and limit is not None and limit <= _PROBE_TOKENS
            self._said = NOTHING if not heard else None if is_probe else said
            self._broken_off = heard and (broken_off or cut_off)
            self._so_far = None

    def compare(self, held: Said) -> Likeness:
        """Compare it with what a request holds."""
        if self._stage == "due":
            return "other" if held else "open"
        if self._stage == "started":
            so_far = self._so_far() if self._so_far is not None else None
            return "open" if so_far is None else compare(so_far, held, broken_off=True)
        return "open" if self._said is None else compare(self._said, held, broken_off=self._broken_off)


def distinct(answers: Iterable[Answer]) -> tuple[Answer, ...]:
    """Return the answers that are to be kept: each that is not over, and of equal ones the last."""
    kept: dict[object, Answer] = {}
    for answer in answers:
        if answer.is_expected:
            kept[answer.identity] = answer
    return tuple(kept.values())


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
