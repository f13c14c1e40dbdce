"""Requests, tasks and answers find each other, in whatever order and however many at a time."""

from __future__ import annotations

import itertools

import pytest

from kvstack.state.events import AnswerSeen, MemorySampled, WarmupEnded, WarmupStarted, WarmupStepped
from kvstack.state.status_json import encode
from tests.unit.state.rows import slot_of, task_of
from tests.unit.state.story import Story


def test_the_log_after_the_answer() -> None:
    """The log's lines lag behind the answer; the row is completed when they come, and only then settled."""
    story = Story()
    number = story.ask()
    task = story.launch(how="lcp", similarity=0.9)
    story.answer(number, 1000, 950)
    story.end(number)
    before = story.row(number)
    assert (before.verdict, before.settled) == ("WARM", False)
    story.finish(task, 1000, 950)
    after = story.row(number)
    assert (after.settled, task_of(after), after.lcp_similarity_ratio) == (True, task, 0.9)
    assert story.stack_state.totals.requests == 1
    assert story.stack_state.totals.cached_tokens == 950


def test_all_of_the_log_after_the_answer() -> None:
    """Even the launch may come after the request is over."""
    story = Story()
    number = story.ask()
    story.answer(number, 1000, 950)
    story.end(number)
    task = story.launch(how="lcp", similarity=0.9)
    story.finish(task, 1000, 950)
    row = story.row(number)
    assert (task_of(row), row.lcp_similarity_ratio, row.settled) == (task, 0.9, True)
    assert story.stack_state.log.unclaimed_tasks == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parallel_requests_are_told_apart(order: tuple[int, ...]) -> None:
    """Tasks are launched in another order than requests were sent: the figures prove whose is whose."""
    story = Story()
    prompts = [1000, 1100, 1200]
    numbers = [story.ask(f"c{index}") for index in range(3)]
    tasks = {index: story.launch(slot=index, how="lcp", similarity=0.2 + index / 10) for index in order}
    for index in reversed(order):
        story.finish(tasks[index], prompts[index], 0, slot=index)
    for index in order:
        story.answer(numbers[index], prompts[index], 0)
        story.end(numbers[index])
    for index in range(3):
        row = story.row(numbers[index])
        assert (slot_of(row), task_of(row), row.tokens.prompt) == (index, tasks[index], prompts[index])
        assert row.lcp_similarity_ratio == pytest.approx(0.2 + index / 10)
        assert row.settled
        assert story.stack_state.slots[index].conversation == f"c{index}"
    assert story.stack_state.log.unclaimed_tasks == 0


def test_bypass_beside_a_proxied_request() -> None:
    """A request past the proxy takes the first task; the proxied one still gets its own in the end."""
    story = Story()
    number = story.ask()
    foreign = story.launch(slot=1, how="lcp", similarity=0.99)
    own = story.launch(slot=0, how="lcp", similarity=0.5)
    story.finish(foreign, 700, 690, slot=1)
    story.finish(own, 800, 400, slot=0)
    story.answer(number, 800, 400)
    story.end(number)
    row = story.row(number)
    assert (task_of(row), slot_of(row), row.lcp_similarity_ratio) == (own, 0, 0.5)
    assert story.stack_state.log.unclaimed_tasks == 1
    assert story.stack_state.slots[1].request is None


def test_figures_that_contradict_are_not_taken() -> None:
    """A task whose figures are not the answer's belongs to somebody else."""
    story = Story()
    number = story.ask()
    foreign = story.launch(how="lcp", similarity=0.99)
    story.finish(foreign, 700, 690)
    story.answer(number, 800, 400)
    story.end(number)
    row = story.row(number)
    assert (task_of(row), row.lcp_similarity_ratio) == (None, None)
    assert story.stack_state.log.unclaimed_tasks == 1


