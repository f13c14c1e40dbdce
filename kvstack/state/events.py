"""
Everything that happens, as frozen dataclasses, and their union `Event`.

Times (`time_s`) are seconds since the epoch, given by the publisher.  What is not known is None.  Log facts carry
what one log record says and nothing more; joining them with requests is `kvstack.state.attribution`'s work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstack.state.causes import Cause
from kvstack.state.lifecycle import State
from kvstack.state.log_facts import LogFact


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The stack moved to another state."""

    time_s: float
    state: State
    reason: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class ServerSpawned:
    """A llama-server process was started by us."""

    time_s: float
    pid: int
    argv: tuple[str, ...]
    """The command, secrets masked."""


@dataclass(frozen=True, slots=True)
class ServerDescribed:
    """What is known of the upstream, from its binary, `/props` and its log; None leaves the former value."""

    time_s: float
    url: str | None = None
    build: str | None = None
    model: str | None = None
    device: str | None = None
    ctx_per_slot: int | None = None
    slots: int | None = None
    layers_offloaded: int | None = None
    layers_total: int | None = None
    similarity_threshold_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """Resident memory of the child and its descendants."""

    time_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class LogLineSeen:
    """One line of the server's log, decoded and without control characters."""

    time_s: float
    text: str


@dataclass(frozen=True, slots=True)
class LogFactSeen:
    """What one record of the server's log says."""

    time_s: float
    run: int
    """Number of the server process in this stack's life, counted from 1: task ids start again with each."""
    fact: LogFact


@dataclass(frozen=True, slots=True)
class RuleHit:
    """One rule's effect on one request."""

    rule: str
    action: str
    count: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where and how a request leaves its conversation's former one."""

    cause: Cause
    path: str
    """JSON path in the former request."""
    offset: int
    """Characters into that text."""
    item: int | None = None
    """Index of the message or input item; None for tools and for system texts outside of that list."""
    behind: tuple[Cause, ...] = ()
    """Other kinds of values that changed in the same text behind it, for example `clock`."""

    @property
    def is_in_head(self) -> bool:
        """Whether it is in front of the conversation: in the system text or the tools."""
        return self.item in {None, 0}


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The proxy has read a model request and applied the rules to it."""

    time_s: float
    id: int
    """Number of the request in this stack's life, counted from 1."""
    method: str
    path: str
    api: str | None
    """`chat`, `responses`, `messages`, `completion`, or None for everything else."""
    client: str | None
    conversation: str | None
    """Opaque key of the conversation, if one was recognised."""
    items: int
    """Messages, or input items, of the body."""
    stream: bool
    ts_removed: int
    msg_ids_removed: int
    items_modified: int
    hits: tuple[RuleHit, ...] = ()
    side: str | None = None
    """Kind of a side request (title, memory, heartbeat), if it is one."""
    difference: Difference | None = None
    """From its conversation's former request; None if it extends that.  Of one that begins a conversation: how its
    system text and tools differ from the most similar recent ones."""
    head_fingerprint: str | None = None
    """Digest of system texts and tools of one that begins a conversation."""


@dataclass(frozen=True, slots=True)
class RequestForwarded:
    """The request went to the upstream."""

    time_s: float
    id: int


@dataclass(frozen=True, slots=True)
class FirstByteSent:
    """
    The first token of a streamed answer came from the upstream.

    An answer in one piece, also an error, has no such event: nobody sees when its first token was there.
    """

    time_s: float
    id: int


@dataclass(frozen=True, slots=True)
class AnswerSeen:
    """
    What an answer says of itself: `timings` and `usage`, in the dialect's own words.

    Tokens and milliseconds; None where the answer does not say.
    """

    id: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    evaluated_tokens: int | None = None
    generated_tokens: int | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    decode_tokens_per_s: float | None = None
    """As the server counts it: newer builds leave the first token out."""
    error: str | None = None
    """Message of an error object in the answer, also of one in the middle of a stream."""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request is over."""

    time_s: float
    id: int
    status: int | None
    """HTTP status that the client got; None if it left before there was one."""
    outcome: Literal["done", "cancelled", "failed"]
    error: str | None = None
    """What went wrong on the way, if the answer itself does not say it."""


@dataclass(frozen=True, slots=True)
class WarmupStarted:
    """A warm-up begins."""

    time_s: float


@dataclass(frozen=True, slots=True)
class WarmupEnded:
    """A warm-up is over."""

    time_s: float
    outcome: Literal["done", "failed", "no prefix known", "off"]
    prompt_tokens: int | None = None
    evaluated_tokens: int | None = None
    duration_ms: float | None = None
    detail: str = ""
    boundary_tokens: int | None = None
    """End of the system and tools block in the prompt, where it is known: so much must be found cached later."""
    snapshot: Literal["saved", "restored"] | None = None
    """Whether the slot holds a prefix snapshot: made by this warm-up, or read from the disk; None for the chat form."""
    head_fingerprint: str | None = None
    """Digest of the system texts and tools that were warmed up."""

    @property
    def warm_tokens(self) -> int | None:
        """How much of it others can use: not the user text behind the prefix, where that is known."""
        if self.outcome != "done":
            return None
        return self.prompt_tokens if self.boundary_tokens is None else self.boundary_tokens


@dataclass(frozen=True, slots=True)
class WarmupStepped:
    """A warm-up that goes on has had a task of the server done: the figures prove that the task is the stack's own."""

    time_s: float
    prompt_tokens: int
    evaluated_tokens: int


@dataclass(frozen=True, slots=True)
class WarmupJudged:
    """The first answer to a prompt that begins with a restored prefix: only that shows whether the snapshot holds."""

    time_s: float
    holds: bool
    cached_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should read, once."""

    time_s: float
    level: Literal["info", "warning", "error"]
    text: str


Event = (
    StateChanged
    | ServerSpawned
    | ServerDescribed
    | MemorySampled
    | LogLineSeen
    | LogFactSeen
    | RequestReceived
    | RequestForwarded
    | FirstByteSent
    | AnswerSeen
    | RequestEnded
    | WarmupStarted
    | WarmupStepped
    | WarmupEnded
    | WarmupJudged
    | Notice
)
