"""How `kvstack rules test` shows what rules did to captured requests: for programs, and for a person."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstack.prompt.diff.difference import FoundDifference
from kvstack.prompt.engine import UNSPLIT
from kvstack.prompt.report.listing import Shown
from kvstack.prompt.report.mismatch import Mismatch, MismatchReason
from kvstack.prompt.report.replay import Compared, Prefix, ReplayResult, Unmatched
from kvstack.state.causes import Cause
from kvstack.state.events import Difference
from kvstack.terminal.format import one_line, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


WIDTH = 79

_AROUND = 20
_INDENT = "     "

# A piece of a line, and its style.
Piece = tuple[str, str]


def data(results: Sequence[ReplayResult], unmatched: Sequence[Unmatched]) -> dict[str, Any]:
    """What the rules did, for the envelope."""
    return {
        "requests": [_request(one) for one in results],
        "unmatched": [
            {
                "rule": one.rule.name,
                "active": one.rule.active,
                "origin": one.rule.origin,
                "begins_in": None
                if one.request is None
                else {"request": one.request, "path": one.path, "inside_line": one.inside_line},
            }
            for one in unmatched
        ],
    }


def _request(one: ReplayResult) -> dict[str, Any]:
    stripped, compared, new = one.stripped, one.compared, one.new
    found = new.mismatch if new is not None else None
    return {
        "number": one.number,
        "path": one.recorded.endpoint,
        "api": stripped.api,
        "client": stripped.client,
        "conversation": stripped.conversation,
        "new_conversation": None
        if new is None
        else {
            "like_request": new.like,
            "why": None if found is None else _mismatch(found),
            "differs": {"path": found.path, "offset": found.offset, "cause": found.cause}
            if found is not None and found.path
            else None,
        },
        "side": stripped.side,
        "items": stripped.items,
        "stripped": {
            "ts_removed": stripped.ts_removed,
            "msg_ids_removed": stripped.msg_ids_removed,
            "items_modified": stripped.items_modified,
        },
        "hits": [asdict(hit) | {"edits": one.edits_of(hit)} for hit in stripped.hits],
        "idle": [asdict(kept) for kept in stripped.unchanged],
        "edits": [asdict(shown) for shown in one.edits],
        "compared_with": compared.number if compared is not None else None,
        "common_prefix_ratio": {
            "before": compared.before.common.kept_ratio if compared is not None else None,
            "after": compared.after.common.kept_ratio if compared is not None else None,
        },
        "common_prefix": None
        if compared is None
        else {"before": _prefix(compared.before), "after": _prefix(compared.after)},
        "warnings": list(stripped.warnings),
    }


def _prefix(prefix: Prefix) -> dict[str, Any]:
    return asdict(prefix.common) | {
        "evaluated_anew": prefix.anew,
        "differs": prefix.found_difference.flat() if prefix.found_difference is not None else None,
    }


def text(results: Sequence[ReplayResult], unmatched: Sequence[Unmatched]) -> Callable[[Console], RenderableType]:
    """What the rules did, for a person: it fits into 80 columns, and needs no colour."""

    def draw(_: Console) -> RenderableType:
        from rich.text import Text  # noqa: PLC0415 - only when there is something to draw

        out = Text()
        conversations: set[str | None] = set()
        for one in results:
            _draw_request(out, one, first=not conversations)
            if one.new is not None:
                conversations.add(one.stripped.conversation)
        _draw_summary(out, results, unmatched)
        out.rstrip()
        return out

    return draw


def _draw_request(out: Text, one: ReplayResult, *, first: bool) -> None:
    stripped = one.stripped
    words = [one.recorded.endpoint, stripped.client or "unknown client"]
    if one.empty:
        words.append("no prompt in it")
    words.append(_belongs(one, first=first))
    words.append(plural(len(one.edits), "edit"))
    _say(out, f"{one.number}. {' | '.join(word for word in words if word)}", "bold", indent="", hang="   ")
    if any(hit.rule == UNSPLIT for hit in stripped.hits):
        _say(
            out,
            f"{UNSPLIT}: not split into turns: its model's chat template is not known, or has no role markers; "
            "no rule can act in it",
            "yellow",
        )
    if one.new is not None and one.new.mismatch is not None:
        _say(
            out,
            f"a new conversation, although similar to request {one.new.like}: {_mismatch(one.new.mismatch)}",
            "yellow",
        )
    if one.compared is not None:
        _draw_compared(out, one.compared)
    for line in _idle(one):
        _say(out, line)
    for number, shown in enumerate(one.edits):
        if number not in one.same:
            _draw_edit(out, shown)
    if one.same and one.compared is not None:
        counts = Counter(name for number in one.same for name in one.edits[number].rules)
        _say(out, f"{plural(len(one.same), 'edit')} as in request {one.compared.number}: {_counted(counts)}", "dim")
    for warning in stripped.warnings:
        _say(out, warning, "yellow")


_SPEAKERS = {
    "system": "the system text",
    "user": "a user text",
    "assistant": "an answer of the model",
    "tool": "a tool result",
}
_REASONS = {
    MismatchReason.UNANSWERED: "no model has answered in it yet, so it begins a conversation",
    MismatchReason.SHORTER: "it ends before the other one does",
    MismatchReason.SESSION: "the client gives it another session id",
    MismatchReason.CHAT: "its trailing messages name another chat",
    MismatchReason.DROPPED_VALUE: "the id or time that a rule drops from its first user text differs",
    MismatchReason.AMBIGUOUS: "it may continue more than one conversation, or too much is missing in between",
    MismatchReason.OTHER_ITEM: "an item that has no text differs",
    MismatchReason.OTHER_KIND: "another kind of item follows: {speaker} differs",
    MismatchReason.TEXT: "{speaker} differs",
}
# Causes that say no more than that the text differs.
_NO_MORE = (Cause.SYSTEM_CHANGED, Cause.HISTORY_EDITED, Cause.RESULT_CHANGED)


def _mismatch(found: Mismatch) -> str:
    words = _REASONS[found.reason].format(speaker=_SPEAKERS.get(found.role, "an item"))
    if not found.path:
        return words
    kind = f" ({found.cause})" if found.cause is not None and found.cause not in _NO_MORE else ""
    return f"{words} @{found.offset:,}{kind} in {found.path}"


def _belongs(one: ReplayResult, *, first: bool) -> str:
    """Say to which conversation a request belongs."""
    name = one.stripped.conversation
    if one.stripped.side:
        return f"{one.stripped.side} request"
    if one.empty or name is None:
        return ""
    if one.new is None:
        return f"conversation {name}"
    return f"first of its conversation ({name})" if first else f"another conversation ({name})"


def _draw_compared(out: Text, compared: Compared) -> None:
    before, after = compared.before, compared.after
    _say(
        out,
        f"to evaluate after request {compared.number}: {before.anew:,} of {before.common.current:,} -> "
        f"{after.anew:,} of {after.common.current:,} characters",
    )
    if before.found_difference is None and after.found_difference is None:
        _say(out, f"it begins with all of request {compared.number}, without and with the rules")
        return
    pairs = [("without the rules", before), ("with the rules", after)]
    if before.found_difference == after.found_difference:
        pairs = [("without and with the rules", after)]
    for label, prefix in pairs:
        found = prefix.found_difference
        if found is None:
            _say(out, f"{label} it begins with all of request {compared.number}")
        else:
            _say(out, f"{label}, {_where(found.difference)}")
            _draw_change(out, found)


def _where(difference: Difference) -> str:
    """The kind of change and its place, as in `a date or time changed in messages[0].content @17`."""
    return f"{difference.cause.meaning} in {difference.path} @{difference.offset:,}"


def _draw_change(out: Text, found: FoundDifference) -> None:
    if found.old or found.new:
        _lay_out(out, [*_change(_shortened(found.old, 30), _shortened(found.new, 30))])


def _draw_edit(out: Text, shown: Shown) -> None:
    names = list(dict.fromkeys(shown.rules))
    _say(out, f"@{shown.start:,} {', '.join(names)}")
    _lay_out(
        out,
        [
            (_plain(shown.before[-_AROUND:]), "dim"),
            *_change(_shortened(shown.removed, 100), _shortened(shown.inserted, 100)),
            (_plain(shown.after[:_AROUND]), "dim"),
        ],
    )


def _change(removed: str, inserted: str) -> Iterable[Piece]:
    if removed:
        yield f"[-{removed}-]", "red"
    if inserted:
        yield f"{{+{inserted}+}}", "green"


def _idle(one: ReplayResult) -> list[str]:
    """Say which rules matched and changed nothing, those of one kind together."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for kept in one.stripped.unchanged:
        places.setdefault((kept.rule, kept.action, kept.why), []).append(kept.path)
    return [
        f"{rule} matched, no edit: {why} ({action}, {paths[0] if len(paths) == 1 else plural(len(paths), 'place')})"
        for (rule, action, why), paths in places.items()
    ]