def test_answers_without_timings_take_times_from_the_log() -> None:
    """Responses and messages that are not streamed have usage only."""
    story = Story()
    number = story.ask(api="messages")
    task = story.launch(how="lru")
    story.finish(task, 600, 0, generated=11)
    story.answer(number, 600, 0, generated=11, timings=False)
    story.end(number)
    row = story.row(number)
    assert (row.timing.prefill_ms, row.timing.decode_ms, row.timing.decode_tokens_per_s) == (600.0, 22.0, 100.0)
    assert row.settled


@pytest.mark.parametrize("detailed", [True, False])
def test_an_answer_without_any_figures(detailed: bool) -> None:
    """A streamed chat without usage or timings is told by the log alone, at either level."""
    story = Story()
    number = story.ask()
    task = story.launch(how="lru")
    story.finish(task, 3164, 100, generated=8, detailed=detailed)
    story.end(number)
    row = story.row(number)
    assert (row.tokens.prompt, row.tokens.cached, row.tokens.evaluated, row.tokens.generated) == (3164, 100, 3064, 8)
    assert row.settled


def test_progress_of_a_running_prefill() -> None:
    """While the prompt is evaluated, row and slot show how far it is."""
    story = Story()
    number = story.ask()
    task = story.launch(slot=2, how="lcp", similarity=0.3)
    head = f"id  2 | task {task} | "
    story.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = 29614")
    story.log(f"slot   operator(): {head}cached n_tokens = 8192, memory_seq_rm [8192, end)")
    story.log(
        f"slot print_timing: {head}prompt processing, n_tokens =  24576, progress = 0.83,"
        " t =   3.48 s / 7070.30 tokens per second"
    )
    row, slot = story.row(number), story.stack_state.slots[0]
    assert (row.tokens.prompt, row.tokens.processed, row.work and row.work.tokens_per_s) == (29614, 24576, 7070.3)
    assert (row.tokens.cached, row.verdict) == (8192, None)
    assert (slot.slot, slot.conversation, slot.processed_tokens, slot.tokens_per_s) == (2, "c1", 24576, 7070.3)
    shown = encode(story.stack_state)["slots"][0]
    assert (shown["is_busy"], shown["running_prompt_tokens"], shown["processed_tokens"]) == (True, 29614, 24576)


def test_child_tasks_are_their_parents() -> None:
    """Further answers to one prompt (n > 1) are neither requests nor bypass."""
    story = Story()
    number = story.ask()
    parent = story.launch(slot=0, how="lru")
    child = story.launch(slot=1, child=True)
    story.finish(parent, 500, 0)
    story.finish(child, 500, 499, slot=1)
    story.answer(number, 500, 0)
    story.end(number)
    assert task_of(story.row(number)) == parent
    assert story.stack_state.log.unclaimed_tasks == 0
    assert story.stack_state.totals.requests == 1


def test_the_last_words_of_a_dead_server_change_nothing() -> None:
    """Lines of an earlier run that come late are not mixed into the new one."""
    story = Story()
    old = story.reader
    story.spawn()
    story.run = 1
    story.reader = old
    story.launch(how="lru")
    assert story.stack_state.join.tasks == ()
    assert story.stack_state.join.run == 2


def test_a_restart_while_a_request_runs() -> None:
    """The request fails; a task of the new server is not given to it."""
    story = Story()
    number = story.ask()
    story.launch(how="lru")
    story.spawn()
    task = story.launch(how="lru")
    story.finish(task, 100, 0)
    story.end(number, "failed", 502)
    row = story.row(number)
    assert (row.verdict, row.settled) == ("FAILED", True)
    assert story.stack_state.log.unclaimed_tasks == 1


def test_other_requests_get_no_task() -> None:
    """A request without a prompt (a list of models, say) is not given the next task."""
    story = Story()
    story.ask(None, api=None)
    number = story.ask()
    task = story.launch(how="lru")
    assert task_of(story.row(number)) == task


