"""One request in plain words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstack.state.causes import Cause
from kvstack.state.events import Difference
from kvstack.state.explain import Explanation, explain, reason_words
from kvstack.state.records import RequestRow, TaskView
from kvstack.state.status_json import encode
from kvstack.state.verdict import Verdict
from tests.unit.state.rows import changed, request_row
from tests.unit.state.story import Story


def told(story: Story, number: int) -> Explanation:
    """The explanation of one request of a story."""
    row = story.row(number)
    before = story.stack_state.row(row.change.before) if row.change.before is not None else None
    return explain(row, before, story.stack_state.prefill_tokens_per_s, story.stack_state.server.slots)


def part(explanation: Explanation, title: str) -> str:
    """One part's sentences in a row."""
    return " ".join(" ".join(part.sentences) for part in explanation.parts if part.title == title)


def test_a_clock_in_the_system_prompt() -> None:
    """The difference, the server's doing, the price and the remedy are named."""
    story = Story()
    story.turn(18000, 0)
    number = story.ask(items=4, difference=Difference(Cause.CLOCK, "system", 57012))
    task = story.launch(how="lcp", similarity=0.151)
    story.log(f"slot operator(): id  0 | task {task} | forcing full prompt re-processing due to lack of cache data")
    story.finish(task, 18310, 0)
    story.answer(number, 18310, 0)
    story.end(number)
    found = told(story, number)
    assert found.verdict == "PARTIAL"
    assert found.headline == "The prompt diverges from the cached one so early that nothing could be reused."
    assert part(found, "What the client changed") == "It differs from the previous request: clock in system @57,012."
    server = part(found, "What the server did")
    assert "slot 0, which held request 1" in server
    assert "sim_best 0.151" in server
    assert "no checkpoint" in server
    assert "Of 18,310 tokens in the prompt, 0 came from the cache and 18,310 were evaluated in 18.3 s." in server
    assert "18,000 tokens were evaluated that could have been cached, which took 18.0 s." in part(found, "What it cost")
    assert "`freeze`" in part(found, "What to do")


def test_what_changed_behind_the_first_difference() -> None:
    """To mend the first difference alone would not help: what else changed is told."""
    story = Story()
    story.turn(2941, 0)
    number = story.ask(items=4, difference=Difference(Cause.ID, "messages[0].content", 50, 0, (Cause.CLOCK,)))
    client = part(told(story, number), "What the client changed")
    assert client == "It differs from the previous request: id in messages[0].content @50, and a clock behind it."
    assert encode(story.stack_state)["requests"][-1]["change"]["difference"]["behind"] == ["clock"]


def test_an_id_at_the_very_front() -> None:
    """The id is to blame, and no warm-up is offered against it."""
    story = Story()
    story.turn(2941, 0)
    row = story.turn(2995, 10, items=4, difference=Difference(Cause.ID, "messages[0].content", 3, 0), similarity=0.003)
    found = told(story, row.id)
    assert found.verdict == "PARTIAL"
    assert "2,931 tokens were evaluated that could have been cached" in part(found, "What it cost")
    assert "`drop` for this id" in part(found, "What to do")
    assert "warm" not in whole(found)


@pytest.mark.parametrize("warm", [False, True])
def test_single_turns_whose_beginning_changes(warm: bool) -> None:
    """A warm-up is no remedy against an id in front of everything, and what is told says whose request was alike."""
    story = Story()
    if warm:
        story.warm(2900, boundary=2890)
    story.turn(2941, 0, conversation="c1", how="lru")
    row = story.turn(
        2950, 3, conversation="c2", difference=Difference(Cause.ID, "messages[0].content", 6, 0), how="lru"
    )
    found = told(story, row.id)
    assert "It is the first request of its conversation." in part(found, "The request")
    assert part(found, "What the client changed") == (
        "Its system text and tools are nearly those of a recent request of another conversation, but not quite:"
        " id in messages[0].content @6."
    )
    # No more than the slot held: 2,941 tokens.
    assert "Up to 2,938 tokens were evaluated that could have been cached" in part(found, "What it cost")
    assert "add a rule with `drop` for this id" in part(found, "What to do")
    assert "warm" not in part(found, "What to do")


def test_a_new_conversation_with_another_prompt_lost_nothing() -> None:
    """All that it had in common with what was there was reused: nobody may say that the rest could have been cached."""
    story = Story()
    story.warm(5000, boundary=4900)
    row = story.turn(3000, 400, conversation="b", similarity=0.133)
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "only its first 400 tokens were known")
    assert (row.tokens.lost, row.timing.cost_s) == (0, 0.0)
    cost = part(told(story, row.id), "What it cost")
    assert "could have been cached" not in cost
    assert "As far as is known, none of what was evaluated had been in the cache." in cost


