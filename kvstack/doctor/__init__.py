"""
The doctor: facts about a machine, a config and a server -> findings. Pure.

    facts             what is known, as values; everything may be unknown
    cache             does this configuration let the prompt cache work?
    memory            does it fit, with the system and the caches beside it?
    gpu               is the GPU there, is it the right one, does it do the work?
    model             the model file and its chat template
    machine           kernel, ports, log level, proxy
    running           the stack as it runs now: does it serve, is it warm, what keeps its cache from working?
    recurring_misses  requests that lost to one cause -> the habit
    failures          failure messages of server, driver and kernel, with their remedies

A check is a function from `Facts` to findings, a finding is a value.  What is not known gives no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstack.doctor import cache, failures, gpu, machine, memory, model, running
from kvstack.doctor.facts import Facts, Finding, Severity

__all__ = ["CHECKS", "Facts", "Finding", "Severity", "diagnose"]

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *running.CHECKS,
    *cache.CHECKS,
    *memory.CHECKS,
    *gpu.CHECKS,
    *model.CHECKS,
    *machine.CHECKS,
    *failures.CHECKS,
)
"""All checks, in the order in which a person should read their findings."""


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """
    Run all checks.

    Returns:
        Findings, the severe ones first.
    """
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: finding.severity.rank))
