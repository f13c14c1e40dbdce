"""
The assessment of a request: its figures, and once it is over one verdict with its reason.

The answer's own figures are the truth about reuse.  The log explains them, the proxy names the cause.  LCP similarity
is a prediction that the server made before it knew whether it could keep what matched: it never makes a verdict, it
only tells how much would have been there.

Judged by tokens.  *Prompt* = *cached* + *evaluated*.  *Expected* is what should have been cached: the prompt of the
conversation's former request (its answer may be rendered anew), or, where no conversation is known, the former prompt
on the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstack.state.attribution import is_contested, task_of
from kvstack.state.events import Difference
from kvstack.state.records import RequestRow, TaskView
from kvstack.state.request_stats import compose, has_figures, ttft_ms
from kvstack.state.stack_state import StackState
from kvstack.state.totals import seconds
from kvstack.state.verdict import Reason, ReasonKind, Verdict

SLACK_TOKENS = 64
"""Cached tokens may fall short of what was expected by so many: a template's tail, a checkpoint before the end."""

_BOUNDARY_SLACK_TOKENS = 4

_RETRY_TOKENS = 8
"""The same prompt once more costs 1 token (dense), 4 (hybrid) or 5 (sliding window)."""

_THRESHOLD_RATIO = 0.1
"""llama-server's default of `--slot-prompt-similarity`."""


def judged(stack_state: StackState, row: RequestRow, *, is_late: bool = False) -> RequestRow:
    """
    A request with all that log and answer tell by now: its figures, and once it is over its verdict.

    Args:
        stack_state: All that is known.
        row: The request.
        is_late: Whether it has been over for so long that the log has told what it has to tell of it.
    """
    join = stack_state.join
    if row.settled:
        return row
    task = None
    if row.run == join.run:
        # (The log of another run knows nothing of this request any more; what the former said stays.)
        task = task_of(join, row.id)
        if is_late and _is_undecidable(stack_state, row, task):
            task = None  # whose it was will never be known: no figures are better than another request's
        row = compose(row, task)
    if not row.is_over:
        return row
    before = stack_state.row(row.change.before) if row.change.before is not None else None
    judgement = judge(
        row,
        task,
        before,
        slot_taken_by=_taken_by(stack_state, row, before),
        boundary_tokens=stack_state.warmup.boundary_tokens,
        log_is_read=join.facts > 0,
        begins_run=not any(_is_earlier(other, row) for other in stack_state.requests),
        threshold_ratio=stack_state.server.similarity_threshold_ratio,
    )
    # What was lost was evaluated by this very request: its own rate is the best.
    own = (
        row.tokens.evaluated * 1000.0 / row.timing.prefill_ms
        if row.tokens.evaluated and row.timing.prefill_ms
        else None
    )
    settled = (
        row.api is None
        or row.phase == "failed"
        or not has_log(stack_state)
        or _is_settled(stack_state, row, task, is_late=is_late)
    )
    timing = replace(row.timing, ttft_ms=ttft_ms(row))
    if not row.is_counted:
        timing = replace(
            timing,
            cost_s=seconds(judgement.lost_tokens, own or join.prefill_tokens_per_s),
            saved_s=seconds(row.tokens.cached, join.prefill_tokens_per_s or own),
        )
    return replace(
        row,
        verdict=judgement.verdict,
        reason=judgement.reason,
        tokens=replace(row.tokens, lost=judgement.lost_tokens, processed=None),
        timing=timing,
        is_counted=row.is_counted or settled,
        settled=settled,
    )


def has_log(stack_state: StackState) -> bool:
    """Whether there is a log of the server to be read."""
    # Of a server that we started there is one, though it may lag behind; of one that we attached to there is none.
    return stack_state.join.facts > 0 or stack_state.server.pid is not None


def _is_earlier(other: RequestRow, row: RequestRow) -> bool:
    return other.id < row.id and other.run == row.run and other.api is not None


