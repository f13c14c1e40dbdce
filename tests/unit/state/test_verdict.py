"""Each verdict from the facts that make it, told in the server's own words."""

from __future__ import annotations

import pytest

from kvstack.state.causes import CAUSES, Cause
from kvstack.state.events import Difference, ServerDescribed
from kvstack.state.explain import difference_words, reason_words
from kvstack.state.verdict import REASONS, VERDICTS, ReasonKind, Verdict
from tests.unit.state.rows import slot_of, task_of
from tests.unit.state.story import Story

FORCED = (
    "slot   operator(): id  0 | task {task} | forcing full prompt re-processing due to lack of cache data"
    " (likely due to SWA or hybrid/recurrent memory, see URL)"
)
SEARCHED = "srv          load:  - looking for better prompt, base f_keep = {:.3f}, f_sim = {:.3f}"
RAM_HIT = "srv          load:  - found better prompt with f_keep = 0.999, f_sim = 0.970"


def test_growing_conversation() -> None:
    """The first request is cold, each that extends it is a hit that costs nothing."""
    story = Story()
    first = story.turn(2896, 0, items=2, how="lru")
    assert (first.verdict, reason_words(first), first.tokens.lost) == (
        "COLD",
        "first request of its conversation",
        2896,
    )
    for items, prompt, cached in ((4, 2943, 2892), (6, 2990, 2939), (8, 3037, 2986)):
        row = story.turn(prompt, cached, items=items)
        assert (row.verdict, reason_words(row), row.tokens.lost, row.timing.cost_s) == ("HIT", None, 0, 0.0)
        assert row.settled
    assert story.stack_state.totals.verdicts == {"COLD": 1, "HIT": 3}


def test_a_long_answer_that_is_rendered_anew_is_still_a_hit() -> None:
    """A hybrid model goes back to the end of the former prompt: what it evaluates is the answer and what is new."""
    story = Story()
    story.turn(2000, 0, generated=600)
    row = story.turn(2700, 1996, items=4, similarity=0.74)
    assert (row.verdict, row.tokens.evaluated) == ("HIT", 704)


def test_partial_with_the_proxys_cause() -> None:
    """The client changed something early: the proxy says what, the tokens that were lost are counted."""
    story = Story()
    story.turn(2941, 0)
    row = story.turn(2995, 395, items=4, difference=Difference(Cause.ID, "system", 1514), similarity=0.132)
    assert (row.verdict, reason_words(row), row.tokens.lost) == ("PARTIAL", "id in system @1,514", 2941 - 395)
    assert row.timing.cost_s == pytest.approx((2941 - 395) / 1000)


def test_partial_on_a_hybrid_model_that_kept_nothing() -> None:
    """Where the change lost more than the missing checkpoint, the change is the cause, though nothing was kept."""
    story = Story()
    story.turn(2941, 0)
    number = story.ask(items=4, difference=Difference(Cause.CLOCK, "system", 57012))
    task = story.launch(how="lcp", similarity=0.132)
    story.log(FORCED.format(task=task))
    story.finish(task, 2995, 0)
    story.answer(number, 2995, 0)
    story.end(number)
    row = story.row(number)
    assert (row.verdict, reason_words(row), row.tokens.cached) == ("PARTIAL", "clock in system @57,012", 0)
    assert row.tokens.lost == 2941
    assert row.lcp_similarity_ratio == 0.132


def test_partial_of_a_conversation_that_is_not_recognised_any_more() -> None:
    """A changed system prompt breaks the conversation's identity; the proxy's word is enough."""
    story = Story()
    story.turn(2941, 0, conversation="c1")
    row = story.turn(
        2995, 395, conversation="c2", items=4, difference=Difference(Cause.ID, "system", 0), similarity=0.132
    )
    assert (row.verdict, reason_words(row), row.tokens.lost) == ("PARTIAL", "id in system @0", 2941 - 395)


@pytest.mark.parametrize("cached", [0, 10, 395])
def test_single_turns_whose_beginning_changes(cached: int) -> None:
    """Each is the first of its conversation; that the client changes what they could share is why nothing is."""
    story = Story()
    first = story.turn(2941, 0, how="lru")
    assert (first.verdict, reason_words(first)) == ("COLD", "first request of its conversation")
    for number in (2, 3):
        row = story.turn(
            2950, cached, conversation=f"c{number}", difference=Difference(Cause.ID, "messages[0].content", 6, 0)
        )
        assert (row.verdict, reason_words(row)) == ("PARTIAL", "id in messages[0].content @6")
        assert row.tokens.lost is not None
        assert 2941 - cached <= row.tokens.lost <= 2950 - cached  # (what the slot held is all that could be reused)


