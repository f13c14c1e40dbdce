"""Who speaks, and how the turns of a raw prompt are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool", "reasoning", "other"]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """
    How a chat template marks the turns of a raw prompt.

    Attributes:
        starts: Literals that open a turn, each with its role.
        end: Literal that closes a turn.
    """

    starts: tuple[tuple[str, Role], ...]
    end: str


_MARKERS = {
    "<|im_start|>": TurnMarkers(tuple((f"<|im_start|>{name}\n", role) for name, role in ROLES.items()), "<|im_end|>"),
    "<start_of_turn>": TurnMarkers(
        tuple((f"<start_of_turn>{name}\n", role) for name, role in ROLES.items()), "<end_of_turn>"
    ),
    "<|start_header_id|>": TurnMarkers(
        tuple((f"<|start_header_id|>{name}<|end_header_id|>\n\n", role) for name, role in ROLES.items()), "<|eot_id|>"
    ),
}


def turn_markers(chat_template: str | None) -> TurnMarkers | None:
    """Find the role markers in a model's chat template: ChatML, Gemma or Llama 3; None for any other."""
    if chat_template is None:
        return None
    return next((markers for sign, markers in _MARKERS.items() if sign in chat_template), None)


def must_alternate(chat_template: str | None) -> bool:
    """Whether a template refuses two messages of one role in a row: it says so when it raises."""
    return chat_template is not None and "raise_exception" in chat_template and "alternate" in chat_template


def split_prompt(prompt: str, markers: TurnMarkers) -> list[tuple[Role, int, int]]:
    """
    Split a raw prompt into turns.

    Returns:
        Role, start and end of the text of each turn; what stands before the first marker is no turn.
    """
    cuts = sorted(
        (pos, pos + len(marker), role) for marker, role in markers.starts for pos in _positions(prompt, marker)
    )
    turns: list[tuple[Role, int, int]] = []
    for index, (_, begin, role) in enumerate(cuts):
        end = cuts[index + 1][0] if index + 1 < len(cuts) else len(prompt)
        close = prompt.find(markers.end, begin, end)
        turns.append((role, begin, end if close < 0 else close))
    return turns


def _positions(text: str, marker: str) -> list[int]:
    found = []
    pos = text.find(marker)
    while pos >= 0:
        found.append(pos)
        pos = text.find(marker, pos + len(marker))
    return found
