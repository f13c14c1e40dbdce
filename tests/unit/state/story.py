"""A stack's life as tests tell it: requests of the proxy, records of the log in the server's own words, answers."""

from __future__ import annotations

from typing import Literal

from kvstack.llama.log.reader import LogReader
from kvstack.state.events import (
    AnswerSeen,
    Difference,
    Event,
    FirstByteSent,
    LogFactSeen,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    ServerSpawned,
    StateChanged,
    WarmupEnded,
)
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView, RequestRow
from kvstack.state.reducer import reduce
from kvstack.state.stack_state import StackState

RATE_TOKENS_PER_MS = 1.0


class Story:
    """A stack that is ready, its server in run 1."""

    def __init__(self, *, attached: bool = False) -> None:
        self.stack_state = StackState("test", ProxyView("http://127.0.0.1:1234"))
        self.now_s = 1000.0
        self.run = 0
        self.numbers = 0
        self.tasks = 0
        self.reader = LogReader()
        self.contents: dict[int, int] = {}
        if not attached:
            self.spawn()
        self.emit(StateChanged(self.now_s, State.READY, ""))

    def emit(self, event: Event) -> None:
        """Let something happen."""
        self.now_s += 0.001
        self.stack_state = reduce(self.stack_state, event)

    def spawn(self) -> None:
        """Start the server (again)."""
        self.run += 1
        self.tasks = 0
        self.reader = LogReader()
        self.emit(ServerSpawned(self.now_s, 4000 + self.run, ("llama-server",)))

    def log(self, text: str) -> None:
        """Let the server say something."""
        for fact in self.reader.feed(text.encode() + b"\n").facts:
            self.emit(LogFactSeen(self.now_s, self.run, fact))

    def ask(
        self,
        conversation: str | None = "c1",
        *,
        items: int = 2,
        side: str | None = None,
        difference: Difference | None = None,
        api: str | None = "chat",
        client: str | None = "openclaw",
        head: str | None = None,
    ) -> int:
        """Let a client send a request; return its number."""
        self.numbers += 1
        number = self.numbers
        path = "/v1/chat/completions"
        self.emit(
            RequestReceived(
                self.now_s,
                number,
                "POST",
                path,
                api,
                client,
                conversation,
                items,
                False,
                1,
                2,
                1,
                (),
                side,
                difference,
                head,
            )
        )
        self.emit(RequestForwarded(self.now_s, number))
        return number

    def launch(
        self,
        slot: int = 0,
        how: str = "lru",
        similarity: float = 0.0,
        *,
        keep: float = 1.0,
        between: str = "",
        child: bool = False,
    ) -> int:
        """Let the server choose a slot and launch a task; return its number."""
        task = self.tasks
        self.tasks += 7
        if not child:
            figures = f"f_sim_best = {similarity:.3f} (> 0.100 thold), f_keep = {keep:.3f}"
            chosen = {
                "lru": "selected slot by LRU, t_last = 12345",
                "id": f"selected slot by id ({slot})",
                "lcp": f"selected slot by LCP similarity, {figures}",
            }[how]
            self.log(f"slot get_availabl: id  {slot} | task -1 | {chosen}")
        if between:
            self.log(between)
        self.log(f"slot launch_slot_: id  {slot} | task {task} | processing task, is_child = {int(child)}")
        return task

    def finish(
        self,
        task: int,
        prompt: int,
        cached: int,
        *,
        slot: int = 0,
        generated: int = 8,
        detailed: bool = False,
        truncated: bool = False,
    ) -> None:
        """Let a task run to its end."""
        head = f"id  {slot} | task {task} | "
        new = prompt - cached
        if detailed:
            self.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = {prompt}")
            self.log(f"slot   operator(): {head}cached n_tokens = {cached}, memory_seq_rm [{cached}, end)")
        speed = "(    0.01 ms per token, 100.00 tokens per second)"
        self.log(
            f"slot print_timing: {head}prompt eval time = {self.prefill_ms(new):10.2f} ms / {new:5d} tokens {speed}"
        )
        self.log(
            f"slot print_timing: {head}       eval time = {generated * 2.0:10.2f} ms / {generated:5d} tokens {speed}"
        )
        total = prompt + generated - 1
        self.contents[slot] = total
        self.log(f"slot      release: {head}stop processing: n_tokens = {total}, truncated = {int(truncated)}")

    @staticmethod
    def prefill_ms(new: int) -> float:
        """Milliseconds that a prefill takes here."""
        return new / RATE_TOKENS_PER_MS

    def answer(
        self,
        number: int,
        prompt: int,
        cached: int,
        *,
        generated: int = 8,
        timings: bool = True,
        error: str | None = None,
    ) -> None:
        """Let the answer come, streamed."""
        self.emit(FirstByteSent(self.now_s, number))
        new = prompt - cached
        self.emit(
            AnswerSeen(
                number,
                prompt,
                cached,
                new,
                generated,
                self.prefill_ms(new) if timings else None,
                generated * 2.0 if timings else None,
                error=error,
            )
        )

    def end(
        self, number: int, outcome: Literal["done", "cancelled", "failed"] = "done", status: int | None = 200
    ) -> None:
        """Let the request be over."""
        self.emit(RequestEnded(self.now_s, number, status, outcome))

    def turn(
        self,
        prompt: int,
        cached: int,
        *,
        conversation: str | None = "c1",
        items: int = 2,
        slot: int = 0,
        how: str = "lcp",
        similarity: float | None = None,
        between: str = "",
        side: str | None = None,
        difference: Difference | None = None,
        generated: int = 8,
        head: str | None = None,
    ) -> RequestRow:
        """One whole request, from the client to the end of the log."""
        number = self.ask(conversation, items=items, side=side, difference=difference, head=head)
        task = self.launch(slot, how, cached / prompt if similarity is None else similarity, between=between)
        self.finish(task, prompt, cached, slot=slot, generated=generated)
        self.answer(number, prompt, cached, generated=generated)
        self.end(number)
        return self.row(number)

    def warm(self, prompt: int, *, boundary: int | None = None, head: str | None = None) -> None:
        """Let the stack warm up."""
        self.emit(StateChanged(self.now_s, State.WARMING, ""))
        task = self.launch(0, "lru")
        self.finish(task, prompt, 0, generated=1)
        took_ms = self.prefill_ms(prompt)
        self.emit(
            WarmupEnded(self.now_s, "done", prompt, prompt, took_ms, boundary_tokens=boundary, head_fingerprint=head)
        )
        self.emit(StateChanged(self.now_s, State.READY, ""))

    def row(self, number: int) -> RequestRow:
        """One request."""
        row = self.stack_state.row(number)
        assert row is not None
        return row
