"""
Runs a stack in this process: signals, dashboard or plain lines, exit code.

The first Ctrl-C (or TERM) begins the orderly stop, the second kills.  The exit code says which signal it was, as
shells do: 130 or 143.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstack.errors import ExitCode, KvstackError
from kvstack.stack.plan import Plan
from kvstack.stack.stack import Stack
from kvstack.state.stack_state import StackState
from kvstack.terminal import format, output
from kvstack.terminal.plain_lines import Announcer, Line

_SIGNALS = {
    "SIGINT": ExitCode.INTERRUPTED,
    "SIGTERM": ExitCode.TERMINATED,
    "SIGHUP": ExitCode.TERMINATED,  # the terminal is gone
    "SIGBREAK": ExitCode.INTERRUPTED,  # Windows' Ctrl-Break
}
LINES_WAITING = 10_000


def run_foreground(plan: Plan, *, dashboard: bool) -> int:
    """
    Run the plan's stack until it ends.

    Args:
        plan: What to run.
        dashboard: Whether to draw the dashboard on stdout; plain lines otherwise.

    Returns:
        The exit code.

    Raises:
        KvstackError: The stack could not start, or is lost.
    """
    return asyncio.run(_run(plan, dashboard))


async def _run(plan: Plan, dashboard: bool) -> int:
    stack = Stack(plan)
    begun_s = time.monotonic()
    with _Signals(stack, quiet=dashboard) as signals:
        if dashboard:
            await _with_dashboard(stack, signals)
        else:
            await _with_lines(stack)
    output.say(_farewell(stack.bus.stack_state, time.monotonic() - begun_s))
    return signals.exit_code


async def _with_dashboard(stack: Stack, signals: _Signals) -> None:
    from kvstack.terminal.dashboard.live import Dashboard  # noqa: PLC0415 - plain lines need no rich

    drawn = Dashboard(lambda: stack.bus.stack_state)
    code: int = ExitCode.ERROR
    try:
        with drawn:
            await stack.run()
        code = signals.exit_code
    except KvstackError as error:
        code = error.exit_code
        raise
    finally:
        if drawn.is_stuck:
            # Nothing of the stack is left, and nobody reads what could be said: to flush it would be to wait.
            os._exit(code)
    if drawn.error is not None:
        output.say(f"warning: the dashboard ended early: {type(drawn.error).__name__}: {drawn.error}")


async def _with_lines(stack: Stack) -> None:
    writer = _LineWriter()
    over = asyncio.Event()
    talking = asyncio.create_task(_announce(stack, writer.put, over))
    try:
        await stack.run()
    finally:
        over.set()
        await talking
        writer.close()


async def _announce(stack: Stack, put: Callable[[Line], None], over: asyncio.Event) -> None:
    announcer = Announcer()
    with stack.bus.subscribe() as events:
        next_event = asyncio.ensure_future(anext(events))
        ended = asyncio.ensure_future(over.wait())
        while True:
            await asyncio.wait({next_event, ended}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            if next_event.done():
                for line in announcer.feed(next_event.result(), stack.bus.stack_state):
                    put(line)
                next_event = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)  # what waits already is taken before the end is looked at
            elif ended.done():
                break
            for line in announcer.settle(stack.bus.stack_state, time.time()):
                put(line)
        next_event.cancel()
        for line in announcer.settle(stack.bus.stack_state, float("inf")):
            put(line)


class _LineWriter:
    """Writes lines from a thread of its own: a pipe that nobody reads makes it wait, and not the stack."""

    def __init__(self) -> None:
        self._lines: queue.Queue[Line | None] = queue.Queue(LINES_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(1.0)
        if self._lost:
            output.say(f"warning: {format.plural(self._lost, 'line')} lost: nobody read them")

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if line.is_data:
                # The reader left, or the disk is full: the stack goes on without it.
                with contextlib.suppress(OSError, ValueError, KvstackError):
                    output.write(line.text)
            else:
                output.say(line.text)


class _Signals:
    """While open, signals stop the stack: the first in order, the second at once."""

    def __init__(self, stack: Stack, *, quiet: bool) -> None:
        self.exit_code: int = ExitCode.OK
        self._stack = stack
        self._quiet = quiet
        self._before: dict[int, Any] = {}
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> _Signals:
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            before = None if number is None else signal.getsignal(number)
            if number is None or before is signal.SIG_IGN:  # as under nohup, or as a job of a script
                continue
            self._before[number] = before
            if sys.platform == "win32":
                signal.signal(number, lambda given, _: self._loop.call_soon_threadsafe(self._signalled, given))
            else:
                self._loop.add_signal_handler(number, self._signalled, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            if sys.platform == "win32":
                signal.signal(number, before)
            else:
                self._loop.remove_signal_handler(number)
                signal.signal(number, before)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.exit_code == ExitCode.OK:
            self.exit_code = _SIGNALS[name]
            if not self._quiet:
                output.say("stopping; press Ctrl-C again to kill at once")
            self._stack.request_stop("Ctrl-C" if name == "SIGINT" else name)
        else:
            self._stack.kill()


def _farewell(stack_state: StackState, lived_s: float) -> str:
    totals = stack_state.totals
    text = f"{stack_state.name} ended after {format.duration(lived_s)}"
    if totals.requests:
        text += f": {format.plural(totals.requests, 'request')}"
        if totals.prompt_tokens:
            text += f", {format.percent(totals.cached_tokens / totals.prompt_tokens)} of the prompts from the cache"
        if totals.saved_s >= 1:
            text += f", {format.duration(totals.saved_s)} of prefill saved"
    return text
