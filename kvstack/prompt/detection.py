"""
Which client sent a request, and whether it is part of the main conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstack.core.rulespec import DetectSpec
from kvstack.prompt.dialects import Document, Text
from kvstack.prompt.head import match_first
from kvstack.prompt.ruleset import Client, RuleSet, Side

__all__ = ["detect_client", "side_label", "tool_names"]


def detect_client(document: Document, rules: RuleSet, headers: Sequence[tuple[str, str]]) -> Client:
    """
    Find the client by its signs; several send nothing but `OpenAI/JS`, so texts count as much as headers.
    """
    facts = _Facts(document, headers)
    return next((client for client in rules.clients if any(map(facts.show, client.detect))), rules.unknown)


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


def side_label(document: Document, client: Client) -> str | None:
    """
    Tell what kind of side request this is; None for the main conversation.
    """
    if not client.sides:
        return None
    has_tools = bool(document.top.get("tools"))
    return next(
        (
            side.spec.label
            for side in client.sides
            if (side.spec.tools is None or side.spec.tools == has_tools) and _shows(document, side)
        ),
        None,
    )


def _shows(document: Document, side: Side) -> bool:
    if side.spec.where == "system":
        return any(_line_begins(text, side) for item in document.items if item.leading for text in item.texts)
    users = [item for item in document.items if item.role == "user" and item.texts]
    if not users:
        return False
    item = users[0] if side.spec.where == "first user" else users[-1]
    return any(match_first(side.patterns, text.value, 0) is not None for text in item.texts)


def _line_begins(text: Text, side: Side) -> bool:
    for pattern in side.patterns:
        pos = text.value.find(pattern.head)
        while pos >= 0:
            if (pos == 0 or text.value[pos - 1] == "\n") and pattern.match(text.value, pos) is not None:
                return True
            pos = text.value.find(pattern.head, pos + 1)
    return False
