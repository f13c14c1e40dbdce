"""
Which client sent a request, and whether it is part of the main conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvstack.core.rulespec import DetectSpec
from kvstack.prompt.dialects import Document, Item
from kvstack.prompt.head import match_first
from kvstack.prompt.ruleset import Client, RuleSet, Side

__all__ = ["detect_client", "side_label", "tool_names"]


def detect_client(document: Document, rules: RuleSet, headers: Sequence[tuple[str, str]]) -> Client:
    """
    Find the client by its signs: headers first, then tools, then texts; several send nothing but `OpenAI/JS`.
    """
    facts = _Facts(document, headers)
    for strength in (_has_header, _has_tools, _has_text):
        for client in rules.clients:
            if any(strength(sign) and facts.show(sign) for sign in client.detect):
                return client
    return rules.unknown


def _has_header(sign: DetectSpec) -> bool:
    return sign.header is not None


def _has_tools(sign: DetectSpec) -> bool:
    return sign.header is None and bool(sign.tools)


def _has_text(sign: DetectSpec) -> bool:
    return sign.header is None and not sign.tools


class _Facts:
    """
    What signs look at, each read once and only if a sign asks.
    """

    def __init__(self, document: Document, headers: Sequence[tuple[str, str]]) -> None:
        self._document = document
        self._headers = {name.lower(): value for name, value in headers}
        self._system = [text.value for item in document.items if item.leading for text in item.texts]
        self._tools: frozenset[str] | None = None

    def show(self, sign: DetectSpec) -> bool:
        if sign.header is not None:
            value = self._headers.get(sign.header.lower())
            if value is None or not value.startswith(sign.starts):
                return False
        if sign.tools:
            if self._tools is None:
                self._tools = tool_names(self._document.top.get("tools"))
            if not self._tools.issuperset(sign.tools):
                return False
        return all(any(literal in text for text in self._system) for literal in sign.system)


def tool_names(tools: Any) -> frozenset[str]:
    """
    Return the names of the tools of a request, in whichever form its dialect has.
    """
    if not isinstance(tools, list):
        return frozenset()
    names = []
    for tool in tools:
        if isinstance(tool, dict):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else tool.get("name")
            if isinstance(name, str):
                names.append(name)
    return frozenset(names)


def side_label(document: Document, client: Client, carriers: Collection[int] = ()) -> str | None:
    """
    Tell what kind of side request this is; None for the main conversation.

    Args:
        document: The request.
        client: Its client.
        carriers: Indices of items that are no turns of the user.
    """
    if not client.sides:
        return None
    users = [
        item
        for index, item in enumerate(document.items)
        if item.role == "user" and item.texts and index not in carriers
    ]
    has_tools = bool(document.top.get("tools"))
    for side in client.sides:
        spec = side.spec
        if spec.tools is not None and spec.tools != has_tools:
            continue
        if spec.lacks and not tool_names(document.top.get("tools")).isdisjoint(spec.lacks):
            continue
        if not side.patterns or _shows(document, client, side, users):
            return spec.label
    return None


def _shows(document: Document, client: Client, side: Side, users: Sequence[Item]) -> bool:
    if side.spec.where == "system":
        texts = [text.value for item in document.items if item.leading for text in item.texts]
        return any(
            True
            for text in texts
            for pattern in side.patterns
            for _ in pattern.search(text, 0, len(text), anywhere=False)
        )
    if not users:
        return False
    item = users[0] if side.spec.where == "first user" else users[-1]
    head = client.head.read(item.texts)
    text, pos = (head.blocks[-1].text, head.blocks[-1].end) if head.blocks else (item.texts[0], 0)
    return match_first(side.patterns, text.value, pos) is not None or any(
        match_first(side.patterns, text.value, 0) is not None for text in item.texts
    )
