"""
What holds of every verdict, whatever is known of a request.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvstack.core.verdict import VERDICTS, judge
from kvstack.core.views import RequestRow, TaskView

_TOKENS = st.integers(0, 5000)


@given(
    prompt=st.integers(1, 5000),
    cached=_TOKENS,
    former=st.none() | _TOKENS,
    former_run=st.integers(1, 2),
    divergence=st.sampled_from([None, "id in messages[0].content @3", "history edited in messages[3].content @1"]),
    conversation=st.sampled_from([None, "c1"]),
    repeats=st.booleans(),
    task=st.none()
    | st.builds(
        TaskView,
        slot=st.just(0),
        task=st.just(1),
        how=st.sampled_from([None, "lcp", "lru", "id"]),
        similarity_ratio=st.none() | st.floats(0, 1),
        holder=st.sampled_from([None, "c1", "c2"]),
        holder_prompt_tokens=st.none() | _TOKENS,
        holder_is_warmup=st.booleans(),
    ),
    log_is_read=st.booleans(),
)
def test_what_reused_nothing_is_neither_partial_nor_a_success(
    prompt: int,
    cached: int,
    former: int | None,
    former_run: int,
    divergence: str | None,
    conversation: str | None,
    repeats: bool,
    task: TaskView | None,
    log_is_read: bool,
) -> None:
    """Whatever is known besides; and what reused something has a verdict of the list."""
    cached = min(cached, prompt)
    row = RequestRow(
        2, 1.0, "POST", "/x", "chat", phase="done", status=200, items=4, run=2, prompt_tokens=prompt,
        cached_tokens=cached, evaluated_tokens=prompt - cached, divergence=divergence, conversation=conversation,
        repeats=repeats,
    )  # fmt: skip
    before = None if former is None else replace(row, id=1, run=former_run, prompt_tokens=former)
    verdict = judge(row, task, before, log_is_read=log_is_read).verdict
    assert verdict in VERDICTS
    if cached == 0:
        assert verdict in {"COLD", "EVICTED", "REPROCESS", "TEMPLATE"}
