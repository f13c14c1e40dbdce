"""
Who works for whom: joins the log's slots and tasks with the proxy's requests.

The log names no request and the answer names no task.  What they share is exact: an answer's `timings.prompt_ms`,
`prompt_n` and `predicted_n` are the figures of the task's `prompt eval time` and `eval time` lines.  So a task has a
likely owner as soon as it is launched (requests get tasks in the order in which they were sent), which is enough to
show progress, and a proved one when the figures agree; either side may come first.  A likely owner that the figures
contradict loses the task.  A task without figures, of a prompt that was refused or a client that left, goes to the
request that ended so; as long as another request may turn out to be the owner, it is *contested*.

A warm-up is a client too, of the stack's own: while the stack warms up before it serves, all tasks are its; later its
task is found as a request's is, by the order of sending and then by the figures.

Task ids and slots start again with each server process, so nothing is carried over from one run to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstack.state import log_facts as facts
from kvstack.state.events import AnswerSeen, WarmupEnded
from kvstack.state.records import RequestRow, SlotView, TaskView
from kvstack.state.request_stats import agrees, has_figures, prompt_of

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
        warmup_figures: Evaluated and prompt tokens of a warm-up's tasks that are over and not proved yet.
        warmup_refused: Why the last warm-up failed, as long as its task may still come: the log may lag.
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
    warmup_figures: tuple[tuple[int, int | None], ...] = ()
    warmup_refused: str | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The prefill rate of this run."""
        return self.rate_tokens * 1000.0 / self.rate_ms if self.rate_ms > 0 else None

    def with_task(self, index: int, task: TaskView) -> Join:
        """The same with another task at *index*."""
        return replace(self, tasks=(*self.tasks[:index], task, *self.tasks[index + 1 :]))

    def with_slot(self, slot: int, change: Callable[[SlotView], SlotView]) -> Join:
        """The same with a slot changed, which is a new one if nothing was heard of it yet."""
        slots = {view.slot: view for view in self.slots}
        slots[slot] = change(slots.get(slot) or SlotView(slot))
        return replace(self, slots=tuple(slots[number] for number in sorted(slots)))


def task_of(join: Join, request: int) -> TaskView | None:
    """The task that works for a request, as far as it is known."""
    return next((task for task in reversed(join.tasks) if task.owner == request and not task.is_child), None)


def measured(join: Join, tokens: int | None, ms: float | None) -> Join:
    """Count one finished prefill into the rate."""
    if tokens is None or ms is None or tokens < RATE_FROM_TOKENS or ms <= 0:
        return join
    return replace(join, rate_tokens=join.rate_tokens + tokens, rate_ms=join.rate_ms + ms)


def settle(join: Join, rows: Sequence[RequestRow]) -> tuple[Join, frozenset[int]]:
    """
    Prove or correct the owners of tasks by the answers that are there.

    Returns:
        The new join, and the numbers of the requests that gained or lost a task.
    """
    changed: set[int] = set()
    final = {row.id for row in rows if row.settled and row.work is not None}
    for index, task in enumerate(join.tasks):
        if task.owner in final and not task.is_proved:
            join = join.with_task(index, replace(task, is_proved=True))
    proved = {task.owner for task in join.tasks if task.is_proved}
    for row in rows:
        answer = row.answer
        if row.settled or answer is None or not has_figures(answer):
            continue  # (a settled row whose task is forgotten must not take a new one with the same figures)
        if row.id in proved or row.run != join.run:
            continue
        join = _prove(join, row, answer, rows, changed)
    for index in range(len(join.tasks)):
        join = _claim_without_figures(join, index, rows, changed)
    return join, frozenset(changed)


