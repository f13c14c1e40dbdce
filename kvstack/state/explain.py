"""
One request in plain words: what came, what the client changed, what the server did, what it cost, what to do.

Made of figures and of the proxy's own words for a difference; no text of a prompt is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstack.state.causes import Cause
from kvstack.state.events import Difference
from kvstack.state.records import RequestRow, TaskView
from kvstack.state.verdict import REASONS, ReasonKind, Verdict


@dataclass(frozen=True, slots=True)
class Part:
    """One paragraph: a title and its sentences."""

    title: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What there is to say of one request."""

    request: int
    verdict: str | None
    headline: str
    parts: tuple[Part, ...]


def explain(
    row: RequestRow,
    before: RequestRow | None = None,
    prefill_tokens_per_s: float | None = None,
    slots: int | None = None,
    *,
    attached: bool = False,
) -> Explanation:
    """
    Explain one request.

    Args:
        row: The request.
        before: The request of the same conversation that it could extend, if that is remembered.
        prefill_tokens_per_s: The prefill rate that this run measured.
        slots: How many slots the server had that it was sent to; None if that is not known.
        attached: Whether the server is somebody else's, which keeps its own log.
    """
    parts = (
        Part("The request", tuple(_request(row, before))),
        Part("What went wrong", tuple(_failure(row))),
        Part("What the client changed", tuple(_client(row, before))),
        Part("What the server did", (*_restart(row, before), *_server(row, slots))),
        Part("What it cost", tuple(_cost(row, prefill_tokens_per_s))),
        Part("What to do", tuple(_advice(row, "its own log" if attached else "`kvstack logs`"))),
    )
    return Explanation(row.id, row.verdict, _headline(row), tuple(part for part in parts if part.sentences))


def _headline(row: RequestRow) -> str:
    if row.verdict is None:
        return "The request is still running."
    if row.verdict is Verdict.RESTORED and _begins(row):
        return "The cache worked: a former prompt that begins like this one came back from the RAM cache."
    if row.verdict is Verdict.PARTIAL and row.tokens.cached == 0:
        return "The prompt diverges from the cached one so early that nothing could be reused."
    if row.verdict is Verdict.COLD and row.tokens.cached:
        return "Almost nothing of this prompt was cached."  # (what every chat begins with)
    return row.verdict.info.headline


def difference_words(difference: Difference) -> str:
    """Where and how two requests differ, in a few words: `clock in messages[0].content @17`."""
    return f"{difference.cause} in {difference.path} @{difference.offset:,}"


def reason_words(row: RequestRow) -> str | None:
    """The reason of a request's verdict in a few words; None where the verdict needs none."""
    if row.verdict is Verdict.FAILED:
        return row.error or (f"HTTP {row.status}" if row.status is not None else None)
    reason = row.reason
    if reason is None:
        return None
    return REASONS[reason.kind].format(
        difference=difference_words(row.change.difference) if row.change.difference is not None else None,
        matched=reason.matched_tokens or 0,
        kept=reason.kept_tokens or 0,
        request=reason.request,
        client=reason.client,
    )


def _was_restarted(row: RequestRow) -> bool:
    return row.reason is not None and row.reason.kind is ReasonKind.SERVER_RESTARTED


def _begins(row: RequestRow) -> bool:
    """Whether it is the first request of its conversation, as far as anybody knows."""
    return row.change.before is None and not row.change.repeats


