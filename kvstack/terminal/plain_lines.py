"""
Plain lines for pipes and services: one line for each request that is over, on stdout; talk on stderr.

```
POST /v1/responses | items=8 | ts_removed=2 | msg_ids_removed=3 | items_modified=3 | stream=True | sim_best=0.982 | \
cached=18377 | evaluated=25 | HIT
```

What is not known is `-`.  Behind the verdict may stand `| why=...`, for a verdict that needs a reason, `| status=...`,
for an answer that was no success, and `| rules=...`, what each rule did.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstack.state.events import Event, Notice, RequestEnded, StateChanged, WarmupEnded, WarmupJudged
from kvstack.state.explain import reason_words
from kvstack.state.lifecycle import State
from kvstack.state.records import RequestRow
from kvstack.state.stack_state import StackState
from kvstack.state.verdict import Verdict
from kvstack.terminal import format
from kvstack.terminal.format import one_line

SETTLE_S = 1.0
"""How long a request that is over may wait for figures that come with the log."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and whether it is data (stdout) or talk (stderr)."""

    text: str
    is_data: bool = False


def request_line(row: RequestRow) -> str:
    """One request, as it is known now."""
    parts = [
        f"{one_line(row.method)} {one_line(row.path)}",
        f"items={row.items}",
        f"ts_removed={row.stripped.ts_removed}",
        f"msg_ids_removed={row.stripped.msg_ids_removed}",
        f"items_modified={row.stripped.items_modified}",
        f"stream={row.stream}",
        f"sim_best={format.ratio(row.lcp_similarity_ratio)}",
        f"cached={_plain(row.tokens.cached)}",
        f"evaluated={_plain(row.tokens.evaluated)}",
        one_line(row.verdict or Verdict.UNKNOWN),
    ]
    why = reason_words(row) or row.error
    if why:
        parts.append(f"why={one_line(why)}")
    if row.status is not None and row.status >= 400:
        parts.append(f"status={row.status}")
    if row.stripped.rules:
        parts.append("rules=" + ",".join(f"{one_line(rule)}:{count}" for rule, count in row.stripped.rules.items()))
    return " | ".join(parts)


def _plain(count: int | None) -> str:
    return format.UNKNOWN if count is None else str(count)


def how_to_use(stack_state: StackState) -> list[str]:
    """What to do with a stack that is ready."""
    url, name = stack_state.proxy.url, stack_state.name
    return [
        f"  OpenAI clients:     base URL {url}/v1 (any API key)",
        f"  Anthropic clients:  base URL {url}",
        f"  other terminals:    {verbs_for(name, attached=stack_state.server.is_attached)}",
    ]


def verbs_for(name: str, *, attached: bool) -> str:
    """
    What can be asked of a stack from another terminal; not for a log where it keeps none.

    Args:
        name: The stack.
        attached: Whether its llama-server is somebody else's, which keeps its own log.
    """
    verbs = ("status", "down") if attached else ("status", "logs -f", "down")
    return " | ".join(f"kvstack {verb} {name}" for verb in verbs)


class Announcer:
    """Turns events into lines.  Pure: time comes in."""

    def __init__(self) -> None:
        self._pending: dict[int, float] = {}
        self._told_how = False

    def feed(self, event: Event, stack_state: StackState) -> list[Line]:
        """
        Lines that *event* gives at once.

        Args:
            event: What happened.
            stack_state: The stack as of then, or later.
        """
        match event:
            case StateChanged():
                return self._state(event, stack_state)
            case WarmupEnded(outcome="done"):
                return [Line(_warm(event))]
            case WarmupJudged(holds=True):
                return [Line(f"warm-up: proved, {format.tokens(event.cached_tokens)} tokens were found cached")]
            case WarmupEnded(outcome="no prefix known"):
                return [Line("warm-up: no prefix known; set warmup.request_file or warmup.system_prompt")]
            case Notice():
                return [Line(f"{event.level}: {one_line(event.text)}")]
            case RequestEnded():
                self._pending[event.id] = event.time_s
                return []
            case _:
                return []

    def settle(self, stack_state: StackState, now_s: float) -> list[Line]:
        """Lines of requests that are over and whose figures are there, or will not come any more."""
        rows = {row.id: row for row in stack_state.requests}
        lines: list[Line] = []
        for number, ended_s in list(self._pending.items()):
            row = rows.get(number)
            if row is not None and not _is_settled(row) and now_s - ended_s < SETTLE_S:
                continue
            del self._pending[number]
            if row is not None:
                lines.append(Line(request_line(row), is_data=True))
        return lines

    def _state(self, event: StateChanged, stack_state: StackState) -> list[Line]:
        reason = f": {one_line(event.reason)}" if event.reason else ""
        if stack_state.server.is_attached and event.state in {State.LOADING, State.BACKOFF}:
            reason = f": {one_line(stack_state.server.url or '')}{reason}"
        lines = [Line(f"{event.state.value}{reason}")]
        if event.state is State.READY and not self._told_how:
            self._told_how = True
            lines += [Line(text) for text in how_to_use(stack_state)]
        return lines


def _warm(event: WarmupEnded) -> str:
    took = "" if event.duration_ms is None else f" in {format.duration(event.duration_ms / 1000)}"
    warm, new = format.tokens(event.warm_tokens), format.tokens(event.evaluated_tokens)
    match event.snapshot:
        case "restored":
            return f"warm-up: {warm} tokens were restored from a snapshot{took}; the first answer will prove it"
        case "saved":
            return f"warm-up: {new} tokens were evaluated and saved as a snapshot{took}; the first answer will prove it"
        case None:
            why = f" ({one_line(event.detail)})" if event.detail else ""
            return f"warm-up: {warm} tokens are warm, {new} were evaluated{took}{why}"


def _is_settled(row: RequestRow) -> bool:
    return row.api is None or (row.settled and row.verdict is not None)