@pytest.mark.parametrize(("cached", "verdict"), [(2900, "WARM"), (1600, "WARM")])
def test_a_change_behind_the_warm_part_is_no_loss(cached: int, verdict: str) -> None:
    """A first request that found half of its prompt is warm, whatever changed behind that."""
    story = Story()
    story.turn(2941, 0, how="lru")
    row = story.turn(
        2950, cached, conversation="c2", difference=Difference(Cause.CLOCK, "messages[0].content", 9000, 0)
    )
    assert (row.verdict, reason_words(row)) == (verdict, None)


def test_the_first_request_of_a_server_is_not_compared_with_what_another_one_had() -> None:
    """Nothing of that could be cached."""
    story = Story()
    story.turn(2941, 0, how="lru")
    story.spawn()
    row = story.turn(
        2950, 0, conversation="c2", difference=Difference(Cause.ID, "messages[0].content", 6, 0), how="lru"
    )
    assert (row.verdict, reason_words(row)) == ("COLD", "first request of its conversation")
    row = story.turn(
        2950, 0, conversation="c3", difference=Difference(Cause.ID, "messages[0].content", 6, 0), how="lru"
    )
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "id in messages[0].content @6")


@pytest.mark.parametrize("forced", [True, False])
def test_high_similarity_and_a_full_prefill(forced: bool) -> None:
    """FR-25: LCP similarity near 1 is no reuse; also where the build hides the reason (FR-33)."""
    story = Story()
    story.turn(5000, 0)
    number = story.ask(items=4)
    task = story.launch(how="lcp", similarity=0.994)
    if forced:
        story.log(FORCED.format(task=task))
    story.finish(task, 5030, 0)
    story.answer(number, 5030, 0)
    story.end(number)
    row = story.row(number)
    assert (row.verdict, row.tokens.lost) == ("REPROCESS", 5000)
    assert reason_words(row) == f"5,000 tokens matched, 0 kept: {'no checkpoint' if forced else 'not kept'}"


def test_reprocess_from_an_early_checkpoint() -> None:
    """A checkpoint far before the point where the prompts part is a loss, too."""
    story = Story()
    story.turn(9400, 0)
    row = story.turn(9500, 5967, items=4, similarity=0.98)
    assert (row.verdict, row.tokens.lost) == ("REPROCESS", round(0.98 * 9500) - 5967)


def test_exact_token_counts_are_preferred() -> None:
    """Where the log compares in tokens, no rounding decides."""
    story = Story()
    story.turn(100000, 0)
    number = story.ask(items=4)
    story.log("slot get_availabl: id  0 | task -1 |  - checking sim = 0.999 (99980/100100) > 0.100")
    task = story.launch(how="lcp", similarity=0.999)
    story.finish(task, 100100, 99000)
    story.answer(number, 100100, 99000)
    story.end(number)
    assert story.row(number).tokens.lost == 980


@pytest.mark.parametrize("how", ["lru", "lcp"])
def test_restored_from_the_ram_cache(how: str) -> None:
    """FR-29: a slot that was chosen by age may be filled from the RAM cache."""
    story = Story()
    story.turn(1100, 0, conversation="c1")
    story.turn(900, 10, conversation="c2", how="lru")
    row = story.turn(1147, 1115, conversation="c1", items=4, how=how, similarity=0.12, between=RAM_HIT)
    assert (row.verdict, row.tokens.lost) == ("RESTORED", 0)
    assert story.stack_state.totals.ram_hits == 1


def test_restored_where_the_build_hides_it() -> None:
    """At the default log level only the tokens tell: chosen by age, and yet nearly all was cached."""
    story = Story()
    story.turn(1100, 0, conversation="c1")
    story.turn(900, 10, conversation="c2", how="lru")
    assert story.turn(1147, 1115, conversation="c1", items=4, how="lru").verdict == "RESTORED"


