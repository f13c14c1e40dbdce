"""Whose the slots are: who took a conversation's slot, and whether the warm-up's prefix still has one."""

from __future__ import annotations

from kvstack.state.records import RequestRow
from kvstack.state.stack_state import StackState


def taken_by(stack_state: StackState, row: RequestRow, before: RequestRow | None) -> str | None:
    """Who used the slot of the conversation's former request after it."""
    if before is None or before.slot is None:
        return None
    after = [
        task
        for task in stack_state.join.tasks
        if task.slot == before.slot and task.task != row.task and not task.is_child and _came_after(task.task, before)
    ]
    if not after:
        return None
    task = after[0]
    if task.is_warmup:
        return "the warm-up"
    other = stack_state.row(task.owner) if task.owner is not None else None
    if other is None:
        return "a request past the proxy"
    if other.conversation == row.conversation and other.side == row.side:
        return None
    return f"request {other.id} ({other.side or other.client or other.path})"


def _came_after(task: int, before: RequestRow) -> bool:
    return before.task is not None and task > before.task


def warm_tokens(stack_state: StackState) -> int | None:
    """What is warm now: the warm-up's prefix, as long as it, or a conversation that began with it, has a slot."""
    if stack_state.join.facts == 0 or stack_state.warmup.warm_tokens is None:
        return stack_state.warmup.warm_tokens  # (without a log nobody knows who has which slot)
    warmed = {row.conversation for row in stack_state.requests if row.verdict == "WARM"}
    is_there = any(slot.is_warmup or (slot.request and slot.conversation in warmed) for slot in stack_state.slots)
    return stack_state.warmup.warm_tokens if is_there else 0
