"""
One cursor reads the head of a user text: blocks that the client wrote, then the user's own words.

Blocks match only at the cursor, each kind at most once (unless it says otherwise), in any order; blank lines behind
a block belong to it.  A kind may say more of where its client writes it: never behind certain others, or in a content
part of its own.  The cursor stops at the first character that it does not know, and nothing behind it is ever touched:
a marker that a user typed or pasted is the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstack.prompt.pattern.pattern import Found, Pattern
from kvstack.prompt.request.message import Text


@dataclass(frozen=True, slots=True)
class Block:
    """
    A kind of block at the head of user texts.

    Attributes:
        name: What rules call it.
        patterns: How it reads; the first that matches counts.
        repeat: It may stand more than once.
        alone: It fills a content part of its own.
        not_behind: Names of blocks behind which it is the user's.
    """

    name: str
    patterns: tuple[Pattern, ...]
    repeat: bool = False
    alone: bool = False
    not_behind: frozenset[str] = frozenset()

    @property
    def heads(self) -> tuple[str, ...]:
        """What its patterns begin with; empty strings for those that begin with a token."""
        return tuple(pattern.head for pattern in self.patterns)

    @property
    def ends_in_line(self) -> bool:
        """Whether what follows it stands in the same line, behind a blank."""
        return any(pattern.source.endswith(" ") for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class LeadingBlock:
    """
    A block that was read.

    Attributes:
        block: Its kind.
        text: The text that holds it.
        found: Where it matched.
        end: Offset behind the blank lines that follow it.
    """

    block: Block
    text: Text
    found: Found
    end: int


@dataclass(frozen=True, slots=True)
class LeadingBlocks:
    """
    What the cursor read.

    Attributes:
        blocks: The blocks, in order.
        doubled: Kinds that match once more behind themselves, client and user both wrote one; and those behind which
            stands what would be read as a block without them.
        words: Something of the user's follows.
    """

    blocks: tuple[LeadingBlock, ...]
    doubled: frozenset[str] = frozenset()
    words: bool = True


def match_first(patterns: Sequence[Pattern], text: str, pos: int) -> Found | None:
    """Return the match of the first pattern that matches exactly at *pos*."""
    for pattern in patterns:
        found = pattern.match(text, pos)
        if found is not None and found.end > found.start:
            return found
    return None


class LeadingBlockReader:
    """
    Reads the heads of user items; made once for each client.

    Args:
        blocks: The kinds of block that its user texts begin with.
    """

    __slots__ = ("_blocks", "_heads")

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = [(block, block.heads) for block in blocks]
        self._heads = tuple({head for block in blocks for head in block.heads})

    def read(self, texts: Sequence[Text]) -> LeadingBlocks:
        """Read the head of a user item; the cursor goes on to the next text only if blocks fill the one before it."""
        if not self._heads or not texts or not texts[0].value.startswith(self._heads):
            return _NOTHING
        read: list[LeadingBlock] = []
        used: set[str] = set()
        doubled: set[str] = set()
        for text in texts:
            pos = 0
            value = text.value
            while pos < len(value):
                hit = self._next(text, pos, used, doubled)
                if hit is None:
                    return LeadingBlocks(tuple(read), frozenset(doubled))
                read.append(hit)
                used.add(hit.block.name)
                pos = hit.end
        return LeadingBlocks(tuple(read), frozenset(doubled), words=False)

    def _next(self, text: Text, pos: int, used: set[str], doubled: set[str]) -> LeadingBlock | None:
        hit = None
        value = text.value
        if not value.startswith(self._heads, pos):
            return None
        for block, heads in self._blocks:
            if not value.startswith(heads, pos):
                continue
            before = block.not_behind & used
            if before:
                # The user's.  If what stands before it went, it would look like the client's: so that stays.
                if before - doubled and match_first(block.patterns, value, pos) is not None:
                    doubled |= before
                continue
            again = block.name in used and not block.repeat
            if again and block.name in doubled:
                continue
            if again or hit is None:
                found = match_first(block.patterns, value, pos)
                if found is None:
                    continue
                # Behind a block that ends inside a line, line ends are the user's.
                inside = block.ends_in_line and value[found.end - 1] == " "
                end = found.end if inside else _skip_blank(value, found.end)
                if block.alone and end < len(value):
                    continue
                if again and block.alone:
                    return None  # in parts of their own the client's stands first: the user's words are a copy
                if again:
                    doubled.add(block.name)
                else:
                    hit = LeadingBlock(block, text, found, end)
        return hit


_NOTHING = LeadingBlocks(())


def _skip_blank(text: str, pos: int) -> int:
    """Skip line ends at *pos*."""
    while pos < len(text) and text[pos] in "\r\n":
        pos += 1
    return pos