def _claim_without_figures(join: Join, index: int, rows: Sequence[RequestRow], changed: set[int]) -> Join:
    """
    Give a task that ended without figures to the oldest request that ended as it did.

    A prompt that is refused is answered at once, and a client that leaves waits for nobody: when the log tells of the
    task its request may be over, and waits for none any more.  A refusal has the same words in answer and log.
    """
    task = join.tasks[index]
    if not task.released or task.is_proved or task.is_child or task.is_warmup:
        return join
    if not (task.cancelled or task.rejected is not None or task.owner is None):
        return join
    owner = next((row for row in rows if row.id == task.owner), None)
    # (A task is cancelled because its client left: that one is over by now.)
    if owner is not None and ((not owner.is_over and not task.cancelled) or _ended_alike(owner, task)):
        return join
    heir, lost = _heir(join, task, rows)
    if heir is None:
        if task.owner is None and task.rejected is not None and task.rejected in (join.warmup_refused or ""):
            return _hand_over(replace(join, warmup_refused=None), index, None, is_warmup=True)
        return join
    changed.update(number for number in (heir.id, task.owner) if number is not None)
    if lost is not None:
        join = _hand_over(join, lost, owner)  # the two were mixed up
    join = _hand_over(join, index, heir)
    return join if lost is None or owner is not None else _claim_without_figures(join, lost, rows, changed)


def _heir(join: Join, task: TaskView, rows: Sequence[RequestRow]) -> tuple[RequestRow | None, int | None]:
    """The oldest request that ended as *task* did, and the place of the task that it has by mistake, if it has one."""
    alike = [row for row in rows if row.run == join.run and _ended_alike(row, task)]
    alike.sort(key=lambda row: row.answer is None or not agrees(row.answer, task, is_cut=True))
    places = {other.owner: index for index, other in enumerate(join.tasks) if not other.is_child}
    for row in alike:
        if row.id not in places:
            return row, None
    for row in alike:
        other = join.tasks[places[row.id]]
        if row.settled or other.is_proved or other.rejected is not None or task.cancelled == other.cancelled:
            continue
        others = (free for free in rows if free.run == join.run and free.id not in places)
        if task.cancelled or any(_ended_alike(free, other) for free in others):
            return row, places[row.id]
    return None, None


def _ended_alike(row: RequestRow, task: TaskView) -> bool:
    if row.api is None:
        return False
    if task.rejected is not None:
        return row.phase == "failed" and row.error is not None and task.rejected in row.error
    if row.phase != "cancelled" or (row.answer is not None and agrees(row.answer, task, is_cut=True) is False):
        return False
    # A task may end just when its client leaves; what has begun to be answered certainly had one.
    return task.cancelled or (row.status is not None and not row.settled)


def is_contested(join: Join, row: RequestRow, task: TaskView, rows: Sequence[RequestRow], *, by_running: bool) -> bool:
    """
    Whether another request may turn out to own the task that a request is likely to own.

    Args:
        join: What is known.
        row: The request, which is over.
        task: Its task, which has ended and is not proved.
        rows: All requests.
        by_running: Ask only for requests that are not over yet.
    """
    return any(
        _may_own(join, other, task)
        for other in rows
        if other.id in task.claimants and other.id != row.id and not (by_running and other.is_over)
    )


def _may_own(join: Join, other: RequestRow, task: TaskView) -> bool:
    own = task_of(join, other.id)
    if other.run != join.run or other.phase == "failed" or (own is not None and own.is_proved):
        return False
    if not other.is_over:
        return not task.cancelled
    if other.settled and other.work is not None:
        return False
    if other.answer is not None and agrees(other.answer, task, is_cut=other.phase == "cancelled") is False:
        return False
    return other.phase == "cancelled" or not task.cancelled


def _prove(join: Join, row: RequestRow, answer: AnswerSeen, rows: Sequence[RequestRow], changed: set[int]) -> Join:
    own = next((index for index, task in enumerate(join.tasks) if task.owner == row.id), None)
    found = _find(join, row, answer, own)
    if found is None:
        is_cut = row.phase == "cancelled"
        task = join.tasks[own] if own is not None and row.is_over else None
        if own is None or task is None or not task.released or agrees(answer, task, is_cut=is_cut) is not False:
            return join
        other = _likely_exchange(join, row, answer, task, rows) if is_cut else None
        if other is not None:
            place = next(index for index, owned in enumerate(join.tasks) if owned.owner == other.id)
            join = _hand_over(join, place, row)
            changed.add(other.id)
        changed.add(row.id)
        return _hand_over(join, own, other)
    loser = join.tasks[found].owner
    if own is not None and own != found:
        # The two were mixed up: the other request gets what was taken for ours.
        heir = next((other for other in rows if other.id == loser), None)
        join = _hand_over(join, own, heir, is_warmup=join.tasks[found].is_warmup)
    join = _hand_over(join, found, row)
    task = join.tasks[found]
    if _is_exact(answer, task) or row.phase == "done" or not is_contested(join, row, task, rows, by_running=False):
        join = join.with_task(found, replace(task, is_proved=True))
    changed.update(number for number in (row.id, loser) if number is not None)
    return join