def test_the_only_slot_is_told_with_its_likeness() -> None:
    """Taken by age, it may well begin like the prompt: how much, and what the RAM cache had."""
    story = Story()
    story.log("srv    load_model: initializing slots, n_slots = 1")
    searched = "srv          load:  - looking for better prompt, base f_keep = 0.900, f_sim = {:.3f}"
    better = "srv          load:  - found better prompt with f_keep = 0.999, f_sim = 0.990"
    story.turn(1000, 0, how="lru")
    row = story.turn(3500, 1000, items=4, how="lru", between=searched.format(0.286))
    assert part(told(story, row.id), "What the server did").startswith(
        "It took slot 0, its only one, which held request 1 (sim_best 0.286)."
        " It looked for a better match in the RAM cache and found none."
    )
    story.turn(3000, 900, conversation="c2", how="lru", between=searched.format(0.3))
    row = story.turn(3600, 3550, items=6, how="lru", between=f"{searched.format(0.25)}\n{better}")
    assert part(told(story, row.id), "What the server did").startswith(
        "It took slot 0, its only one, which held request 3 (sim_best 0.250)."
        " It found a better match in the RAM cache and restored it into the slot."
    )


def test_after_a_crash_the_restart_is_told() -> None:
    """A slot of a new server holds nothing: that it was not alike is not why nothing was cached."""
    story = Story()
    story.turn(3000, 0, how="lru")
    story.spawn()
    story.log("srv    load_model: initializing slots, n_slots = 1")
    row = story.turn(3100, 0, items=4, how="lru")
    server = part(told(story, row.id), "What the server did")
    assert reason_words(row) == "the server was restarted"
    assert "The llama-server was restarted after request 1, and its cache was empty then." in server
    assert "It took slot 0, its only one, which held nothing." in server
    assert "enough like this prompt" not in server


def test_a_hit_needs_no_advice() -> None:
    """Where all is well nothing is recommended."""
    story = Story()
    story.turn(1000, 0)
    story.turn(1050, 996, items=4)
    found = told(story, 2)
    assert [part.title for part in found.parts] == [
        "The request",
        "What the client changed",
        "What the server did",
        "What it cost",
    ]
    assert part(found, "What the client changed") == "Nothing: it only adds to the previous request."
    assert "The cache saved 996 ms of prefill." in part(found, "What it cost")
    assert "1 timestamp and 2 message ids removed" in part(found, "The request")


def test_restored_at_the_default_level() -> None:
    """What the log did not say is not claimed as said."""
    story = Story()
    story.turn(1100, 0, conversation="a")
    story.turn(900, 10, conversation="b", how="lru")
    story.turn(1147, 1115, conversation="a", items=4, how="lru")
    server = part(told(story, 3), "What the server did")
    assert "can only come from the RAM cache" in server


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (Cause.CLOCK, "freeze"),
        (Cause.ID, "`drop` for this id"),
        (Cause.COUNTER, "`tail`"),
        (Cause.MOVED, "`place`"),
        (Cause.TOOLS_REORDERED, "Keep the client's tools"),
        (Cause.TOOLS_CHANGED, "Keep the client's tools"),
        (Cause.RESULT_CHANGED, "prunes old tool results"),
        (Cause.DECORATION, "`sticky`"),
        (Cause.HISTORY_EDITED, "larger window"),
        (Cause.TRIMMED, "drops its oldest turns"),
    ],
)
def test_each_class_of_cause_has_its_remedy(cause: Cause, word: str) -> None:
    """The remedy follows the cause."""
    difference = Difference(cause, "input[3].content", 20, 3)
    row = request_row(path="/v1/responses", api="responses", verdict=Verdict.PARTIAL, difference=difference)
    assert word in part(explain(row), "What to do")


def test_a_remedy_is_one_for_this_client() -> None:
    """A switch of OpenClaw is none for others; what stands behind the first change wants its own; no freezing alone."""
    difference = Difference(Cause.ID, "messages[0].content", 9, 0, (Cause.CLOCK,))
    row = request_row(path="/v1/x", verdict=Verdict.PARTIAL, items=2, difference=difference)
    told = part(explain(row), "What to do")
    assert "strip_message_ids" not in told
    assert "`drop` for this id" in told
    assert "`tail`, `coarsen` or `drop` keeps a clock" in told
    assert "freeze" not in told
    assert "strip_message_ids" in part(explain(replace(row, client="openclaw")), "What to do")


def test_a_client_that_left_before_anything_was_evaluated() -> None:
    """Nothing is kept, and nothing is said to be."""
    row = RequestRow(1, 1.0, "POST", "/v1/chat/completions", "chat", verdict=Verdict.CANCELLED, phase="cancelled")
    assert part(explain(row), "What to do") == ""


