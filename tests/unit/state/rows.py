"""Requests for tests, their values named without the part of the request that they are in."""

from __future__ import annotations

from dataclasses import fields, replace

from kvstack.state.records import Change, RequestRow, Stripped, TaskView, Timing, Tokens

PARTS = {"tokens": Tokens, "timing": Timing, "change": Change, "stripped": Stripped}


def request_row(**values: object) -> RequestRow:
    """A chat request with *values*."""
    return changed(RequestRow(1, 1.0, "POST", "/x", "chat"), **values)


def changed(row: RequestRow, **values: object) -> RequestRow:
    """*row* with other *values*: `cached` is `tokens.cached`, and `similarity_ratio` that of its task."""
    if "similarity_ratio" in values:
        work = row.work or TaskView(0, row.id)
        values["work"] = replace(work, similarity_ratio=values.pop("similarity_ratio"))  # type: ignore[arg-type]
    for part, kind in PARTS.items():
        inside = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
        if inside:
            values[part] = replace(getattr(row, part), **inside)
    return replace(row, **values)  # type: ignore[arg-type]


def slot_of(row: RequestRow) -> int | None:
    """The slot that worked for *row*."""
    return None if row.work is None else row.work.slot


def task_of(row: RequestRow) -> int | None:
    """The task that worked for *row*."""
    return None if row.work is None else row.work.task
