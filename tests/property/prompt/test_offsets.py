"""Offsets of decoded strings in raw literals, whatever the spelling."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvstack.prompt.rawjson.offsets import raw_offsets

# What is hard to spell: runs of backslashes, quotes, line ends, letters that look like escapes, pairs and their halves.
PIECES = st.sampled_from(
    ["\\", "\\\\\\", '"', "\n", "\t", "u", "\\u00e9", "n", "é", "\U0001f600", "\ud83d", "\ude00", "a", " " * 9]
)


@st.composite
def literals(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A JSON string literal, and the spelling of each of its decoded characters."""
    spelled: list[str] = []
    # Without escapes of six letters every escape has two, and offsets are counted; with them, walked.
    short = draw(st.booleans())
    for character in "".join(draw(st.lists(PIECES, max_size=40))):
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        escaped = json.dumps(character)[1:-1]
        long = "".join(f"\\u{unit:04x}" for unit in _units(character))
        spellings = [plain, escaped, long, long.upper().replace("\\U", "\\u")]
        # Two halves of a pair that are spelled as escapes are one character to every reader.
        if spelled and spelled[-1].lower().startswith("\\ud8") and len(spelled[-1]) == 6 and character == "\ude00":
            spellings = [character]
        if short:
            spellings = [plain]
        spelled.append(draw(st.sampled_from(spellings)))
    return '"' + "".join(spelled) + '"', spelled


def _units(character: str) -> list[int]:
    data = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[n : n + 2]) for n in range(0, len(data), 2)]


@given(literals(), st.data())
def test_offsets_in_raw_literals(literal: tuple[str, list[str]], data: st.DataObject) -> None:
    """An offset in the decoded string leads to where that character's spelling begins, from either end of the text."""
    raw, spelled = literal
    before = data.draw(st.sampled_from(["", '{"a": "\\\\", "b": ', "[\n"]))
    behind = data.draw(st.sampled_from(["", ', "c": "\\u0041"}', "\\u"]))
    text = before + raw + behind
    places = [len(before) + 1]
    for spelling in spelled:
        places.append(places[-1] + len(spelling))
    wanted = sorted(data.draw(st.sets(st.integers(0, len(spelled)), min_size=1, max_size=4)))
    span = (len(before), len(before) + len(raw))
    assert raw_offsets(text, span, len(spelled), wanted) == [places[offset] for offset in wanted]
