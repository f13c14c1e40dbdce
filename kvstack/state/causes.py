"""What to do against each kind of change that a client makes."""

from __future__ import annotations

from collections.abc import Iterator

from kvstack.state.records import RequestRow

_AGAINST = {
    "clock": "A rule with `freeze`, `coarsen` or `drop` keeps a clock from changing the prompt.",
    "id": "Add a rule with `drop` for this id.",
    "counter": "A rule with `tail` moves a counter to the end, where it costs nothing.",
    "decoration": "A rule with `sticky` keeps what the client adds to the newest turn when that turn becomes history.",
    "moved block": "A rule with `place` leaves a moving block where it first stood.",
    "tools changed": "Keep the client's tools the same for a conversation: tool servers that come and go change them.",
    "tools reordered": "Keep the client's tools in one order: some tool servers list theirs anew for each request.",
    "keys reordered": "The client writes the same JSON in another order each time; a newer release may be steadier.",
    "system text changed": "Whatever changes in the system text is best kept out of it, or frozen by a rule.",
    "old tool result changed": "The client prunes old tool results: let it do so less often, or not at all.",
    "history edited": "The client rewrites older turns: if that is compaction, give it a larger window.",
    "window trimmed": "The client drops its oldest turns: give it a larger window, so that this happens less often.",
    "white space": "The client writes the same text with other white space; a rule can make both the same.",
}


def remedies(row: RequestRow) -> Iterator[str]:
    """
    Yield what to do about the cause of a request's loss, and about what changed behind it; nothing for other causes.
    """
    first = [change for change in _AGAINST if _names(row.cause or "", change)][:1]
    behind = [change for change in row.divergence_behind if change in _AGAINST and change not in first]
    for change in (*first, *behind):
        if change == "clock" and row.before is None and not row.repeats and 0 < row.items <= 2:
            # Where each request is a conversation of its own there is no first value to keep.
            yield "A rule with `tail`, `coarsen` or `drop` keeps a clock from changing the prompt of new conversations."
        elif change == "id" and row.client == "openclaw":
            yield "Set `proxy.strip_message_ids = true`, or add a rule with `drop` for this id."
        else:
            yield _AGAINST[change]


def _names(cause: str, change: str) -> bool:
    # `id in system @1,514` names an id, `provided text` does not.
    return f" {change} " in f" {cause.lower()} "
