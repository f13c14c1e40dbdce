"""The verdicts: what the cache did for a request.  One table says what is known of each, another names the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Level = Literal["good", "warn", "bad", "idle"]
"""How good a verdict is; `idle` says nothing of the cache."""


class Verdict(StrEnum):
    """What the cache did for one request."""

    HIT = "HIT"
    PARTIAL = "PARTIAL"
    COLD = "COLD"
    WARM = "WARM"
    RESTORED = "RESTORED"
    EVICTED = "EVICTED"
    REPROCESS = "REPROCESS"
    TEMPLATE = "TEMPLATE"
    TRUNCATED = "TRUNCATED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"

    @property
    def info(self) -> VerdictInfo:
        """Its row of the table."""
        return VERDICTS[self]


@dataclass(frozen=True, slots=True)
class VerdictInfo:
    """
    What is known of a verdict.

    Attributes:
        when: When it is given.
        headline: Its meaning for one request, in a sentence.
        level: How good it is.
        recurring: What requests that keep getting it have in common, as a clause; None where that is no fault.
        advice: What to do, whatever the reason; `kvstack.state.explain` adds what depends on the request.
    """

    when: str
    headline: str
    level: Level
    recurring: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def concerns_cache(self) -> bool:
        """Whether it says how the cache did."""
        return self.level == "good" or self.recurring is not None


VERDICTS: Mapping[Verdict, VerdictInfo] = {
    Verdict.HIT: VerdictInfo(
        "cached >= expected - 64: what was evaluated is about what is new",
        "The cache worked: only what is new was evaluated.",
        "good",
    ),
    Verdict.WARM: VerdictInfo(
        "a conversation's first request that found its prefix cached: what the warm-up evaluated, or half the prompt",
        "The cache worked: a new conversation found its prefix evaluated already.",
        "good",
    ),
    Verdict.RESTORED: VerdictInfo(
        "as one of these, from the RAM cache",
        "The cache worked: the conversation came back from the RAM cache.",
        "good",
    ),
    Verdict.COLD: VerdictInfo(
        "almost nothing was cached, nothing of it was expected to be, and no slot was similar",
        "Nothing of this prompt came from the cache.",
        "warn",
        "nothing like them was in the cache",
    ),
    Verdict.PARTIAL: VerdictInfo(
        "the prompt diverged early from the previous one: the client changed something",
        "The prompt diverges early from the cached prompt: the rest had to be evaluated.",
        "warn",
        "their prompts differ from what was cached",
    ),
    Verdict.REPROCESS: VerdictInfo(
        "more matched than was kept: the server had no checkpoint where the prompts diverge",
        "The server found the prompt's beginning, but could not keep it.",
        "bad",
        "the server could not keep what matched",
        (
            "This model's state cannot be rewound without a checkpoint before the point where the prompts diverge.",
            "Raise server.ctx_checkpoints, leave server.checkpoint_min_step alone; newer builds keep more.",
        ),
    ),
    Verdict.EVICTED: VerdictInfo(
        "the prompt extends the former one, but another conversation took the slot",
        "The conversation had lost its place in the cache.",
        "bad",
        "their conversation had lost its slot to another one",
        (
            "Give the RAM cache room (server.cache_ram_mib): then a conversation that lost its slot comes back.",
            "Or keep two conversations apart with server.parallel = 2, if memory allows.",
        ),
    ),
    Verdict.TEMPLATE: VerdictInfo(
        "the body extends the former one, in the same slot, but the rendered prompt does not",
        "The client only added to the conversation, but the rendered prompt changed further up.",
        "bad",
        "the chat template renders older turns differently",
        (
            "The chat template renders older turns differently, often without their reasoning:"
            " try `--reasoning-preserve` in server.extra_args if this build has it.",
        ),
    ),
    Verdict.TRUNCATED: VerdictInfo(
        "the context was full: the prompt was cut, shifted, or the answer ended there",
        "The context was full.",
        "warn",
        "the context was full",
        ("Raise server.ctx_size, lower server.parallel, or let the client compact its history earlier.",),
    ),
    Verdict.CANCELLED: VerdictInfo("the client left", "The client left before the answer was complete.", "idle"),
    Verdict.FAILED: VerdictInfo(
        "the answer is an error, also one in the middle of a stream", "The request failed.", "bad"
    ),
    Verdict.UNKNOWN: VerdictInfo(
        "neither the answer nor the log told what was cached",
        "Neither the answer nor the log told what was cached.",
        "idle",
        advice=("Let the client ask for usage (stream_options.include_usage), or raise server.log_verbosity.",),
    ),
}
"""The one table of verdicts."""


class ReasonKind(StrEnum):
    """Why a request got its verdict."""

    CLIENT_LEFT = "client left"
    CLIENT_CHANGED = "client changed"
    EARLIER_TURN_CHANGED = "earlier turn changed"
    CONTEXT_FULL = "context full"
    NO_FIGURES_IN_ANSWER = "no figures in answer"
    NO_FIGURES = "no figures"
    NO_CHECKPOINT = "no checkpoint"
    NOT_KEPT = "not kept"
    SHORT_MATCH = "short match"
    NOT_IN_CACHE = "not in cache"
    RENDERED_ANEW = "rendered anew"
    SERVER_RESTARTED = "server restarted"
    OTHER_PROMPT_WARMED = "other prompt warmed"
    FIRST_REQUEST = "first request"
    NOTHING_ALIKE = "nothing alike"
    SLOT_LOST = "slot lost"
    SLOT_LOST_TO_REQUEST = "slot lost to request"
    SLOT_LOST_TO_WARMUP = "slot lost to warm-up"
    SLOT_LOST_TO_BYPASS = "slot lost to bypass"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request got its verdict, with the figures that belong to it."""

    kind: ReasonKind
    matched_tokens: int | None = None
    kept_tokens: int | None = None
    request: int | None = None
    """The request that took the slot."""
    client: str | None = None
    """Whose request that was."""


