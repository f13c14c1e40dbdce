"""
The one picture of a stack: what the dashboard draws, `status` prints and the metrics count.

`reduce` is the only way to a new Snapshot.  `to_dict` is the documented shape of `GET /kvstack/status` and of the
`data` in `kvstack status --json`; what is not known is null there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstack.core.lifecycle import State

__all__ = ["REQUESTS_KEPT", "RequestRow", "ServerView", "Snapshot", "Totals", "WarmupView"]

REQUESTS_KEPT = 100
"""Requests that a Snapshot remembers, newest last."""

LOG_LINES_KEPT = 50
NOTICES_KEPT = 50


@dataclass(frozen=True, slots=True)
class RequestRow:
    """
    One request, as far as it is known by now.
    """

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
    ts_removed: int = 0
    msg_ids_removed: int = 0
    items_modified: int = 0
    phase: str = "received"
    """`received`, `forwarded`, `answering`, then an outcome: `done`, `cancelled`, `failed`."""
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    evaluated_tokens: int | None = None
    generated_tokens: int | None = None
    lcp_similarity_ratio: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    decode_ms: float | None = None
    slot: int | None = None
    task: int | None = None
    processed_tokens: int | None = None
    """Of a running prefill."""
    verdict: str | None = None
    """None while the request runs."""
    cause: str | None = None
    """Why, in a few words, where a verdict needs it."""
    error: str | None = None

    @property
    def reuse_ratio(self) -> float | None:
        """
        Cached tokens / prompt tokens, 0 to 1.
        """
        if not self.prompt_tokens or self.cached_tokens is None:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def decode_tokens_per_s(self) -> float | None:
        """
        Decode speed in tokens per second.
        """
        if not self.decode_ms or not self.generated_tokens:
            return None
        return self.generated_tokens * 1000.0 / self.decode_ms


@dataclass(frozen=True, slots=True)
class ServerView:
    """
    The upstream.
    """

    url: str | None = None
    pid: int | None = None
    build: str | None = None
    model: str | None = None
    device: str | None = None
    ctx_per_slot: int | None = None
    slots: int | None = None
    layers_offloaded: int | None = None
    layers_total: int | None = None
    rss_bytes: int | None = None
    similarity_threshold_ratio: float | None = None
    argv: tuple[str, ...] = ()
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class WarmupView:
    """
    The last warm-up.
    """

    outcome: str = "pending"
    """`pending`, `done`, `failed`, `no prefix known` or `off`."""
    prompt_tokens: int | None = None
    evaluated_tokens: int | None = None
    duration_ms: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """
    Sums since the stack started, of requests whose figures are known.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    prefill_ms: float = 0.0
    ts_removed: int = 0
    msg_ids_removed: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    One stack at one moment.
    """

    name: str
    proxy_url: str
    state: State = State.STOPPED
    reason: str = ""
    state_since_s: float | None = None
    started_s: float | None = None
    restarts: int = 0
    server: ServerView = field(default_factory=ServerView)
    warmup: WarmupView = field(default_factory=WarmupView)
    totals: Totals = field(default_factory=Totals)
    requests: tuple[RequestRow, ...] = ()
    log_lines: tuple[str, ...] = ()
    notices: tuple[tuple[float, str, str], ...] = ()
    """Time, level and text."""

    def to_dict(self) -> dict[str, Any]:
        """
        The documented shape, ready for JSON.
        """
        return {
            "name": self.name,
            "state": self.state.value,
            "reason": self.reason,
            "state_since_s": self.state_since_s,
            "started_s": self.started_s,
            "restarts": self.restarts,
            "proxy": {"url": self.proxy_url},
            "server": {
                "url": self.server.url,
                "pid": self.server.pid,
                "build": self.server.build,
                "model": self.server.model,
                "device": self.server.device,
                "ctx_per_slot": self.server.ctx_per_slot,
                "slots": self.server.slots,
                "layers_offloaded": self.server.layers_offloaded,
                "layers_total": self.server.layers_total,
                "rss_bytes": self.server.rss_bytes,
                "similarity_threshold_ratio": self.server.similarity_threshold_ratio,
                "started_s": self.server.started_s,
            },
            "warmup": {
                "outcome": self.warmup.outcome,
                "prompt_tokens": self.warmup.prompt_tokens,
                "evaluated_tokens": self.warmup.evaluated_tokens,
                "duration_ms": self.warmup.duration_ms,
                "detail": self.warmup.detail,
            },
            "totals": {
                "requests": self.totals.requests,
                "prompt_tokens": self.totals.prompt_tokens,
                "cached_tokens": self.totals.cached_tokens,
                "evaluated_tokens": self.totals.evaluated_tokens,
                "prefill_ms": self.totals.prefill_ms,
                "ts_removed": self.totals.ts_removed,
                "msg_ids_removed": self.totals.msg_ids_removed,
            },
            "requests": [_row_dict(row) for row in self.requests],
            "log_lines": list(self.log_lines),
            "notices": [{"time_s": time_s, "level": level, "text": text} for time_s, level, text in self.notices],
        }


def _row_dict(row: RequestRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "time_s": row.time_s,
        "method": row.method,
        "path": row.path,
        "api": row.api,
        "client": row.client,
        "conversation": row.conversation,
        "side": row.side,
        "stream": row.stream,
        "items": row.items,
        "phase": row.phase,
        "status": row.status,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "evaluated_tokens": row.evaluated_tokens,
        "generated_tokens": row.generated_tokens,
        "lcp_similarity_ratio": row.lcp_similarity_ratio,
        "reuse_ratio": row.reuse_ratio,
        "prefill_ms": row.prefill_ms,
        "ttft_ms": row.ttft_ms,
        "decode_tokens_per_s": row.decode_tokens_per_s,
        "verdict": row.verdict,
        "cause": row.cause,
        "error": row.error,
        "stripped": {
            "ts_removed": row.ts_removed,
            "msg_ids_removed": row.msg_ids_removed,
            "items_modified": row.items_modified,
        },
    }
