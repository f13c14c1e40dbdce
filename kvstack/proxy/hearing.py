"""What is read along of an answer, for the request's figures and for the memory of conversations."""

from __future__ import annotations

from collections.abc import Iterable

from kvstack.llama.response import AnswerTap
from kvstack.prompt.answering import Answer
from kvstack.prompt.saying import NOTHING, Said, say
from kvstack.state.events import AnswerSeen


class Hearing:
    """
    Listens to one answer.  It never raises, and never holds up what goes to the client.

    Args:
        number: The request's number.
        api: The request's dialect.
        headers: Header pairs of the answer.
        answer: What the memory is to know of it.
    """

    def __init__(self, number: int, api: str | None, headers: Iterable[tuple[bytes, bytes]], answer: Answer) -> None:
        content_type = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        self._tap = AnswerTap(number, api, content_type.decode("latin-1"))
        self._answer = answer
        self._told = False

    @property
    def started(self) -> bool:
        """Whether the first token of a stream came."""
        return self._tap.started

    def feed(self, piece: bytes) -> None:
        """Take the next bytes that went to the client."""
        self._tap.feed(piece)
        if self._tap.heard:
            self._answer.begin(self._said)
        if self._tap.ended:
            # The client may send its next turn before the connection is closed.
            self._tell(broken_off=False)

    def close(self, *, broken_off: bool) -> AnswerSeen:
        """
        No more comes.

        Args:
            broken_off: The answer did not end by itself.
        """
        seen = self._tap.result()
        self._tell(broken_off=broken_off)
        return seen

    def _tell(self, *, broken_off: bool) -> None:
        if not self._told:
            self._told = True
            said = self._said()
            if said != NOTHING:
                broken_off = broken_off or self._tap.broken or self._tap.words.cut
            self._answer.end(said, self._tap.generated_tokens, broken_off=broken_off)

    def _said(self) -> Said | None:
        words = self._tap.words
        text = words.text
        # Of thinking in the text itself only the end tells where the answer begins.
        is_thinking = words.cut and text.lstrip().startswith("<think>") and "</think>" not in text
        return say(text, words.calls) if words.whole and not is_thinking else None
