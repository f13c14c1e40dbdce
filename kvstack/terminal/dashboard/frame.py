"""
The dashboard: `render(snapshot, width, height, now_s)` draws one frame.  Pure.

From top to bottom: who and in what state; what runs; **is the cache working, and if not, why**; sim_best as a
history; the requests, newest first; running prefills; warnings; the server's last log lines fill the rest.  Every
line is cut to the width, so nothing wraps; the frame has exactly *height* lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from kvstack.state.lifecycle import State
from kvstack.state.records import RequestRow, ServerView
from kvstack.state.stack_state import StackState
from kvstack.state.verdict import Level
from kvstack.terminal import format
from kvstack.terminal.dashboard.getting_started import guidance
from kvstack.terminal.dashboard.glyphs import UNICODE, Glyphs, Point, chart, cut, piece, sparkline
from kvstack.terminal.dashboard.headline import (
    decode_speed_by_context,
    model_requests,
    read,
    recent_reuse_ratio,
)
from kvstack.terminal.dashboard.request_table import STYLES, RequestTable, verdict_style
from kvstack.terminal.dashboard.slots import slot_lines
from kvstack.terminal.format import one_line

CHART_FROM_HEIGHT = 40
CHART_ROWS = 6
BOTH_FROM_WIDTH = 72
"""From here on both what was saved and what was lost have room."""

THRESHOLD_FROM_WIDTH = 90


def render(
    stack_state: StackState, width: int, height: int, now_s: float, glyphs: Glyphs = UNICODE, *, watching: bool = False
) -> Group:
    """One frame as something that rich can print."""
    return Group(*frame(stack_state, width, height, now_s, glyphs, watching=watching))


def frame(
    stack_state: StackState, width: int, height: int, now_s: float, glyphs: Glyphs = UNICODE, *, watching: bool = False
) -> list[Text]:
    """
    One frame.

    Args:
        stack_state: What to show.
        width: In cells.
        height: In lines.
        now_s: The present, in seconds since the epoch.
        glyphs: Shapes that the terminal can show.
        watching: Whether the stack runs elsewhere: Ctrl-C leaves the view then, and the stack goes on.

    Returns:
        Exactly *height* lines of exactly *width* cells.
    """
    width, height = max(1, width), max(1, height)
    head = head_lines(stack_state, width, now_s, glyphs)
    if height >= CHART_FROM_HEIGHT:
        head[-1:] = _tall_history(stack_state, width, glyphs)
    foot = _foot(stack_state, width, glyphs, watching=watching)
    room = height - len(head) - len(foot)
    lines = head + _middle(stack_state, width, max(0, room), now_s, glyphs)
    lines = lines[: height - len(foot)]
    lines += [Text()] * (height - len(foot) - len(lines)) + foot
    return [cut(line.copy(), width, glyphs) for line in lines[:height]]


def summary(stack_state: StackState, width: int, now_s: float, rows: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """
    The same picture for a page that is printed once: no log, no more lines than there is to say.

    Args:
        stack_state: What to show.
        width: In cells.
        now_s: The present, in seconds since the epoch.
        rows: How many of the newest requests.
        glyphs: Shapes that the output can show.
    """
    lines = head_lines(stack_state, width, now_s, glyphs)
    shown = model_requests(stack_state)[-rows:]
    if shown:
        table = RequestTable(width, glyphs)
        lines += [table.heading(), *table.block(shown, 2 * len(shown))]
    lines += slot_lines(stack_state, width, 8, glyphs, idle=True)
    # Warnings are whole sentences, and here there is room for all of them.
    return [*(cut(line, width, glyphs) for line in lines), *_warnings(stack_state, 4, glyphs)]


def head_lines(stack_state: StackState, width: int, now_s: float, glyphs: Glyphs) -> list[Text]:
    """The lines at the top: identity, facts, the reading, the history of sim_best."""
    lines = [
        _title(stack_state, width, now_s, glyphs),
        *_facts(stack_state, width, glyphs),
        _reading(stack_state, now_s, glyphs),
        _history(stack_state, width, glyphs),
    ]
    return [cut(line, width, glyphs) for line in lines]


def _sign(level: Level, glyphs: Glyphs) -> str:
    return {"good": glyphs.good, "warn": glyphs.warn, "bad": glyphs.bad, "idle": glyphs.idle}[level]


def _state_level(state: State) -> Level:
    if state is State.READY:
        return "good"
    return "bad" if state in {State.FAILED, State.BACKOFF} else "warn"


def _short_url(url: str) -> str:
    """`:1234` for a loopback URL; the host too for any other."""
    shown = one_line(url).removeprefix("http://").rstrip("/")
    for host in ("127.0.0.1:", "localhost:", "[::1]:"):
        if shown.startswith(host):
            return f":{shown[len(host) :]}"
    return shown


def _spread(left: Text, right: Text, width: int, glyphs: Glyphs) -> Text:
    """*left* and *right* at the two ends; where it is tight, *left* gives way."""
    room = width - right.cell_len - 1
    if room < width // 3:
        return cut(left, width, glyphs)
    return cut(left, room, glyphs) + piece(" ") + right


def _title(stack_state: StackState, width: int, now_s: float, glyphs: Glyphs) -> Text:
    level = _state_level(stack_state.state)
    left = piece(" kvstack ", "bold reverse") + piece(f" {one_line(stack_state.name)}", "bold")
    right = piece(f" {_sign(level, glyphs)} {stack_state.state.upper()} ", f"{STYLES[level]} reverse")
    if stack_state.started_s is not None:
        right.append(f" {format.elapsed_clock(now_s - stack_state.started_s)}", "bold")
    port = f" {_short_url(stack_state.server.url)}" if stack_state.server.url else ""
    program = " llama-server" if width >= 100 else ""
    pieces = [
        (f"  {_short_url(stack_state.proxy.url)} {glyphs.arrow}{program}{port}", "dim"),
        (f"  {format.plural(stack_state.restarts, 'restart')}" if stack_state.restarts else "", "yellow"),
        (f"  pid {stack_state.server.pid}" if stack_state.server.pid is not None else "", "dim"),
    ]
    for text, style in pieces:
        if left.cell_len + right.cell_len + len(text) + 1 <= width:
            right.append(text, style)
    # The state is never what gives way.
    return cut(left, max(0, width - right.cell_len - 1), glyphs) + right


def _facts(stack_state: StackState, width: int, glyphs: Glyphs) -> list[Text]:
    """What runs (model, device) and how it is (context, memory, warm prefix): one line if there is room, else two."""
    server, warm = stack_state.server, stack_state.warmup
    model = one_line(server.model or _model_of(server.argv) or "model not known").replace("\\", "/").rpartition("/")[2]
    device = _device_words(server)
    slots = f" x {server.slots} slots" if server.slots and server.slots > 1 else ""
    state: list[tuple[str, str]] = [
        (f"ctx {format.tokens(server.ctx_per_slot)}{slots}", ""),
        (f"mem {format.memory(server.rss_bytes)}", ""),
    ]
    if stack_state.state in {State.FAILED, State.STOPPED}:
        pass  # nothing is warm where nothing runs
    elif warm.is_running:
        state.append(("warming up", "yellow"))
    elif warm.is_unproved:
        state.append((f"prefix {format.tokens(warm.warm_tokens)} tok {warm.snapshot}, not proved yet", "cyan"))
    elif warm.outcome == "done":
        state.append((f"warm prefix {format.tokens(warm.warm_tokens)} tok {glyphs.good}", "green"))
    elif warm.outcome == "failed":
        state.append((f"warm-up failed {glyphs.bad}", "yellow"))
    elif warm.outcome == "pending":
        state.append(("warm-up pending", "dim"))
    else:
        state.append((f"warm-up: {one_line(warm.outcome)}", "dim"))
    if server.asleep:
        state.append(("asleep", "yellow"))
    if stack_state.ram_cache.prompts:
        ram = stack_state.ram_cache
        held = f"{format.plural(stack_state.ram_cache.prompts, 'prompt')} {format.memory(ram.size_bytes)}"
        state.append((f"ram cache {held}", ""))
    if server.build:
        state.append((f"build {one_line(server.build)}", "dim"))
    what = piece(" ") + _joined([(model, "bold"), (device, "")], glyphs)
    how = piece(" ") + _joined(state, glyphs)
    if what.cell_len + how.cell_len + 2 <= width:
        return [what + piece(f" {glyphs.separator}", "dim") + how]
    return [what, how]


def _model_of(argv: Sequence[str]) -> str | None:
    """The model that a command names: all that is known of it while it is being loaded."""
    for flag, value in itertools.pairwise(argv):
        if flag in {"-m", "--model", "-hf", "--hf-repo"}:
            return value
    return None


def _device_words(server: ServerView) -> str:
    words = " ".join(one_line(word) for word in (server.device, server.device_name) if word)
    if not words:
        # Without a device the line "offloaded 3/3 layers" is printed too: only where the buffers are tells.
        # `CPU_Mapped` is memory of the CPU too.
        places = {key.rpartition(" ")[2].partition("_")[0] for key in server.buffers_bytes if key.startswith("model ")}
        return " + ".join(sorted(one_line(place) for place in places)) if places else "device not known"
    if server.layers_total:
        words += f" {server.layers_offloaded or 0}/{server.layers_total} layers"
    return words


def _joined(pieces: Sequence[tuple[str, str]], glyphs: Glyphs) -> Text:
    return piece(f" {glyphs.separator} ", "dim").join(piece(text, style) for text, style in pieces)


def _reading(stack_state: StackState, now_s: float, glyphs: Glyphs) -> Text:
    reading = read(stack_state, now_s)
    style = STYLES[reading.level]
    return piece(f" {_sign(reading.level, glyphs)} {reading.head}", style) + piece(f"  {reading.detail}")


def _points(rows: Sequence[RequestRow]) -> list[Point]:
    return [(row.lcp_similarity_ratio, verdict_style(row)) for row in rows]


def _sim_best_words(stack_state: StackState, width: int) -> Text:
    # Of the last request, as its row has it; one that runs may not have been given its slot yet.
    newest = next(
        (
            row
            for row in reversed(model_requests(stack_state))
            if row.is_over or row.verdict is not None or row.lcp_similarity_ratio is not None
        ),
        None,
    )
    text = piece(" sim_best ", "bold")
    if newest is None or newest.lcp_similarity_ratio is None:
        text.append(format.UNKNOWN, "dim")
    else:
        text.append(format.ratio(newest.lcp_similarity_ratio), verdict_style(newest))
    if stack_state.server.similarity_threshold_ratio is not None and width >= THRESHOLD_FROM_WIDTH:
        text.append(f" (> {stack_state.server.similarity_threshold_ratio:.2f})", "dim")
    return text


def _totals_words(stack_state: StackState, width: int) -> Text:
    text = piece(" reuse ", "bold")
    text.append(format.percent(recent_reuse_ratio(model_requests(stack_state))))
    totals = stack_state.totals
    if width < BOTH_FROM_WIDTH and totals.cost_s >= 1:
        # What was saved is half the truth: where there is no room for both, the difference.
        net_s = totals.saved_s - totals.cost_s
        text.append("  saved net ", "bold")
        text.append(f"{'-' if net_s < 0 else ''}{format.duration(abs(net_s))}", "yellow" if net_s < 0 else "")
    else:
        text.append("  saved ", "bold")
        text.append(format.duration(totals.saved_s) if totals.requests else format.UNKNOWN)
        if totals.cost_s >= 1:
            text.append("  lost ", "bold")
            text.append(format.duration(totals.cost_s), "yellow")
    if width >= 100 and totals.requests:
        text.append(f" in {format.plural(totals.requests, 'turn')}")
    text.append(" ")
    return text


def _history(stack_state: StackState, width: int, glyphs: Glyphs) -> Text:
    left, right = _sim_best_words(stack_state, width), _totals_words(stack_state, width)
    left.append("  ")
    left += sparkline(_points(model_requests(stack_state)), width - left.cell_len - right.cell_len - 1, glyphs)
    return _spread(left, right, width, glyphs)


def _tall_history(stack_state: StackState, width: int, glyphs: Glyphs) -> list[Text]:
    threshold_ratio = stack_state.server.similarity_threshold_ratio
    title = _spread(_sim_best_words(stack_state, width), _totals_words(stack_state, width), width, glyphs)
    points = _points(model_requests(stack_state))
    if not points:
        return [title]
    rows = chart(points, width - 2, CHART_ROWS, threshold_ratio, glyphs)
    return [title, *(piece(" ") + row for row in rows)]


def _middle(stack_state: StackState, width: int, room: int, now_s: float, glyphs: Glyphs) -> list[Text]:
    roomy = room >= 30
    requests = model_requests(stack_state)
    slots = slot_lines(stack_state, width, 8 if roomy else 2, glyphs, idle=roomy)
    warnings = _warnings(stack_state, 4 if roomy else 1, glyphs)
    if not requests:
        body = guidance(stack_state, now_s, glyphs)
        log = _log(stack_state, width, room - len(body) - len(slots) - len(warnings), glyphs)
        return body + slots + warnings + log
    if roomy:
        slots = [*slots, *_decode_by_context(requests, glyphs)]
    room -= len(slots) + len(warnings) + 1
    table = RequestTable(width, glyphs)
    log_least = min(len(stack_state.log_lines), 10 if roomy else 4)
    log_least += 1 if log_least else 0
    rows = table.block(requests, max(1, room - log_least))
    lines = [table.heading(), *rows, *slots, *warnings]
    return lines + _log(stack_state, width, room - len(rows), glyphs)


def _decode_by_context(rows: Sequence[RequestRow], glyphs: Glyphs) -> list[Text]:
    """Decode speed at growing context: that long conversations are slower is normal, and is seen as such here."""
    speeds = decode_speed_by_context(rows)
    if not speeds:
        return []
    text = piece(" decode ", "bold")
    text.append(
        f" {glyphs.separator} ".join(f"up to {limit // 1024}k ctx {format.rate(speed)}" for limit, speed in speeds)
        + " tok/s"
    )
    return [text]


def _warnings(stack_state: StackState, most: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for notice in stack_state.notices:
        if notice.level == "info":
            continue
        sign, style = (glyphs.bad, "bold red") if notice.level == "error" else (glyphs.warn, "bold yellow")
        time = piece(f"{format.clock_time(notice.time_s)} ", "dim")
        lines.append(piece(f" {sign} ", style) + time + piece(one_line(notice.text), "yellow"))
    return lines[-most:]


def _log(stack_state: StackState, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    if room < 2:
        return []
    if not stack_state.log_lines:
        if stack_state.state is State.READY and stack_state.server.is_attached:
            words = "attached: the server's log is not read, so there is no sim_best; the figures are the answers' own"
            return [Text(), piece(f" {words}", "dim")]
        return []
    title = piece(f"{glyphs.rule * 2} llama-server's log ", "dim")
    title.append(glyphs.rule * max(0, width - title.cell_len), "dim")
    return [title, *(piece(f" {one_line(line)}", "dim") for line in stack_state.log_lines[-(room - 1) :])]


def _foot(stack_state: StackState, width: int, glyphs: Glyphs, *, watching: bool) -> list[Text]:
    left = piece(f" {one_line(stack_state.proxy.url)}", "cyan")
    totals, log = stack_state.totals, stack_state.log
    notes: list[tuple[str, str]] = []
    if log.unclaimed_tasks:
        notes.append((f"  {log.unclaimed_tasks:,} bypassed the proxy", "yellow"))
    if log.drift:
        notes.append((f"  {format.plural(log.drift, 'log record')} not understood", "yellow"))
    if totals.ts_removed or totals.msg_ids_removed:
        notes.append((f"  stripped: ids {totals.msg_ids_removed:,}, ts {totals.ts_removed:,}", "dim"))
    stops = "again kills" if stack_state.state is State.STOPPING else "stops"
    right = piece(f"Ctrl-C {'leaves' if watching else stops} ", "dim")
    for text, style in notes:
        if left.cell_len + len(text) + right.cell_len < width:
            left.append(text, style)
    return [_spread(left, right, width, glyphs)]