@pytest.mark.parametrize("word", ["sim", "f_sim"])
def test_a_slot_that_was_taken_by_age_was_compared_all_the_same(word: str) -> None:
    """Where the RAM cache is searched the row gets its similarity, though no line names a sim_best."""
    story = Story()
    searched = SEARCHED.replace("f_sim", word)
    first = story.turn(1100, 0, conversation="c1", how="lru", between=searched.format(-1, 0))
    assert first.lcp_similarity_ratio is None  # an empty slot is like nothing
    row = story.turn(1900, 900, conversation="c2", how="lru", between=searched.format(0.8, 0.474))
    assert row.lcp_similarity_ratio == 0.474
    back = story.turn(1147, 1115, items=4, how="lru", between=f"{searched.format(0.45, 0.785)}\n{RAM_HIT}")
    assert (back.verdict, back.lcp_similarity_ratio) == ("RESTORED", 0.785)


def test_a_search_changes_nothing_of_a_slot_that_was_taken_for_what_it_holds() -> None:
    """Its line has the figure already."""
    story = Story()
    row = story.turn(1000, 300, similarity=0.3, between=SEARCHED.format(0.4, 0.25))
    assert row.lcp_similarity_ratio == 0.3


def test_a_long_turn_in_the_only_slot_is_a_hit() -> None:
    """More than a twentieth of the prompt is new: taken by age, nothing better was found, and the slot's was kept."""
    story = Story()
    story.turn(1000, 0)
    row = story.turn(3500, 1000, items=4, how="lru", between=SEARCHED.format(0.99, 0.286))
    assert (row.verdict, row.tokens.lost) == ("HIT", 0)
    other = story.turn(3600, 900, conversation=None, how="lru", between=SEARCHED.format(0.26, 0.25))
    assert (other.verdict, other.tokens.lost) == ("PARTIAL", 2600)  # by what the slot held


def test_matched_but_not_kept_in_a_slot_that_was_taken_by_age() -> None:
    """A hybrid model without a checkpoint: what the search compared is what had matched."""
    story = Story()
    story.turn(9000, 0)
    row = story.turn(9500, 0, items=4, how="lru", between=SEARCHED.format(0.99, 0.94))
    assert (row.verdict, row.tokens.lost) == ("REPROCESS", 8930)


@pytest.mark.parametrize(("threshold_ratio", "verdict"), [(None, "RESTORED"), (0.1, "RESTORED"), (0.95, "WARM")])
def test_the_threshold_in_force_bounds_what_a_slot_taken_by_age_held(
    threshold_ratio: float | None, verdict: str
) -> None:
    """Where the log does not tell of the RAM cache, a new conversation may find its prefix in such a slot."""
    story = Story()
    story.emit(ServerDescribed(story.now_s, similarity_threshold_ratio=threshold_ratio))
    story.turn(1100, 0, conversation="c1", how="lru")
    assert story.turn(1147, 900, conversation="c2", how="lru").verdict == verdict


def test_lru_alone_is_neither_hit_nor_miss() -> None:
    """FR-29: judged by what was evaluated; with one slot and no comparison of slots it may be a plain hit."""
    story = Story()
    story.turn(1100, 0)
    assert story.turn(1147, 1115, items=4, how="lru").verdict == "HIT"


def test_evicted_by_a_side_request() -> None:
    """One slot and no RAM cache: a title request throws the conversation out, and is named."""
    story = Story()
    story.turn(4787, 0, conversation="main")
    story.turn(446, 10, conversation="title", side="title", how="lru")
    row = story.turn(4837, 12, conversation="main", items=4, how="lru")
    assert (row.verdict, reason_words(row), row.tokens.lost) == ("EVICTED", "by request 2 (title)", 4787 - 12)


def test_evicted_by_a_request_past_the_proxy() -> None:
    """A request that did not come through the proxy is named as that, and counted."""
    story = Story()
    story.turn(4787, 0)
    story.finish(story.launch(how="lru"), 500, 10)
    row = story.turn(4837, 12, items=4, how="lru")
    assert (row.verdict, reason_words(row)) == ("EVICTED", "by a request that bypassed the proxy")
    assert story.stack_state.log.unclaimed_tasks == 1


def test_two_conversations_thrash_one_slot() -> None:
    """FR-28: equal system prompts always pick the same slot, though others are free."""
    story = Story()
    story.turn(30000, 0, conversation="a", slot=0, how="lru")
    second = story.turn(30000, 4000, conversation="b", slot=0)
    assert second.verdict == "PARTIAL"
    back = story.turn(30100, 4000, conversation="a", items=4, slot=0)
    assert (back.verdict, reason_words(back), slot_of(back)) == ("EVICTED", "by request 2 (openclaw)", 0)