def _is_settled(stack_state: StackState, row: RequestRow, task: TaskView | None, *, is_late: bool) -> bool:
    """Whether all that the log tells of a request is there, and nobody else's."""
    if task is None:
        return is_late and row.phase == "cancelled"  # its client left before the server had begun
    if not task.released or task.is_proved:
        return task.released
    if row.phase == "cancelled":
        return not is_contested(stack_state.join, row, task, stack_state.requests, by_running=False)
    if has_figures(row.answer):
        return False
    return is_late or not is_contested(stack_state.join, row, task, stack_state.requests, by_running=True)


def _is_undecidable(stack_state: StackState, row: RequestRow, task: TaskView | None) -> bool:
    """Whether the task of a cancelled request may as well be that of another, and no answer is left to tell."""
    if task is None or row.phase != "cancelled" or not task.released or task.is_proved:
        return False
    join, rows = stack_state.join, stack_state.requests
    contested = is_contested(join, row, task, rows, by_running=False)
    return contested and not is_contested(join, row, task, rows, by_running=True)


# --- whose the slots are ----------------------------------------------------------------------------------------------


def _taken_by(stack_state: StackState, row: RequestRow, before: RequestRow | None) -> Reason | None:
    """Who used the slot of the conversation's former request after it."""
    if before is None or before.work is None:
        return None
    slot, last, own = before.work.slot, before.work.task, None if row.work is None else row.work.task
    after = [
        task
        for task in stack_state.join.tasks
        if task.slot == slot and task.task != own and not task.is_child and task.task > last
    ]
    if not after:
        return None
    task = after[0]
    if task.is_warmup:
        return Reason(ReasonKind.SLOT_LOST_TO_WARMUP)
    other = stack_state.row(task.owner) if task.owner is not None else None
    if other is None:
        return Reason(ReasonKind.SLOT_LOST_TO_BYPASS)
    if other.conversation == row.conversation and other.side == row.side:
        return None
    who = other.side or other.client or other.path
    return Reason(ReasonKind.SLOT_LOST_TO_REQUEST, request=other.id, client=who)


