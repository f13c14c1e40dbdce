"""What the stack's state means, in one sentence: is the cache working, and if not, why?  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstack.state.assessment import is_next_to_nothing
from kvstack.state.explain import reason_words
from kvstack.state.lifecycle import State
from kvstack.state.records import RequestRow
from kvstack.state.stack_state import StackState
from kvstack.state.totals import decode_by_context
from kvstack.state.verdict import Level, Verdict
from kvstack.terminal.format import duration, one_line, percent, plural, seconds, tokens

RECENT = 10
"""Requests over which the reuse is summed up."""

GOOD_RATIO = 0.8
"""Reuse from which on the cache works, whatever was lost."""

SMALL_RATIO = 0.1
"""Part of the prompts that may be lost to what could be avoided."""


@dataclass(frozen=True, slots=True)
class Reading:
    """
    The answer of one glance.

    Attributes:
        level: What colour and sign it gets.
        head: Two or three words.
        detail: The rest of the sentence.
    """

    level: Level
    head: str
    detail: str


def level_of(verdict: Verdict | None) -> Level:
    """How good a verdict is."""
    return "idle" if verdict is None else verdict.info.level


def _judged(stack_state: StackState) -> list[RequestRow]:
    """Requests that say something of the cache; side requests (titles, memory) only if there is nothing else."""
    judged = [row for row in model_requests(stack_state) if level_of(row.verdict) != "idle"]
    return [row for row in judged if row.side is None] or judged


def recent_reuse_ratio(rows: Iterable[RequestRow]) -> float | None:
    """Cached / prompt tokens over the newest requests whose figures are known."""
    known = _known(rows)
    prompt = sum(row.tokens.prompt or 0 for row in known)
    return sum(row.tokens.cached or 0 for row in known) / prompt if prompt else None


def _known(rows: Iterable[RequestRow]) -> list[RequestRow]:
    return [row for row in rows if row.tokens.prompt and row.tokens.cached is not None][-RECENT:]


def model_requests(stack_state: StackState) -> list[RequestRow]:
    """Requests that may concern the cache: all but a client's looking around (its list of models, say)."""
    return [row for row in stack_state.requests if row.api is not None or row.method == "POST"]


def decode_speed_by_context(rows: Iterable[RequestRow]) -> list[tuple[int, float]]:
    """
    Decode speed at growing context, as far as *rows* go.

    Returns:
        For each power of two that contexts lie below, in tokens, the decode speed in tokens per second.
    """
    return [(one.up_to_tokens, one.tokens_per_s) for one in decode_by_context(rows)]


def state_sentence(stack_state: StackState, now_s: float) -> str:
    """What a stack that is not ready does, and for how long."""
    since = "" if stack_state.state_since_s is None else f" for {duration(now_s - stack_state.state_since_s)}"
    so_far = f" ({since.removeprefix(' for ')} so far)" if since else ""
    reason = one_line(stack_state.reason)
    server = stack_state.server
    match stack_state.state:
        case State.STARTING | State.LOADING if server.is_attached:
            # Whose fault it is that nothing goes on: not a load's, where nobody listens.
            return f"{attached_words(stack_state)}{so_far}"
        case State.BACKOFF if server.is_attached:
            return f"{attached_words(stack_state)}: waiting until it is back{so_far}"
        case State.STARTING:
            return f"starting llama-server{since}"
        case State.LOADING:
            return f"llama-server loads the model{since}"
        case State.WARMING:
            return f"evaluating the prefix{since}: the first request will find it cached"
        case State.BACKOFF:
            restarts = plural(stack_state.restarts, "restart")
            return f"{reason or 'llama-server died'}; it restarts soon ({restarts})"
        case State.STOPPING:
            return f"open streams finish, then llama-server stops{f' ({reason})' if reason else ''}"
        case State.FAILED | State.STOPPED:
            return reason or "nothing runs"
        case State.READY:
            return reason


def attached_words(stack_state: StackState) -> str:
    """What is known of a server that is attached to and does not serve yet: its address first."""
    reason = "" if stack_state.state is State.STARTING else one_line(stack_state.reason)
    return f"{one_line(stack_state.server.url or 'the server')}: {reason or 'looking for the server'}"