def _draw_summary(out: Text, results: Sequence[ReplayResult], unmatched: Sequence[Unmatched]) -> None:
    out.append("\n" if results else "")
    line = f"{plural(len(results), 'request')}, {plural(sum(len(one.edits) for one in results), 'edit')}"
    compared = [one.compared for one in results if one.compared is not None]
    if compared:
        before, after = sum(one.before.anew for one in compared), sum(one.after.anew for one in compared)
        line += f"; to evaluate in {len(compared)} of them: {before:,} -> {after:,} characters"
    _say(out, line, indent="")
    acted = Counter(name for one in results for shown in one.edits for name in shown.rules)
    if acted:
        _say(out, f"edits by rule: {_counted(acted)}", indent="")
    idle = Counter(kept.rule for one in results for kept in one.stripped.unchanged)
    only_idle = Counter({name: n for name, n in idle.items() if name not in acted})
    if only_idle:
        _say(out, f"matched, but never an edit: {_counted(only_idle)}", indent="")
    split = [one for one in results if one.new is not None and one.new.mismatch is not None and one.new.mismatch.path]
    unchanged = [rule for one in results for rule in one.stripped.unchanged]
    freezing = {rule.rule for rule in unchanged if rule.action == "freeze"} & set(only_idle)
    if freezing and not split and len(results) > 1 and all(one.stripped.starts for one in results):
        _say(
            out,
            f"each request began a conversation, so there is no first value that `freeze` could keep ("
            f"{', '.join(sorted(freezing))}): `drop`, `coarsen` and `tail` act on each request.",
            "yellow",
            indent="",
        )
    if split:
        _say(
            out,
            f"{plural(len(split), 'request')} taken as a new conversation, although similar to an earlier one: what "
            "was frozen or placed before does not apply there.  A conversation is known by its texts, without what "
            "rules take out, freeze or make constant; a rule for a difference that does not matter keeps the "
            "conversation together.",
            "yellow",
            indent="",
        )
    for one in unmatched:
        _say(out, _never(one), "yellow", indent="")


