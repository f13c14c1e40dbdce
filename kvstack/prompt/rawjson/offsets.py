"""
Where a character of a decoded string stands in its raw JSON literal.

An escape is one character and two, six or twelve letters long; nothing of the literal is decoded again to find out.
"""

from __future__ import annotations

from collections.abc import Sequence

# A run of more backslashes is read from its beginning.
_MANY_SLASHES = 64
# A surrogate pair.
_LONGEST_ESCAPE = 12


def raw_offsets(text: str, literal: tuple[int, int], length: int, decoded: Sequence[int]) -> list[int]:
    """
    Map ascending offsets of a decoded string to offsets in the raw text.

    Args:
        text: The JSON text.
        literal: Offsets of the opening quote, and behind the closing one.
        length: Length of the decoded string.
        decoded: Offsets in the decoded string, ascending.

    Returns:
        For each, the offset in *text* of the same character (or of the closing quote).
    """
    result: list[int] = []
    raw, seen = literal[0] + 1, 0
    if decoded and 2 * decoded[0] > length:
        # Nearer to the end: a metadata block stands behind a long text.
        before = _retreat(text, raw, literal[1] - 1, length - decoded[0])
        if before is not None:
            raw, seen = before, decoded[0]
    for target in decoded:
        if target > seen:
            raw = _advance(text, raw, target - seen)
            seen = target
        result.append(raw)
    return result


def _advance(text: str, raw: int, step: int) -> int:
    r"""
    Go *step* decoded characters on from the raw offset.

    Without `\u` every escape takes two characters for one, and escapes are counted at C speed: each backslash opens
    one, but of two in a row only the first.  The estimate grows to the least offset that fits, which is the right one.
    """
    # `clean` is an offset that no escape spans; what stands before it is counted once.
    clean, escapes = raw, 0
    end = raw + step
    while True:
        total = escapes + text.count("\\", clean, end) - text.count("\\\\", clean, end)
        if raw + step + total == end:
            break
        if text[end - 1] != "\\":
            clean, escapes = end, total
        end = raw + step + total
    # An escape of another length stands in the way: what was counted is wrong, and it takes a closer look.
    return _walk_escapes(text, raw, step) if text.find("\\u", raw, end) >= 0 else end


def _retreat(text: str, first: int, end: int, step: int) -> int | None:
    r"""
    Go *step* decoded characters back from the raw offset *end*, which no escape spans; None if it takes a closer look.

    Each raw character is one decoded character at most, so the estimate never goes too far.
    """
    raw = end
    while step > 0:
        raw -= step
        if raw < first:
            return None
        # An odd number of backslashes in front: the last of them opens an escape that goes on here.
        slashes = raw
        while slashes > first and text[slashes - 1] == "\\" and raw - slashes <= _MANY_SLASHES:
            slashes -= 1
        if raw - slashes > _MANY_SLASHES or text.find("\\u", max(first, raw - _LONGEST_ESCAPE), end) >= 0:
            return None
        raw -= (raw - slashes) % 2
        step -= end - raw - text.count("\\", raw, end) + text.count("\\\\", raw, end)
        end = raw
    return raw


def _walk_escapes(text: str, raw: int, step: int) -> int:
    """Go on escape by escape."""
    while True:
        escape_at = text.find("\\", raw, raw + step)
        if escape_at < 0:
            return raw + step
        step -= escape_at - raw + 1
        raw = escape_at + _escape_length(text, escape_at)


def _escape_length(text: str, pos: int) -> int:
    """Return the length of the escape at *pos*; a surrogate pair is one character and twelve letters long."""
    if text[pos + 1] != "u":
        return 2
    if text[pos + 2] in "dD" and text[pos + 3] in "89abAB" and text[pos + 6 : pos + 8] == "\\u":
        low = text[pos + 8 : pos + 12]
        if len(low) == 4 and low[0] in "dD" and low[1] in "cdefCDEF":
            return 12
    return 6
