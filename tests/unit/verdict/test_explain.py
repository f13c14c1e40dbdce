"""One request in plain words."""

from __future__ import annotations

import json

import pytest

from kvstack.core.explain import Explanation, explain
from kvstack.core.verdict import VERDICTS
from kvstack.core.views import RequestRow
from tests.unit.verdict.story import Story


def told(story: Story, number: int) -> Explanation:
    """The explanation of one request of a story."""
    row = story.row(number)
    before = story.snapshot.row(row.before) if row.before is not None else None
    return explain(row, before, story.snapshot.prefill_tokens_per_s)


def part(explanation: Explanation, title: str) -> str:
    """One part's sentences in a row."""
    return " ".join(" ".join(part.sentences) for part in explanation.parts if part.title == title)


def test_a_clock_in_the_system_prompt() -> None:
    """The difference, the server's doing, the price and the remedy are named."""
    story = Story()
    story.turn(18000, 0)
    number = story.ask(items=4, divergence="clock in system @57,012")
    task = story.launch(how="lcp", similarity=0.151)
    story.log(f"slot operator(): id  0 | task {task} | forcing full prompt re-processing due to lack of cache data")
    story.finish(task, 18310, 0)
    story.answer(number, 18310, 0)
    story.end(number)
    found = told(story, number)
    assert found.verdict == "PARTIAL"
    assert part(found, "What the client changed") == "It differs from the former request: clock in system @57,012."
    server = part(found, "What the server did")
    assert "slot 0, which held request 1" in server
    assert "sim_best 0.151" in server
    assert "no checkpoint" in server
    assert "Of 18,310 tokens in the prompt, 0 came from the cache and 18,310 were evaluated in 18.3 s." in server
    assert "18,000 tokens were evaluated that could have been cached, which took 18.0 s." in part(found, "What it cost")
    assert "`freeze`" in part(found, "What to do")


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
    assert part(found, "What the client changed") == "Nothing: it only adds to the former request."
    assert "The cache saved 996 ms of prefill." in part(found, "What it cost")
    assert "1 timestamp and 2 message ids removed" in part(found, "The request")


def test_restored_at_the_default_level() -> None:
    """What the log did not say is not claimed as said."""
    story = Story()
    story.turn(1100, 0, conversation="a")
    story.turn(900, 10, conversation="b", how="lru")
    story.turn(1147, 1115, conversation="a", items=4, how="lru")
    server = part(told(story, 3), "What the server did")
    assert "can only have come from the RAM cache" in server


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        ("clock in system @3", "freeze"),
        ("id in messages[3].content @20", "strip_message_ids"),
        ("counter in system", "`tail`"),
        ("moved block in messages[9]", "`place`"),
        ("tools reordered", "Keep the client's tools"),
        ("tools changed @9", "Keep the client's tools"),
        ("old tool result changed in messages[4]", "prunes old tool results"),
        ("decoration in messages[2]", "`sticky`"),
        ("history edited at messages[2]", "larger window"),
        ("window trimmed", "drops its oldest turns"),
    ],
)
def test_each_class_of_cause_has_its_remedy(cause: str, word: str) -> None:
    """The remedy follows the cause."""
    row = RequestRow(1, 1.0, "POST", "/v1/responses", "responses", verdict="PARTIAL", cause=cause, divergence=cause)
    assert word in part(explain(row), "What to do")


def test_a_word_in_a_word_is_no_cause() -> None:
    """`provided` holds `id` and is none."""
    row = RequestRow(1, 1.0, "POST", "/x", "chat", verdict="PARTIAL", cause="provided text", divergence="provided text")
    assert part(explain(row), "What to do") == ""


@pytest.mark.parametrize("verdict", [*VERDICTS, None])
def test_every_verdict_can_be_explained(verdict: str | None) -> None:
    """Also a request of which next to nothing is known, and as JSON."""
    found = explain(RequestRow(7, 1.0, "POST", "/v1/messages", "messages", verdict=verdict))
    assert found.headline.endswith(".")
    assert json.loads(json.dumps(found.to_dict()))["request"] == 7


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
        (slot + "slot context shift, n_keep = 0, n_left = 90, n_discard = 45", "45 tokens out of the middle"),
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
    row = RequestRow(1, 1.0, "POST", "/x", "chat", verdict="HIT", saved_s=1234.5, ttft_ms=900.0)
    assert part(explain(row), "What it cost") == (
        "The cache saved 20.6 min of prefill. The first token came after 900 ms."
    )