def test_template_renders_the_history_anew() -> None:
    """FR-26: bodies extend each other and the slot is still the conversation's, but the rendered prompts part."""
    story = Story()
    story.turn(3000, 0)
    story.turn(3200, 2996, items=4)
    row = story.turn(3300, 2100, items=6, similarity=0.64)
    assert (row.verdict, row.tokens.lost) == ("TEMPLATE", 1100)


def test_warm_after_the_warmup() -> None:
    """The first request of a conversation finds what the warm-up evaluated."""
    story = Story()
    story.warm(7504, boundary=7494)
    row = story.turn(7766, 7494)
    assert (row.verdict, row.timing.saved_s) == ("WARM", pytest.approx(7.494))
    assert story.stack_state.log.unclaimed_tasks == 0


def test_warm_with_a_user_text_that_is_longer_than_the_prefix() -> None:
    """What counts is that the whole warm prefix was found, not its share."""
    story = Story()
    story.warm(1004)
    assert story.turn(5000, 990).verdict == "WARM"


def test_not_warm_if_the_boundary_was_not_reached() -> None:
    """Half a prefix is no proof: tools were missing in the warm-up, say."""
    story = Story()
    story.warm(5767, boundary=5760)
    row = story.turn(12000, 2255)
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "only its first 2,256 tokens were known")


def test_a_short_chat_that_only_shares_the_template_is_not_warm() -> None:
    """All that it could find in the warmed slot is the template's beginning: that is not the prefix."""
    story = Story()
    story.warm(3068, boundary=3032)
    assert story.turn(37, 10).verdict == "PARTIAL"


def test_a_second_conversation_shares_the_prefix() -> None:
    """A new conversation that finds the system prompt of another one is warm."""
    story = Story()
    story.turn(7766, 0, conversation="a")
    assert story.turn(7560, 7494, conversation="b").verdict == "WARM"


def test_cold_although_the_template_matches() -> None:
    """The few tokens with which every chat begins are nothing."""
    story = Story()
    story.turn(2404, 0, conversation="a")
    row = story.turn(2404, 10, conversation="b", how="lru")
    assert (row.verdict, row.tokens.lost) == ("COLD", 2394)


def test_cold_after_a_restart() -> None:
    """Task ids start again with the server, and nothing of the former run counts."""
    story = Story()
    story.turn(3000, 0)
    story.spawn()
    row = story.turn(3100, 0, items=4, how="lru")
    assert (row.verdict, reason_words(row), task_of(row)) == ("COLD", "the server was restarted", 0)


def test_the_same_request_again_is_a_hit() -> None:
    """A retry costs one token (dense), four (hybrid) or five (sliding window)."""
    story = Story()
    story.turn(3000, 0)
    assert story.turn(3000, 2995).verdict == "HIT"


def test_only_the_last_message_differs() -> None:
    """Everything before the edited turn was reused: all that is evaluated is new."""
    story = Story()
    story.turn(3164, 0, items=4)
    row = story.turn(3164, 2887, items=4, similarity=0.915)
    assert (row.verdict, row.tokens.evaluated) == ("HIT", 277)


def test_only_the_last_message_differs_and_the_proxy_saw_it() -> None:
    """The same with the proxy's word: a difference in the newest turn is no loss."""
    story = Story()
    story.turn(3164, 0, items=4)
    row = story.turn(
        3164, 2887, items=4, similarity=0.915, difference=Difference(Cause.HISTORY_EDITED, "messages[3].content", 0, 3)
    )
    assert (row.verdict, reason_words(row)) == ("HIT", None)


def test_evicted_although_a_block_far_down_changed() -> None:
    """A change in a late turn would have cost little: that another conversation took the slot cost everything."""
    story = Story()
    story.turn(4787, 0, conversation="main", items=8)
    story.turn(446, 10, conversation="title", side="title", how="lru")
    late = Difference(Cause.DECORATION, "messages[7].content", 12, 7)
    row = story.turn(4837, 12, conversation="main", items=10, how="lru", difference=late)
    assert (row.verdict, reason_words(row)) == ("EVICTED", "by request 2 (title)")
    story.turn(446, 10, conversation="title", side="title", how="lru")
    early = Difference(Cause.CLOCK, "messages[0].content", 57012, 0)
    row = story.turn(4880, 12, conversation="main", items=12, how="lru", difference=early)
    assert (row.verdict, reason_words(row)) == ("PARTIAL", difference_words(early))