def read(stack_state: StackState, now_s: float) -> Reading:
    """The sentence for *stack_state*."""
    if stack_state.state is not State.READY:
        level: Level = "bad" if stack_state.state in {State.FAILED, State.BACKOFF} else "idle"
        return Reading(level, stack_state.state.upper(), state_sentence(stack_state, now_s))
    judged = _judged(stack_state)
    if not judged:
        if any(row.verdict is None for row in model_requests(stack_state)):
            return Reading("idle", "READY", "the first request runs; its verdict comes when it is over")
        if any(row.verdict is Verdict.UNKNOWN for row in model_requests(stack_state)):
            return Reading("idle", "NO FIGURES YET", "neither an answer nor the log told what was cached")
        if stack_state.warmup.is_unproved:
            warmup = stack_state.warmup
            warm = f"{tokens(warmup.warm_tokens)} tokens are {warmup.snapshot}, which it will prove"
        elif stack_state.warmup.outcome == "done":
            warm = f"{tokens(stack_state.warmup.warm_tokens)} tokens are warm"
        elif stack_state.warmup.outcome == "failed":
            return Reading("warn", "READY, NOT WARM", f"the warm-up failed: {one_line(stack_state.warmup.detail)}")
        else:
            warm = "nothing is warm yet: the first prompt will be evaluated in full"
        return Reading("idle", "READY", f"waiting for the first request; {warm}")
    if level_of(judged[-1].verdict) == "good":
        return _of_recent(judged)
    return _of_row(judged[-1])


def _of_recent(judged: list[RequestRow]) -> Reading:
    """The last prompt found its prefix: whether that is how it goes."""
    known = _known(judged)
    prompt = sum(row.tokens.prompt or 0 for row in known)
    cached = sum(row.tokens.cached or 0 for row in known)
    lost = [row for row in known if level_of(row.verdict) != "good" and row.tokens.lost]
    lost_tokens = sum(row.tokens.lost or 0 for row in lost)
    # That a first prompt is evaluated once is no fault, as long as more comes back than was spent.
    avoidable = sum(row.tokens.lost or 0 for row in lost if row.verdict is not Verdict.COLD)
    ratio = cached / prompt if prompt else None
    over = "prompt" if len(known) == 1 else plural(len(known), "prompt")
    works = ratio is None or ratio >= GOOD_RATIO or (avoidable <= SMALL_RATIO * prompt and lost_tokens <= cached)
    if works or not lost:
        return Reading("good", "CACHE WORKS", f"{percent(ratio)} of the last {over} came from the cache")
    return Reading("warn", "CACHE PARTLY", f"{percent(ratio)} of the last {over} reused; {_main_cause(lost)}")


def _main_cause(lost: list[RequestRow]) -> str:
    """The verdict that lost most, and its newest cause."""
    sums: Counter[Verdict | None] = Counter()
    for row in lost:
        sums[row.verdict] += row.tokens.lost or 0
    worst = max(sums, key=lambda verdict: sums[verdict])
    newest = next(row for row in reversed(lost) if row.verdict == worst)
    why = reason_words(newest)
    return f"{worst}: {one_line(why)}" if why else f"most was lost to {worst}"


def _is_nothing(row: RequestRow) -> bool:
    known = row.tokens.cached is not None and row.tokens.prompt is not None
    return known and is_next_to_nothing(row.tokens.cached or 0, row.tokens.prompt or 0)


def _of_row(row: RequestRow) -> Reading:
    cost = f"{tokens(row.tokens.evaluated)} tokens evaluated"
    if row.timing.prefill_ms is not None:
        cost = f"{tokens(row.tokens.evaluated)} tokens in {seconds(row.timing.prefill_ms)}"
    cause = one_line(reason_words(row) or "")
    if cause and row.verdict is Verdict.EVICTED:
        cause = f"evicted {cause}"  # the cause begins with "by"
    because = f"{cause}: {cost}" if cause else cost
    match row.verdict:
        case Verdict.FAILED:
            return Reading("bad", "REQUEST FAILED", one_line(row.error or reason_words(row) or "no reason given"))
        case Verdict.COLD:
            return Reading("warn", "COLD", because if cause else f"the last prompt found nothing cached: {cost}")
        case Verdict.TRUNCATED:
            return Reading("warn", "CONTEXT FULL", because)
        case Verdict.PARTIAL if not _is_nothing(row):
            return Reading("warn", "CACHE PARTLY", because)
        case Verdict.PARTIAL:
            return Reading("bad", "CACHE MISSED", because)
        case _:
            return Reading(level_of(row.verdict), "CACHE MISSED", because if cause else f"{row.verdict}: {cost}")