def _likely_exchange(
    join: Join, row: RequestRow, answer: AnswerSeen, task: TaskView, rows: Sequence[RequestRow]
) -> RequestRow | None:
    """The request that may own the task that contradicts *row*, and whose own task may be that of *row*."""
    for other in rows:
        own = task_of(join, other.id)
        if own is None or other.settled or other.id == row.id or not {other.id, row.id} <= task.claimants:
            continue
        if _may_own(join, other, task) and agrees(answer, own, is_cut=True) is not False:
            return other
    return None


def _find(join: Join, row: RequestRow, answer: AnswerSeen, own: int | None) -> int | None:
    """The place of the task that the figures of an answer name: by its times, or else by its tokens."""
    is_cut = row.phase == "cancelled"
    places = [
        index
        for index, task in enumerate(join.tasks)
        if not (task.is_proved or task.is_child) and agrees(answer, task, is_cut=is_cut)
    ]
    exact = [index for index in places if _is_exact(answer, join.tasks[index])]
    if exact:
        return own if own in exact else exact[0]
    if own in places:
        return own if row.is_over else None
    if not row.is_over or (own is not None and not join.tasks[own].released):
        return None  # its figures, or the answer's end, are still to come
    if is_cut and own is None:
        # Equal tokens of a prompt that others may have too take nothing away from them.
        places = [index for index in places if join.tasks[index].owner is None]
    return next(iter(places), None)


def _is_exact(answer: AnswerSeen, task: TaskView) -> bool:
    return answer.prefill_ms is not None and task.prefill_ms is not None


def _hand_over(join: Join, index: int, row: RequestRow | None, *, is_warmup: bool = False) -> Join:
    """Give a task another owner, and with it what it left in its slot."""
    task = join.tasks[index]
    if task.owner == (row.id if row is not None else None) and task.is_warmup == is_warmup:
        return join
    if task.released and not task.is_child:
        was_nobodys = task.owner is None and not task.is_warmup
        unclaimed = join.unclaimed + (row is None and not is_warmup) - was_nobodys
        join = replace(join, unclaimed=max(unclaimed, 0))
    conversation = row.conversation if row is not None else None
    request = row.id if row is not None else None
    join = join.with_task(index, replace(task, owner=request, is_warmup=is_warmup))
    if _was_refused(task):
        return join
    for later in range(index + 1, len(join.tasks)):
        after = join.tasks[later]
        if after.slot == task.slot:
            heir = replace(after, holder=conversation, holder_request=request, holder_is_warmup=is_warmup)
            join = join.with_task(later, heir)
            if not _was_refused(after):
                return join
    client = (row.side or row.client) if row is not None else None
    return join.with_slot(
        task.slot,
        lambda s: replace(s, conversation=conversation, client=client, request=request, is_warmup=is_warmup),
    )


def _was_refused(task: TaskView) -> bool:
    # It left the slot's content as it was: what it found there is there still.
    return task.released and task.rejected is not None


# --- warm-ups ------------------------------------------------------------------------------------------------------


def begin_warmup(join: Join, newest_request: int) -> Join:
    """A warm-up is sent: the next task is its, unless a request that was sent before still has none."""
    return replace(join, warmup_after=newest_request, warmup_figures=(), warmup_refused=None)


def step_warmup(join: Join, newest_request: int, figures: tuple[int, int | None]) -> Join:
    """
    A warm-up has had one of its tasks done and sends another.

    Args:
        join: What is known so far.
        newest_request: Number of the newest request.
        figures: Evaluated and prompt tokens of the task that is done.
    """
    join = claim_warmup(replace(join, warmup_figures=(*join.warmup_figures, figures)))
    return replace(join, warmup_after=newest_request)