def test_a_warmup_by_hand_is_no_bypass() -> None:
    """A warm-up while the stack is ready is recognised by its figures."""
    from kvstack.state.events import WarmupEnded

    story = Story()
    story.finish(story.launch(how="lru"), 7504, 0, generated=1)
    assert story.stack_state.log.unclaimed_tasks == 1
    story.emit(WarmupEnded(story.now_s, "done", 7504, 7504, 7504.0))
    assert story.stack_state.log.unclaimed_tasks == 0
    assert story.stack_state.slots[0].is_warmup


def test_a_log_that_lags_behind_the_warmup() -> None:
    """The warm-up's records may come when the stack is ready already, and even beside the first request."""
    from kvstack.state.events import WarmupEnded

    story = Story()
    story.emit(WarmupEnded(story.now_s, "done", 7504, 7504, 7504.0))
    number = story.ask()
    story.finish(story.launch(how="lru"), 7504, 0, generated=1)
    task = story.launch(how="lcp", similarity=0.96)
    story.finish(task, 7766, 7494)
    story.answer(number, 7766, 7494)
    story.end(number)
    assert (task_of(story.row(number)), story.row(number).verdict) == (task, "WARM")
    assert story.stack_state.log.unclaimed_tasks == 0


def test_requests_beyond_what_is_kept() -> None:
    """Old requests are forgotten, the totals are not."""
    story = Story()
    for index in range(130):
        story.turn(1000 + index * 20, 990 + index * 20, items=2 + 2 * index)
    assert len(story.stack_state.requests) == 100
    assert story.stack_state.requests[-1].id == 130
    assert story.stack_state.totals.requests == 130
    assert len(story.stack_state.join.tasks) <= 64


@pytest.mark.parametrize(("ours", "theirs"), [((8, 0.0), (9, 0.0)), ((8, 0.0), (8, 0.02))])
def test_near_misses_are_no_proof(ours: tuple[int, float], theirs: tuple[int, float]) -> None:
    """Equal prompts are told apart by what was generated, and by hundredths of a millisecond."""
    story = Story()
    number = story.ask()
    task = story.launch(how="lru")
    story.log(f"slot print_timing: id  0 | task {task} | prompt eval time = {500 + theirs[1]:.2f} ms / 500 tokens (")
    story.log(
        f"slot print_timing: id  0 | task {task} | eval time = 16.00 ms / {theirs[0]} tokens (1 ms per token,"
        " 1.00 tokens per second)"
    )
    story.log(f"slot      release: id  0 | task {task} | stop processing: n_tokens = 507, truncated = 0")
    story.emit(AnswerSeen(number, 500, 0, 500, ours[0], 500.0 + ours[1], 16.0))
    story.end(number)
    assert task_of(story.row(number)) is None
    assert story.stack_state.log.unclaimed_tasks == 1


def test_the_slot_knows_its_checkpoints() -> None:
    """Checkpoints come and go, and the number in the record is the truth where there is one."""
    story = Story()
    task = story.launch(how="lru")
    head = f"slot create_check: id  0 | task {task} | "
    for number in (1, 2, 3):
        story.log(
            f"{head}created context checkpoint {number} of 32 (pos_min = 9, pos_max = 9, n_tokens = {number * 10},"
            " size = 0.028 MiB)"
        )
    assert story.stack_state.slots[0].checkpoints == 3
    story.log(f"{head}erasing old context checkpoint (pos_min = 9, pos_max = 9, n_tokens = 10, size = 0.028 MiB)")
    assert story.stack_state.slots[0].checkpoints == 2
    story.log("srv  try_clear_id: purging slot 0 with 30 tokens")
    assert story.stack_state.slots[0].checkpoints == 0


def test_a_failed_load_from_the_ram_cache_is_no_hit() -> None:
    """A better prompt that could not be loaded restored nothing."""
    story = Story()
    story.turn(1100, 0, conversation="a")
    story.turn(900, 10, conversation="b", how="lru")
    between = (
        "srv          load:  - found better prompt with f_keep = 0.999, f_sim = 0.970\n"
        "slot prompt_load: id  0 | task -1 | failed to load prompt from cache"
    )
    row = story.turn(1147, 10, conversation="a", items=4, how="lru", between=between)
    assert row.verdict == "EVICTED"


