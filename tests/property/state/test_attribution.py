"""Concurrent requests with equal prompts, some of which lose their client: whose is which task."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstack.state.events import AnswerSeen, MemorySampled
from tests.property.budget import examples
from tests.unit.state.rows import task_of
from tests.unit.state.story import Story

PROMPT_TOKENS = 1000
SPEED = "(    0.01 ms per token, 100.00 tokens per second)"

Step = Callable[[], None]


class _Requests:
    """Requests whose tasks are launched in any order; each has a slot of its own, and ends in its own way."""

    def __init__(self, ends: list[str], random: Random) -> None:
        self.story = Story()
        self.numbers = [self.story.ask(f"c{place}") for place in range(len(ends))]
        order = list(range(len(ends)))
        random.shuffle(order)
        self.tasks = {place: self.story.launch(place) for place in order}
        scripts = [self._script(place, end, random) for place, end in enumerate(ends)]
        while any(scripts):
            random.choice([script for script in scripts if script]).pop(0)()
        for _ in range(2):
            self.story.now_s += 10.0
            self.story.emit(MemorySampled(self.story.now_s, 1))

    def _script(self, place: int, end: str, random: Random) -> list[Step]:
        said = random.choice(["nothing", "usage", "timings"])
        if end == "done":
            return random.sample([lambda: self._finish(place), lambda: self._answer(place)], 2)
        if end == "left with the last token":
            return random.sample([lambda: self._finish(place), lambda: self._leave(place, said)], 2)
        filled = 512 if end == "left in the prefill" else PROMPT_TOKENS + 3
        return [
            lambda: self._leave(place, None if end == "left in the prefill" else said),
            lambda: self._cancel(place, filled),
        ]

    def _prefill_ms(self, place: int) -> float:
        return PROMPT_TOKENS + place / 10

    def _answer(self, place: int) -> None:
        figures = (PROMPT_TOKENS, 0, PROMPT_TOKENS, 8, self._prefill_ms(place), 16.0)
        self.story.emit(AnswerSeen(self.numbers[place], *figures))
        self.story.end(self.numbers[place])

    def _leave(self, place: int, said: str | None) -> None:
        number = self.numbers[place]
        if said == "nothing":
            self.story.emit(AnswerSeen(number))
        elif said == "usage":
            self.story.emit(AnswerSeen(number, PROMPT_TOKENS, 0, PROMPT_TOKENS, 0))
        elif said == "timings":
            self.story.emit(AnswerSeen(number, PROMPT_TOKENS, 0, PROMPT_TOKENS, 1, self._prefill_ms(place), 0.1))
        self.story.end(number, "cancelled", None if said is None else 200)

    def _finish(self, place: int) -> None:
        head = f"slot print_timing: id  {place} | task {self.tasks[place]} | "
        self.story.log(f"{head}prompt eval time = {self._prefill_ms(place):10.2f} ms / {PROMPT_TOKENS} tokens {SPEED}")
        self.story.log(f"{head}       eval time =      16.00 ms /     8 tokens {SPEED}")
        self._release(place, PROMPT_TOKENS + 7)

    def _cancel(self, place: int, filled: int) -> None:
        head = f"slot   operator(): id  {place} | task {self.tasks[place]} | "
        self.story.log(f"{head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = {PROMPT_TOKENS}")
        self.story.log(f"{head}cached n_tokens = 0, memory_seq_rm [0, end)")
        self.story.log(f"srv          stop: cancel task, id_task = {self.tasks[place]}")
        self._release(place, filled)

    def _release(self, place: int, filled: int) -> None:
        head = f"slot      release: id  {place} | task {self.tasks[place]} | "
        self.story.log(f"{head}stop processing: n_tokens = {filled}, truncated = 0")


LEFT = ["left in the prefill", "left in the answer", "left with the last token"]


@given(st.sampled_from(LEFT), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=examples(150), deadline=None)
def test_one_of_several_equal_requests_loses_its_client(left: str, others: int, random: Random) -> None:
    """In whatever order all is told, each request has its own task in the end, and nobody is a stranger."""
    ends = [left, *["done"] * others]
    random.shuffle(ends)
    requests = _Requests(ends, random)
    rows = [requests.story.row(number) for number in requests.numbers]
    assert [task_of(row) for row in rows] == [requests.tasks[place] for place in range(len(ends))]
    assert all(row.settled for row in rows)
    assert requests.story.stack_state.log.unclaimed_tasks == 0


@given(st.lists(st.sampled_from(["done", *LEFT]), min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=examples(150), deadline=None)
def test_several_equal_requests_lose_their_clients(ends: list[str], random: Random) -> None:
    """Who cannot be told apart shows no figures of the log: never those of another one."""
    requests = _Requests(ends, random)
    rows = [requests.story.row(number) for number in requests.numbers]
    assert all(task_of(row) in {None, requests.tasks[place]} for place, row in enumerate(rows))
    assert all(row.settled for row in rows)
    assert requests.story.stack_state.log.unclaimed_tasks == 0