def end_warmup(join: Join, ended: WarmupEnded) -> Join:
    """A warm-up is over; its figures prove its task, now or when the log has caught up."""
    if ended.outcome != "done":
        known = any(task.is_warmup and task.rejected is not None for task in join.tasks)
        return replace(join, warmup_after=None, warmup_refused=None if known else ended.detail)
    if ended.snapshot is not None:
        # The server's log has no task for it: the slot was filled from a file.
        tokens = ended.prompt_tokens
        join = join.with_slot(0, lambda _: SlotView(0, tokens=tokens, prompt_tokens=tokens, is_warmup=True))
    if not ended.evaluated_tokens:
        join = claim_warmup(join)
        return join if join.warmup_figures else replace(join, warmup_after=None)
    return claim_warmup(
        replace(join, warmup_figures=(*join.warmup_figures, (ended.evaluated_tokens, ended.prompt_tokens)))
    )


def claim_warmup(join: Join) -> Join:
    """Prove the tasks of a warm-up that are over, where there are some with their figures."""
    if not join.warmup_figures:
        return join
    left = []
    for figures in join.warmup_figures:
        found = _find_warmup(join, *figures)
        if found is None:
            left.append(figures)
            continue
        join = _hand_over(join, found, None, is_warmup=True)
        join = join.with_task(found, replace(join.tasks[found], is_proved=True))
    if left:
        return replace(join, warmup_figures=tuple(left))
    for index, task in enumerate(join.tasks):
        if task.is_warmup and not task.is_proved and task.released:
            join = _hand_over(join, index, None)  # it was taken for the warm-up's by mistake
    return replace(join, warmup_figures=(), warmup_after=None)


def _find_warmup(join: Join, evaluated: int, prompt: int | None) -> int | None:
    alike = [
        index
        for index, task in enumerate(join.tasks)
        if task.evaluated_tokens == evaluated
        and not (task.is_child or task.is_proved)
        and prompt_of(task) in {None, prompt}
        and (task.is_warmup or task.owner is None)
    ]
    # Its own, if it has one; what nobody claimed otherwise.  Of several the newest.
    return max(alike, key=lambda index: (join.tasks[index].is_warmup, index), default=None)


# --- the log -------------------------------------------------------------------------------------------------------


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
    if isinstance(fact, facts.TaskLaunched):
        return _launch(join, fact, rows, warming=warming)
    on_task, on_join = _TASK_CHANGES.get(type(fact)), _JOIN_CHANGES.get(type(fact))
    if on_task is not None:
        join = _on_task(join, getattr(fact, "slot", None), getattr(fact, "task", None), lambda t: on_task(t, fact))
    return join if on_join is None else on_join(join, fact)


_TASK_CHANGES: Mapping[type[facts.LogFact], Callable[[TaskView, Any], TaskView]] = {
    facts.PromptStarted: lambda t, fact: replace(t, prompt_tokens=fact.prompt_tokens),
    facts.ReusePoint: lambda t, fact: _reuse(t, fact.cached_tokens),
    facts.PrefillProgressed: lambda t, fact: replace(
        t, processed_tokens=fact.processed_tokens, tokens_per_s=fact.tokens_per_s or t.tokens_per_s
    ),
    facts.PrefillTimed: lambda t, fact: replace(t, prefill_ms=fact.prefill_ms, evaluated_tokens=fact.evaluated_tokens),
    facts.DecodeTimed: lambda t, fact: replace(
        t,
        decode_ms=fact.decode_ms,
        generated_tokens=fact.generated_tokens,
        decode_tokens_per_s=fact.tokens_per_s,
    ),
    facts.FullReprocess: lambda t, fact: replace(t, reprocessed=True),
    facts.CheckpointRestored: lambda t, fact: replace(t, restored_tokens=fact.position_tokens),
    facts.CheckpointErased: lambda t, fact: replace(t, checkpoints_erased=t.checkpoints_erased + 1),
    facts.ChunkReused: lambda t, fact: replace(t, chunk_tokens=t.chunk_tokens + fact.tokens),
    facts.ContextShifted: lambda t, fact: replace(t, shifted_tokens=t.shifted_tokens + fact.discarded_tokens),
    facts.PromptTruncated: lambda t, fact: replace(t, truncated=True),
    # (A client that leaves behind the last token is told of too.)
    facts.TaskCancelled: lambda t, fact: t if t.released else replace(t, cancelled=True),
    facts.RequestRejected: lambda t, fact: replace(t, rejected=fact.text),
}
"""What a fact changes of the task that it names."""