@pytest.mark.parametrize("verdict", [*Verdict, None])
def test_every_verdict_can_be_explained(verdict: Verdict | None) -> None:
    """Also a request of which next to nothing is known, and as JSON."""
    found = explain(RequestRow(7, 1.0, "POST", "/v1/messages", "messages", verdict=verdict))
    assert found.headline.endswith(".")
    assert json.loads(json.dumps(encode(found)))["request"] == 7


def test_a_running_request() -> None:
    """There is no verdict yet, and none is made up."""
    story = Story()
    assert told(story, story.ask()).headline == "The request is still running."


def test_what_the_log_told_of_a_task() -> None:
    """Checkpoints, moved chunks, shifts, refusals and cancellations are told where they happened."""
    slot, server = "slot x: id  0 | task {} | ", "srv  x: "
    records = (
        (slot + "restored context checkpoint (pos_min = 9, n_past = 2400, size = 1.0 MiB)", "at 2,400 tokens"),
        (slot + "reusing chunk with size 700, shifting KV cache [9, 709) -> [5, 705)", "700 tokens of the old"),
        (slot + "slot context shift, n_keep = 0, n_left = 90, n_discard = 45", "45 tokens from the middle"),
        (slot + "stop processing: n_tokens = 90, truncated = 1", "The context was full"),
        (server + "task id = {}, error: request is too long", "refused the prompt: request is too long"),
        (server + "cancel task, id_task = {}", "the client was gone"),
    )
    for record, sentence in records:
        story = Story()
        number = story.ask()
        task = story.launch(how="lru")
        story.log(record.format(task))
        story.answer(number, 5000, 4000)
        story.end(number)
        assert sentence in part(told(story, number), "What the server did"), record


def test_long_times_are_minutes() -> None:
    """Nobody reads 1,234,567 ms."""
    row = request_row(verdict=Verdict.HIT, saved_s=1234.5, ttft_ms=900.0)
    assert part(explain(row), "What it cost") == (
        "The cache saved 20.6 min of prefill. The first token came after 900 ms."
    )


def whole(explanation: Explanation) -> str:
    """All that is said."""
    return " ".join([explanation.headline, *(part(explanation, one.title) for one in explanation.parts)])


def test_an_answer_in_one_piece() -> None:
    """When it came, and when its first token was there."""
    row = request_row(verdict=Verdict.HIT, phase="done", status=200, duration_ms=4300.0, ttft_ms=400.0)
    assert part(explain(row), "What it cost") == (
        "The answer came after 4.3 s in one piece (not streamed); its first token after 400 ms."
    )
    unknown = changed(row, ttft_ms=None)
    assert part(explain(unknown), "What it cost") == "The answer came after 4.3 s in one piece (not streamed)."
    streamed = changed(row, is_streamed=True)
    assert part(explain(streamed), "What it cost") == "The first token came after 400 ms."


@pytest.mark.parametrize(
    ("status", "error", "said", "remedy"),
    [
        (400, "the request exceeds the available context size", "HTTP 400: the request exceeds", "server.ctx_size"),
        (401, "Invalid API Key", "HTTP 401: Invalid API Key.", "server.api_key"),
        (502, "the llama-server broke off: read error", "HTTP 502: the llama-server broke off", "kvstack logs"),
        (503, "the llama-server is not ready yet", "HTTP 503: the llama-server is not ready", "kvstack status"),
        (500, None, "HTTP 500, without a reason.", "kvstack logs"),
        (200, "the connection closed", "began with HTTP 200 and broke off: the connection closed.", "kvstack logs"),
    ],
)
def test_a_failure_names_status_and_error(status: int, error: str | None, said: str, remedy: str) -> None:
    """What the client got stands there in the server's own words, and a next step."""
    row = request_row(
        verdict=Verdict.FAILED,
        phase="failed",
        status=status,
        error=error,
        duration_ms=7.0,
    )
    assert said in part(explain(row), "What went wrong")
    assert "It failed after 7 ms." in part(explain(row), "What it cost")
    assert remedy in part(explain(row), "What to do")
    attached = part(explain(row, attached=True), "What to do")
    assert "kvstack logs" not in attached
    assert remedy in attached or "its own log" in attached


def test_cold_beside_a_warm_prefix() -> None:
    """A strange prompt is called one: to set up a warm-up is no advice where there is one."""
    story = Story()
    story.warm(5000, boundary=4900)
    row = story.turn(3000, 5, how="lru")
    found = told(story, row.id)
    assert (row.verdict, reason_words(row)) == ("COLD", "not the prompt that was warmed up")
    assert "4,900 tokens were warm, but this prompt is not the one that was warmed up." in part(found, "What to do")
    assert "Set warmup" not in whole(found)
    assert "A warm-up does that" not in whole(found)