def _request(row: RequestRow, before: RequestRow | None) -> Iterator[str]:
    who = f" of {row.client}" if row.client else ""
    kind = f", a side request ({row.side})" if row.side else ""
    yield f"Request {row.id}{who}{kind}: {row.method} {row.path} with {_plural(row.items, 'item')}."
    if before is not None:
        yield f"It continues the conversation of request {before.id}, which had {_plural(before.items, 'item')}."
    elif row.change.before is not None:
        yield f"It continues the conversation of request {row.change.before}, which is no longer remembered."
    elif row.change.repeats:
        yield "It repeats or edits a turn of a known conversation."
    elif row.verdict in {Verdict.HIT, Verdict.RESTORED}:
        # The same first turn once more begins a conversation, as far as anybody can tell: but not for the cache.
        yield "Its prompt begins like one that was evaluated before."
    elif row.conversation is not None:
        yield "It is the first request of its conversation."
    if row.stripped.items_modified:
        what = [
            text
            for count, text in (
                (row.stripped.ts_removed, _plural(row.stripped.ts_removed, "timestamp")),
                (row.stripped.msg_ids_removed, _plural(row.stripped.msg_ids_removed, "message id")),
            )
            if count
        ]
        removed = f" ({' and '.join(what)} removed)" if what else ""
        yield f"The rules changed {_plural(row.stripped.items_modified, 'item')} of it{removed}."
    if row.stripped.rules:
        counts = ", ".join(f"{rule} {count}" for rule, count in row.stripped.rules.items())
        yield f"Rules that found something: {counts}."


def _failure(row: RequestRow) -> Iterator[str]:
    if row.verdict != "FAILED":
        return
    status = f"HTTP {row.status}" if row.status is not None else "no answer at all"
    error = (row.error or "").rstrip(".")
    if (row.status or 0) >= 400 or row.status is None:
        yield f"The client got {status}{f': {error}' if error else ', without a reason'}."
    else:
        # The head of the answer had gone out already.
        yield f"The answer began with {status} and broke off{f': {error}' if error else ''}."


def _client(row: RequestRow, before: RequestRow | None) -> Iterator[str]:
    if row.change.difference is not None and _begins(row):
        yield (
            "Its system text and tools are nearly those of a recent request of another conversation, but not quite:"
            f" {difference_words(row.change.difference)}{_behind(row)}."
        )
    elif row.change.difference is not None:
        yield f"It differs from the previous request: {difference_words(row.change.difference)}{_behind(row)}."
    elif before is not None:
        yield "Nothing: it only adds to the previous request."


