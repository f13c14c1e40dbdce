"""How figures are written for a person: one spelling for each unit, and a dash for what is not known."""

from __future__ import annotations

import time
import unicodedata

UNKNOWN = "-"
"""What stands where a figure is not known: never an invented zero."""


def tokens(count: int | None) -> str:
    """A token count with thousands separators: `18,402`."""
    return UNKNOWN if count is None else f"{count:,}"


def ratio(value: float | None) -> str:
    """A ratio with three places, as llama-server's log prints it: `0.982`."""
    return UNKNOWN if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A ratio as a whole percentage: `97 %`.  Never `100 %` for less than all, nor `0 %` for more than nothing."""
    if value is None:
        return UNKNOWN
    whole = round(value * 100)
    if whole == 100 and value < 1:
        whole = 99
    elif whole == 0 and value > 0:
        whole = 1
    return f"{whole} %"


def seconds(milliseconds: float | None) -> str:
    """A short span in at most five characters: `0.3ms`, `53ms`, `0.24s`, `39.1s`, `412s`, `27m`."""
    if milliseconds is None:
        return UNKNOWN
    if 0 < milliseconds < 9.95:
        return f"{milliseconds:.1f}ms"
    if milliseconds < 99.5:
        return f"{milliseconds:.0f}ms"
    value = milliseconds / 1000
    if value < 9.995:
        return f"{value:.2f}s"
    if value < 99.95:
        return f"{value:.1f}s"
    if value < 999.5:
        return f"{value:.0f}s"
    return f"{value / 60:.0f}m" if value < 59970 else f"{value / 3600:.0f}h"


def rate(tokens_per_s: float | None) -> str:
    """A speed in tokens per second, in at most four characters: `41.2`, `1204`, `38k`."""
    if tokens_per_s is None:
        return UNKNOWN
    if tokens_per_s < 99.95:
        return f"{tokens_per_s:.1f}"
    return f"{tokens_per_s:.0f}" if tokens_per_s < 9999.5 else f"{min(tokens_per_s / 1000, 999):.0f}k"


def count(number: int, width: int) -> str:
    """A count in a narrow place: a dash for none, thousands where it would not fit: `3`, `12k`."""
    if not number:
        return UNKNOWN
    text = str(number)
    return text if len(text) <= width else f"{number // 1000}k"


def duration(span_s: float) -> str:
    """A span in words, its two largest units: `14 s`, `41 m 12 s`, `2 h 05 m`, `3 d 04 h`."""
    whole = max(0, int(span_s))
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} m {rest_s:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} m"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02} h"


def elapsed_clock(span_s: float) -> str:
    """A running clock: `02:14:07`, with days in front where there are any: `3d 02:14:07`."""
    whole = max(0, int(span_s))
    days, whole = divmod(whole, 86400)
    clock = f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{days}d {clock}" if days else clock


def clock_time(time_s: float) -> str:
    """Local time of day of a moment: `20:48:11`."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def memory(size_bytes: int | None) -> str:
    """A memory size in binary units: `61.4 GiB`."""
    if size_bytes is None:
        return UNKNOWN
    if size_bytes < 1024 * 1024:
        return f"{size_bytes / 1024:.0f} KiB"
    if size_bytes < 1024**3:
        return f"{size_bytes / 1024**2:.0f} MiB"
    return f"{size_bytes / 1024**3:.1f} GiB"


def plural(count: int, word: str) -> str:
    """A count and its word: `1 turn`, `63 turns`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def one_line(text: str) -> str:
    """
    Text from outside (a log, a client, an error) made safe for one line of a terminal.

    Control characters, terminal escapes, line and direction marks, surrogates and other characters without a shape
    become spaces or vanish; what a person can read stays.
    """
    shown: list[str] = []
    for character in text:
        if character.isascii():
            shown.append(character if character.isprintable() else " ")
            continue
        category = unicodedata.category(character)
        if category in {"Zs", "Zl", "Zp"}:
            shown.append(" ")
        elif category in {"Cc", "Cs", "Co", "Cn"}:
            shown.append("\N{REPLACEMENT CHARACTER}")
        elif category != "Cf":
            shown.append(character)
    return "".join(shown)