def test_a_warm_up_while_clients_are_served() -> None:
    """Its task is the warm-up's from its launch on, and no stranger's."""
    story = Story()
    story.turn(900, 0)
    story.emit(WarmupStarted(story.now_s))
    assert story.stack_state.warmup.is_running
    task = story.launch(how="lcp", similarity=0.5)
    assert story.stack_state.slots[0].is_warmup
    story.finish(task, 1200, 200, generated=1)
    story.emit(WarmupEnded(story.now_s, "done", 1200, 1000, 1000.0))
    assert not story.stack_state.warmup.is_running
    assert story.stack_state.slots[0].is_warmup
    assert story.stack_state.log.unclaimed_tasks == 0
    # The next one past the proxy is a stranger's again.
    story.finish(story.launch(), 300, 0)
    assert not story.stack_state.slots[0].is_warmup
    assert story.stack_state.log.unclaimed_tasks == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_warm_up_of_several_tasks(late: bool) -> None:
    """What pushes a conversation out of its slot, and what evaluates: both are its own, however late the log is."""
    story = Story()
    story.turn(900, 0)
    story.emit(WarmupStarted(story.now_s))
    if not late:
        story.finish(story.launch(), 2, 0, generated=1)
    story.emit(WarmupStepped(story.now_s, 2, 2))
    if late:
        story.finish(story.launch(), 2, 0, generated=1)
    else:
        story.finish(story.launch(), 1200, 0, generated=1)
    story.emit(WarmupEnded(story.now_s, "done", 1200, 1200, 1200.0, boundary_tokens=1200, snapshot="saved"))
    if late:
        story.finish(story.launch(), 1200, 0, generated=1)
    assert story.stack_state.log.unclaimed_tasks == 0
    assert [task.is_proved for task in story.stack_state.join.tasks if task.is_warmup] == [True, True]
    assert story.stack_state.slots[0].is_warmup
    story.finish(story.launch(), 300, 0)
    assert story.stack_state.log.unclaimed_tasks == 1


def test_a_restore_is_no_task() -> None:
    """The log tells nothing of it: the slot is the warm-up's all the same, and the next task is a client's."""
    story = Story()
    story.turn(900, 0)
    story.emit(WarmupStarted(story.now_s))
    story.finish(story.launch(), 2, 0, generated=1)
    story.emit(WarmupStepped(story.now_s, 2, 2))
    story.emit(WarmupEnded(story.now_s, "done", 1200, 0, 8.0, boundary_tokens=1200, snapshot="restored"))
    assert story.stack_state.slots[0].is_warmup
    assert story.stack_state.log.unclaimed_tasks == 0
    assert story.turn(1300, 1200, conversation="other").verdict == "WARM"
    assert story.stack_state.log.unclaimed_tasks == 0


def test_a_late_log_still_finds_the_warm_up() -> None:
    """The warm-up may be over before the log tells of its task."""
    story = Story()
    story.turn(900, 0)
    story.emit(WarmupStarted(story.now_s))
    story.emit(WarmupEnded(story.now_s, "done", 1200, 1000, 1000.0))
    story.finish(story.launch(), 1200, 200, generated=1)
    assert story.stack_state.slots[0].is_warmup
    assert story.stack_state.log.unclaimed_tasks == 0


def test_a_second_warm_up_with_the_same_figures() -> None:
    """The first one's task does not stand for the second's."""
    story = Story()
    for _ in range(2):
        story.emit(WarmupStarted(story.now_s))
        story.emit(WarmupEnded(story.now_s, "done", 1200, 1, 1.0))
        story.finish(story.launch(how="lcp", similarity=0.999), 1200, 1199, generated=1)
        assert story.stack_state.slots[0].is_warmup
    assert story.stack_state.log.unclaimed_tasks == 0
    assert [task.is_proved for task in story.stack_state.join.tasks] == [True, True]


