"""
The parts of a stack's state: what is known of each request, slot and task, of the server and of the warm-up.

All are values; `kvstack.state.reducer.reduce` makes new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvstack.state.events import AnswerSeen, Difference
from kvstack.state.status_json import INTERNAL
from kvstack.state.verdict import Reason, Verdict


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task of the server, as its log tells it."""

    slot: int
    task: int
    is_child: bool = False
    owner: int | None = None
    """Number of the request that it works for; None for one that did not come through the proxy."""
    is_proved: bool = False
    """Whether figures of the answer prove the owner, or nobody else can own it; before that it is only the likely
    one."""
    claimants: frozenset[int] = field(default=frozenset(), metadata=INTERNAL)
    """Numbers of the requests that were waiting when the log told of its launch: one of them owns it."""
    is_warmup: bool = False
    """The owner is the stack's own warm-up; while clients are served that too has to be proved."""
    how: str | None = None
    """How the slot was chosen: `lcp`, `lcs`, `lru` or `id`."""
    similarity_ratio: float | None = None
    """Of what the slot held when it was chosen, before anything came out of the RAM cache."""
    keep_ratio: float | None = None
    lcp_tokens: int | None = None
    """Exact, where the log gives it."""
    ram_hit: bool = False
    """The slot was filled from the RAM cache."""
    ram_similarity_ratio: float | None = None
    holder: str | None = None
    """Conversation whose tokens the slot held before."""
    holder_request: int | None = None
    holder_is_warmup: bool = False
    holder_is_cut: bool = False
    """What the slot held was a prompt whose prefill was broken off."""
    holder_prompt_tokens: int | None = None
    """Prompt of the task before this one on the slot."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    processed_tokens: int | None = None
    tokens_per_s: float | None = None
    evaluated_tokens: int | None = None
    prefill_ms: float | None = None
    generated_tokens: int | None = None
    decode_ms: float | None = None
    decode_tokens_per_s: float | None = None
    total_tokens: int | None = None
    """What the slot held at the end."""
    truncated: bool = False
    shifted_tokens: int = 0
    reprocessed: bool = False
    restored_tokens: int | None = None
    """Position of the checkpoint that was gone back to."""
    checkpoints_erased: int = 0
    chunk_tokens: int = 0
    cancelled: bool = False
    rejected: str | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a request, counted."""

    derived: ClassVar = ("reuse_ratio",)

    prompt: int | None = None
    cached: int | None = None
    evaluated: int | None = None
    generated: int | None = None
    processed: int | None = None
    """Of a running prefill: tokens of the prompt that are in the slot, reused ones included."""
    lost: int | None = None
    """Tokens that were evaluated though they had been in the cache, or should have been."""
    warm: int | None = None
    """What a warm-up had made warm when it was sent to the server; 0 if that had lost its slot by then."""

    @property
    def reuse_ratio(self) -> float | None:
        """Cached tokens / prompt tokens, 0 to 1."""
        if not self.prompt or self.cached is None:
            return None
        return min(self.cached / self.prompt, 1.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request took, and what the cache saved and lost of that."""

    prefill_ms: float | None = None
    ttft_ms: float | None = None
    """Of an answer in one piece: reckoned from its end and the time that the decode took."""
    is_streamed: bool = False
    """Whether the answer's first token was seen on its way to the client."""
    duration_ms: float | None = None
    """From the receipt to the end."""
    decode_ms: float | None = None
    decode_tokens_per_s: float | None = None
    cost_s: float | None = None
    """Seconds that the lost tokens took, by the request's own prefill rate, or that of this run."""
    saved_s: float | None = None
    """Seconds that the cached tokens would have taken, by the prefill rate of this run."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the client changed since the conversation's former request."""

    difference: Difference | None = None
    """From its conversation's former request, as the proxy saw it; of one that begins a conversation: how its system
    text and tools differ from the most similar recent ones."""
    before: int | None = None
    """Number of the newest request of the conversation that had fewer items: the one that this can extend."""
    repeats: bool = False
    """Whether the conversation had a request of as many items already: a retry, or an edit."""


@dataclass(frozen=True, slots=True)
class Stripped:
    """What the rules did to a request."""

    ts_removed: int = 0
    msg_ids_removed: int = 0
    items_modified: int = 0
    rules: Mapping[str, int] = field(default_factory=dict)
    """What each rule did, counted."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, as far as it is known by now."""

    derived: ClassVar = ("lcp_similarity_ratio",)

    id: int
    time_s: float
    method: str
    path: str
    api: str | None = None
    client: str | None = None
    conversation: str | None = None
    side: str | None = None
    stream: bool = False
    items: int = 0
    run: int = 0
    """Number of the server process that it was sent to."""
    phase: str = "received"
    """`received`, `forwarded`, `answering`, then an outcome: `done`, `cancelled`, `failed`."""
    status: int | None = None
    error: str | None = None
    verdict: Verdict | None = None
    """None while the request runs."""
    reason: Reason | None = None
    """Why, where a verdict needs it."""
    settled: bool = False
    """Whether the verdict is final: the request is over, and all that the log says of it is read."""
    tokens: Tokens = Tokens()
    timing: Timing = Timing()
    change: Change = Change()
    stripped: Stripped = field(default_factory=Stripped)
    has_warmed_head: bool | None = None
    """Whether its system texts and tools are those that the warm-up evaluates; None if that is not known."""
    work: TaskView | None = None
    """What the log said of its task."""
    answer: AnswerSeen | None = field(default=None, metadata=INTERNAL)
    """What the answer said of itself."""
    head_fingerprint: str | None = field(default=None, metadata=INTERNAL)
    """Digest of system texts and tools, as its conversation began."""
    is_counted: bool = field(default=False, metadata=INTERNAL)
    """Whether its seconds are in the totals: they do not change any more."""

    @property
    def is_over(self) -> bool:
        """Whether the client has its answer, or left."""
        return self.phase in {"done", "cancelled", "failed"}

    @property
    def lcp_similarity_ratio(self) -> float | None:
        """How much of its prompt the server found in the slot when it chose that; llama-server's `sim_best`."""
        return None if self.work is None else self.work.similarity_ratio


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a slot holds, and for whom."""

    derived: ClassVar = ("is_busy",)

    slot: int
    tokens: int | None = None
    prompt_tokens: int | None = None
    """Of the last prompt; the rest of `tokens` is its answer."""
    conversation: str | None = None
    client: str | None = None
    request: int | None = None
    """The last request that used it; None if that did not come through the proxy."""
    is_warmup: bool = False
    is_cut: bool = False
    """The prefill was broken off: the slot holds only a part of the prompt."""
    task: int | None = None
    """The running task."""
    running_prompt_tokens: int | None = None
    """Of the running task's prompt."""
    processed_tokens: int | None = None
    """Of a running prefill."""
    tokens_per_s: float | None = None
    checkpoints: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a task runs in it."""
        return self.task is not None


@dataclass(frozen=True, slots=True)
class ProxyView:
    """What clients connect to."""

    url: str = "?"


@dataclass(frozen=True, slots=True)
class ServerView:
    """The upstream."""

    url: str | None = None
    is_attached: bool = False
    """Whether it is somebody else's: not started and not stopped by this stack, and its log is not read."""
    pid: int | None = None
    build: str | None = None
    model: str | None = None
    device: str | None = None
    device_name: str | None = None
    ctx_per_slot: int | None = None
    slots: int | None = None
    kv_unified: bool | None = None
    layers_offloaded: int | None = None
    layers_total: int | None = None
    rss_bytes: int | None = None
    similarity_threshold_ratio: float | None = None
    buffers_bytes: Mapping[str, int] = field(default_factory=dict)
    """Per kind and device, for example `kv Vulkan0`, as the log tells them."""
    warnings: tuple[str, ...] = ()
    asleep: bool = False
    argv: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class RamCacheView:
    """The server's RAM cache: prompts that lost their slot."""

    prompts: int | None = None
    size_bytes: int | None = None
    limit_bytes: int | None = None
    """None: unknown or no limit; 0: off."""


@dataclass(frozen=True, slots=True)
class WarmupView:
    """The last warm-up."""

    outcome: str = "pending"
    """`pending`, `done`, `failed`, `no prefix known` or `off`."""
    prompt_tokens: int | None = None
    evaluated_tokens: int | None = None
    duration_ms: float | None = None
    boundary_tokens: int | None = None
    """End of the system and tools block, where it is known."""
    snapshot: str | None = None
    """`saved` or `restored`: the slot was filled from a prefix snapshot; None for the chat form."""
    is_proved: bool = False
    """Whether an answer has shown that the restored prefix is there; of the chat form nobody doubts it."""
    detail: str = ""
    is_running: bool = False
    """Whether another one is under way."""
    head_fingerprint: str | None = field(default=None, metadata=INTERNAL)
    """Digest of the system texts and tools that it evaluated."""

    @property
    def warm_tokens(self) -> int | None:
        """How much of it others can use: not the user text behind the prefix, where that is known."""
        if self.outcome != "done":
            return None
        return self.prompt_tokens if self.boundary_tokens is None else self.boundary_tokens

    @property
    def is_unproved(self) -> bool:
        """Whether it rests on a restored snapshot that no answer has confirmed yet."""
        return self.outcome == "done" and self.snapshot is not None and not self.is_proved


@dataclass(frozen=True, slots=True)
class LogView:
    """How well the log is understood."""

    facts: int = 0
    drift: int = 0
    """Records of a known family in an unknown form."""
    drift_samples: tuple[str, ...] = ()
    unclaimed_tasks: int = 0
    """Tasks that did not come through the proxy: bypass."""


@dataclass(frozen=True, slots=True)
class Totals:
    """
    Sums since the stack started.

    Tokens and times are those of requests whose figures are known.
    """

    requests: int = 0
    """Model requests that are over."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    saved_s: float = 0.0
    """Prefill that the cache saved, by the measured rate; only grows."""
    cost_s: float = 0.0
    """Prefill that a better reuse would have saved, by the measured rate; only grows."""
    ts_removed: int = 0
    msg_ids_removed: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    """Requests per verdict."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """What each rule did, counted."""
    full_reprocesses: int = 0
    checkpoints_restored: int = 0
    ram_hits: int = 0
    ram_evictions: int = 0
    context_shifts: int = 0