def _never(one: Unmatched) -> str:
    rule = one.rule
    if not rule.active:
        return f"never matched: {rule.name} of the config, for it is off"
    said = f"never matched: {rule.name} of the config ({rule.spec.where}, {rule.spec.action})"
    if one.request is None:
        return said
    where = f"in {one.path} of request {one.request}"
    if one.inside_line:
        return f'{said}; it would match {where}, inside a line, with `at = "any"`'
    return f"{said}; its beginning, {_shortened(one.head, 30)!r}, stands {where}, but the rest or the place is another"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _say(out: Text, line: str, style: str = "", *, indent: str = "   ", hang: str = _INDENT) -> None:
    """Add a line of words, folded between them."""
    for row in textwrap.wrap(
        one_line(line),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=hang,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        out.append(row + "\n", style=style)


def _lay_out(out: Text, pieces: Iterable[Piece]) -> None:
    """Add pieces of a body, folded wherever the line ends."""
    out.append(_INDENT)
    room = WIDTH - len(_INDENT)
    for piece, style in pieces:
        rest = piece
        while rest:
            if not room:
                out.append(f"\n{_INDENT}")
                room = WIDTH - len(_INDENT)
            out.append(rest[:room], style=style)
            rest, room = rest[room:], max(0, room - len(rest))
    out.append("\n")


def _shortened(words: str, most: int) -> str:
    shown = _plain(words)
    return shown if len(shown) <= most else f"{shown[: most - most // 3]} ... {shown[-most // 3 :]}"


def _plain(words: str) -> str:
    """A piece of a body without what would move the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
