"""
By what a request is known, kept to be shown: why it was not taken for the next one of a conversation.

Nothing of this is needed to apply rules.  It repeats what the memory compares, in words instead of digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstack.prompt.memory.fingerprint import beside_text
from kvstack.prompt.memory.state import Hints
from kvstack.prompt.request.document import spell_path
from kvstack.prompt.request.message import Item
from kvstack.prompt.rules.edits import Replacement, changed_text


@dataclass(frozen=True, slots=True)
class TracedText:
    """
    One text of an item, or what it holds beside texts.

    Attributes:
        path: Where it stands, for example `messages[0].content`.
        normalized: What it counts as: what rules take out, freeze or make constant is masked.
        replacements: What rules want to replace in it, settled.
    """

    path: str
    normalized: str
    replacements: tuple[Replacement, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """
    One item that counts when conversations are compared.

    Attributes:
        digest: What it counts as.
        item: The item.
        texts: What it says.
    """

    digest: bytes
    item: Item
    texts: tuple[TracedText, ...]


@dataclass(slots=True)
class Trace:
    """
    By what one request is known.

    Attributes:
        turns: The items that count, in order.
        hints: What it says of its conversation beside words.
        answered: A model has spoken in it.
    """

    turns: list[Turn] = field(default_factory=list)
    hints: Hints = field(default_factory=Hints)
    answered: bool = False

    def add(self, item: Item, digest: bytes, replacements: Sequence[Sequence[Replacement]]) -> None:
        """
        Note an item that counts.

        Args:
            item: The item.
            digest: What it counts as.
            replacements: The settled replacements in each of its texts.
        """
        texts = [
            TracedText(spell_path(text.path), changed_text(text, own, normalized=True), tuple(own))
            for text, own in zip(item.texts, replacements, strict=True)
        ]
        texts += [TracedText(spell_path(item.path), beside) for beside in beside_text(item.value)]
        self.turns.append(Turn(digest, item, tuple(texts)))
