"""Does this configuration let the prompt cache work?"""

from __future__ import annotations

from collections.abc import Iterator

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.llama.model.memory import MIB, Kind
from kvstack.state import log_facts


def context_per_slot(facts: Facts) -> Iterator[Finding]:
    """A conversation gets less context than the config says."""
    server = facts.config.server
    wanted = server.ctx_size
    evidence, got = "", None
    if facts.props is not None and facts.props.ctx_per_slot is not None:
        got = facts.props.ctx_per_slot
        evidence = f"/props: n_ctx = {got:,}, total_slots = {facts.props.slots}; ctx_size = {wanted:,}"
    elif slots := facts.logged(log_facts.SlotsInitialised):
        got = slots[-1].ctx_per_slot
        evidence = f"log: n_slots = {slots[-1].slots}, n_ctx_slot = {got}; ctx_size = {wanted:,}"
    elif server.parallel > 1 and not facts.settings.unified and not facts.config.attached:
        got = wanted // server.parallel
        evidence = f"ctx_size {wanted:,} / parallel {server.parallel}, not unified"
    if got is None or got >= wanted or facts.config.attached:
        return
    trained = facts.shape.training_ctx_tokens if facts.shape is not None else None
    if trained is not None and trained < wanted and got <= trained:
        remedy = f"The model was trained for {trained:,} tokens: set server.ctx_size to that."
    else:
        remedy = "Set server.parallel = 1, or server.kv_unified = true where the build has --kv-unified."
    yield Finding(
        "ctx-per-slot",
        Severity.ERROR if got * 2 <= wanted else Severity.WARNING,
        f"One conversation gets {got:,} tokens of context instead of {wanted:,}",
        evidence,
        remedy,
    )


def training_context(facts: Facts) -> Iterator[Finding]:
    """The context is longer than the model was trained for."""
    trained = facts.shape.training_ctx_tokens if facts.shape is not None else None
    if trained is None or facts.config.server.ctx_size <= trained or facts.config.attached:
        return
    yield Finding(
        "ctx-beyond-training",
        Severity.WARNING,
        "The context is longer than the model was trained for, and llama-server cuts it down",
        f"ctx_size = {facts.config.server.ctx_size:,}; the model's header says {trained:,}",
        f"Set server.ctx_size = {trained}.",
    )


def cache_ram_off(facts: Facts) -> Iterator[Finding]:
    """A side request throws the conversation away for good."""
    if facts.settings.cache_ram_bytes != 0 or facts.config.attached:
        return
    shape = facts.shape
    rewinds = shape is not None and shape.needs_checkpoints
    yield Finding(
        "cache-ram-off",
        Severity.ERROR if rewinds else Severity.WARNING,
        "The host prompt cache is off: after a side request (title, heartbeat) the conversation is evaluated again",
        "--cache-ram 0" + (f"; {shape.architecture} is a {shape.kind} model" if rewinds and shape is not None else ""),
        "Set server.cache_ram_mib to 2048 or more (8192 keeps one conversation of 100,000 tokens).",
    )


def checkpoint_min_step(facts: Facts) -> Iterator[Finding]:
    """The list of checkpoints fills with recent positions and loses the system prompt's."""
    if facts.settings.checkpoint_min_step != 0 or facts.shape is None or not facts.shape.needs_checkpoints:
        return
    yield Finding(
        "checkpoint-min-step",
        Severity.ERROR,
        "Checkpoints may be close together, so the one at the end of the system prompt is lost after some steps",
        f"--checkpoint-min-step 0 on a {facts.shape.kind} model ({facts.shape.architecture})",
        "Remove server.checkpoint_min_step: the default keeps it.",
    )


def cache_reuse(facts: Facts) -> Iterator[Finding]:
    """Chunk reuse is unsafe where there is recurrent state, and useless against a replaced id."""
    if facts.settings.cache_reuse <= 0 or facts.shape is None or not facts.shape.needs_checkpoints:
        return
    hybrid = facts.shape.kind == Kind.HYBRID
    yield Finding(
        "cache-reuse",
        Severity.ERROR if hybrid else Severity.WARNING,
        "Chunk reuse restores the recurrent state of another text"
        if hybrid
        else "Chunk reuse does not work with a sliding window",
        f"--cache-reuse {facts.settings.cache_reuse} on a {facts.shape.kind} model ({facts.shape.architecture})",
        "Remove --cache-reuse from server.extra_args; it never helps against a replaced id or time anyway.",
    )


def similarity(facts: Facts) -> Iterator[Finding]:
    """Slots are not chosen by what they hold; with one slot there is nothing to choose."""
    slots = facts.props.slots if facts.props is not None else None
    if (slots or facts.config.server.parallel) == 1:
        return
    ratio = facts.settings.similarity_ratio
    selected = [fact for fact in facts.logged(log_facts.SlotSelected) if fact.threshold_ratio is not None]
    logged = selected[-1].threshold_ratio if selected else None
    if (ratio if ratio is not None else logged) != 0:
        return
    yield Finding(
        "slot-similarity",
        Severity.WARNING,
        "A slot is not chosen by the prompt that it holds, so a conversation may land on another one's slot",
        "--slot-prompt-similarity 0" if ratio is not None else "log: the threshold of sim_best is 0.000",
        "Remove server.slot_prompt_similarity, or the flag from server.extra_args (llama-server's default: 0.1).",
    )


def context_shift(facts: Facts) -> Iterator[Finding]:
    """A full context loses its middle, and with it the common prefix."""
    shifted = facts.logged(log_facts.ContextShifted)
    if not facts.settings.context_shift and not shifted:
        return
    if shifted:
        evidence = f"log: {len(shifted)} times, last with {shifted[-1].discarded_tokens:,} tokens thrown away"
    else:
        evidence = "--context-shift"
    yield Finding(
        "context-shift",
        Severity.WARNING,
        "A conversation that fills its context loses its middle silently, and its cached prefix too",
        evidence,
        "Remove --context-shift; a client that gets an error instead compacts its conversation.",
    )


def sleep(facts: Facts) -> Iterator[Finding]:
    """A server that sleeps forgets its cache."""
    seconds = facts.settings.sleep_idle_s
    slept = [fact for fact in facts.logged(log_facts.ServerSlept) if fact.asleep]
    if seconds < 0 and not slept:
        return
    yield Finding(
        "sleep",
        Severity.WARNING,
        "The server unloads its model when it is idle, and its KV cache with it",
        f"--sleep-idle-seconds {seconds:g}" if seconds >= 0 else f"log: it went to sleep {len(slept)} times",
        "Remove --sleep-idle-seconds.",
    )


def slots_without_memory(facts: Facts) -> Iterator[Finding]:
    """An entry that is larger than the host cache's limit is skipped."""
    skipped = facts.logged(log_facts.RamCacheSkipped)
    if not skipped:
        return
    yield Finding(
        "cache-ram-small",
        Severity.WARNING,
        "A conversation did not fit into the host prompt cache and was not kept",
        f"log: {len(skipped)} times skipped; the limit is {facts.settings.cache_ram_bytes // MIB:,} MiB",
        "Raise server.cache_ram_mib, if the memory allows it.",
    )


CHECKS = (
    context_per_slot,
    training_context,
    cache_ram_off,
    checkpoint_min_step,
    cache_reuse,
    similarity,
    context_shift,
    sleep,
    slots_without_memory,
)
"""The checks of this module."""
