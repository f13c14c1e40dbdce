"""Byte-exact edits of a JSON body."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rawjson.offsets import raw_offsets
from kvstack.prompt.rawjson.scan import MAX_ELEMENTS, Edit, NotJson, apply_edits, removal, walk_object
from kvstack.prompt.request.apis import Api
from kvstack.prompt.request.document import read_document
from kvstack.prompt.rules.compiler import compile_rules
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings


def test_raw_offsets_walk_escapes() -> None:
    """Each decoded offset leads to the raw offset of the same character; a surrogate pair is one character."""
    raw = r'"a\n\u00e9\ud83d\ude00\ud83d\\z"'
    decoded = json.loads(raw)
    offsets = raw_offsets(raw, (0, len(raw)), len(decoded), range(len(decoded) + 1))
    spelled = [raw[a:b] for a, b in pairwise(offsets)]
    assert spelled == ["a", r"\n", r"\u00e9", r"\ud83d\ude00", r"\ud83d", r"\\", "z"]
    assert offsets[-1] == len(raw) - 1


def test_locate_takes_the_last_of_duplicate_keys() -> None:
    """As JSON readers do, the last of equal keys counts."""
    text = '{"tools": [1], "tools": [4, {"b": 2, "b": 5}], "messages": [{"content": "x", "content": "y"}]}'
    document = read_document(text, Api.CHAT)
    for path, value in ((("tools", 1, "b"), "5"), (("messages", 0, "content"), '"y"'), (("tools", 0), "4")):
        start, end = document.locate(path)
        assert (text[start:end], start) == (value, text.rindex(value))


@pytest.mark.parametrize("text", ['{"a" 1}', '{"a": 1', '{"a": 1,}', "{a: 1}", '{"a": 1 "b": 2}', '{"\n": 1}'])
def test_broken_objects(text: str) -> None:
    """What is no JSON is said to be none."""
    with pytest.raises(NotJson):
        walk_object(text, 0)


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        ([True, False, False], "{ b, c }"),
        ([False, True, False], "{ a, c }"),
        ([False, False, True], "{ a, b }"),
        ([True, True, False], "{ c }"),
        ([True, False, True], "{ b }"),
        ([True, True, True], "{}"),
        ([False, False, False], "{ a, b, c }"),
    ],
)
def test_removal_leaves_no_comma(dropped: list[bool], expected: str) -> None:
    """What remains reads as if the dropped ones had never been there."""
    text = "{ a, b, c }"
    cuts = removal([(2, 3), (5, 6), (8, 9)], dropped, (1, 10))
    assert apply_edits(text, [Edit(start, end, "") for start, end in cuts]) == expected


def test_edits_do_not_overlap() -> None:
    """Overlapping edits are a bug of the caller and are refused."""
    with pytest.raises(ValueError, match="overlap"):
        apply_edits("abcdef", [Edit(0, 3, ""), Edit(2, 4, "")])


TIMED = "[Wed 2026-02-18 20:48 UTC] see <b>"
ESCAPED = '"[Wed 2026-02-18 20:48 UTC] see \\u003cb>"'
PLAIN = json.dumps(TIMED)


@pytest.mark.parametrize(
    ("path", "body", "touched"),
    [
        (
            "/v1/messages",
            '{"messages":[{"role":"user","content":[{"type":"text","text":%s},{"type":"tool_result","tool_use_id":"a",'
            '"content":[{"type":"text","text":%s}]}]}]}',
            0,
        ),
        (
            "/v1/messages",
            '{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text",'
            '"text":%s}]},{"type":"text","text":%s}]}]}',
            1,
        ),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":%s,"extra":{"content":%s}}]}', 0),
        ("/v1/chat/completions", '{"messages":[{"role":"user","extra":{"content":%s},"content":%s}]}', 1),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":%s,"content":%s}]}', 1),
        ("/v1/responses", '{"input":[{"role":"user","content":%s},{"type":"function_call_output","output":%s}]}', 0),
    ],
)
@pytest.mark.parametrize("spellings", [(ESCAPED, PLAIN), (PLAIN, ESCAPED), (PLAIN, PLAIN), (ESCAPED, ESCAPED)])
def test_the_same_text_elsewhere_in_another_spelling_is_not_touched(
    path: str, body: str, touched: int, spellings: tuple[str, str], rules: RuleSet
) -> None:
    """Locality: the literal at the text's own path is edited, whatever looks like it stands where it may."""
    literals = list(spellings)
    before = (body % tuple(literals)).encode()
    literals[touched] = literals[touched].replace("[Wed 2026-02-18 20:48 UTC] ", "")
    assert apply_rules(before, path, rules).body == (body % tuple(literals)).encode()


def test_a_request_of_endless_messages_is_passed_by() -> None:
    """Nobody's conversation has that many; it goes out untouched instead of keeping the proxy for minutes."""
    rules = compile_rules([], RuleSettings())
    body = b'{"messages":[' + b"{}," * MAX_ELEMENTS + b'{"role":"user","content":"x"}]}'
    stripped = apply_rules(body, "/v1/chat/completions", rules, ConversationMemory())
    assert stripped.body is body
    assert (stripped.items, stripped.conversation) == (0, None)
