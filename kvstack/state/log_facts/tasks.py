"""What the log says of slots and their tasks: chosen, launched, prefilled, decoded, released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SlotCompared:
    """How one slot's content compares with the next task's prompt; exact token counts (builds from July 2026 on)."""

    slot: int
    similarity_ratio: float | None
    lcp_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SlotSelected:
    """
    A slot was chosen for the next task; its id comes with the next `TaskLaunched` of the slot.

    `lcs` is the form of 2025, which called the common prefix so.
    """

    slot: int
    how: Literal["lcp", "lcs", "lru", "id"]
    similarity_ratio: float | None = None
    threshold_ratio: float | None = None
    keep_ratio: float | None = None
    """Share of the slot's own tokens that the prompt begins with."""
    lcp_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TaskLaunched:
    """A task began on a slot."""

    slot: int
    task: int
    is_child: bool = False
    """Whether it is a further answer to another task's prompt (`n` > 1)."""


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """The prompt's length is known."""

    slot: int
    task: int
    prompt_tokens: int
    ctx_per_slot: int | None = None


@dataclass(frozen=True, slots=True)
class ReusePoint:
    """
    How many tokens the slot holds before the next batch of this prompt.

    The first of a task is what was reused; the later ones are progress.
    """

    slot: int
    task: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillProgressed:
    """A running prefill: tokens of the prompt that are in the slot by now, reused ones included."""

    slot: int
    task: int
    processed_tokens: int
    progress_ratio: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillTimed:
    """A finished prefill: tokens that were computed, not the prompt's length."""

    slot: int
    task: int
    prefill_ms: float | None
    """None where the server printed `nan`."""
    evaluated_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeProgressed:
    """A running decode."""

    slot: int
    task: int
    generated_tokens: int
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeTimed:
    """A finished decode."""

    slot: int
    task: int
    decode_ms: float | None
    generated_tokens: int
    tokens_per_s: float | None = None
    """As the server counts it: newer builds leave the first token out."""


@dataclass(frozen=True, slots=True)
class DraftTimed:
    """How speculative decoding did."""

    slot: int
    task: int
    accepted_tokens: int
    drafted_tokens: int


@dataclass(frozen=True, slots=True)
class SlotReleased:
    """The task is over; the slot holds this many tokens."""

    slot: int
    task: int
    total_tokens: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class SlotCleared:
    """A slot's content was dropped."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    """The client of a task left."""

    task: int


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """The server refused a task, for example because its prompt is longer than the context."""

    task: int
    text: str
