"""Which client sent a request, and whether it is part of the main conversation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from kvstack.config.rules import DetectSpec
from kvstack.prompt.request.document import Document
from kvstack.prompt.rules.leading_blocks import LeadingBlocks, match_first
from kvstack.prompt.rules.ruleset import Client, RuleSet, Side

_NOTHING_READ: Mapping[int, LeadingBlocks] = MappingProxyType({})


def detect_client(document: Document, rules: RuleSet, headers: Sequence[tuple[str, str]]) -> Client:
    """Find the client by its signs: headers first, then tools, then texts; several send nothing but `OpenAI/JS`."""
    facts = _Facts(document, headers)
    return next((client for sign, client in rules.signs if facts.show(sign)), rules.unknown)


class _Facts:
    """What signs look at, each read once and only if a sign asks."""

    def __init__(self, document: Document, headers: Sequence[tuple[str, str]]) -> None:
        self._document = document
        self._headers = {name.lower(): value for name, value in headers}
        self._system = [text.value for item in document.items if item.leading for text in item.texts]

    def show(self, sign: DetectSpec) -> bool:
        if sign.header is not None:
            value = self._headers.get(sign.header.lower())
            if value is None or not value.startswith(sign.starts):
                return False
        if sign.tools and not self._document.tool_names.issuperset(sign.tools):
            return False
        return all(any(literal in text for text in self._system) for literal in sign.system)


def side_label(
    document: Document,
    client: Client,
    trailing: Collection[int] = (),
    heads: Mapping[int, LeadingBlocks] = _NOTHING_READ,
) -> str | None:
    """
    Tell what kind of side request this is; None for the main conversation.

    Args:
        document: The request.
        client: Its client.
        trailing: Indices of items that are no turns of the user.
        heads: Heads of items, by index, where they were read already.
    """
    if not client.sides:
        return None
    has_tools = bool(document.top.get("tools"))
    texts = _Texts(document, client, trailing, heads)
    for side in client.sides:
        spec = side.spec
        if spec.tools is not None and spec.tools != has_tools:
            continue
        if spec.lacks and not document.tool_names.isdisjoint(spec.lacks):
            continue
        if not side.patterns or texts.show(side):
            return spec.label
    return None


class _Texts:
    """The texts that give side requests away, each read once and only if needed."""

    def __init__(
        self, document: Document, client: Client, trailing: Collection[int], heads: Mapping[int, LeadingBlocks]
    ) -> None:
        self._document = document
        self._client = client
        self._trailing = trailing
        self._heads = heads
        self._known: dict[bool, tuple[list[str], str, int] | None] = {}

    def show(self, side: Side) -> bool:
        if side.spec.where == "system":
            texts = [text.value for item in self._document.items if item.leading for text in item.texts]
            return any(
                True
                for text in texts
                for pattern in side.patterns
                for _ in pattern.search(text, 0, len(text), anywhere=False)
            )
        last = side.spec.where == "last user"
        if last not in self._known:
            self._known[last] = self._read(last=last)
        known = self._known[last]
        if known is None:
            return False
        texts, own, pos = known
        return match_first(side.patterns, own, pos) is not None or any(
            match_first(side.patterns, text, 0) is not None for text in texts
        )

    def _read(self, *, last: bool) -> tuple[list[str], str, int] | None:
        """Return the texts of a user item, the one with the user's own words, and where those begin."""
        items = self._document.items
        for index in range(len(items) - 1, -1, -1) if last else range(len(items)):
            item = items[index]
            if item.role == "user" and index not in self._trailing and item.texts:
                head = self._heads.get(index) or self._client.head.read(item.texts)
                texts = [text.value for text in item.texts]
                return (texts, head.blocks[-1].text.value, head.blocks[-1].end) if head.blocks else (texts, texts[0], 0)
        return None
