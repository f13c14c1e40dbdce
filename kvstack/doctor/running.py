"""The stack as it runs now, or how its last run ended: does it serve, is it warm, what keeps its cache from working?"""

from __future__ import annotations

from collections.abc import Iterator

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.doctor.recurring_misses import habits, judged_rows
from kvstack.state.explain import advice
from kvstack.state.lifecycle import State

MISSED_FROM_RATIO = 0.25
"""Part of the requests that has to share one cause before it is called a habit of the stack."""


def unreachable(facts: Facts) -> Iterator[Finding]:
    """Nobody answers at the address that is attached to."""
    if facts.config.attached and facts.unreachable is not None:
        yield Finding(
            "server-unreachable",
            Severity.ERROR,
            "The llama-server that the stack attaches to does not answer",
            f"server.url = {facts.config.upstream_url}: {facts.unreachable}",
            "Start that server, or correct server.url.",
        )


def state(facts: Facts) -> Iterator[Finding]:
    """It gave up, waits for its next start, or lost its server before."""
    running = facts.running
    look = f"`kvstack logs {facts.config.name}` shows the server's last lines."
    if running is None:
        if facts.last_end is not None:
            yield Finding("stack-failed", Severity.ERROR, *facts.last_end)
        return
    if running.state is State.FAILED:
        yield Finding("stack-failed", Severity.ERROR, "The stack has given up", running.reason, look)
    elif running.state is State.BACKOFF and not facts.config.attached:
        yield Finding("server-died", Severity.ERROR, "llama-server died and is being restarted", running.reason, look)
    elif running.restarts and not facts.config.attached:
        times = "once" if running.restarts == 1 else f"{running.restarts} times"
        yield Finding(
            "server-died",
            Severity.WARNING,
            "The llama-server died while the stack was running, and its cache with it",
            f"restarted {times}",
            look,
        )


def warmup(facts: Facts) -> Iterator[Finding]:
    """The warm-up failed, so first requests are evaluated as a whole."""
    running = facts.running
    if running is not None and running.warmup.outcome == "failed":
        name, detail = facts.config.name, running.warmup.detail or "no reason was given"
        too_long = "context size" in detail
        yield Finding(
            "warmup-failed",
            Severity.WARNING,
            "The warm-up failed: the first request of each conversation is evaluated as a whole",
            detail,
            "The prefix does not fit: raise server.ctx_size, or lower server.parallel, and start the stack again."
            if too_long
            else f"Fix the reported problem ([warmup] in the config), then run `kvstack warmup {name}` again.",
        )


def reuse(facts: Facts) -> Iterator[Finding]:
    """Requests keep missing the cache for one reason."""
    running = facts.running
    rows = judged_rows(running.requests) if running is not None else []
    found = habits(rows)
    if not found or found[0].times < MISSED_FROM_RATIO * len(rows):
        return
    habit = found[0]
    cause = habit.verdict.info.recurring if habit.cause is None else f"{habit.cause} in {habit.path}"
    cached, prompt = sum(row.tokens.cached or 0 for row in rows), sum(row.tokens.prompt or 0 for row in rows)
    yield Finding(
        "cache-missed",
        Severity.WARNING,
        f"{habit.times} of the last {len(rows)} requests missed the cache for one reason: {cause}",
        f"{habit.verdict}, last of request {habit.newest.id}; {cached:,} of all {prompt:,} prompt tokens were cached",
        " ".join((*advice(habit.newest), f"`kvstack explain {habit.newest.id}` tells more.")),
    )


CHECKS = (unreachable, state, warmup, reuse)
"""The checks of this module."""