def warm_tokens(stack_state: StackState) -> int | None:
    """What is warm now: the warm-up's prefix, as long as it, or a conversation that began with it, has a slot."""
    if stack_state.join.facts == 0 or stack_state.warmup.warm_tokens is None:
        return stack_state.warmup.warm_tokens  # (without a log nobody knows who has which slot)
    warmed = {row.conversation for row in stack_state.requests if row.verdict == Verdict.WARM}
    is_there = any(slot.is_warmup or (slot.request and slot.conversation in warmed) for slot in stack_state.slots)
    return stack_state.warmup.warm_tokens if is_there else 0


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, its reason where it needs one, and how many tokens were evaluated in vain."""

    verdict: Verdict
    reason: Reason | None = None
    lost_tokens: int | None = None


def judge(
    row: RequestRow,
    task: TaskView | None,
    before: RequestRow | None,
    *,
    slot_taken_by: Reason | None = None,
    boundary_tokens: int | None = None,
    log_is_read: bool = False,
    begins_run: bool = False,
    threshold_ratio: float | None = None,
) -> Judgement:
    """
    Judge a request that is over.

    Args:
        row: The request, its figures composed of answer and log.
        task: Its task on the server, if it is known.
        before: The conversation's former request, if that is remembered.
        slot_taken_by: Who used the slot of *before* last, if that was somebody else.
        boundary_tokens: What the warm-up made warm: the end of the system and tools block.
        log_is_read: Whether the server's log is there at all; it is not for a server that is only attached to.
        begins_run: Whether it was the server's first request: nothing that was sent before could be cached.
        threshold_ratio: The `--slot-prompt-similarity` in force: a slot that is more alike is chosen for that, not by
            age.  None if nobody said.
    """
    if row.phase == "cancelled":
        return Judgement(Verdict.CANCELLED, Reason(ReasonKind.CLIENT_LEFT))
    if row.phase == "failed" or row.error is not None or (row.status or 200) >= 400:
        return Judgement(Verdict.FAILED)
    prompt, cached, evaluated = row.tokens.prompt, row.tokens.cached, row.tokens.evaluated
    if prompt is None or cached is None or evaluated is None:
        return Judgement(
            Verdict.UNKNOWN, Reason(ReasonKind.NO_FIGURES if log_is_read else ReasonKind.NO_FIGURES_IN_ANSWER)
        )
    if task is not None and (task.truncated or task.shifted_tokens):
        return Judgement(Verdict.TRUNCATED, Reason(ReasonKind.CONTEXT_FULL))
    reuse = _Reuse(row, task, before, prompt, cached, evaluated, begins_run, threshold_ratio or _THRESHOLD_RATIO)
    return _judge_reuse(reuse, slot_taken_by, boundary_tokens, log_is_read=log_is_read)


def is_next_to_nothing(cached_tokens: int, prompt_tokens: int) -> bool:
    """Whether so few tokens were cached that they say nothing: every chat begins with the same few of a template."""
    return cached_tokens < max(1.0, min(32.0, prompt_tokens / 4))


@dataclass(frozen=True, slots=True)
class _Reuse:
    """What is known about the reuse of one request; tokens throughout."""

    row: RequestRow
    task: TaskView | None
    before: RequestRow | None
    prompt: int
    cached: int
    evaluated: int
    begins_run: bool
    threshold_ratio: float

    @property
    def begins(self) -> bool:
        """Whether it is the first request of its conversation, as far as anybody knows."""
        return self.before is None and not self.row.change.repeats

    @property
    def is_nothing(self) -> bool:
        return is_next_to_nothing(self.cached, self.prompt)

    @property
    def is_like_nothing(self) -> bool:
        # A hybrid model may keep nothing of what matched: that is no strange prompt.
        return self.is_nothing and (self.matched or 0) <= SLACK_TOKENS

    @property
    def matched(self) -> int | None:
        """What the server found equal before it decided, or None if it did not say."""
        task = self.task
        if task is None:
            return None
        if task.ram_hit:
            ratio = task.ram_similarity_ratio
            return None if ratio is None else round(ratio * self.prompt)
        if task.lcp_tokens is not None:
            return min(task.lcp_tokens, self.prompt)
        if task.similarity_ratio is not None:
            return round(task.similarity_ratio * self.prompt)
        return None

    @property
    def unkept(self) -> int:
        """What provably could have been cached and was not: tokens that the server found equal and did not keep."""
        return max((self.matched or 0) - self.cached, 0)

    @property
    def differs_in_last_item(self) -> bool:
        difference = self.row.change.difference
        return difference is not None and not difference.is_in_head and difference.item == self.row.items - 1

    @property
    def is_from_ram(self) -> bool:
        task = self.task
        if task is None or self.is_nothing:
            return False
        if task.ram_hit:
            return True
        if task.how != "lru" or task.similarity_ratio is not None:
            return False  # the log tells of the RAM cache
        # Builds that tell of the RAM cache only at trace level: no slot was similar by more than the threshold, and yet
        # much was cached.  (With `--slot-prompt-similarity 0` slots are never compared: then the holder tells.)
        return self.cached > self.prompt * self.threshold_ratio + SLACK_TOKENS and self.holder_is_other

    @property
    def slot_is_alike(self) -> bool:
        """Whether the slot was taken for what it held, or by age and held the beginning of this prompt all the same."""
        task = self.task
        if task is None or task.how != "lru" or task.ram_hit:
            return task is not None and task.how in {"lcp", "lcs", "id"}
        return (task.similarity_ratio or 0.0) > _THRESHOLD_RATIO

    @property
    def holder_is_other(self) -> bool:
        """Whether the slot that the task got held somebody else's tokens, or none."""
        return self.task is not None and (self.task.holder is None or self.task.holder != self.row.conversation)

    @property
    def same_run(self) -> bool:
        return self.before is not None and self.before.run == self.row.run

    @property
    def expected(self) -> int | None:
        """What should have been cached, or None if nothing says so."""
        before = self.before
        if before is None or not self.same_run or before.tokens.prompt is None:
            return None
        left = before.tokens.prompt
        if before.phase == "cancelled" and before.tokens.cached is not None and before.tokens.evaluated is not None:
            # Its client left during the prefill: only the part that was evaluated by then is there.
            left = min(left, before.tokens.cached + before.tokens.evaluated)
        return min(left, self.prompt - 1)

    @property
    def slot_expected(self) -> int | None:
        """The former prompt on the slot, if that is alike."""
        task = self.task
        if task is None or not self.slot_is_alike or task.holder_prompt_tokens is None:
            return None
        return min(task.holder_prompt_tokens, self.prompt - 1)

    @property
    def held(self) -> int | None:
        """The former prompt on the slot, however that was chosen: no more than that could be reused."""
        task = self.task
        if task is None or task.holder_prompt_tokens is None:
            return None
        return min(task.holder_prompt_tokens, self.prompt - 1)


