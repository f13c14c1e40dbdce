"""
Whether a request's path has one reading: the proxy decides by its own, llama-server acts by its own.

Both decode `%XX` once, `%2F` and `%00` too, and fold nothing: no `//`, no `/../`, no `;parameters`, no letter case.
llama-server (cpp-httplib) decodes `%uXXXX` as well, and ends a path at `#`.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_to_bytes

_MALFORMED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CODE_POINT = re.compile("%u([0-9A-Fa-f]{4})")


def ambiguity(raw_path: bytes) -> str | None:
    """
    What in a path, as it came, the server may read differently; None if there is nothing.

    >>> ambiguity(b"/sl%u006fts/0")
    "the path has a '%' without two hexadecimal digits"
    """
    if _MALFORMED.search(raw_path):
        return "the path has a '%' without two hexadecimal digits"
    if b"#" in raw_path:
        return "the path has a '#'"
    try:
        unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        return "the path is not UTF-8"
    return None


def path_at_server(raw_path: bytes) -> str:
    """
    The path as llama-server reads it.

    >>> path_at_server(b"/v1/mess%u0061ges#x")
    '/v1/messages'
    """
    path = raw_path.partition(b"#")[0].decode("latin-1")
    return unquote(_CODE_POINT.sub(lambda found: chr(int(found[1], 16)), path))
