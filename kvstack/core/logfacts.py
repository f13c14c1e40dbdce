"""
What the records of a llama-server's log say, one frozen dataclass per kind, and their union `LogFact`.

`kvstack.llama.log` makes them.  A slot or task of -1 in the log (not assigned yet) is None here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "DecodeTimed",
    "LogFact",
    "PrefillProgressed",
    "PrefillTimed",
    "PromptStarted",
    "ReusePoint",
    "SlotReleased",
    "SlotSelected",
    "TaskLaunched",
]


@dataclass(frozen=True, slots=True)
class SlotSelected:
    """
    A slot was chosen for the next task; its id comes with the next `TaskLaunched` of the slot.
    """

    slot: int
    how: Literal["lcp", "lru", "id"]
    similarity_ratio: float | None = None
    threshold_ratio: float | None = None
    keep_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class TaskLaunched:
    """
    A task began on a slot.
    """

    slot: int
    task: int
    is_child: bool = False


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """
    The prompt's length is known.
    """

    slot: int
    task: int
    prompt_tokens: int
    ctx_per_slot: int | None = None


@dataclass(frozen=True, slots=True)
class ReusePoint:
    """
    How many tokens the slot keeps for this prompt.
    """

    slot: int
    task: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    """
    A running prefill.
    """

    slot: int
    task: int
    processed_tokens: int
    progress_ratio: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillTimed:
    """
    A finished prefill: tokens that were computed, not the prompt's length.
    """

    slot: int
    task: int
    prefill_ms: float
    evaluated_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeTimed:
    """
    A finished decode.
    """

    slot: int
    task: int
    decode_ms: float
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class SlotReleased:
    """
    The task is over; the slot holds this many tokens.
    """

    slot: int
    task: int
    total_tokens: int
    truncated: bool = False


LogFact = (
    SlotSelected
    | TaskLaunched
    | PromptStarted
    | ReusePoint
    | PrefillProgressed
    | PrefillTimed
    | DecodeTimed
    | SlotReleased
)