def test_a_warm_up_that_failed_claims_nothing() -> None:
    """A warm-up that the server refused has no task: the next one is a client's."""
    story = Story()
    story.emit(WarmupStarted(story.now_s))
    story.emit(WarmupEnded(story.now_s, "failed", detail="HTTP 400"))
    assert slot_of(story.turn(1000, 0)) == 0
    assert not story.stack_state.slots[0].is_warmup


@pytest.mark.parametrize("warm_up_first", [False, True])
def test_a_warm_up_and_a_request_at_once(warm_up_first: bool) -> None:
    """Whatever the server took first: the figures tell whose is whose, and nobody is called a stranger."""
    story = Story()
    story.emit(WarmupStarted(story.now_s))
    number = story.ask()
    first, second = story.launch(0), story.launch(1)
    ours, theirs = (first, second) if warm_up_first else (second, first)
    slot = {first: 0, second: 1}
    story.finish(ours, 1200, 0, slot=slot[ours], generated=1)
    story.finish(theirs, 700, 0, slot=slot[theirs])
    story.answer(number, 700, 0)
    story.end(number)
    story.emit(WarmupEnded(story.now_s, "done", 1200, 1200, 1200.0))
    assert task_of(story.row(number)) == theirs
    assert story.row(number).settled
    assert [slot_view.is_warmup for slot_view in story.stack_state.slots] == [slot[ours] == 0, slot[ours] == 1]
    assert story.stack_state.log.unclaimed_tasks == 0


def test_a_request_that_was_sent_before_the_warm_up_keeps_its_task() -> None:
    """A request that waits already is served first."""
    story = Story()
    number = story.ask()
    story.emit(WarmupStarted(story.now_s))
    story.launch(0)
    assert slot_of(story.row(number)) == 0
    assert not story.stack_state.slots[0].is_warmup
    story.launch(1)
    assert story.stack_state.slots[1].is_warmup


def test_a_refused_task_that_was_mixed_up_leaves_the_slot_as_it_was() -> None:
    """The task of a refused prompt changes hands when the other task is proved: it still left nothing in its slot."""
    story = Story()
    held = story.turn(1000, 0, conversation="held", slot=0, how="lru")
    too_long = story.ask("too long")
    other = story.ask("other")
    served = story.launch(slot=1, how="lcp", similarity=0.2)  # of the second request, though launched first
    refused = story.launch(slot=0, how="lcp", similarity=0.9)
    story.log(f"srv    send_error: task id = {refused}, error: request (3036 tokens) exceeds the context size")
    story.log(f"slot      release: id  0 | task {refused} | stop processing: n_tokens = 1007, truncated = 0")
    story.finish(served, 1100, 0, slot=1)
    story.answer(other, 1100, 0)
    story.end(other)
    assert task_of(story.row(other)) == served
    assert task_of(story.row(too_long)) == refused
    slots = story.stack_state.slots
    assert [(slot.conversation, slot.request) for slot in slots] == [("held", held.id), ("other", other)]


def _refuse(story: Story, tokens: int) -> None:
    task = story.launch(how="lru")
    story.log(f"srv    send_error: task id = {task}, error: request ({tokens} tokens) exceeds the context size")
    story.log(f"slot      release: id  0 | task {task} | stop processing: n_tokens = 7, truncated = 0")


@pytest.mark.parametrize("late", ["first", "both", "begun"])
@pytest.mark.parametrize("sizes", [(3036, 3036), (3036, 2999)])
def test_a_refused_prompt_whose_log_lags_is_no_bypass(late: str, sizes: tuple[int, int]) -> None:
    """The answer may be there before the log tells of the task, also when the next request is under way already."""
    story = Story()

    def answered(tokens: int) -> None:
        number = story.ask()
        story.emit(AnswerSeen(number, error=f"request ({tokens} tokens) exceeds the context size"))
        story.end(number, "failed", 400)

    answered(sizes[0])
    if late == "first":
        _refuse(story, sizes[0])
    if late == "begun":
        number = story.ask()
        _refuse(story, sizes[0])
        _refuse(story, sizes[1])
        story.emit(AnswerSeen(number, error=f"request ({sizes[1]} tokens) exceeds the context size"))
        story.end(number, "failed", 400)
    else:
        answered(sizes[1])
        for tokens in sizes if late == "both" else sizes[1:]:
            _refuse(story, tokens)
    assert story.stack_state.log.unclaimed_tasks == 0
    assert {task.owner for task in story.stack_state.join.tasks} == {1, 2}  # (equal words do not tell which is whose)
    story.log("slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 12345")
    _refuse(story, 3036)  # past the proxy: nobody is left whose it could be
    assert story.stack_state.log.unclaimed_tasks == 1


