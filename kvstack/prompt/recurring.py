"""
Items that come again.

A conversation sends all its earlier turns with each request.  What the rules make of most items depends on the item
alone, so it is worked out once and looked up by the item's raw text from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstack.prompt.ruleset import RuleSet
from kvstack.prompt.splice import Edit

__all__ = ["ItemCache", "Local"]

# A longer item is read as fast as it is looked up; one of the user has more to be worked out.
MAX_ITEM_CHARACTERS = 2 * 1024
MAX_USER_ITEM_CHARACTERS = 16 * 1024


@dataclass(frozen=True, slots=True)
class Local:
    """
    What the rules make of one item, whatever stands around it.

    Attributes:
        digest: What it counts as when conversations are compared.
        edits: Edits, relative to the start of the item.
        done: Rules that acted: name, path inside the item, action, how many things.
        timestamps: Timestamp prefixes removed.
        message_ids: `message_id` keys removed.
    """

    digest: bytes
    edits: tuple[Edit, ...] = ()
    done: tuple[tuple[str, str, str, int], ...] = ()
    timestamps: int = 0
    message_ids: int = 0


class ItemCache:
    """
    Results by raw item text, for one rule set at a time; what was not asked for in a while is forgotten.

    Args:
        max_bytes: How much raw text is kept, at two bytes a character.
    """

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._max_characters = max_bytes // 4
        self._rules: RuleSet | None = None
        self._young: dict[tuple[str, str, str], Local] = {}
        self._old: dict[tuple[str, str, str], Local] = {}
        self._characters = 0

    def use(self, rules: RuleSet) -> None:
        """
        Forget everything if the rules are not the same object as before.
        """
        if rules is not self._rules:
            self._rules = rules
            self._young, self._old, self._characters = {}, {}, 0

    def get(self, key: tuple[str, str, str]) -> Local | None:
        """
        Look up an item: client, dialect, raw text.
        """
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: tuple[str, str, str], local: Local) -> None:
        """
        Keep the result for an item.
        """
        self._characters += len(key[2])
        if self._characters > self._max_characters:
            self._old, self._young, self._characters = self._young, {}, len(key[2])
        self._young[key] = local
