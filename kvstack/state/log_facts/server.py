"""What the log says of the server itself: its start, devices and memory, warnings, and records that are not known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SlotsInitialised:
    """How the context is split."""

    slots: int
    ctx_per_slot: int | None = None
    kv_unified: bool | None = None


@dataclass(frozen=True, slots=True)
class SlotCreated:
    """One slot and its context."""

    slot: int
    ctx_per_slot: int


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The model is in memory."""


@dataclass(frozen=True, slots=True)
class ServerListening:
    """The server accepts connections."""

    url: str


@dataclass(frozen=True, slots=True)
class ServerSlept:
    """The server went to sleep, which loses the KV cache, or woke up."""

    asleep: bool


@dataclass(frozen=True, slots=True)
class DeviceUsed:
    """The model goes to this device."""

    device: str
    description: str
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LayersOffloaded:
    """Layers that were meant for a GPU; printed without any GPU too, so that it proves nothing alone."""

    layers: int
    layers_total: int


@dataclass(frozen=True, slots=True)
class BufferAllocated:
    """Memory that was allocated on a device."""

    device: str
    kind: Literal["model", "kv", "recurrent", "compute", "output"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ServerWarned:
    """A warning that explains what the cache cannot do."""

    text: str


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """A line that says why the server will not run."""

    text: str


@dataclass(frozen=True, slots=True)
class UnknownRecord:
    """Drift: a record of a family that kvstack reads, in a form that it does not know."""

    family: str
    text: str
