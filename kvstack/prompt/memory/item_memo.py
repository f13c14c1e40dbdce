"""
What the rules did inside one item that depends on nothing around it, by the item's raw text.

A conversation sends all its earlier turns with each request, spelled alike; what came of them is looked up here.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

from kvstack.prompt.memory.state import NOTHING_DROPPED, DroppedFingerprint
from kvstack.prompt.rawjson.scan import Edit

_BYTES_PER_ITEM = 600


@dataclass(frozen=True, slots=True)
class KnownItem:
    """
    What came of one item.  Offsets count from the item's start, paths from the item.

    Attributes:
        digest: Its fingerprint.
        edits: Edits of its raw text.
        hits: What is reported: rule, the end of the spelled path, action, how many things.
        timestamps: Timestamp prefixes removed.
        message_ids: `message_id` keys removed.
        dropped_fingerprint: Of the first user item: what was dropped from its text.
    """

    digest: bytes
    edits: tuple[Edit, ...] = ()
    hits: tuple[tuple[str, str, str, int], ...] = ()
    timestamps: int = 0
    message_ids: int = 0
    dropped_fingerprint: DroppedFingerprint = NOTHING_DROPPED


Key = tuple[str, str]
"""Client, API and place of an item, which with the rules decide what comes of it; and its raw text."""


class ItemMemo:
    """
    Known items of one rule set; those that were not asked for longest go first.

    Args:
        max_items: How many are kept.
        max_bytes: How much memory they may take, about.
    """

    def __init__(self, max_items: int = 50_000, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._rules: object = None
        self._items: OrderedDict[Key, KnownItem] = OrderedDict()
        self._bytes = 0

    def of(self, rules: object) -> ItemMemo:
        """Return the memo itself, emptied if the rules are not the same object as before."""
        if rules is not self._rules:
            self._rules, self._bytes = rules, 0
            self._items.clear()
        return self

    def get(self, key: Key) -> KnownItem | None:
        """Return what is known of an item."""
        known = self._items.get(key)
        if known is not None:
            self._items.move_to_end(key)
        return known

    def put(self, key: Key, known: KnownItem) -> None:
        """Keep what came of an item that is not known."""
        self._items[key] = known
        self._bytes += _cost_bytes(key)
        while self._bytes > self._max_bytes or len(self._items) > self._max_items:
            oldest, _ = self._items.popitem(last=False)
            self._bytes -= _cost_bytes(oldest)


def _cost_bytes(key: Key) -> int:
    return sys.getsizeof(key[1]) + _BYTES_PER_ITEM