def test_an_old_message_differs() -> None:
    """An edit far back is the client's doing."""
    story = Story()
    story.turn(9000, 0, items=8)
    row = story.turn(9000, 2000, items=8)
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "the client changed an earlier turn")


@pytest.mark.parametrize("conversation", ["c1", "c2", None])
def test_cancelled_and_tried_again(conversation: str | None) -> None:
    """A client that left is no failure of the cache, and its retry goes on where the prefill stopped."""
    story = Story()
    number = story.ask()
    task = story.launch(how="lru")
    head = f"id  0 | task {task} | "
    story.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = 29614")
    story.log(f"slot   operator(): {head}cached n_tokens = 0, memory_seq_rm [0, end)")
    story.log(f"slot   operator(): {head}cached n_tokens = 4096, memory_seq_rm [4096, end)")
    story.end(number, "cancelled", None)
    assert story.row(number).verdict == "CANCELLED"
    assert not story.row(number).settled
    story.log(f"srv          stop: cancel task, id_task = {task}")
    story.log(f"slot      release: {head}stop processing: n_tokens = 6144, truncated = 0")
    row = story.row(number)
    assert (row.verdict, row.tokens.prompt, row.tokens.cached, row.tokens.evaluated) == ("CANCELLED", 29614, 0, 6144)
    assert row.settled
    # Whether or not the proxy still knows the conversation, to which nothing was answered.
    again = story.turn(29614, 6144, conversation=conversation, similarity=0.207)
    assert again.verdict == "HIT"
    assert again.timing.saved_s == pytest.approx(6.144)


def test_failed_in_the_middle_of_a_stream() -> None:
    """FR-43: an error object after good chunks is no success of the cache."""
    story = Story()
    number = story.ask()
    task = story.launch()
    story.finish(task, 500, 0)
    story.answer(number, 500, 0, error="Invalid diff: now finding less tool calls!")
    story.end(number)
    row = story.row(number)
    assert (row.verdict, reason_words(row)) == ("FAILED", "Invalid diff: now finding less tool calls!")


def test_a_prompt_that_does_not_fit() -> None:
    """FR-45: refused, with both numbers; the slot keeps the conversation that it held."""
    story = Story()
    story.turn(393, 0, conversation="small")
    number = story.ask("large")
    task = story.launch(how="lru")
    text = "request (3036 tokens) exceeds the available context size (2048 tokens), try increasing it"
    story.log(f"srv    send_error: task id = {task}, error: {text}")
    story.log(f"slot      release: id  0 | task {task} | stop processing: n_tokens = 400, truncated = 0")
    story.end(number, "failed", 400)
    assert (story.row(number).verdict, reason_words(story.row(number))) == ("FAILED", "HTTP 400")
    assert story.stack_state.slots[0].conversation == "small"
    assert story.turn(450, 396, conversation="small", items=4).verdict == "HIT"


def test_truncated_at_the_end_of_the_context() -> None:
    """An answer that ran into the end of the context is said to."""
    story = Story()
    number = story.ask()
    task = story.launch()
    story.finish(task, 2000, 0, generated=48, truncated=True)
    story.answer(number, 2000, 0, generated=48)
    story.end(number)
    assert (story.row(number).verdict, reason_words(story.row(number))) == ("TRUNCATED", "the context is full")


def test_truncated_by_a_context_shift() -> None:
    """A shift throws the prefix away."""
    story = Story()
    number = story.ask()
    task = story.launch()
    story.log(
        f"slot update_slots: id  0 | task {task} | slot context shift, n_keep = 0, n_left = 2046, n_discard = 1023"
    )
    story.finish(task, 2000, 0)
    story.answer(number, 2000, 0)
    story.end(number)
    assert story.row(number).verdict == "TRUNCATED"
    assert story.stack_state.totals.context_shifts == 1


def test_unknown_without_figures() -> None:
    """Neither the answer nor the log told anything: no verdict is made up."""
    story = Story(attached=True)
    number = story.ask()
    story.end(number)
    row = story.row(number)
    assert (row.verdict, reason_words(row), row.settled) == ("UNKNOWN", "no figures in the answer", True)


