"""
Who works for whom: joins the log's slots and tasks with the proxy's requests.

The log names no request and the answer names no task.  What they share is exact: an answer's `timings.prompt_ms`,
`prompt_n` and `predicted_n` are the figures of the task's `prompt eval time` and `eval time` lines.  So a task has a
likely owner as soon as it is launched (requests get tasks in the order in which they were sent), which is enough to
show progress, and a proved one when the figures agree; either side may come first.  A likely owner that the figures
contradict loses the task.

A warm-up is a client too, of the stack's own: while the stack warms up before it serves, all tasks are its; later its
task is found as a request's is, by the order of sending and then by the figures.

Task ids and slots start again with each server process, so nothing is carried over from one run to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstack.core import logfacts as facts
from kvstack.core.events import AnswerSeen, WarmupEnded
from kvstack.core.figures import agrees, prompt_of
from kvstack.core.views import RequestRow, SlotView, TaskView

__all__ = ["Join", "begin_warmup", "claim_warmup", "end_warmup", "fold", "measured", "settle", "task_of"]

TASKS_KEPT = 64
"""Tasks of one run that may still meet their request."""

RATE_FROM_TOKENS = 64
"""Shorter prefills measure the overhead, not the rate."""


@dataclass(frozen=True, slots=True)
class Join:
    """
    What the log of the present run has told so far.

    Attributes:
        run: Number of the server process.
        facts: Facts read of its log; 0 means that there is no log.
        tasks: The newest tasks, in the order of their launch.
        slots: By slot number.
        pending: What was said of a slot's next task, by slot; its `task` is -1.
        selected: The slot that was chosen last: records of the RAM cache are about it.
        rate_tokens: Prefilled tokens that the rate is measured by.
        rate_ms: Milliseconds that they took.
        unclaimed: Tasks that are over and did not come through the proxy.
        warmup_after: The newest request when a warm-up was sent that has no task yet; None if there is none such.
        warmup_figures: Evaluated and prompt tokens of a warm-up that is over and whose task is not proved yet.
    """

    run: int = 0
    facts: int = 0
    tasks: tuple[TaskView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    pending: Mapping[int, TaskView] = field(default_factory=dict)
    selected: int | None = None
    rate_tokens: int = 0
    rate_ms: float = 0.0
    unclaimed: int = 0
    warmup_after: int | None = None
    warmup_figures: tuple[int, int | None] | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """
        The prefill rate of this run.
        """
        return self.rate_tokens * 1000.0 / self.rate_ms if self.rate_ms > 0 else None


def task_of(join: Join, request: int) -> TaskView | None:
    """
    The task that works for a request, as far as it is known.
    """
    return next((task for task in reversed(join.tasks) if task.owner == request and not task.is_child), None)


def measured(join: Join, tokens: int | None, ms: float | None) -> Join:
    """
    Count one finished prefill into the rate.
    """
    if tokens is None or ms is None or tokens < RATE_FROM_TOKENS or ms <= 0:
        return join
    return replace(join, rate_tokens=join.rate_tokens + tokens, rate_ms=join.rate_ms + ms)


# --- the log's side ------------------------------------------------------------------------------------------------


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
            return _on_slot(join, fact.slot, lambda s: replace(s, processed_tokens=fact.cached_tokens))
        case facts.PrefillProgressed():
            join = _on_task(
                join,
                fact.slot,
                fact.task,
                lambda t: replace(
                    t, processed_tokens=fact.processed_tokens, tokens_per_s=fact.tokens_per_s or t.tokens_per_s
                ),
            )
            return _on_slot(
                join,
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
            return _on_slot(join, fact.slot, lambda s: replace(s, checkpoints=fact.number or s.checkpoints + 1))
        case facts.CheckpointErased():
            join = _on_task(
                join, fact.slot, fact.task, lambda t: replace(t, checkpoints_erased=t.checkpoints_erased + 1)
            )
            return _on_slot(join, fact.slot, lambda s: replace(s, checkpoints=max(s.checkpoints - 1, 0)))
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
            return _on_slot(join, fact.slot, lambda s: replace(SlotView(s.slot), task=s.task))
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


def _on_task(join: Join, slot: int | None, task: int | None, change: Callable[[TaskView], TaskView]) -> Join:
    for index in range(len(join.tasks) - 1, -1, -1):
        view = join.tasks[index]
        if view.task == task and (slot is None or view.slot == slot):
            return _with_task(join, index, change(view))
    return join


def _with_task(join: Join, index: int, task: TaskView) -> Join:
    return replace(join, tasks=(*join.tasks[:index], task, *join.tasks[index + 1 :]))


def _on_slot(join: Join, slot: int, change: Callable[[SlotView], SlotView]) -> Join:
    slots = {view.slot: view for view in join.slots}
    slots[slot] = change(slots.get(slot) or SlotView(slot))
    return replace(join, slots=tuple(slots[number] for number in sorted(slots)))


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
    return _on_slot(join, fact.slot, lambda s: _occupied(s, task, owner))


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


def _release(join: Join, fact: facts.SlotReleased) -> Join:
    def over(task: TaskView) -> TaskView:
        evaluated = task.evaluated_tokens
        if evaluated is None and task.cached_tokens is not None:
            # Cancelled during the prefill: no timings are printed, but the work that was done stays in the slot.
            evaluated = max(fact.total_tokens - task.cached_tokens, 0)
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
        return _on_slot(
            join,
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
    return _on_slot(
        join,
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


# --- proof ---------------------------------------------------------------------------------------------------------


def settle(join: Join, rows: Sequence[RequestRow]) -> tuple[Join, frozenset[int]]:
    """
    Prove or correct the owners of tasks by the answers that are there.

    Returns:
        The new join, and the numbers of the requests that gained or lost a task.
    """
    changed: set[int] = set()
    proved = {task.owner for task in join.tasks if task.is_proved}
    for row in rows:
        answer = row.answer
        if row.settled or answer is None or answer.evaluated_tokens is None:
            continue  # (a settled row whose task is forgotten must not take a new one with the same figures)
        if row.id in proved or row.run != join.run:
            continue
        join = _prove(join, row, answer, rows, changed)
    return join, frozenset(changed)


def _prove(join: Join, row: RequestRow, answer: AnswerSeen, rows: Sequence[RequestRow], changed: set[int]) -> Join:
    own = next((index for index, task in enumerate(join.tasks) if task.owner == row.id), None)
    found = own if own is not None and agrees(answer, join.tasks[own]) else None
    if found is None:
        found = next(
            (
                index
                for index, task in enumerate(join.tasks)
                if not task.is_proved and not task.is_child and agrees(answer, task)
            ),
            None,
        )
    if found is None:
        if own is not None and join.tasks[own].released and agrees(answer, join.tasks[own]) is False:
            join = _hand_over(join, own, None)
            changed.add(row.id)
        return join
    loser = join.tasks[found].owner
    if own is not None and own != found:
        # The two were mixed up: the other request gets what was taken for ours.
        heir = next((other for other in rows if other.id == loser), None)
        join = _hand_over(join, own, heir, is_warmup=join.tasks[found].is_warmup)
    join = _hand_over(join, found, row)
    join = _with_task(join, found, replace(join.tasks[found], is_proved=True))
    changed.update(number for number in (row.id, loser) if number is not None)
    return join


def _hand_over(join: Join, index: int, row: RequestRow | None, *, is_warmup: bool = False) -> Join:
    """
    Give a task another owner, and with it what it left in its slot.
    """
    task = join.tasks[index]
    if task.owner == (row.id if row is not None else None) and task.is_warmup == is_warmup:
        return join
    if task.released and not task.is_child:
        was_nobodys = task.owner is None and not task.is_warmup
        unclaimed = join.unclaimed + (row is None and not is_warmup) - was_nobodys
        join = replace(join, unclaimed=max(unclaimed, 0))
    conversation = row.conversation if row is not None else None
    request = row.id if row is not None else None
    join = _with_task(join, index, replace(task, owner=request, is_warmup=is_warmup))
    for later in range(index + 1, len(join.tasks)):
        if join.tasks[later].slot == task.slot:
            heir = replace(join.tasks[later], holder=conversation, holder_request=request, holder_is_warmup=is_warmup)
            return _with_task(join, later, heir)
    client = (row.side or row.client) if row is not None else None
    return _on_slot(
        join,
        task.slot,
        lambda s: replace(s, conversation=conversation, client=client, request=request, is_warmup=is_warmup),
    )


# --- warm-ups ------------------------------------------------------------------------------------------------------


def begin_warmup(join: Join, newest_request: int) -> Join:
    """
    A warm-up is sent: the next task is its, unless a request that was sent before still has none.
    """
    return replace(join, warmup_after=newest_request, warmup_figures=None)


def end_warmup(join: Join, ended: WarmupEnded) -> Join:
    """
    A warm-up is over; its figures prove its task, now or when the log has caught up.
    """
    if ended.outcome != "done":
        return replace(join, warmup_after=None)
    figures = None if ended.evaluated_tokens is None else (ended.evaluated_tokens, ended.prompt_tokens)
    return claim_warmup(replace(join, warmup_figures=figures))


def claim_warmup(join: Join) -> Join:
    """
    Prove the task of a warm-up that is over, if there is one with its figures.
    """
    if join.warmup_figures is None:
        return join
    evaluated, prompt = join.warmup_figures
    alike = [
        index
        for index, task in enumerate(join.tasks)
        if task.evaluated_tokens == evaluated
        and not (task.is_child or task.is_proved)
        and prompt_of(task) in {None, prompt}
        and (task.is_warmup or task.owner is None)
    ]
    if not alike:
        return join
    # Its own, if it has one; what nobody claimed otherwise.  Of several the newest.
    found = max(alike, key=lambda index: (join.tasks[index].is_warmup, index))
    for index, task in enumerate(join.tasks):
        if task.is_warmup and not task.is_proved and index != found and task.released:
            join = _hand_over(join, index, None)  # it was taken for the warm-up's by mistake
    join = _hand_over(join, found, None, is_warmup=True)
    join = _with_task(join, found, replace(join.tasks[found], is_proved=True))
    return replace(join, warmup_figures=None, warmup_after=None)
