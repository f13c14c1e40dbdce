"""What the log says of cached tokens: checkpoints, re-processing, shifts, the RAM cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CheckpointCreated:
    """A context checkpoint was made: the state after this many tokens can be gone back to."""

    slot: int
    task: int | None
    position_tokens: int
    size_bytes: int
    number: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRestored:
    """The slot went back to a context checkpoint."""

    slot: int
    task: int | None
    position_tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointErased:
    """A context checkpoint is gone: behind the point of reuse, list full, too close to another, or superseded."""

    slot: int
    task: int | None
    position_tokens: int | None
    why: Literal["invalidated", "list full", "too close", "superseded"]


@dataclass(frozen=True, slots=True)
class FullReprocess:
    """The slot matched but could not be cut there and had no checkpoint: the whole prompt is evaluated again."""

    slot: int
    task: int | None


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A checkpoint or a saved prompt could not be restored."""

    slot: int | None
    task: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ChunkReused:
    """A later part of the old prompt was shifted into place (`--cache-reuse`)."""

    slot: int
    task: int | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ContextShifted:
    """The context was full and its middle was thrown away: from here on the prefix differs from the client's."""

    slot: int
    task: int | None
    kept_tokens: int
    discarded_tokens: int


@dataclass(frozen=True, slots=True)
class PromptTruncated:
    """The server cut the middle out of a prompt that is too long (2025; later builds refuse it)."""

    slot: int
    task: int | None


@dataclass(frozen=True, slots=True)
class RamCacheSaved:
    """A slot's content is being copied to the RAM cache."""

    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RamCacheSearched:
    """The RAM cache is searched for a prompt that fits better than the slot's content does."""

    keep_ratio: float | None
    """Of the slot's content; None for an empty slot."""
    similarity_ratio: float | None
    """Of the slot's content with the prompt."""


@dataclass(frozen=True, slots=True)
class RamCacheHit:
    """A better prompt was found in the RAM cache and goes into the slot that was selected last."""

    keep_ratio: float | None
    similarity_ratio: float | None


@dataclass(frozen=True, slots=True)
class RamCacheEvicted:
    """The RAM cache dropped its oldest entry."""

    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class RamCacheSkipped:
    """A prompt was not saved: it alone is larger than the RAM cache."""

    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class RamCacheState:
    """What the RAM cache holds."""

    prompts: int
    size_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class RamCacheEntry:
    """One prompt in the RAM cache."""

    tokens: int
    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CacheRamLimited:
    """How large the RAM cache may grow, in bytes; 0 is off, None is no limit."""

    limit_bytes: int | None
