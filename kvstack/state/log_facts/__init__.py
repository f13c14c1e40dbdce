"""
What the records of a llama-server's log say, one frozen dataclass per kind, and their union `LogFact`.

`kvstack.llama.log.reader` makes them.  A slot or task of -1 in the log (not assigned yet) is None here, a ratio that
the server printed as `nan`, `inf` or a negative placeholder is None too.  Nothing here is joined with a request: that is
the work of `kvstack.state.attribution`.
"""

from __future__ import annotations

from kvstack.state.log_facts.cache import (
    CacheRamLimited,
    CheckpointCreated,
    CheckpointErased,
    CheckpointRestored,
    ChunkReused,
    ContextShifted,
    FullReprocess,
    PromptTruncated,
    RamCacheEntry,
    RamCacheEvicted,
    RamCacheHit,
    RamCacheSaved,
    RamCacheSearched,
    RamCacheSkipped,
    RamCacheState,
    RestoreFailed,
)
from kvstack.state.log_facts.server import (
    BufferAllocated,
    DeviceUsed,
    LayersOffloaded,
    ModelLoaded,
    ServerFailed,
    ServerListening,
    ServerSlept,
    ServerWarned,
    SlotCreated,
    SlotsInitialised,
    UnknownRecord,
)
from kvstack.state.log_facts.tasks import (
    DecodeProgressed,
    DecodeTimed,
    DraftTimed,
    PrefillProgressed,
    PrefillTimed,
    PromptStarted,
    RequestRejected,
    ReusePoint,
    SlotCleared,
    SlotCompared,
    SlotReleased,
    SlotSelected,
    TaskCancelled,
    TaskLaunched,
)

__all__ = [
    "BufferAllocated",
    "CacheRamLimited",
    "CheckpointCreated",
    "CheckpointErased",
    "CheckpointRestored",
    "ChunkReused",
    "ContextShifted",
    "DecodeProgressed",
    "DecodeTimed",
    "DeviceUsed",
    "DraftTimed",
    "FullReprocess",
    "LayersOffloaded",
    "LogFact",
    "ModelLoaded",
    "PrefillProgressed",
    "PrefillTimed",
    "PromptStarted",
    "PromptTruncated",
    "RamCacheEntry",
    "RamCacheEvicted",
    "RamCacheHit",
    "RamCacheSaved",
    "RamCacheSearched",
    "RamCacheSkipped",
    "RamCacheState",
    "RequestRejected",
    "RestoreFailed",
    "ReusePoint",
    "ServerFailed",
    "ServerListening",
    "ServerSlept",
    "ServerWarned",
    "SlotCleared",
    "SlotCompared",
    "SlotCreated",
    "SlotReleased",
    "SlotSelected",
    "SlotsInitialised",
    "TaskCancelled",
    "TaskLaunched",
    "UnknownRecord",
]

LogFact = (
    SlotCompared
    | SlotSelected
    | TaskLaunched
    | PromptStarted
    | ReusePoint
    | PrefillProgressed
    | PrefillTimed
    | DecodeProgressed
    | DecodeTimed
    | DraftTimed
    | SlotReleased
    | CheckpointCreated
    | CheckpointRestored
    | CheckpointErased
    | FullReprocess
    | RestoreFailed
    | ChunkReused
    | ContextShifted
    | PromptTruncated
    | SlotCleared
    | TaskCancelled
    | RequestRejected
    | RamCacheSaved
    | RamCacheSearched
    | RamCacheHit
    | RamCacheEvicted
    | RamCacheSkipped
    | RamCacheState
    | RamCacheEntry
    | CacheRamLimited
    | SlotsInitialised
    | SlotCreated
    | ModelLoaded
    | ServerListening
    | ServerSlept
    | DeviceUsed
    | LayersOffloaded
    | BufferAllocated
    | ServerWarned
    | ServerFailed
    | UnknownRecord
)