def test_a_client_that_left_before_the_log_told_of_its_task_is_no_bypass() -> None:
    """Its request is over when the task is launched."""
    story = Story()
    number = story.ask()
    story.end(number, "cancelled", None)
    task = story.launch(how="lru")
    head = f"id  0 | task {task} | "
    story.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = 2000")
    story.log(f"slot   operator(): {head}cached n_tokens = 0, memory_seq_rm [0, end)")
    story.log(f"srv          stop: cancel task, id_task = {task}")
    story.log(f"slot      release: {head}stop processing: n_tokens = 512, truncated = 0")
    assert story.stack_state.log.unclaimed_tasks == 0
    row = story.row(number)
    assert (task_of(row), row.verdict, row.tokens.evaluated) == (task, "CANCELLED", 512)


def test_whose_a_slot_is_reaches_past_a_refused_task() -> None:
    """The slot's owner is corrected although a refused prompt passed through the slot since."""
    story = Story()
    first, second = story.ask("first"), story.ask("second")
    seconds_task = story.launch(slot=0, how="lru")  # of the second request, though launched first
    firsts_task = story.launch(slot=1, how="lru")
    story.finish(seconds_task, 1100, 0, slot=0)
    story.finish(firsts_task, 1000, 0, slot=1)
    refused = story.launch(slot=0, how="lcp", similarity=0.9)
    story.log(f"srv    send_error: task id = {refused}, error: request (3036 tokens) exceeds the context size")
    story.log(f"slot      release: id  0 | task {refused} | stop processing: n_tokens = 1107, truncated = 0")
    story.answer(first, 1000, 0)
    story.answer(second, 1100, 0)
    assert [slot.conversation for slot in story.stack_state.slots] == ["second", "first"]
    # The next one that comes finds whom it drives out.
    story.launch(slot=0, how="lru")
    assert story.stack_state.join.tasks[-1].holder == "second"


@pytest.mark.parametrize("lags", [False, True])
def test_a_warm_up_that_was_refused_is_no_bypass(lags: bool) -> None:
    """Its task is its own, also where the log tells of it when it is over."""
    story = Story()
    story.turn(2000, 0)
    words = "request (3035 tokens) exceeds the context size"
    story.emit(WarmupStarted(story.now_s))
    if not lags:
        _refuse(story, 3035)
    story.emit(WarmupEnded(story.now_s, "failed", detail=f"HTTP 400: {words}"))
    if lags:
        _refuse(story, 3035)
    assert story.stack_state.log.unclaimed_tasks == 0
    _refuse(story, 3035)  # once more, and nobody's
    assert story.stack_state.log.unclaimed_tasks == 1


# Concurrent requests, some of which lose their client: equal prompts give equal figures.


def _cancel(story: Story, task: int, slot: int, tokens: int, prompt: int = 1000) -> None:
    head = f"id  {slot} | task {task} | "
    story.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = {prompt}")
    story.log(f"slot   operator(): {head}cached n_tokens = 0, memory_seq_rm [0, end)")
    story.log(f"srv          stop: cancel task, id_task = {task}")
    story.log(f"slot      release: {head}stop processing: n_tokens = {tokens}, truncated = 0")


def _leave(story: Story, number: int, *, usage: bool) -> None:
    """The client leaves during the answer; the Messages API has told the prompt's figures by then."""
    story.emit(AnswerSeen(number, 1000, 0, 1000, 0) if usage else AnswerSeen(number))
    story.end(number, "cancelled", 200)


