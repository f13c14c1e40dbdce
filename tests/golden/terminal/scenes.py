"""Synthetic Snapshots for the dashboard, one per situation that a person meets."""

from __future__ import annotations

from dataclasses import replace

from kvstack.state.causes import Cause
from kvstack.state.events import Difference, Notice
from kvstack.state.lifecycle import State
from kvstack.state.records import (
    LogView,
    ProxyView,
    RamCacheView,
    RequestRow,
    ServerView,
    SlotView,
    TaskView,
    Totals,
    WarmupView,
)
from kvstack.state.stack_state import StackState
from kvstack.state.verdict import Reason, ReasonKind, Verdict
from tests.unit.state.rows import changed, request_row

NOW_S = 1_771_447_691.0
"""2026-02-18 20:48:11 UTC."""

SERVER = ServerView(
    url="http://127.0.0.1:12345",
    pid=4711,
    build="b11434",
    model="/models/Qwen3-Coder-Next-80B-Q6_K.gguf",
    device="Vulkan0",
    device_name="Radeon 8060S",
    ctx_per_slot=131072,
    slots=1,
    layers_offloaded=49,
    layers_total=49,
    rss_bytes=int(61.4 * 1024**3),
    similarity_threshold_ratio=0.1,
)

LOST_TO_TITLE = Reason(ReasonKind.SLOT_LOST_TO_REQUEST, request=19, client="title")

LOG_LINES = tuple(
    f"{minute}.46.933.316 I slot update_slots: id  0 | task {minute} | prompt processing, n_tokens = {minute * 512}"
    for minute in range(1, 31)
)


def row(number: int, verdict: str | None = "HIT", **changes: object) -> RequestRow:
    """Request *number* of an agent's conversation that grows by 60 tokens a turn."""
    prompt = 16_500 + 60 * number
    cached = {"HIT": prompt - 25, "COLD": 0, "REPROCESS": 0, "PARTIAL": 2_480}.get(verdict or "", 0)
    base = request_row(
        id=number,
        time_s=NOW_S - 60 * (40 - number),
        method="POST",
        path="/v1/responses",
        api="responses",
        client="openclaw",
        conversation="main",
        stream=True,
        items=2 * number,
        ts_removed=1,
        msg_ids_removed=3,
        items_modified=3,
        phase="done",
        status=200,
        prompt=prompt,
        cached=cached,
        evaluated=prompt - cached,
        generated=120,
        similarity_ratio=1.0 if verdict in {"HIT", "REPROCESS"} else 0.151,
        prefill_ms=(prompt - cached) * 2.13,
        ttft_ms=(prompt - cached) * 2.13 + 40,
        decode_ms=120 * 24.5,
        decode_tokens_per_s=1000 / 24.5,
        saved_s=cached * 0.00213,
        cost_s=(prompt - cached) * 0.00213 if verdict in {"PARTIAL", "REPROCESS"} else 0.0,
        settled=verdict is not None,
        work=TaskView(0, number),
        verdict=None if verdict is None else Verdict(verdict),
    )
    return changed(base, **changes)


def clock_changed(path: str) -> dict[str, object]:
    """The fields of a request in which a clock changed."""
    return {"reason": Reason(ReasonKind.CLIENT_CHANGED), "difference": Difference(Cause.CLOCK, path, 57_012)}