@pytest.mark.parametrize(
    ("conversation", "cached", "verdict"),
    [("c1", 2940, "HIT"), ("c1", 395, "PARTIAL"), ("c1", 3, "COLD"), (None, 2940, "HIT"), (None, 395, "PARTIAL")],
)
def test_attached_without_a_log(conversation: str | None, cached: int, verdict: str) -> None:
    """A server that is only attached to has no log; the answers are judged, the causes stay open."""
    story = Story(attached=True)
    for items, known in ((2, 0), (4, cached)):
        number = story.ask(conversation, items=items)
        story.answer(number, 2941 + 25 * items, known)
        story.end(number)
    row = story.row(2)
    assert row.verdict == verdict
    assert row.settled
    assert row.lcp_similarity_ratio is None


def test_no_conversation_is_known() -> None:
    """Without a recognised conversation the slot's former prompt is the measure."""
    story = Story()
    story.turn(3000, 0, conversation=None)
    assert story.turn(4000, 2996, conversation=None, similarity=0.75).verdict == "HIT"
    assert story.turn(4100, 500, conversation=None, similarity=0.12).verdict == "PARTIAL"


def test_the_tables_are_whole() -> None:
    """Every verdict, reason and cause has its row."""
    assert (set(VERDICTS), set(REASONS), set(CAUSES)) == (set(Verdict), set(ReasonKind), set(Cause))


@pytest.mark.parametrize("conversation", ["c2", None])
@pytest.mark.parametrize("cached", [395, 0])
def test_partial_without_the_proxys_word(conversation: str | None, cached: int) -> None:
    """A new id at 15 % where nobody saw the cause: the log tells how far the prompts agreed, kept or not."""
    story = Story()
    story.turn(2941, 0, conversation="c1" if conversation else None)
    row = story.turn(2995, cached, conversation=conversation, items=4, similarity=0.132)
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "only its first 395 tokens were known")


@pytest.mark.parametrize("first", ["log", "client"])
def test_cancelled_in_the_middle_of_its_answer(first: str) -> None:
    """What the slot held in the end is prompt and answer: no token of the answer counts as evaluated."""
    story = Story()
    number = story.ask()
    task = story.launch(how="lru")
    head = f"id  0 | task {task} | "
    story.log(f"slot   operator(): {head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = 29")
    story.log(f"slot   operator(): {head}cached n_tokens = 1, memory_seq_rm [1, end)")
    if first == "client":
        story.end(number, "cancelled", 200)
    story.log(f"srv          stop: cancel task, id_task = {task}")
    story.log(f"slot      release: {head}stop processing: n_tokens = 71, truncated = 0")
    if first == "log":
        story.end(number, "cancelled", 200)
    row = story.row(number)
    assert (row.verdict, row.tokens.prompt, row.tokens.cached, row.tokens.evaluated) == ("CANCELLED", 29, 1, 28)


@pytest.mark.parametrize("cached", [0, 10])
def test_a_change_at_the_very_front(cached: int) -> None:
    """It is the cause, whether the template's first words were kept or not."""
    story = Story()
    story.turn(2941, 0)
    row = story.turn(
        2995, cached, items=4, difference=Difference(Cause.ID, "messages[0].content", 3, 0), how="lcp", similarity=0.003
    )
    assert (row.verdict, reason_words(row)) == ("PARTIAL", "id in messages[0].content @3")
    assert row.tokens.lost == 2941 - cached


def test_a_change_after_a_restart_is_not_its_cause() -> None:
    """Nothing could have been there."""
    story = Story()
    story.turn(3000, 0)
    story.spawn()
    row = story.turn(3100, 0, items=4, how="lru", difference=Difference(Cause.CLOCK, "system", 57012))
    assert (row.verdict, reason_words(row)) == ("COLD", "the server was restarted")


def test_an_edited_turn_of_a_conversation_that_lost_its_slot() -> None:
    """The edit cost little."""
    story = Story()
    story.turn(4787, 0, conversation="main", items=8)
    story.turn(446, 10, conversation="title", side="title", how="lru")
    edit = Difference(Cause.HISTORY_EDITED, "messages[5].content", 12, 5)
    row = story.turn(4790, 12, conversation="main", items=8, how="lru", difference=edit)
    assert row.verdict == "EVICTED"