def _judge_reuse(reuse: _Reuse, slot_taken_by: Reason | None, boundary: int | None, *, log_is_read: bool) -> Judgement:
    row, cached, matched, expected = reuse.row, reuse.cached, reuse.matched, reuse.expected
    likely = expected if expected is not None else reuse.slot_expected
    kept_short = max((matched or 0) - cached, 0)
    left_early = max((likely or 0) - max(matched or 0, cached), 0)
    if kept_short > SLACK_TOKENS and kept_short >= left_early:
        return Judgement(Verdict.REPROCESS, _why_reprocessed(reuse, matched or 0), kept_short)
    if reuse.is_from_ram:
        return Judgement(Verdict.RESTORED, None, 0)
    if reuse.evaluated <= _RETRY_TOKENS and not reuse.is_nothing:
        return Judgement(Verdict.HIT, None, 0)
    if expected is not None:
        if cached >= expected - SLACK_TOKENS and not reuse.is_nothing:
            return Judgement(Verdict.HIT, None, 0)
        return _judge_loss(reuse, expected, slot_taken_by, log_is_read=log_is_read)
    if row.change.difference is not None:
        if reuse.differs_in_last_item and kept_short <= SLACK_TOKENS and not reuse.is_nothing:
            return Judgement(Verdict.HIT, None, 0)  # the newest turn in other words: all that was evaluated is new
        if reuse.begins:
            # Its difference is from another conversation that began nearly so: a matter of what both could share.
            first = _judge_first(reuse, boundary)
            if reuse.begins_run or first.verdict in {Verdict.HIT, Verdict.WARM}:
                return first
        lost = max((likely or reuse.held or reuse.prompt - 1) - cached, 0)
        if reuse.is_nothing and reuse.before is not None:
            return Judgement(Verdict.COLD, _why_cold(reuse), lost)  # whatever changed: the server was another one
        return _judge_change(
            reuse, row.change.difference, lost, slot_taken_by, is_known=row.change.repeats and log_is_read
        )
    if row.conversation is None:
        return _judge_by_slot(reuse)
    if row.change.repeats:
        return _judge_repeated(reuse, slot_taken_by)
    return _judge_first(reuse, boundary)


def _judge_by_slot(reuse: _Reuse) -> Judgement:
    """Judge a request of which no conversation is known: by the former prompt on its slot."""
    cached, expected = reuse.cached, reuse.slot_expected
    if reuse.is_like_nothing:
        return Judgement(Verdict.COLD, _why_cold(reuse), reuse.evaluated)
    if expected is not None and cached >= expected - SLACK_TOKENS:
        return Judgement(Verdict.HIT, None, 0)
    if cached * 10 >= reuse.prompt * 9 or reuse.evaluated <= SLACK_TOKENS:
        return Judgement(Verdict.HIT, None, 0)
    return Judgement(Verdict.PARTIAL, _how_far(reuse), reuse.unkept if expected is None else max(expected - cached, 0))


def _judge_repeated(reuse: _Reuse, slot_taken_by: Reason | None) -> Judgement:
    """Judge a request that repeats or edits a turn of its conversation; only what is before that turn can be cached."""
    if reuse.is_nothing:
        if reuse.holder_is_other:
            return Judgement(Verdict.EVICTED, slot_taken_by or Reason(ReasonKind.SLOT_LOST), reuse.evaluated)
        return Judgement(Verdict.COLD, _why_cold(reuse), reuse.evaluated)
    expected = reuse.slot_expected
    if not reuse.holder_is_other and expected is not None and reuse.cached >= expected - SLACK_TOKENS:
        return Judgement(Verdict.HIT, None, 0)  # a retry goes on where the abandoned prefill stopped
    if reuse.cached * 2 >= reuse.prompt:
        return Judgement(Verdict.HIT, None, 0)
    lost = reuse.unkept if expected is None else max(expected - reuse.cached, 0)
    return Judgement(Verdict.PARTIAL, Reason(ReasonKind.EARLIER_TURN_CHANGED), lost)


