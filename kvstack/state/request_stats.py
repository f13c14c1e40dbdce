"""The figures of one request: what its answer says of itself, and what the log says where the answer is silent."""

from __future__ import annotations

from dataclasses import replace

from kvstack.state.events import AnswerSeen
from kvstack.state.records import RequestRow, TaskView

_MS_PRINTED = 0.0051
"""The log rounds milliseconds to two places."""


def prompt_of(task: TaskView) -> int | None:
    """
    Length of a task's prompt: said by the log, or what is left of the slot's content without the answer.

    The last generated token is not in the slot.
    """
    if task.prompt_tokens is not None:
        return task.prompt_tokens
    if task.total_tokens is None or task.generated_tokens is None or task.shifted_tokens:
        return None
    return max(task.total_tokens - max(task.generated_tokens - 1, 0), 0)


def compose(row: RequestRow, task: TaskView | None) -> RequestRow:
    """The row with all figures that answer and log give, the answer's first."""
    answer = row.answer or AnswerSeen(row.id)
    said = task or TaskView(-1, -1)  # (of which nothing is known)
    prompt = _first(answer.prompt_tokens, prompt_of(said))
    evaluated = _first(answer.evaluated_tokens, said.evaluated_tokens)
    cached = _first(answer.cached_tokens, said.cached_tokens)
    if task is not None and cached is None and prompt is not None and evaluated is not None:
        cached = max(prompt - evaluated, 0)
    if task is not None and prompt is None and cached is not None and evaluated is not None:
        prompt = cached + evaluated
    prompt, cached, evaluated = _bounded(prompt, cached, evaluated)
    generated = _first(answer.generated_tokens, said.generated_tokens)
    decode_ms = answer.decode_ms if answer.decode_ms is not None else said.decode_ms
    speed = answer.decode_tokens_per_s if answer.decode_tokens_per_s is not None else said.decode_tokens_per_s
    return replace(
        row,
        tokens=replace(
            row.tokens,
            prompt=prompt,
            cached=cached,
            evaluated=evaluated,
            generated=generated,
            processed=said.processed_tokens,
        ),
        timing=replace(
            row.timing,
            prefill_ms=answer.prefill_ms if answer.prefill_ms is not None else said.prefill_ms,
            decode_ms=decode_ms,
            decode_tokens_per_s=_speed(speed, generated, decode_ms),
        ),
        work=task,
    )


def _bounded(prompt: int | None, cached: int | None, evaluated: int | None) -> tuple[int | None, ...]:
    """Tokens of a prompt, no more of them cached and evaluated than it has: figures of two sources may contradict."""
    if prompt is None:
        return prompt, cached, evaluated
    cached = None if cached is None else min(cached, prompt)
    return prompt, cached, None if evaluated is None else min(evaluated, prompt - (cached or 0))


def ttft_ms(row: RequestRow) -> float | None:
    """
    Time to the first token, in milliseconds.

    A stream shows it.  An answer in one piece comes when its last token is there: what the decode took lies between.
    None if there was no token, or nobody knows when.
    """
    if row.timing.is_streamed:
        return row.timing.ttft_ms
    if row.phase != "done" or row.error is not None or row.tokens.generated == 0:
        return None
    if row.timing.duration_ms is None or row.timing.decode_ms is None:
        return None
    return max(row.timing.duration_ms - row.timing.decode_ms, 0.0)


def _speed(said: float | None, generated: int | None, ms: float | None) -> float | None:
    if generated is not None and generated <= 1:
        return None  # the first token comes with the prefill: no time was measured
    if said is not None:
        return said
    return generated * 1000.0 / ms if generated and ms else None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def has_figures(answer: AnswerSeen | None) -> bool:
    """Whether an answer says what was evaluated for it."""
    return answer is not None and answer.evaluated_tokens is not None


def agrees(answer: AnswerSeen, task: TaskView, *, is_cut: bool = False) -> bool | None:
    """
    Whether an answer and a task are of one piece; None while that cannot be told.

    Args:
        answer: What the answer said.
        task: What the log says.
        is_cut: Whether the client left before the answer's end: the task may have done less of the prompt than the
            answer announced, and generated more than the answer tells of.
    """
    ours, theirs = answer.evaluated_tokens, task.evaluated_tokens
    if task.cancelled and not is_cut:
        return False
    if ours is None or theirs is None:
        return None
    if ours != theirs and not (is_cut and task.cancelled and theirs < ours):
        return False
    times = [(answer.prefill_ms, task.prefill_ms)]
    if not is_cut:
        if answer.generated_tokens is not None and task.generated_tokens not in {None, answer.generated_tokens}:
            return False
        times.append((answer.decode_ms, task.decode_ms))
    if any(said is not None and logged is not None and abs(said - logged) > _MS_PRINTED for said, logged in times):
        return False
    if answer.prefill_ms is not None and task.prefill_ms is not None:
        return True
    # Usage without timings: the length of the prompt is all that is left to compare.
    prompt = prompt_of(task)
    return answer.prompt_tokens is None or prompt is None or prompt == answer.prompt_tokens
