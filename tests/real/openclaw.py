"""
A conversation as OpenClaw 2026.2.17 sends it: structure and volatile parts are the client's, the prose is made up.

Per turn, the system text's metadata block holds the newest message's id, and the user text begins with a
`Conversation info` block and a timestamp prefix; both stay in the history as they were.
"""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OpenClaw"]

WORDS = """
agent answer before cache change check command context conversation file follow given keep language line memory message
model name never note only order path plain project prompt question read report result rule session short skill step
system task text time tool turn user value when word work workspace write
""".split()


def _prose(random_source: random.Random, characters: int) -> str:
    lines: list[str] = []
    size = 0
    while size < characters:
        words = random_source.choices(WORDS, k=random_source.randint(6, 16))
        line = "- " + " ".join(words).capitalize() + "."
        lines.append(line)
        size += len(line) + 1
    return "\n".join(lines)


@dataclass
class OpenClaw:
    """
    One conversation.

    Attributes:
        system_characters: Length of the system text; the ids stand at 40 % of it.
        tool_characters: Length of the tools.
        seed: Two conversations with one seed have the same system text and tools.
    """

    system_characters: int = 22_000
    tool_characters: int = 22_000
    seed: int = 1
    session: int = 1
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        source = random.Random(self.seed)
        self._before = _prose(source, int(self.system_characters * 0.4))
        self._after = _prose(source, int(self.system_characters * 0.6))
        self._ids = random.Random(1000 * self.seed + self.session)
        count = 20
        self.tools = [
            {
                "type": "function",
                "function": {
                    "name": f"tool_{number}",
                    "description": _prose(source, self.tool_characters // count - 250),
                    "parameters": {
                        "type": "object",
                        "properties": {"path": {"type": "string", "description": "Path of the file"}},
                        "required": ["path"],
                    },
                },
            }
            for number in range(count)
        ]

    def ask(self, words: str) -> dict[str, Any]:
        """The request of the next user turn, and the user's text in it."""
        self.turn += 1
        message_id = str(uuid.UUID(int=self._ids.getrandbits(128), version=4))
        block = {
            "schema": "openclaw.inbound_meta.v1",
            "message_id": message_id,
            "sender_id": "cli",
            "channel": "webchat",
            "provider": "webchat",
            "surface": "webchat",
            "chat_type": "direct",
            "flags": {"has_reply_context": False, "history_count": self.turn - 1},
        }
        info = {"message_id": message_id, "sender": "cli"}
        self.user_text = (
            "Conversation info (untrusted metadata):\n```json\n"
            + json.dumps(info, indent=2)
            + f"\n```\n\n[Wed 2026-02-18 20:{10 + self.turn} UTC] {words}"
        )
        self.messages.append({"role": "user", "content": [{"type": "text", "text": self.user_text}]})
        system = (
            f"{self._before}\n\n## Inbound Context (trusted metadata)\n```json\n{json.dumps(block, indent=2)}\n```\n\n"
            f"{self._after}"
        )
        return {
            "model": "local",
            "messages": [{"role": "system", "content": system}, *self.messages],
            "stream": False,
            "max_tokens": 16,
            "tools": self.tools,
        }

    def hear(self, answer: str) -> None:
        """Take the model's answer into the history, as the client does."""
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