def _judge_first(reuse: _Reuse, boundary: int | None) -> Judgement:
    """Judge the first request of a conversation, or since a restart: it can only share a prefix with others."""
    cached = reuse.cached
    if reuse.is_like_nothing:
        return Judgement(Verdict.COLD, _why_cold(reuse), reuse.evaluated)
    task, on_slot = reuse.task, reuse.slot_expected
    took_all = task is not None and on_slot is not None and cached >= on_slot - SLACK_TOKENS
    if task is not None and task.holder_is_cut and took_all:
        return Judgement(Verdict.HIT, None, 0)  # a retry goes on where the abandoned prefill stopped
    if boundary is not None and cached >= boundary - _BOUNDARY_SLACK_TOKENS:
        return Judgement(Verdict.WARM, None, 0)
    if cached * 2 >= reuse.prompt:
        return Judgement(Verdict.WARM, None, 0)
    # Where the prefix's end is not known, all that the slot had of it has to do.
    if boundary is None and task is not None and task.holder_is_warmup and took_all:
        return Judgement(Verdict.WARM, None, 0)
    return Judgement(Verdict.PARTIAL, _how_far(reuse), reuse.unkept)


def _judge_loss(reuse: _Reuse, expected: int, slot_taken_by: Reason | None, *, log_is_read: bool) -> Judgement:
    """Judge a request that found less than the former request of its conversation left."""
    lost = max(expected - reuse.cached, 0)
    if reuse.row.change.difference is not None:
        return _judge_change(reuse, reuse.row.change.difference, lost, slot_taken_by, is_known=log_is_read)
    if not log_is_read or reuse.task is None:
        # Without the log nobody can tell an eviction from a template that renders the history anew.
        return Judgement(Verdict.COLD if reuse.is_nothing else Verdict.PARTIAL, Reason(ReasonKind.NOT_IN_CACHE), lost)
    if reuse.holder_is_other:
        return Judgement(Verdict.EVICTED, slot_taken_by or Reason(ReasonKind.SLOT_LOST), lost)
    return Judgement(Verdict.TEMPLATE, Reason(ReasonKind.RENDERED_ANEW), lost)


def _judge_change(
    reuse: _Reuse, difference: Difference, lost: int, slot_taken_by: Reason | None, *, is_known: bool
) -> Judgement:
    """
    Judge a request that the client made other than the former one.

    Args:
        reuse: What is known of it.
        difference: What the client changed.
        lost: Tokens that were evaluated in vain.
        slot_taken_by: Who used the conversation's slot last.
        is_known: Whether the conversation had a slot, and the log tells whose that is now.
    """
    if reuse.is_nothing and is_known and reuse.holder_is_other and not difference.is_in_head:
        # A change far down cost little; that somebody else had the slot cost everything.
        return Judgement(Verdict.EVICTED, slot_taken_by or Reason(ReasonKind.SLOT_LOST), lost)
    return Judgement(Verdict.PARTIAL, Reason(ReasonKind.CLIENT_CHANGED), lost)


def _why_reprocessed(reuse: _Reuse, matched: int) -> Reason:
    forced = reuse.task is not None and reuse.task.reprocessed
    return Reason(ReasonKind.NO_CHECKPOINT if forced else ReasonKind.NOT_KEPT, matched, reuse.cached)


def _how_far(reuse: _Reuse) -> Reason:
    return Reason(ReasonKind.SHORT_MATCH, max(reuse.matched or 0, reuse.cached))


def _why_cold(reuse: _Reuse) -> Reason:
    if reuse.before is not None and not reuse.same_run:
        return Reason(ReasonKind.SERVER_RESTARTED)
    if reuse.row.tokens.warm and reuse.task is not None:
        return Reason(ReasonKind.OTHER_PROMPT_WARMED)
    if reuse.row.conversation is not None and not reuse.row.change.repeats:
        return Reason(ReasonKind.FIRST_REQUEST)
    return Reason(ReasonKind.NOTHING_ALIKE)
