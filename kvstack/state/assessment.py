"""What a request's row says once its task and its answer are looked at together."""

from __future__ import annotations

from dataclasses import replace

from kvstack.state.attribution import task_of
from kvstack.state.events import AnswerSeen
from kvstack.state.holders import taken_by
from kvstack.state.records import RequestRow
from kvstack.state.request_stats import compose, ttft_ms
from kvstack.state.stack_state import StackState
from kvstack.state.totals import seconds
from kvstack.state.verdict import judge


def judged(stack_state: StackState, row: RequestRow) -> RequestRow:
    """A request with all that log and answer tell by now: its figures, and once it is over its verdict."""
    join = stack_state.join
    if row.settled:
        return row
    task = None
    if row.run == join.run:
        # (The log of another run knows nothing of this request any more; what the former said stays.)
        task = task_of(join, row.id)
        row = compose(row, task)
    if not row.is_over:
        return row
    before = stack_state.row(row.before) if row.before is not None else None
    judgement = judge(
        row,
        task,
        before,
        slot_taken_by=taken_by(stack_state, row, before),
        boundary_tokens=stack_state.warmup.boundary_tokens,
        log_is_read=join.facts > 0,
        begins_run=not any(_is_earlier(other, row) for other in stack_state.requests),
        threshold_ratio=stack_state.server.similarity_threshold_ratio,
    )
    # What was lost was evaluated by this very request: its own rate is the best.
    own = row.evaluated_tokens * 1000.0 / row.prefill_ms if row.evaluated_tokens and row.prefill_ms else None
    settled = (
        row.api is None
        or row.phase == "failed"
        or not has_log(stack_state)
        or (task is not None and task.released and (task.is_proved or not _has_figures(row.answer)))
    )
    cost_s, saved_s = row.cost_s, row.saved_s
    if not row.is_counted:
        cost_s = seconds(judgement.lost_tokens, own or join.prefill_tokens_per_s)
        saved_s = seconds(row.cached_tokens, join.prefill_tokens_per_s or own)
    return replace(
        row,
        verdict=judgement.verdict,
        cause=judgement.cause,
        ttft_ms=ttft_ms(row),
        lost_tokens=judgement.lost_tokens,
        cost_s=cost_s,
        saved_s=saved_s,
        is_counted=row.is_counted or settled,
        processed_tokens=None,
        settled=settled,
    )


def has_log(stack_state: StackState) -> bool:
    """Whether there is a log of the server to be read."""
    # Of a server that we started there is one, though it may lag behind; of one that we attached to there is none.
    return stack_state.join.facts > 0 or stack_state.server.pid is not None


def _is_earlier(other: RequestRow, row: RequestRow) -> bool:
    return other.id < row.id and other.run == row.run and other.api is not None


def _has_figures(answer: AnswerSeen | None) -> bool:
    return answer is not None and answer.evaluated_tokens is not None
