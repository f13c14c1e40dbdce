"""
Where each key of a TOML text stands.

`tomllib` gives values without positions, and an error message without a line number makes a person search.
This scanner knows just enough TOML (headers, dotted keys, strings, brackets, comments) to find the line of a
key; it never judges the text, `tomllib` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def key_lines(text: str) -> dict[str, int]:
    """
    Map dotted key paths to line numbers.

    Args:
        text: A TOML document.

    Returns:
        Line numbers counted from 1, for tables and keys.  Entries of an array of tables are numbered,
        `rules.add.0.name`, as validation errors name them.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    for number, statement in _statements(text):
        if statement.startswith("[["):
            parts = _split_key(statement[2:].split("]]", 1)[0])
            name = ".".join(parts)
            index = counts.get(name, 0)
            counts[name] = index + 1
            table = (*parts, str(index))
            lines.setdefault(name, number)
            lines.setdefault(".".join(table), number)
        elif statement.startswith("["):
            table = _split_key(statement[1:].split("]", 1)[0])
            lines.setdefault(".".join(table), number)
        else:
            key = (*table, *_split_key(_before_equals(statement)))
            for end in range(1, len(key) + 1):
                lines.setdefault(".".join(key[:end]), number)
    return lines


def line_of(path: str, lines: Mapping[str, int]) -> int | None:
    """
    The line of a key, or of the nearest table around it.

    Args:
        path: Dotted key path.
        lines: What `key_lines` found.

    Returns:
        None if nothing of the path stands in the text.
    """
    while path:
        # Of what should be a list of tables, and is one table, the keys have no number.
        for name in (path, path.replace(".0.", ".", 1)):
            if name in lines:
                return lines[name]
        path = path.rpartition(".")[0]
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each header or key line with its number, skipping the inside of strings and brackets."""
    number, position, size = 1, 0, len(text)
    depth = 0
    start: int | None = None
    start_number = 1
    while position < size:
        char = text[position]
        if char == "\n":
            if start is not None and depth == 0:
                yield start_number, text[start:position]
                start = None
            number += 1
            position += 1
        elif char == "#":
            end = text.find("\n", position)
            end = size if end < 0 else end
            if start is not None and depth == 0:
                yield start_number, text[start:position]
                start = None
            position = end
        elif char in "\"'":
            if start is None:
                start, start_number = position, number
            end = _string_end(text, position)
            number += text.count("\n", position, end)
            position = end
        else:
            if start is None and not char.isspace():
                start, start_number = position, number
                if char == "[":  # a header is no array: skip to its end so that brackets stay balanced
                    end = text.find("\n", position)
                    position = size if end < 0 else end
                    continue
            if char in "[{":
                depth += 1
            elif char in "]}":
                depth = max(0, depth - 1)
            position += 1
    if start is not None:
        yield start_number, text[start:size]


def _string_end(text: str, position: int) -> int:
    quote = text[position]
    if text.startswith(quote * 3, position):
        scan = position + 3
        while scan < len(text):
            if quote == '"' and text[scan] == "\\":
                scan += 2
            elif text.startswith(quote * 3, scan):
                end = scan + 3
                while end < len(text) and text[end] == quote:
                    end += 1
                return end
            else:
                scan += 1
        return len(text)
    scan = position + 1
    while scan < len(text) and text[scan] not in (quote, "\n"):
        scan += 2 if quote == '"' and text[scan] == "\\" else 1
    return min(scan + 1, len(text)) if scan < len(text) and text[scan] == quote else scan


def _before_equals(statement: str) -> str:
    position = 0
    while position < len(statement):
        if statement[position] in "\"'":
            position = _string_end(statement, position)
        elif statement[position] == "=":
            return statement[:position]
        else:
            position += 1
    return statement


def _split_key(key: str) -> tuple[str, ...]:
    parts: list[str] = []
    current = ""
    position = 0
    while position < len(key):
        char = key[position]
        if char in "\"'":
            end = _string_end(key, position)
            current += key[position + 1 : end - 1]
            position = end
        elif char == ".":
            parts.append(current)
            current = ""
            position += 1
        else:
            if not char.isspace():
                current += char
            position += 1
    return (*parts, current)