def _behind(row: RequestRow) -> str:
    if row.change.difference is None:
        return ""
    kinds = " and ".join(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" for kind in row.change.difference.behind)
    return f", and {kinds} behind it" if kinds else ""


def _restart(row: RequestRow, before: RequestRow | None) -> Iterator[str]:
    if row.verdict is Verdict.FAILED:
        return
    if before is not None and before.run < row.run:
        yield f"The llama-server was restarted after request {before.id}, and its cache was empty then."
    elif _was_restarted(row):
        yield "llama-server was restarted, and its cache was empty then."


def _server(row: RequestRow, slots: int | None) -> Iterator[str]:
    task = row.work
    if task is not None:
        yield from _choice(row, task, slots)
        if task.rejected is not None:
            # (the client got the same words, and they stand above)
            yield "It refused the prompt." if task.rejected == row.error else f"It refused the prompt: {task.rejected}."
        if task.chunk_tokens:
            yield f"It moved {_tokens(task.chunk_tokens)} of the old prompt to their new place (--cache-reuse)."
        if task.reprocessed:
            yield (
                "It could not rewind to where the prompts diverge and had no checkpoint before that point:"
                " it evaluated the whole prompt."
            )
        elif task.restored_tokens is not None:
            yield f"It went back to the context checkpoint at {_tokens(task.restored_tokens)}."
        if task.shifted_tokens:
            yield f"It discarded {_tokens(task.shifted_tokens)} from the middle of the context to make room."
        if task.truncated:
            yield "The context was full before the answer was complete."
        if task.cancelled and task.rejected is None:
            yield "It noticed that the client was gone and stopped."
    if row.tokens.prompt is not None and row.tokens.cached is not None and row.tokens.evaluated is not None:
        yield (
            f"Of {_tokens(row.tokens.prompt)} in the prompt, {row.tokens.cached:,} came from the cache"
            f" and {row.tokens.evaluated:,} were evaluated{_in_time(row.timing.prefill_ms)}."
        )
    if row.timing.decode_tokens_per_s is not None and row.tokens.generated is not None:
        yield f"It wrote {_tokens(row.tokens.generated)} at {row.timing.decode_tokens_per_s:.1f} tokens/s."


def _choice(row: RequestRow, task: TaskView, slots: int | None) -> Iterator[str]:
    said = f" (sim_best {task.similarity_ratio:.3f})" if task.similarity_ratio is not None else ""
    held, more = "", "; which was not similar enough to this prompt"
    if task.holder_is_warmup:
        warm = f" of {_tokens(row.tokens.warm)}" if row.tokens.warm else ""
        held = f", which held the warm-up's prefix{warm}"
    elif task.holder_request is not None:
        held = f", which held request {task.holder_request}"
    elif task.how == "lru" and task.holder_prompt_tokens is None:
        held, more = ", which held nothing", ""
    match task.how:
        case "lcp" | "lcs":
            yield f"It chose slot {task.slot}{held}, because its content is most similar to this prompt{said}."
        case "lru":
            if slots == 1 and task.slot == 0:
                yield f"It took slot {task.slot}, its only one{held}{said or more}."
            else:
                oldest = ", the least recently used" if slots is not None else ""
                alike = "No slot was similar enough to this prompt; it took" if more else "It took"
                yield f"{alike} slot {task.slot}{held}{said}{oldest if more else ''}."
        case "id":
            yield f"It took slot {task.slot}{held}, as the client asked."
        case _:
            yield f"It worked in slot {task.slot}{held}."
    if task.ram_hit:
        yield "It found a better match in the RAM cache and restored it into the slot."
    elif task.how == "lru" and said:
        yield "It looked for a better match in the RAM cache and found none."
    elif row.verdict is Verdict.RESTORED:
        yield "So many cached tokens can only come from the RAM cache; this log level does not show it."


def _cost(row: RequestRow, rate: float | None) -> Iterator[str]:
    if row.timing.saved_s:
        yield f"The cache saved {_seconds(row.timing.saved_s)} of prefill."
    if row.tokens.lost:
        spent = f", which took {_seconds(row.timing.cost_s)}" if row.timing.cost_s is not None else ""
        if row.verdict is Verdict.COLD:
            yield f"{_tokens(row.tokens.lost)} were evaluated{spent}."
            if row.tokens.warm is None:
                yield "A warm-up evaluates what requests share beforehand."
        elif row.verdict is Verdict.PARTIAL and _begins(row):
            # It shares a prefix with others at best: how long that could be nobody knows exactly.
            yield f"Up to {_tokens(row.tokens.lost)} were evaluated that could have been cached{spent}."
        else:
            yield f"{_tokens(row.tokens.lost)} were evaluated that could have been cached{spent}."
    elif row.verdict is Verdict.PARTIAL and row.tokens.evaluated:
        yield "As far as is known, none of what was evaluated had been in the cache."
    yield from _waiting(row)
    if row.timing.saved_s and row.tokens.cached:
        rate = row.tokens.cached / row.timing.saved_s  # as it was when the request was over
        yield f"What was saved is an estimate by this run's prefill rate, {rate:,.0f} tokens/s then."
    elif row.timing.cost_s and row.timing.prefill_ms is None and rate is not None:
        yield f"The seconds are an estimate by this run's prefill rate, {rate:,.0f} tokens/s."


def _waiting(row: RequestRow) -> Iterator[str]:
    whole = None if row.timing.duration_ms is None else _seconds(row.timing.duration_ms / 1000)
    first = None if row.timing.ttft_ms is None else _seconds(row.timing.ttft_ms / 1000)
    if row.phase in {"failed", "cancelled"} or row.verdict is Verdict.FAILED:
        if first is not None:
            yield f"The first token came after {first}."
        if whole is not None:
            yield f"The client left after {whole}." if row.phase == "cancelled" else f"It failed after {whole}."
    elif row.timing.is_streamed or whole is None:
        if first is not None:
            yield f"The first token came after {first}."
    else:
        more = f"; its first token after {first}" if first is not None else ""
        yield f"The answer came after {whole} in one piece (not streamed){more}."


def advice(row: RequestRow) -> tuple[str, ...]:
    """What to do about one request, in sentences; none where all is well."""
    return tuple(_advice(row, "`kvstack logs`"))


def _advice(row: RequestRow, log: str) -> Iterator[str]:
    if row.verdict is not None:
        yield from row.verdict.info.advice
    match row.verdict:
        case Verdict.PARTIAL:
            if row.change.difference is not None:
                yield from _against_change(row, row.change.difference)
            elif row.tokens.warm and _begins(row):
                yield (
                    f"{_tokens(row.tokens.warm)} were warm, but this prompt diverges from them early:"
                    " record one request of this client, system prompt and tools, for warmup.request_file."
                )
            else:
                yield "Warm up with a recording of this client (warmup.request_file): its system prompt and tools."
        case Verdict.COLD:
            if row.tokens.warm:
                lost = "" if row.work is not None else ", or that had lost its place by then"
                yield (
                    f"{_tokens(row.tokens.warm)} were warm, but this prompt is not the one that was warmed up{lost}."
                    " If it is this client's that should be warm, record one of its requests for warmup.request_file."
                )
            elif row.tokens.warm == 0 and row.has_warmed_head is False:
                yield (
                    "What is warmed up begins otherwise than this prompt. If it is this client's that should be warm,"
                    " record one of its requests for warmup.request_file."
                )
            elif row.tokens.warm == 0 and row.has_warmed_head is None:
                yield "More room for the RAM cache (server.cache_ram_mib) keeps what had to leave its slot."
            elif row.tokens.warm == 0:
                yield (
                    "What had been warmed up had lost its slot to other conversations by then: `kvstack warmup`"
                    " evaluates it again, and more room for the RAM cache (server.cache_ram_mib) keeps it."
                )
            elif _was_restarted(row):
                yield "The cache dies with the server; warming up with warmup.request_file brings the prefix back."
            else:
                yield "Set warmup.request_file (or warmup.system_prompt), so that the prefix is evaluated at the start."
        case Verdict.CANCELLED:
            if row.tokens.evaluated or row.work is not None:
                yield "What was evaluated is kept: the same request goes on from there."
        case Verdict.FAILED:
            yield from _after_failure(row, log)
        case _:
            pass


def _against_change(row: RequestRow, difference: Difference) -> Iterator[str]:
    """Yield what to do about a change of the client's, and about what changed behind it."""
    for cause in dict.fromkeys((difference.cause, *difference.behind)):
        if cause is Cause.CLOCK and _begins(row) and 0 < row.items <= 2:
            # Where each request is a conversation of its own there is no first value to keep.
            yield "A rule with `tail`, `coarsen` or `drop` keeps a clock from changing the prompt of new conversations."
        elif cause is Cause.ID and row.client == "openclaw":
            yield "Set `proxy.strip_message_ids = true`, or add a rule with `drop` for this id."
        elif cause.advice is not None:
            yield cause.advice


def _after_failure(row: RequestRow, log: str) -> Iterator[str]:
    error = (row.error or "").lower()
    if "context size" in error or "context length" in error:
        yield "Raise server.ctx_size, lower server.parallel, or let the client compact its history earlier."
    elif row.status in {401, 403}:
        yield "Give the client the key that the server asks for (server.api_key)."
    elif row.status == 503:
        yield f"The server was not ready or is gone: `kvstack status` says which, {log} why."
    elif row.status is None or row.status < 400 or row.status >= 500:
        yield f"The server's own words on it are in {log}."


def _tokens(count: int) -> str:
    return _plural(count, "token")


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min"


def _in_time(ms: float | None) -> str:
    return "" if ms is None else f" in {_seconds(ms / 1000)}"