def _selected(join: Join, fact: facts.SlotSelected) -> Join:
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


def _ram_cache_hit(join: Join, fact: facts.RamCacheHit) -> Join:
    if join.selected is None:
        return join
    return _expect(join, join.selected, ram_hit=True, ram_similarity_ratio=fact.similarity_ratio)


def _restore_failed(join: Join, fact: facts.RestoreFailed) -> Join:
    if fact.slot is None or fact.task is not None:
        return join
    return _expect(join, fact.slot, ram_hit=False)


def _progressed(join: Join, fact: facts.PrefillProgressed) -> Join:
    return join.with_slot(
        fact.slot,
        lambda s: replace(s, processed_tokens=fact.processed_tokens, tokens_per_s=fact.tokens_per_s or s.tokens_per_s),
    )


def _checkpoint_created(join: Join, fact: facts.CheckpointCreated) -> Join:
    return join.with_slot(fact.slot, lambda s: replace(s, checkpoints=fact.number or s.checkpoints + 1))


def _checkpoint_erased(join: Join, fact: facts.CheckpointErased) -> Join:
    return join.with_slot(fact.slot, lambda s: replace(s, checkpoints=max(s.checkpoints - 1, 0)))


def _emptied(slot: SlotView) -> SlotView:
    return SlotView(slot.slot, task=slot.task, running_prompt_tokens=slot.running_prompt_tokens)


def _slept(join: Join, fact: facts.ServerSlept) -> Join:
    return replace(join, slots=()) if fact.asleep else join  # the KV cache is lost


def _reuse(task: TaskView, tokens: int) -> TaskView:
    # The first point of a task is what was kept; later ones are the progress of its batches.
    return replace(
        task, processed_tokens=tokens, cached_tokens=tokens if task.cached_tokens is None else task.cached_tokens
    )


def _expect(join: Join, slot: int, **changes: object) -> Join:
    known = join.pending.get(slot) or TaskView(slot, -1)
    return replace(join, pending={**join.pending, slot: replace(known, **changes)})  # type: ignore[arg-type]


def _compare(join: Join, fact: facts.RamCacheSearched) -> Join:
    """A slot that is chosen by age is compared with the prompt only when the RAM cache is searched."""
    slot = join.selected
    said = None if slot is None else join.pending.get(slot)
    if slot is None or said is None or said.how != "lru" or fact.keep_ratio is None:
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
        claimants=frozenset(row.id for row in rows if row.api is not None and row.run == join.run and not row.settled),
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
        running_prompt_tokens=None,
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
                running_prompt_tokens=None,
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
            running_prompt_tokens=None,
            processed_tokens=None,
            tokens_per_s=None,
            tokens=fact.total_tokens,
            is_cut=prompt is not None and fact.total_tokens < prompt,
            prompt_tokens=fact.total_tokens if prompt is None else min(prompt, fact.total_tokens),
        ),
    )


_JOIN_CHANGES: Mapping[type[facts.LogFact], Callable[[Join, Any], Join]] = {
    facts.SlotCompared: lambda join, fact: _expect(join, fact.slot, lcp_tokens=fact.lcp_tokens),
    facts.SlotSelected: _selected,
    facts.RamCacheSearched: _compare,
    facts.RamCacheHit: _ram_cache_hit,
    facts.RestoreFailed: _restore_failed,
    facts.PromptStarted: lambda join, fact: join.with_slot(
        fact.slot, lambda s: replace(s, running_prompt_tokens=fact.prompt_tokens) if s.task == fact.task else s
    ),
    facts.ReusePoint: lambda join, fact: join.with_slot(
        fact.slot, lambda s: replace(s, processed_tokens=fact.cached_tokens)
    ),
    facts.PrefillProgressed: _progressed,
    facts.PrefillTimed: lambda join, fact: measured(join, fact.evaluated_tokens, fact.prefill_ms),
    facts.SlotReleased: _release,
    facts.CheckpointCreated: _checkpoint_created,
    facts.CheckpointErased: _checkpoint_erased,
    facts.SlotCleared: lambda join, fact: join.with_slot(fact.slot, _emptied),
    facts.ServerSlept: _slept,
}
"""What a fact changes of the slots and of the rest."""