REASONS: Mapping[ReasonKind, str] = {
    ReasonKind.CLIENT_LEFT: "the client left",
    ReasonKind.CLIENT_CHANGED: "{difference}",
    ReasonKind.EARLIER_TURN_CHANGED: "the client changed an earlier turn",
    ReasonKind.CONTEXT_FULL: "the context is full",
    ReasonKind.NO_FIGURES_IN_ANSWER: "no figures in the answer",
    ReasonKind.NO_FIGURES: "no figures in answer and log",
    ReasonKind.NO_CHECKPOINT: "{matched:,} tokens matched, {kept:,} kept: no checkpoint",
    ReasonKind.NOT_KEPT: "{matched:,} tokens matched, {kept:,} kept: not kept",
    ReasonKind.SHORT_MATCH: "only its first {matched:,} tokens were known",
    ReasonKind.NOT_IN_CACHE: "the former prompt was not in the cache",
    ReasonKind.RENDERED_ANEW: "the rendered history differs from what the server holds",
    ReasonKind.SERVER_RESTARTED: "the server was restarted",
    ReasonKind.OTHER_PROMPT_WARMED: "not the prompt that was warmed up",
    ReasonKind.FIRST_REQUEST: "first request of its conversation",
    ReasonKind.NOTHING_ALIKE: "nothing like it was cached",
    ReasonKind.SLOT_LOST: "its slot was taken",
    ReasonKind.SLOT_LOST_TO_REQUEST: "by request {request} ({client})",
    ReasonKind.SLOT_LOST_TO_WARMUP: "by the warm-up",
    ReasonKind.SLOT_LOST_TO_BYPASS: "by a request that bypassed the proxy",
}
"""The one table of reasons, in a few words; in braces the figures of a `Reason`."""
