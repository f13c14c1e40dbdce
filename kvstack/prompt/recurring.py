"""
Items that come again.

A conversation sends all its earlier turns with each request.  What the rules make of most items depends on the item
alone, so it is worked out once and taken over as long as the item is spelled the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from kvstack.prompt.rawjson.scan import Edit
from kvstack.prompt.request.document import Api, Document
from kvstack.prompt.rules.ruleset import Client, RuleSet

# A request is kept as text and as values; beside the texts each item has its containers, digest and edits.
_BYTES_PER_TEXT_BYTE = 3
_BYTES_PER_ITEM = 1600


@dataclass(frozen=True, slots=True)
class Hit:
    """
    What one rule did at one place.

    Attributes:
        rule: The rule's name.
        path: Where, for example `messages[0].content`.
        action: What it did there.
        n: How many things it did it to.
    """

    rule: str
    path: str
    action: str
    n: int = 1


class Mark(NamedTuple):
    """
    What was dropped from the first text of the user, though the client keeps it: it tells apart what begins alike.

    Attributes:
        digest: Its digest; empty if nothing was.
        unique: Ids were among it, so no two conversations have the same.
    """

    digest: bytes = b""
    unique: bool = False


NO_MARK = Mark()


@dataclass(frozen=True, slots=True)
class Local:
    """
    What the rules did to one item, whatever stands around it.

    Attributes:
        edits: Edits, relative to the start of the item.
        hits: What is to be reported.
        timestamps: Timestamp prefixes removed.
        message_ids: `message_id` keys removed.
        mark: Of the first item of the user, what tells its conversation apart.
    """

    edits: tuple[Edit, ...] = ()
    hits: tuple[Hit, ...] = ()
    timestamps: int = 0
    message_ids: int = 0
    mark: Mark = NO_MARK


@dataclass(frozen=True, slots=True)
class Former:
    """
    A request that was dealt with.

    Attributes:
        document: It.
        client: Its client.
        digests: What its settled items count as, by index.
        local: What was done to them, where anything was.
        opening: Index of the first item of the user.
        counted: Digests of all items that count.
        links: The chain that they make.
    """

    document: Document
    client: Client
    digests: dict[int, bytes] = field(default_factory=dict)
    local: dict[int, Local] = field(default_factory=dict)
    opening: int = -1
    counted: list[bytes] = field(default_factory=list)
    links: list[bytes] = field(default_factory=list)

    def cost_bytes(self) -> int:
        """Estimate the memory that this takes."""
        return _BYTES_PER_TEXT_BYTE * sys.getsizeof(self.document.text) + _BYTES_PER_ITEM * len(self.document.items)

    def settled(self, document: Document) -> tuple[dict[int, bytes], dict[int, Local]]:
        """Return what is settled of a document that overlaps with this one."""
        known, local = self.digests, self.local
        before = document.before_list
        if before != self.document.before_list:
            return {}, {}
        runs = [range(first + before, end + before) for first, end in document.overlap.runs]
        return (
            {index: known[index] for run in runs for index in run if index in known},
            {index: local[index] for run in runs for index in run if index in local},
        )

    def chain(self, digests: list[bytes], seed: bytes) -> list[bytes]:
        """Make the chain of items that count; links hold as long as all digests are the same."""
        same = len(self.counted)
        if digests[:same] != self.counted:
            pairs = enumerate(zip(digests, self.counted, strict=False))
            same = next((n for n, (one, two) in pairs if one != two), min(len(digests), same))
        links = self.links[:same]
        link = links[-1] if links else seed
        for digest in digests[same:]:
            link = link_up(link, digest)
            links.append(link)
        return links


class RecentRequests:
    """
    The last requests of one rule set, newest first.

    Args:
        max_requests: How many are kept; one that continues another takes its place.
        max_bytes: How much memory they may take, about.
    """

    def __init__(self, max_requests: int = 16, max_bytes: int = 96 * 1024 * 1024) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._rules: RuleSet | None = None
        self._formers: list[Former] = []

    def of(self, rules: RuleSet, api: Api) -> list[Former]:
        """Return the requests in one dialect; all are forgotten if the rules are not the same object as before."""
        if rules is not self._rules:
            self._rules, self._formers = rules, []
        return [former for former in self._formers if former.document.api is api]

    def keep(self, former: Former, continued: Former | None) -> None:
        """
        Keep a request.

        Args:
            former: The request.
            continued: The one that it overlaps with.
        """
        if former.document.array is None:
            return
        if continued is not None:
            shared = sum(end - first for first, end in former.document.overlap.runs)
            # Half is more than a system text and a few first turns, which other conversations have as well.
            if 2 * shared > len(continued.document.items):
                self._formers = [kept for kept in self._formers if kept is not continued]
        self._formers.insert(0, former)
        room = self._max_bytes
        for number, kept in enumerate(self._formers):
            room -= kept.cost_bytes()
            if room < 0 or number >= self._max_requests:
                del self._formers[number:]
                return


def link_up(previous: bytes, digest: bytes) -> bytes:
    """Make the next link of a chain."""
    return blake2b(previous + digest, digest_size=16).digest()