def _wait(story: Story) -> None:
    story.now_s += 10.0
    story.emit(MemorySampled(story.now_s, 1))
    story.emit(MemorySampled(story.now_s, 2))


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_cancelled_stream_beside_an_equal_one(swapped: bool, usage: bool) -> None:
    """A stream that lost its client gets the task that was cancelled, not the one that its equal needs."""
    story = Story()
    left, stayed = story.ask("left"), story.ask("stayed")
    tasks = {slot: story.launch(slot) for slot in ((1, 0) if swapped else (0, 1))}
    _leave(story, left, usage=usage)
    story.finish(tasks[1], 1000, 0, slot=1, detailed=True)
    _cancel(story, tasks[0], 0, 1003)
    story.answer(stayed, 1000, 0)
    story.end(stayed)
    assert [task_of(story.row(number)) for number in (left, stayed)] == [tasks[0], tasks[1]]
    assert [story.row(number).tokens.evaluated for number in (left, stayed)] == [1000, 1000]
    assert story.row(left).settled
    assert story.row(stayed).settled
    assert story.stack_state.log.unclaimed_tasks == 0


@pytest.mark.parametrize("usage", [False, True])
def test_a_client_that_leaves_with_the_last_token(usage: bool) -> None:
    """Its task ends as any other does; that is its own, and the equal one beside it keeps its figures."""
    story = Story()
    left, stayed = story.ask("left"), story.ask("stayed")
    stayeds, lefts = story.launch(1), story.launch(0)
    story.finish(lefts, 1000, 0, slot=0, generated=5)
    _leave(story, left, usage=usage)
    assert not story.row(left).settled
    story.finish(stayeds, 1000, 400, slot=1)
    story.answer(stayed, 1000, 400)
    story.end(stayed)
    assert [task_of(story.row(number)) for number in (left, stayed)] == [lefts, stayeds]
    assert story.row(left).tokens.generated == (0 if usage else 5)
    assert story.row(left).settled
    assert story.stack_state.log.unclaimed_tasks == 0


def test_two_cancelled_streams_that_nothing_tells_apart() -> None:
    """Neither shows figures that may be the other's, both settle after the usual wait, and nobody is a stranger."""
    story = Story()
    numbers = [story.ask("one"), story.ask("two")]
    tasks = [story.launch(0), story.launch(1)]
    for number in numbers:
        _leave(story, number, usage=False)
    _cancel(story, tasks[0], 0, 512)
    _cancel(story, tasks[1], 1, 900)
    assert not any(story.row(number).settled for number in numbers)
    _wait(story)
    rows = [story.row(number) for number in numbers]
    assert [(row.settled, row.verdict, task_of(row), row.tokens.evaluated) for row in rows] == [
        (True, "CANCELLED", None, None)
    ] * 2
    assert story.stack_state.log.unclaimed_tasks == 0


def test_cancelled_one_after_the_other() -> None:
    """Who came after a task had begun has no claim to it: both get their figures at once."""
    story = Story()
    for slot, tokens in ((0, 512), (1, 900)):
        number = story.ask()
        task = story.launch(slot)
        _leave(story, number, usage=False)
        _cancel(story, task, slot, tokens)
        row = story.row(number)
        assert (row.settled, task_of(row), row.tokens.evaluated) == (True, task, tokens)


@pytest.mark.parametrize("status", [None, 200])
def test_a_client_that_left_before_the_server_began(status: int | None) -> None:
    """No task ever comes: after the usual wait the request is settled as cancelled, without figures."""
    story = Story()
    number = story.ask()
    story.turn(900, 0, conversation="other")
    story.end(number, "cancelled", status)
    assert not story.row(number).settled
    _wait(story)
    row = story.row(number)
    assert (row.settled, row.verdict, row.tokens.prompt, task_of(row)) == (True, "CANCELLED", None, None)
    assert story.stack_state.counters.verdicts["CANCELLED"] == 1
