"""Where two requests part, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.prompt.diff.segments import common_prefix, render
from kvstack.state.causes import Cause
from tests.differences import difference_of_bodies

CHAT = "/v1/chat/completions"


def ask(*messages: tuple[str, Any], system: str = "You help.", **more: Any) -> bytes:
    """A chat body."""
    said = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"messages": [{"role": "system", "content": system}, *said], **more}).encode()


U, A = ("user", "one"), ("assistant", "yes")
NOTE = {"type": "text", "text": "<note>today</note>"}
WORDS = {"type": "text", "text": "two"}


@pytest.mark.parametrize(
    ("one", "two", "cause", "path"),
    [
        (ask(U, system="It is 20:48."), ask(U, system="It is 20:51."), Cause.CLOCK, "messages[0].content"),
        (
            ask(U, system="On Sun Mar 22 2026."),
            ask(U, system="On Mon Mar 23 2026."),
            Cause.CLOCK,
            "messages[0].content",
        ),
        (ask(U, system='{"id": "4821a"}'), ask(U, system='{"id": "9b02c"}'), Cause.ID, "messages[0].content"),
        (ask(U, system="cch=543cf;"), ask(U, system="cch=0a1b2;"), Cause.ID, "messages[0].content"),
        (ask(U, system="left: 1,999,841"), ask(U, system="left: 1,998,002"), Cause.COUNTER, "messages[0].content"),
        (ask(U, system="a  b"), ask(U, system="a b"), Cause.WHITE_SPACE, "messages[0].content"),
        (ask(U, system="Room: kitchen"), ask(U, system="Room: bedroom"), Cause.SYSTEM_CHANGED, "messages[0].content"),
        (ask(U, A, ("user", "two")), ask(U, A, ("user", "2 b")), Cause.HISTORY_EDITED, "messages[3].content"),
        (ask(U, A, ("user", "note\n\ntwo")), ask(U, A, ("user", "two"), A), Cause.DECORATION, "messages[3].content"),
        (
            ask(U, A, ("user", [NOTE, WORDS])),
            ask(U, A, ("user", [WORDS]), A),
            Cause.DECORATION,
            "messages[3].content[0].text",
        ),
        (ask(U, ("user", "carrier")), ask(U, A, ("user", "carrier")), Cause.MOVED, "messages[2].content"),
        (ask(U, A, ("tool", "long")), ask(U, A, ("tool", "gone")), Cause.RESULT_CHANGED, "messages[3].content"),
    ],
)
def test_causes(one: bytes, two: bytes, cause: Cause, path: str) -> None:
    """Each kind of change is called by its name, at its place."""
    found = difference_of_bodies(one, two, CHAT)
    assert found is not None
    assert (found.difference.cause, found.difference.path) == (cause, path)


def test_the_first_of_several_changes_counts() -> None:
    """An id in front of other changes is what the cache stumbles over."""
    one = ask(U, system='"message_id": "44115b30", "from": "ann"\nActivation: mention')
    two = ask(U, system='"message_id": "65825666", "from": "bob"\n')
    found = difference_of_bodies(one, two, CHAT)
    assert found is not None
    assert found.difference.cause is Cause.ID


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (ask(U), ask(U, A, ("user", "two"))),
        (ask(U), ask(("user", [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]), A)),
        (ask(U, stream=True, seed=1), ask(U, stream=False, user="x")),
        (b"{broken", ask(U)),
        (ask(U), b"\xff"),
    ],
    ids=["longer", "other form", "other options", "broken", "no text"],
)
def test_no_divergence(one: bytes, two: bytes) -> None:
    """An extension, another form of the same text, and what cannot be read are no difference."""
    assert difference_of_bodies(one, two, CHAT) is None


SESSION = "You help. Session: {}. Current time: 2026-11-30 {}."
UUIDS = "3c4d0f4e-9d1b-4f6a-8a52-0d7f6a1b2c3d", "3c4e77aa-0c1b-4d6a-9a52-1d7f6a1b2c3e"


@pytest.mark.parametrize(
    ("one", "two", "cause", "behind"),
    [
        (SESSION.format(UUIDS[0], "11:00:07"), SESSION.format(UUIDS[1], "11:04:31"), Cause.ID, ("clock",)),
        (
            SESSION.replace(". Cur", ".\nCur").format(UUIDS[0], "11:00:07"),
            SESSION.replace(". Cur", ".\nCur").format(UUIDS[1], "11:04:31"),
            Cause.ID,
            ("clock",),
        ),
        (SESSION.format(UUIDS[0], "11:00:07"), SESSION.format(UUIDS[1], "11:00:07"), Cause.ID, ()),
        (SESSION.format(UUIDS[0], "11:00:07"), SESSION.format(UUIDS[0], "11:04:31"), Cause.CLOCK, ()),
        (f"It is 11:00. Session {UUIDS[0]}", f"It is 11:04. Session {UUIDS[1]}", Cause.CLOCK, ("id",)),
        ("Turns: 14. It is 11:00.", "Turns: 15. It is 11:04.", Cause.COUNTER, ("clock",)),
        ('{"id":"44115b30","at":"11:00"}', '{"id":"65825666","at":"11:04"}', Cause.ID, ("clock",)),
        ("User: ann\nIt is 11:00.", "User: bob\nIt is 11:04.", Cause.SYSTEM_CHANGED, ("clock",)),
        ("On March 22 at 11:00, id 9b02c", "On March 23 at 11:04, id 4821a", Cause.CLOCK, ("id",)),
        ("On March 30, 2026 11:00", "On March 31, 2026 11:04", Cause.CLOCK, ()),
        ("At 2026-11-30T11:00:07Z for 9b02c", "At 2026-11-30T11:04:31Z for 4821a", Cause.CLOCK, ("id",)),
        ("At 11:00 PM", "At 10:00 AM", Cause.CLOCK, ()),
        ("Last seen", "Last seen 11:04", Cause.CLOCK, ()),
        ("a  b 11:00", "a b 11:04", Cause.WHITE_SPACE, ()),
    ],
)
def test_the_cause_is_what_changed_first(one: str, two: str, cause: Cause, behind: tuple[str, ...]) -> None:
    """The value at the first difference gives its name; another kind of value that changed behind it is told beside."""
    found = difference_of_bodies(ask(U, system=one), ask(U, system=two), CHAT)
    assert found is not None
    assert (found.difference.cause, found.difference.behind) == (cause, behind)


def test_figures_and_words() -> None:
    """Position, loss and the sentence of a divergence are right."""
    one, two = ask(U, A, system="x" * 98 + " 1"), ask(U, A, system="x" * 98 + " 2")
    found = difference_of_bodies(one, two, CHAT)
    assert found is not None
    whole = common_prefix(render(one, CHAT), render(one, CHAT))
    assert (found.difference.offset, found.lost) == (99, whole.previous - 99)
    assert found.position_ratio == pytest.approx(99 / whole.previous)
    assert (found.difference.cause.meaning, found.difference.path, found.difference.offset) == (
        "a number changed",
        "messages[0].content",
        99,
    )


@pytest.mark.parametrize("more", ["", "yes<|im_end|>\n<|im_start|>user\nand"])
def test_a_raw_prompt_that_grows_is_extended(more: str) -> None:
    """A raw prompt is one text: going on where the former one ended is no edit, any other change is."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one, two, edited = (
        json.dumps({"prompt": text}).encode() for text in (prompt, prompt + more, prompt.replace("hi", "ho") + more)
    )
    assert difference_of_bodies(one, two, "/completion") is None
    assert common_prefix(render(one, "/completion"), render(two, "/completion")).kept_ratio == 1.0
    found = difference_of_bodies(one, edited, "/completion")
    assert found is not None
    assert found.difference.offset == prompt.index("i<|im_end|>")