def stack_state(*rows: RequestRow, **changes: object) -> StackState:
    """A stack that is ready and has seen *rows*."""
    known = [one for one in rows if one.verdict is not None]
    base = StackState(
        name="qwen3-coder-next-80b",
        proxy=ProxyView("http://127.0.0.1:1234"),
        state=State.READY,
        reason="warm",
        state_since_s=NOW_S - 8000,
        started_s=NOW_S - 8047,
        server=SERVER,
        warmup=WarmupView("done", 17_100, 17_100, 35_170.0, boundary_tokens=16_512),
        totals=Totals(
            requests=len(known),
            prompt_tokens=sum(one.tokens.prompt or 0 for one in known),
            cached_tokens=sum(one.tokens.cached or 0 for one in known),
            evaluated_tokens=sum(one.tokens.evaluated or 0 for one in known),
            prefill_ms=sum(one.timing.prefill_ms or 0 for one in known),
            saved_s=sum(one.timing.saved_s or 0 for one in known),
            cost_s=sum(one.timing.cost_s or 0 for one in known),
            ts_removed=len(known),
            msg_ids_removed=3 * len(known),
        ),
        requests=rows,
        log_lines=LOG_LINES,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def scenes() -> dict[str, StackState]:
    """All situations, by name."""
    hits = [row(number) for number in range(2, 38)]
    running = row(38, None, phase="forwarded", processed=11_230, cached=None, evaluated=None)
    unknown = ("prefill_ms", "ttft_ms", "decode_ms", "decode_tokens_per_s", "saved_s", "cost_s", "generated")
    running = changed(running, time_s=NOW_S - 9, **dict.fromkeys(unknown))
    clock = row(36, "PARTIAL", **clock_changed("the system prompt"))
    return {
        "working": stack_state(
            row(1, "COLD"),
            *hits,
            slots=(SlotView(0, 18_840, 18_720, "main", "openclaw", 37, checkpoints=4),),
        ),
        "partial": stack_state(
            row(1, "COLD"),
            *hits[:20],
            row(30, "REPROCESS", reason=Reason(ReasonKind.NO_CHECKPOINT, 18_300, 0)),
            *hits[30:34],
            clock,
            running,
            slots=(
                SlotView(
                    0,
                    18_660,
                    None,
                    "main",
                    "openclaw",
                    38,
                    task=38,
                    running_prompt_tokens=18_780,
                    processed_tokens=11_230,
                ),
            ),
            prefill_tokens_per_s=1000 / 2.13,
            log=LogView(facts=900, drift=2, unclaimed_tasks=1),
            notices=(Notice(NOW_S - 300, "warning", "2 log lines of a known family were not understood"),),
        ),
        "first": stack_state(
            log_lines=LOG_LINES[:6],
            server=replace(SERVER, device=None, device_name=None, buffers_bytes={"model CPU_Mapped": 5, "kv CPU": 5}),
        ),
        "loading": stack_state(
            state=State.LOADING,
            reason="",
            state_since_s=NOW_S - 72,
            started_s=NOW_S - 74,
            warmup=WarmupView(),
            log_lines=LOG_LINES[:9],
            server=replace(
                SERVER, ctx_per_slot=None, layers_total=None, device=None, device_name=None, rss_bytes=12 * 1024**3
            ),
        ),
        "warming": stack_state(
            state=State.WARMING,
            state_since_s=NOW_S - 21,
            started_s=NOW_S - 140,
            warmup=WarmupView(),
            slots=(
                SlotView(
                    0,
                    0,
                    None,
                    is_warmup=True,
                    task=1,
                    running_prompt_tokens=16_512,
                    processed_tokens=8_192,
                    tokens_per_s=470.0,
                ),
            ),
        ),
        "parallel": stack_state(
            *hits[:6],
            row(
                20,
                "EVICTED",
                reason=Reason(ReasonKind.SLOT_LOST_TO_REQUEST, request=19, client="title"),
                client="hermes",
                side=None,
            ),
            server=replace(SERVER, slots=4, kv_unified=True),
            restarts=2,
            ram_cache=RamCacheView(3, 412 * 1024**2, 8 * 1024**3),
            slots=(
                SlotView(0, 18_840, 18_720, "main", "openclaw", 7, checkpoints=4),
                SlotView(1, 2_100, 2_000, None, None, None),
                SlotView(
                    2,
                    30_000,
                    None,
                    "b",
                    "hermes",
                    20,
                    task=90,
                    running_prompt_tokens=40_000,
                    processed_tokens=30_000,
                    tokens_per_s=500.0,
                ),
            ),
            prefill_tokens_per_s=1000 / 2.13,
        ),
        "attached": stack_state(
            *(replace(one, work=None) for one in hits[:4]),
            warmup=WarmupView("no prefix known"),
            server=ServerView(
                url="http://192.168.1.20:8080", is_attached=True, model="Qwen3-Coder-Next.gguf", ctx_per_slot=131072
            ),
            log_lines=(),
        ),
        "refused": stack_state(
            state=State.LOADING,
            reason="nothing answers (connection refused), trying for up to 10 s",
            state_since_s=NOW_S - 7,
            started_s=NOW_S - 7,
            warmup=WarmupView(),
            server=ServerView(url="http://192.168.1.20:8080", is_attached=True),
            log_lines=(),
        ),
        "begun": StackState(
            "qwen3-coder-next-80b", ProxyView("http://127.0.0.1:1234"), server=ServerView(url="http://127.0.0.1:12345")
        ),
        "mixed": stack_state(
            row(1, "COLD", reason=Reason(ReasonKind.FIRST_REQUEST), lost=16_560, cost_s=35.3),
            *(row(number, "PARTIAL", **clock_changed("system"), lost=14_000, cost_s=29.8) for number in (2, 3)),
            row(4),
            row(
                5,
                "RESTORED",
                cached=16_700,
                evaluated=100,
                similarity_ratio=None,
                prefill_ms=213.0,
                ttft_ms=253.0,
                saved_s=35.6,
            ),
        ),
        "failed": stack_state(
            state=State.FAILED, reason="llama-server died 4 times: killed by signal 9 (out of memory?)", restarts=3
        ),
        "hostile": stack_state(
            *hits[:3],
            row(
                9,
                "PARTIAL",
                client="[red]名前がとても長いクライアント[/red]",
                **clock_changed("\x1b[2J\x1b]0;owned\x07 [bold]" + "日本語" * 20 + "[/bold]\n\u202egnp.exe"),
            ),
            name="名前" * 40,
            log_lines=("\x1b[31m[red]not markup[/red] \r\n" + "長" * 300, "tab\there \x00 \x9b31m \ud800"),
        ),
    }
