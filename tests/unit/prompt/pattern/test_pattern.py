"""Patterns: literals and named tokens."""

from __future__ import annotations

import pytest

from kvstack.prompt.pattern.pattern import PatternError, compile_pattern


@pytest.mark.parametrize(
    ("pattern", "text", "target"),
    [
        ("[{weekday:short} {date} {time} {zone}] ", "[Wed 2026-02-18 20:48 UTC] x", "[Wed 2026-02-18 20:48 UTC] "),
        ("on [[{date}]]!", "on 2026-02-18!", "2026-02-18"),
        ("{weekday}, {month} {int}, {int}", "Sunday, November 29, 2026", "Sunday, November 29, 2026"),
        ("cch=[[{hex:5}]];", "cch=543cf;", "543cf"),
        ("id {uuid}", "id 0b6f2f0e-1111-4222-8333-444455556666", "id 0b6f2f0e-1111-4222-8333-444455556666"),
        ("a [[{line}]]\nb", "a one two\r\nb", "one two"),
        ("<m>[[{text}]]</m>", "<m>1\n2</m>", "1\n2"),
        ("x: {line}", "x: 1\r\ny", "x: 1"),
        ("at {time} {zone}", "at 14:03:55.5 +02:00.", "at 14:03:55.5 +02:00"),
        ("{{a}} {json}", '{a} {"b": [1]} c', '{a} {"b": [1]}'),
        ("{json-fence}", '```json\n{"a": 1}\n```\nmore', '```json\n{"a": 1}\n```'),
    ],
)
def test_match(pattern: str, text: str, target: str) -> None:
    """A pattern reads what it names, and the marked part is its target."""
    found = compile_pattern(pattern).match(text, 0)
    assert found is not None
    assert text[found.target[0] : found.target[1]] == target


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("{hex:5};", "0123456;"),
        ("{uuid}", "0b6f2f0e-1111-4222-8333-44445555666"),
        ("{weekday:short} ", "Wednesday "),
        ("{month} ", "Mayor "),
        ("{date}", "2026-2-18"),
        ("{date}", "２０２６-02-18"),
        ("{time}", "24:00"),
        ("a{line}b", "a\nb"),
        ("{json-fence}", '```json\n{"a": 1} ```'),
        ("{json-fence}", '```json\n{"a": 1}\n```x'),
        ("{json-fence}", "```json\n[1]\n```"),
        ("{json-fence}", '```json\n{"a": }\n```'),
    ],
)
def test_no_match(pattern: str, text: str) -> None:
    """What only looks alike does not match."""
    assert compile_pattern(pattern).match(text, 0) is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "empty"),
        ("{", "brace is open"),
        ("{nope}", "no token {nope}"),
        ("{hex:0}", "no token {hex:0}"),
        ("{text}{int}", "needs a literal"),
        ("{line}{json}", "needs a literal"),
        ("a [[b", r"\[\[ has no \]\]"),
    ],
)
def test_bad_patterns(pattern: str, message: str) -> None:
    """A pattern that cannot work says why."""
    with pytest.raises(PatternError, match=message):
        compile_pattern(pattern)
