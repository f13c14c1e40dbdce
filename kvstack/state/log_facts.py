"""
What the records of a llama-server's log say, one frozen dataclass per kind.

`kvstack.llama.log.reader` makes them.  A slot or task of -1 in the log (not assigned yet) is None here, a ratio that
the server printed as `nan`, `inf` or a negative placeholder is None too.  Nothing here is joined with a request: that
is the work of `kvstack.state.attribution`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LogFact:
    """What one record says; every kind is a subclass in this module."""


@dataclass(frozen=True, slots=True)
class SlotCompared(LogFact):
    """How one slot's content compares with the next task's prompt; exact token counts (builds from July 2026 on)."""

    slot: int
    similarity_ratio: float | None
    lcp_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SlotSelected(LogFact):
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
class TaskLaunched(LogFact):
    """A task began on a slot."""

    slot: int
    task: int
    is_child: bool = False
    """Whether it is a further answer to another task's prompt (`n` > 1)."""


@dataclass(frozen=True, slots=True)
class PromptStarted(LogFact):
    """The prompt's length is known."""

    slot: int
    task: int
    prompt_tokens: int
    ctx_per_slot: int | None = None


@dataclass(frozen=True, slots=True)
class ReusePoint(LogFact):
    """
    How many tokens the slot holds before the next batch of this prompt.

    The first of a task is what was reused; the later ones are progress.
    """

    slot: int
    task: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillProgressed(LogFact):
    """A running prefill: tokens of the prompt that are in the slot by now, reused ones included."""

    slot: int
    task: int
    processed_tokens: int
    progress_ratio: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillTimed(LogFact):
    """A finished prefill: tokens that were computed, not the prompt's length."""

    slot: int
    task: int
    prefill_ms: float | None
    """None where the server printed `nan`."""
    evaluated_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeTimed(LogFact):
    """A finished decode."""

    slot: int
    task: int
    decode_ms: float | None
    generated_tokens: int
    tokens_per_s: float | None = None
    """As the server counts it: newer builds leave the first token out."""


@dataclass(frozen=True, slots=True)
class SlotReleased(LogFact):
    """The task is over; the slot holds this many tokens."""

    slot: int
    task: int
    total_tokens: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class SlotCleared(LogFact):
    """A slot's content was dropped."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TaskCancelled(LogFact):
    """The client of a task left."""

    task: int


@dataclass(frozen=True, slots=True)
class RequestRejected(LogFact):
    """The server refused a task, for example because its prompt is longer than the context."""

    task: int
    text: str


@dataclass(frozen=True, slots=True)
class CheckpointCreated(LogFact):
    """A context checkpoint was made: the state after this many tokens can be gone back to."""

    slot: int
    task: int | None
    position_tokens: int
    size_bytes: int
    number: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRestored(LogFact):
    """The slot went back to a context checkpoint."""

    slot: int
    task: int | None
    position_tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointErased(LogFact):
    """A context checkpoint is gone: behind the point of reuse, list full, too close to another, or superseded."""

    slot: int
    task: int | None
    position_tokens: int | None
    why: Literal["invalidated", "list full", "too close", "superseded"]


@dataclass(frozen=True, slots=True)
class FullReprocess(LogFact):
    """The slot matched but could not be cut there and had no checkpoint: the whole prompt is evaluated again."""

    slot: int
    task: int | None


@dataclass(frozen=True, slots=True)
class RestoreFailed(LogFact):
    """A checkpoint or a saved prompt could not be restored."""

    slot: int | None
    task: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ChunkReused(LogFact):
    """A later part of the old prompt was shifted into place (`--cache-reuse`)."""

    slot: int
    task: int | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ContextShifted(LogFact):
    """The context was full and its middle was thrown away: from here on the prefix differs from the client's."""

    slot: int
    task: int | None
    kept_tokens: int
    discarded_tokens: int


@dataclass(frozen=True, slots=True)
class PromptTruncated(LogFact):
    """The server cut the middle out of a prompt that is too long (2025; later builds refuse it)."""

    slot: int
    task: int | None


@dataclass(frozen=True, slots=True)
class RamCacheSearched(LogFact):
    """The RAM cache is searched for a prompt that fits better than the slot's content does."""

    keep_ratio: float | None
    """Of the slot's content; None for an empty slot."""
    similarity_ratio: float | None
    """Of the slot's content with the prompt."""


@dataclass(frozen=True, slots=True)
class RamCacheHit(LogFact):
    """A better prompt was found in the RAM cache and goes into the slot that was selected last."""

    keep_ratio: float | None
    similarity_ratio: float | None


@dataclass(frozen=True, slots=True)
class RamCacheEvicted(LogFact):
    """The RAM cache dropped its oldest entry."""

    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class RamCacheSkipped(LogFact):
    """A prompt was not saved: it alone is larger than the RAM cache."""

    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class RamCacheState(LogFact):
    """What the RAM cache holds."""

    prompts: int
    size_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class CacheRamLimited(LogFact):
    """How large the RAM cache may grow, in bytes; 0 is off, None is no limit."""

    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class SlotsInitialised(LogFact):
    """How the context is split."""

    slots: int
    ctx_per_slot: int | None = None
    kv_unified: bool | None = None


@dataclass(frozen=True, slots=True)
class SlotCreated(LogFact):
    """One slot and its context."""

    slot: int
    ctx_per_slot: int


@dataclass(frozen=True, slots=True)
class ServerSlept(LogFact):
    """The server went to sleep, which loses the KV cache, or woke up."""

    asleep: bool


@dataclass(frozen=True, slots=True)
class DeviceUsed(LogFact):
    """The model goes to this device."""

    device: str
    description: str
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LayersOffloaded(LogFact):
    """Layers that were meant for a GPU; printed without any GPU too, so that it proves nothing alone."""

    layers: int
    layers_total: int


@dataclass(frozen=True, slots=True)
class BufferAllocated(LogFact):
    """Memory that was allocated on a device."""

    device: str
    kind: Literal["model", "kv", "recurrent", "compute", "output"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ServerWarned(LogFact):
    """A warning that explains what the cache cannot do."""

    text: str


@dataclass(frozen=True, slots=True)
class UnknownRecord(LogFact):
    """Drift: a record of a family that kvstack reads, in a form that it does not know."""

    family: str
    text: str
