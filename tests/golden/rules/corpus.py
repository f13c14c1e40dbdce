"""
The golden corpus: what real clients send, in minimal form.

A file holds one conversation: `requests` in the order of sending, and two tables, `texts` and `tools`, for what
several of them share (`{"$": n}` and `{"$tools": n}` refer to an entry).  Long prose is no part of it: `%a1b2c3:1234%`
stands for 1,234 characters of filler, the same wherever the same name stands.  Markers, ids, clocks, structure, key
order, roles and the form of content are as they were sent.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# What long prompts of agents are made of: words, names of things, flags, paths.
WORDS = (
    "anchor barrel candle garden the of when use `engine_id` `hammerList` `jacketType` --kettle-max --no-ladder "
    "src/magnet.ts docs/needle.md ~/.island/fabric.json DAGGER_HOME (optional) (2-4) e.g. 1. **Never**"
).split()
_FILLER = re.compile(r"%([0-9a-f]{6}):(\d+)%")


@dataclass(frozen=True)
class Request:
    """One recorded request."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    conversation: str
    side: bool


def names() -> list[str]:
    """All conversations, by name."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if not path.stem.startswith("expected"))


@cache
def load(name: str, *, filled: bool = True) -> tuple[Request, ...]:
    """Read a conversation, with its prose filled in or not."""
    document = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    prose = _prose if filled else _mark
    return tuple(
        Request(
            row["path"],
            list(row.get("headers", {}).items()),
            json.dumps(_resolve(row["body"], document, prose), ensure_ascii=False).encode(),
            row["conversation"],
            row.get("kind") == "side",
        )
        for row in document["requests"]
    )


def _resolve(value: Any, document: dict[str, Any], prose: Callable[[str, int], str]) -> Any:
    if isinstance(value, str):
        return _FILLER.sub(lambda match: prose(match[1], int(match[2])), value)
    if isinstance(value, list):
        return [_resolve(inner, document, prose) for inner in value]
    if isinstance(value, dict):
        if value.keys() == {"$"}:
            return _resolve(document["texts"][value["$"]], document, prose)
        if value.keys() == {"$tools"}:
            return _resolve(document["tools"][value["$tools"]], document, prose)
        return {key: _resolve(inner, document, prose) for key, inner in value.items()}
    return value


def _mark(name: str, length: int) -> str:
    return f"<{name} {length}>"


@cache
def _prose(name: str, length: int) -> str:
    rng = random.Random(name)
    return " ".join(rng.choice(WORDS) for _ in range(length // 4 + 1))[: length - 1] + "."
