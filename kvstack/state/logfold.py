"""The log's side of the joining: what one fact of the present run's log changes of tasks and slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvstack.state import log_facts as facts
from kvstack.state.attribution import Join, measured
from kvstack.state.records import RequestRow, SlotView, TaskView
from kvstack.state.request_stats import prompt_of

TASKS_KEPT = 64
"""Tasks of one run that may still meet their request."""


def fold(join: Join, fact: facts.LogFact, rows: Sequence[RequestRow], *, warming: bool) -> Join:
    """
    Take one fact of the present run's log.

    Args:
        join: What is known.
        fact: The new fact.
        rows: The requests, oldest first.
        warming: Whether the stack warms up before it serves: then tasks are its own.
    """
    join = replace(join, facts=join.facts + 1)
    match fact:
        case facts.SlotCompared():
            return _expect(join, fact.slot, lcp_tokens=fact.lcp_tokens)
        case facts.SlotSelected():
            join = _expect(
                replace(join, selected=fact.slot),
                fact.slot,
                how=fact.how,
                similarity_ratio=fact.similarity_ratio,
                keep_ratio=fact.keep_ratio,
                **({} if fact.lcp_tokens is None else {"lcp_tokens": fact.lcp_tokens}),
            )
            # Comparisons with the slots that were not chosen say nothing of the next task.
            return replace(join, pending={fact.slot: join.pending[fact.slot]})
        case facts.RamCacheSearched() if join.selected is not None:
            return _compare(join, join.selected, fact)
        case facts.RamCacheHit() if join.selected is not None:
            return _expect(join, join.selected, ram_hit=True, ram_similarity_ratio=fact.similarity_ratio)
        case facts.RestoreFailed() if fact.slot is not None and fact.task is None:
            return _expect(join, fact.slot, ram_hit=False)
        case facts.TaskLaunched():
            return _launch(join, fact, rows, warming=warming)
        case facts.PromptStarted():
            return _on_task(join, fact.slot, fact.task, lambda t: replace(t, prompt_tokens=fact.prompt_tokens))
        case facts.ReusePoint():
            join = _on_task(join, fact.slot, fact.task, lambda t: _reuse(t, fact.cached_tokens))
            return join.with_slot(fact.slot, lambda s: replace(s, processed_tokens=fact.cached_tokens))
        case facts.PrefillProgressed():
            join = _on_task(
                join,
                fact.slot,
                fact.task,
                lambda t: replace(
                    t, processed_tokens=fact.processed_tokens, tokens_per_s=fact.tokens_per_s or t.tokens_per_s
                ),
            )
            return join.with_slot(
                fact.slot,
                lambda s: replace(
                    s, processed_tokens=fact.processed_tokens, tokens_per_s=fact.tokens_per_s or s.tokens_per_s
                ),
            )
        case facts.PrefillTimed():
            join = measured(join, fact.evaluated_tokens, fact.prefill_ms)
            return _on_task(
                join,
                fact.slot,
                fact.task,
                lambda t: replace(t, prefill_ms=fact.prefill_ms, evaluated_tokens=fact.evaluated_tokens),
            )
        case facts.DecodeTimed():
            return _on_task(
                join,
                fact.slot,
                fact.task,
                lambda t: replace(
                    t,
                    decode_ms=fact.decode_ms,
                    generated_tokens=fact.generated_tokens,
                    decode_tokens_per_s=fact.tokens_per_s,
                ),
            )
        case facts.SlotReleased():
            return _release(join, fact)
        case facts.FullReprocess():
            return _on_task(join, fact.slot, fact.task, lambda t: replace(t, reprocessed=True))
        case facts.CheckpointRestored():
            return _on_task(join, fact.slot, fact.task, lambda t: replace(t, restored_tokens=fact.position_tokens))
        case facts.CheckpointCreated():
            return join.with_slot(fact.slot, lambda s: replace(s, checkpoints=fact.number or s.checkpoints + 1))
        case facts.CheckpointErased():
            join = _on_task(
                join, fact.slot, fact.task, lambda t: replace(t, checkpoints_erased=t.checkpoints_erased + 1)
            )
            return join.with_slot(fact.slot, lambda s: replace(s, checkpoints=max(s.checkpoints - 1, 0)))
        case facts.ChunkReused():
            return _on_task(join, fact.slot, fact.task, lambda t: replace(t, chunk_tokens=t.chunk_tokens + fact.tokens))
        case facts.ContextShifted():
            return _on_task(
                join,
                fact.slot,
                fact.task,
                lambda t: replace(t, shifted_tokens=t.shifted_tokens + fact.discarded_tokens),
            )
        case facts.PromptTruncated():
            return _on_task(join, fact.slot, fact.task, lambda t: replace(t, truncated=True))
        case facts.SlotCleared():
            return join.with_slot(fact.slot, lambda s: replace(SlotView(s.slot), task=s.task))
        case facts.TaskCancelled():
            return _on_task(join, None, fact.task, lambda t: replace(t, cancelled=True))
        case facts.RequestRejected():
            return _on_task(join, None, fact.task, lambda t: replace(t, rejected=fact.text))
        case facts.ServerSlept(asleep=True):
            return replace(join, slots=())  # the KV cache is lost
        case _:
            return join


def _reuse(task: TaskView, tokens: int) -> TaskView:
    # The first point of a task is what was kept; later ones are the progress of its batches.
    return replace(
        task, processed_tokens=tokens, cached_tokens=tokens if task.cached_tokens is None else task.cached_tokens
    )


def _expect(join: Join, slot: int, **changes: object) -> Join:
    known = join.pending.get(slot) or TaskView(slot, -1)
    return replace(join, pending={**join.pending, slot: replace(known, **changes)})  # type: ignore[arg-type]


def _compare(join: Join, slot: int, fact: facts.RamCacheSearched) -> Join:
    """A slot that is chosen by age is compared with the prompt only when the RAM cache is searched."""
    said = join.pending.get(slot)
    if said is None or said.how != "lru" or fact.keep_ratio is None:
        return join
    return _expect(join, slot, similarity_ratio=fact.similarity_ratio, keep_ratio=fact.keep_ratio)


def _on_task(join: Join, slot: int | None, task: int | None, change: Callable[[TaskView], TaskView]) -> Join:
    for index in range(len(join.tasks) - 1, -1, -1):
        view = join.tasks[index]
        if view.task == task and (slot is None or view.slot == slot):
            return join.with_task(index, change(view))
    return join


def _launch(join: Join, fact: facts.TaskLaunched, rows: Sequence[RequestRow], *, warming: bool) -> Join:
    said = join.pending.get(fact.slot) or TaskView(fact.slot, -1)
    slot = next((view for view in join.slots if view.slot == fact.slot), None) or SlotView(fact.slot)
    owner = None if warming or fact.is_child else _likely_owner(join, rows)
    is_warmup = warming
    if not warming and not fact.is_child and join.warmup_after is not None:
        is_warmup = owner is None or owner.id > join.warmup_after
    if is_warmup:
        owner, join = None, replace(join, warmup_after=None)
    task = replace(
        said,
        task=fact.task,
        is_child=fact.is_child,
        owner=owner.id if owner is not None else None,
        is_warmup=is_warmup,
        holder=slot.conversation,
        holder_request=slot.request,
        holder_is_warmup=slot.is_warmup,
        holder_is_cut=slot.is_cut,
        holder_prompt_tokens=slot.prompt_tokens,
    )
    pending = {number: view for number, view in join.pending.items() if number != fact.slot}
    join = replace(join, tasks=(*join.tasks[-(TASKS_KEPT - 1) :], task), pending=pending)
    return join.with_slot(fact.slot, lambda s: _occupied(s, task, owner))


def _occupied(slot: SlotView, task: TaskView, owner: RequestRow | None) -> SlotView:
    return replace(
        slot,
        task=task.task,
        processed_tokens=None,
        tokens_per_s=None,
        conversation=owner.conversation if owner is not None else None,
        client=(owner.side or owner.client) if owner is not None else None,
        request=owner.id if owner is not None else None,
        is_warmup=task.is_warmup,
    )


def _likely_owner(join: Join, rows: Iterable[RequestRow]) -> RequestRow | None:
    owned = {task.owner for task in join.tasks}
    return next((row for row in rows if _waits(row, join.run) and row.id not in owned), None)


def _waits(row: RequestRow, run: int) -> bool:
    return row.api is not None and row.run == run and row.phase in {"forwarded", "answering"} and row.answer is None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _release(join: Join, fact: facts.SlotReleased) -> Join:
    def over(task: TaskView) -> TaskView:
        evaluated = task.evaluated_tokens
        if evaluated is None and task.cached_tokens is not None:
            # Cancelled: no timings are printed, but the work that was done stays in the slot.
            # What is longer than the prompt is of the answer.
            filled = min(fact.total_tokens, _or(task.prompt_tokens, fact.total_tokens))
            evaluated = max(filled - task.cached_tokens, 0)
        return replace(
            task,
            released=True,
            total_tokens=fact.total_tokens,
            truncated=task.truncated or fact.truncated,
            evaluated_tokens=evaluated,
        )

    join = _on_task(join, fact.slot, fact.task, over)
    task = next((view for view in reversed(join.tasks) if (view.slot, view.task) == (fact.slot, fact.task)), None)
    if task is not None and task.owner is None and not task.is_warmup and not task.is_child:
        join = replace(join, unclaimed=join.unclaimed + 1)
    if task is not None and task.rejected is not None:
        # A refused prompt leaves the slot's content as it was.
        former = task
        return join.with_slot(
            fact.slot,
            lambda s: replace(
                s,
                task=None,
                processed_tokens=None,
                tokens_per_s=None,
                conversation=former.holder,
                client=None,
                request=former.holder_request,
                is_warmup=former.holder_is_warmup,
            ),
        )
    prompt = None if task is None else prompt_of(task)
    return join.with_slot(
        fact.slot,
        lambda s: replace(
            s,
            task=None,
            processed_tokens=None,
            tokens_per_s=None,
            tokens=fact.total_tokens,
            is_cut=prompt is not None and fact.total_tokens < prompt,
            prompt_tokens=fact.total_tokens if prompt is None else min(prompt, fact.total_tokens),
        ),
    )
