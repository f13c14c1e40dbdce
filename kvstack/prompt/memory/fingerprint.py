"""What an item says, as one digest: the memory knows earlier turns by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, get_args

from kvstack.prompt.request.chat_template import Role
from kvstack.prompt.request.message import Item

_ROLE_NAMES = {role: role.encode() for role in get_args(Role)}


def digest_item(item: Item, texts: Sequence[str]) -> bytes:
    """
    Digest what an item says; ids, `cache_control` and the form of its content do not count.

    Args:
        item: The item.
        texts: Its texts as they count, in order.
    """
    pieces = [_ROLE_NAMES[item.role]]
    beside = beside_text(item.value)
    for text in (*texts, *beside) if beside else texts:
        data = text.strip().encode("utf-8", "surrogatepass")
        if data:
            pieces += (b"%d:" % len(data), data)
    return blake2b(b"".join(pieces), digest_size=16).digest()


def beside_text(value: Any) -> list[str]:
    """Spell what an item holds beside text: calls with their arguments, results, images."""
    spelled: list[str] = []
    if type(value) is not dict:
        return spelled
    calls = value.get("tool_calls")
    if type(calls) is list:
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                spelled += [str(function.get("name")), str(function.get("arguments"))]
    if "arguments" in value:
        spelled += [str(value.get("name")), str(value["arguments"])]
    content = value.get("content")
    if type(content) is list:
        for part in content:
            if isinstance(part, dict):
                spelled += _beside_part(part)
    return spelled


def _beside_part(part: dict[str, Any]) -> list[str]:
    match part.get("type", "text"):
        case "text" | "input_text" | "output_text" | "thinking" | "redacted_thinking" | "reasoning":
            return []
        case "tool_use":
            return [str(part.get("name")), json.dumps(part.get("input"), sort_keys=True)]
        case "tool_result":
            return _flat(part.get("content"))
        case _:
            return [json.dumps({key: part[key] for key in part if key not in ("cache_control", "id")}, sort_keys=True)]


def _flat(content: Any) -> list[str]:
    if isinstance(content, list):
        return [
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
            for part in content
        ]
    return [content] if isinstance(content, str) else [json.dumps(content)]


def link_up(previous: bytes, digest: bytes) -> bytes:
    """Make the next link of a chain."""
    return blake2b(previous + digest, digest_size=16).digest()