def test_cold_after_the_warm_prefix_lost_its_slot() -> None:
    """To warm up again helps a prompt that begins with the warmed prefix, also in a later turn."""
    story = Story()
    story.warm(5000, boundary=4900, head="warmed")
    story.turn(3000, 5, how="lru", conversation="a", head="other")
    row = story.turn(5010, 5, how="lru", conversation="b", head="warmed")
    assert (row.verdict, row.has_warmed_head) == ("COLD", True)
    assert "had lost its slot" in part(told(story, row.id), "What to do")
    assert "`kvstack warmup`" in part(told(story, row.id), "What to do")
    assert "another one" not in whole(told(story, row.id))
    story.turn(3000, 5, how="lru", conversation="a2", head="other")
    assert story.turn(5050, 5, how="lru", conversation="b", items=4).has_warmed_head


@pytest.mark.parametrize(("head", "advice"), [("other", "warmup.request_file"), (None, "server.cache_ram_mib")])
def test_to_warm_up_again_helps_no_prompt_that_begins_otherwise(head: str | None, advice: str) -> None:
    """What `kvstack warmup` evaluates is of no use to another client's system text and tools."""
    story = Story()
    story.warm(5000, boundary=4900, head="warmed")
    story.turn(3000, 5, how="lru", conversation="a", head=head)
    row = story.turn(5010, 5, how="lru", conversation="b", head=head)
    assert row.verdict == "COLD"
    assert "kvstack warmup" not in whole(told(story, row.id))
    assert advice in part(told(story, row.id), "What to do")


def test_cold_beside_a_conversation_that_began_warm() -> None:
    """The prefix is still there as the beginning of a conversation."""
    story = Story()
    story.warm(5000, boundary=4900)
    assert story.turn(5100, 4980, conversation="a").verdict == "WARM"
    row = story.turn(3000, 5, how="lru", conversation="b", slot=1)
    assert "not the one that was warmed up" in part(told(story, row.id), "What to do")


def test_cold_without_a_warm_up() -> None:
    """Where there is none, it is what helps."""
    story = Story()
    assert "Set warmup.request_file" in part(told(story, story.turn(3000, 0).id), "What to do")


def test_what_was_cached_is_not_called_new() -> None:
    """A first turn that was sent before, in a slot or in the RAM cache, contradicts nothing in its explanation."""
    story = Story()
    story.turn(3000, 0, conversation="a", how="lru")
    again = told(story, story.turn(3000, 2999, conversation="b").id)
    story.turn(900, 5, conversation="c", how="lru")
    restored = told(story, story.turn(3010, 2990, conversation="d", how="lru").id)
    assert (again.verdict, restored.verdict) == ("HIT", "RESTORED")
    for found in (again, restored):
        assert "first request of its conversation" not in whole(found)
        assert "the conversation came back" not in whole(found)
        assert "Its prompt begins like one that was evaluated before." in whole(found)


def test_a_former_request_that_is_forgotten() -> None:
    """It is no first request only because nobody remembers the one before."""
    row = request_row(id=150, verdict=Verdict.HIT, conversation="a", before=3)
    assert "which is no longer remembered" in part(explain(row), "The request")


@pytest.mark.parametrize(("slots", "oldest"), [(1, False), (4, True), (None, False)])
def test_one_slot_is_not_unused_for_longest(slots: int | None, oldest: bool) -> None:
    """Among one there is no choice, and among nobody knows how many none is claimed."""
    story = Story()
    if slots is not None:
        story.log(f"srv    load_model: initializing slots, n_slots = {slots}")
    story.turn(1000, 0, how="lru")
    server = part(told(story, story.turn(2000, 5, how="lru", conversation="b").id), "What the server did")
    assert ("the least recently used" in server) == oldest
    assert ("its only one" in server) == (slots == 1)


def test_slot_2_is_not_the_only_one() -> None:
    """What was said of the slots may be old: a slot beyond the first shows that there are several."""
    row = request_row(verdict=Verdict.COLD, work=TaskView(2, 7, how="lru"))
    assert "its only one" not in part(explain(row, slots=1), "What the server did")


def test_the_rate_reproduces_what_was_saved() -> None:
    """The rate that is named gives the seconds that are named, also after the run's rate has changed."""
    story = Story()
    story.turn(10000, 0)
    story.turn(10050, 9996, items=4)
    other = story.ask(conversation=None)
    task = story.launch(1)
    head = f"id  1 | task {task} | "
    speed = "(    0.01 ms per token, 100.00 tokens per second)"
    story.log(f"slot print_timing: {head}prompt eval time =    90000.00 ms /  9000 tokens {speed}")
    story.end(other)
    cost = part(told(story, 2), "What it cost")
    assert story.stack_state.prefill_tokens_per_s == pytest.approx(19000 / 100)
    assert "The cache saved 10.0 s of prefill." in cost
    assert "estimate by this run's prefill rate, 1,000 tokens/s then" in cost
