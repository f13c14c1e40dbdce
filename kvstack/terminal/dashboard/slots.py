"""The slots panel: what each slot holds, for whom, and how far a running prefill is.  Pure."""

from __future__ import annotations

from rich.text import Text

from kvstack.state.records import RequestRow, SlotView
from kvstack.state.stack_state import StackState
from kvstack.terminal import format
from kvstack.terminal.dashboard.glyphs import Glyphs, piece, progress_bar
from kvstack.terminal.format import one_line


def slot_lines(stack_state: StackState, width: int, most: int, glyphs: Glyphs, *, idle: bool) -> list[Text]:
    """
    A line for each slot that works and, if there is room, for each that only holds something.

    Args:
        stack_state: What to show.
        width: In cells.
        most: How many lines at most; slots that work come first.
        glyphs: Shapes.
        idle: Whether slots that do not work are shown.
    """
    busy = [_busy(stack_state, slot, width, glyphs) for slot in stack_state.slots if slot.is_busy]
    rest = [_idle(stack_state, slot, width, glyphs) for slot in stack_state.slots if not slot.is_busy and slot.tokens]
    return [*busy, *(rest if idle else [])][:most]


def eta_s(stack_state: StackState, slot: SlotView) -> float | None:
    """Seconds until the slot's prefill ends, by its own speed or by the rate that this run measured."""
    prompt_tokens = slot.running_prompt_tokens
    rate = slot.tokens_per_s or stack_state.prefill_tokens_per_s
    if prompt_tokens is None or slot.processed_tokens is None or not rate:
        return None
    return max(0, prompt_tokens - slot.processed_tokens) / rate


def _request(stack_state: StackState, slot: SlotView) -> RequestRow | None:
    return None if slot.request is None else stack_state.row(slot.request)


def _whose(stack_state: StackState, slot: SlotView) -> str:
    if slot.is_warmup:
        return "warm-up"
    row = _request(stack_state, slot)
    client = slot.client or (row.client if row is not None else None)
    side = row.side if row is not None else None
    number = f"request {slot.request}" if slot.request is not None else "not through the proxy"
    return " ".join(one_line(word) for word in (client, side, number) if word)


def _bar_width(width: int) -> int:
    return max(8, min(40, width // 5))


def _busy(stack_state: StackState, slot: SlotView, width: int, glyphs: Glyphs) -> Text:
    text = piece(f" slot {slot.slot} ", "bold")
    row = _request(stack_state, slot)
    prompt_tokens = slot.running_prompt_tokens
    done = slot.processed_tokens
    decodes = row is not None and row.phase == "answering"
    if decodes or not prompt_tokens or done is None:
        text.append("decode " if decodes else "prefill ", "cyan")
        text.append(f" {format.tokens(prompt_tokens)} tokens of prompt ")
    else:
        ratio = min(1.0, done / prompt_tokens)
        text += progress_bar(ratio, _bar_width(width), glyphs, "cyan")
        text.append(f" {format.percent(ratio):>5}  {done:,}/{prompt_tokens:,}", "")
        left_s = eta_s(stack_state, slot)
        if left_s is not None:
            text.append(f"  ETA {format.duration(left_s)}", "bold")
    text.append(f"  {_whose(stack_state, slot)}", "dim")
    return text


def _idle(stack_state: StackState, slot: SlotView, width: int, glyphs: Glyphs) -> Text:
    text = piece(f" slot {slot.slot} ", "bold")
    held, room = slot.tokens or 0, stack_state.server.ctx_per_slot
    if room:
        ratio = min(1.0, held / room)
        text += progress_bar(ratio, _bar_width(width), glyphs, "green")
        text.append(f" {format.percent(ratio):>5}  holds {held:,} of {room:,}")
    else:
        text.append(f"holds {held:,}")
    if slot.checkpoints:
        text.append(f"  {format.plural(slot.checkpoints, 'checkpoint')}", "dim")
    text.append(f"  {_whose(stack_state, slot)}", "dim")
    return text
