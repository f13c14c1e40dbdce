"""Rules tried on recorded requests: what they did, what they left alone and why, and what that is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstack.prompt.diff.difference import FoundDifference, find_difference, likeness
from kvstack.prompt.diff.segments import CommonPrefix, Segment, common_prefix, render
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.recording import Recorded
from kvstack.prompt.report.listing import Shown, show_edits
from kvstack.prompt.report.mismatch import Mismatch, mismatch, traced_segments
from kvstack.prompt.rules.matches import Hit
from kvstack.prompt.rules.ruleset import Rule, RuleSet
from kvstack.prompt.rules.trace import Trace

_MOST = 0.5
# Of these many latest requests the one that is most like a new conversation is looked for.
_LATEST = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """
    How far a request begins as an earlier one does, and where it differs.

    Attributes:
        common: How much they share.
        found_difference: Where the later one differs; None if it extends the earlier one.
    """

    common: CommonPrefix
    found_difference: FoundDifference | None

    @property
    def anew(self) -> int:
        """Characters of the later request that are evaluated after the earlier one was."""
        return self.common.current - self.common.shared


@dataclass(frozen=True, slots=True)
class Compared:
    """
    A request beside an earlier one.

    Attributes:
        number: Number of the earlier request, from 1.
        before: As the client sent both.
        after: As the rules left both.
    """

    number: int
    before: Prefix
    after: Prefix


@dataclass(frozen=True, slots=True)
class NewConversation:
    """
    A request that was taken for the first one of a conversation.

    Attributes:
        like: Number of the earlier request that has most of the same words; None if none has.
        mismatch: Why it does not continue that one.
    """

    like: int | None = None
    mismatch: Mismatch | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """
    One request after the rules.

    Attributes:
        number: From 1.
        recorded: It.
        stripped: What the rules made of it.
        edits: Each of their edits.
        empty: It holds no prompt.
        compared: It beside the last request of its conversation, or the one that it is like; None if there is none, or
            it is a side request.
        new: It starts a conversation; None if it continues one, or is a side request.
        same: Numbers, from 0, of the edits that the request it is compared with had as well.
    """

    number: int
    recorded: Recorded
    stripped: RewriteResult
    edits: tuple[Shown, ...]
    empty: bool = False
    compared: Compared | None = None
    new: NewConversation | None = None
    same: frozenset[int] = frozenset()

    def edits_of(self, hit: Hit) -> list[int]:
        """Return the numbers, from 0, of the edits that belong to a hit."""
        cause = (hit.rule, hit.path)
        return [n for n, shown in enumerate(self.edits) if cause in zip(shown.rules, shown.paths, strict=True)]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """
    A rule of the user's config that matched nowhere.

    Attributes:
        rule: It.
        request: Number of a request that holds how its pattern begins; None if none does.
        path: Where that stands.
        head: How its pattern begins.
        inside_line: All of the pattern stands there, but not where the rule looks: with `at = "any"` it would match.
    """

    rule: Rule
    request: int | None = None
    path: str = ""
    head: str = ""
    inside_line: bool = False


@dataclass(frozen=True, slots=True)
class _Former:
    number: int
    conversation: str | None
    before: Sequence[Segment]
    after: Sequence[Segment]
    trace: Trace


def try_requests(requests: Sequence[Recorded], rules: RuleSet, chat_template: str | None = None) -> list[ReplayResult]:
    """
    Apply rules to recorded requests in their order, as a stack would that was started for them.

    Args:
        requests: The requests.
        rules: The compiled rules.
        chat_template: The model's chat template, if it is known.
    """
    memory = ConversationMemory()
    results: list[ReplayResult] = []
    formers: list[_Former] = []
    for number, request in enumerate(requests, start=1):
        body, path = request.body.encode(), request.endpoint
        trace = Trace()
        stripped = apply_rules(body, path, rules, memory, request.headers, chat_template, trace)
        former = _Former(number, stripped.conversation, render(body, path), render(stripped.body, path), trace)
        compared, new = None, None
        if stripped.side is None and former.before:
            compared, new = _compare(former, formers, starts=stripped.starts)
            formers.append(former)
        edits = tuple(show_edits(body, stripped))
        same = _same_edits(edits, results[compared.number - 1].edits) if compared else frozenset()
        results.append(ReplayResult(number, request, stripped, edits, not former.before, compared, new, same))
    return results


def _same_edits(edits: Sequence[Shown], former: Sequence[Shown]) -> frozenset[int]:
    """Return the numbers of the edits that an earlier request had as well, wherever they stood in its body."""
    known = Counter((shown.rules, shown.paths, shown.removed, shown.inserted) for shown in former)
    same = set()
    for number, shown in enumerate(edits):
        key = (shown.rules, shown.paths, shown.removed, shown.inserted)
        if known[key] > 0:
            known[key] -= 1
            same.add(number)
    return frozenset(same)


def _compare(
    current: _Former, formers: Sequence[_Former], *, starts: bool
) -> tuple[Compared | None, NewConversation | None]:
    if not starts:
        own = [former for former in formers if former.conversation == current.conversation]
        return (_beside(own[-1], current) if own else None), None
    like, most = None, _MOST
    for former in reversed(formers[-_LATEST:]):
        ratio = likeness(traced_segments(former.trace), traced_segments(current.trace)).ratio
        if ratio > most:
            like, most = former, ratio
    if like is None:
        return None, NewConversation()
    return _beside(like, current), NewConversation(like.number, mismatch(like.trace, current.trace))


def _beside(former: _Former, current: _Former) -> Compared:
    return Compared(
        former.number,
        Prefix(common_prefix(former.before, current.before), find_difference(former.before, current.before)),
        Prefix(common_prefix(former.after, current.after), find_difference(former.after, current.after)),
    )


def unmatched_rules(rules: RuleSet, results: Sequence[ReplayResult]) -> list[Unmatched]:
    """Return the rules of the user's config that matched nowhere in the requests; also those that are off."""
    matched = {hit.rule for one in results for hit in one.stripped.hits}
    matched |= {unchanged.rule for one in results for unchanged in one.stripped.unchanged}
    own = [rule for rule in rules.rules if rule.origin.endswith("config") and rule.name not in matched]
    return [_unmatched(rule, results) for rule in own]


def _unmatched(rule: Rule, results: Sequence[ReplayResult]) -> Unmatched:
    patterns = [pattern for pattern in rule.block.patterns if pattern.head.strip()]
    found: Unmatched | None = None
    for one in results if rule.active and patterns else ():
        for segment in render(one.recorded.body.encode(), one.recorded.endpoint):
            for pattern in patterns:
                if pattern.head not in segment.text:
                    continue
                inside = rule.spec.where == segment.role == "system" and rule.spec.at != "any"
                if inside and any(pattern.search(segment.text, 0, len(segment.text), anywhere=True)):
                    return Unmatched(rule, one.number, segment.path, pattern.head, inside_line=True)
                found = found or Unmatched(rule, one.number, segment.path, pattern.head)
    return found or Unmatched(rule)
