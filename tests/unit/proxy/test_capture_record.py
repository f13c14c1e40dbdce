"""A model request as a line: the body untouched, credentials left out, nothing that could forge a line."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSettings
from kvstack.proxy.capture_record import describing_headers, describing_query, record, to_line
from kvstack.state.events import RequestReceived

CHAT = "/v1/chat/completions"
NO_RULES = compile_rules([], RuleSettings())
RECEIVED = RequestReceived(1700000000.1234, 7, "POST", CHAT, "chat", "openclaw", "c1", 1, False, 0, 0, 0)


def line_of(
    body: bytes, received: RequestReceived = RECEIVED, headers: tuple[tuple[str, str], ...] = (), query: bytes = b""
) -> bytes:
    """The line of a request."""
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"headers": pairs, "query_string": query}
    document = apply_rules(body, received.path, NO_RULES).document
    return to_line(record(received, scope, body, document, max_body_bytes=2_000_000))


def row_of(
    body: bytes, received: RequestReceived = RECEIVED, headers: tuple[tuple[str, str], ...] = (), query: bytes = b""
) -> dict[str, Any]:
    """The line, read."""
    row: dict[str, Any] = json.loads(line_of(body, received, headers, query))
    return row


def raw_body(line: bytes) -> bytes:
    """The body as it is spelled in its line."""
    return line.partition(b', "body": ')[2].removesuffix(b"}\n")


@pytest.mark.parametrize(
    "name",
    [
        "Accept", "Content-Type", "User-Agent", "originator", "anthropic-beta", "traceparent", "x-app",
        "X-Stainless-Retry-Count", "x-claude-code-session-id", "session-id", "session_id", "thread-id",
        "x-client-request-id", "x-codex-window-id", "x-openwebui-chat-id", "X-Session-Affinity",
    ],
)  # fmt: skip
def test_headers_that_describe_are_kept(name: str) -> None:
    """What a client, its session or the body is told by."""
    assert describing_headers([(name.encode(), b"v")]) == {name.lower(): "v"}


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "Proxy-Authorization", "Cookie", "Set-Cookie", "X-Api-Key", "api-key", "x-goog-api-key",
        "X-Auth-Token", "X-Auth-Session-Id", "x-session-token", "x-session-key", "X-Session", "X-Client-Secret",
        "X-Forwarded-Client-Cert", "X-Csrf-Session-Id", "Cf-Access-Client-Id", "X-Amz-Security-Token", "X-Password",
        "X-Unknown", "X-Forwarded-For", "X-OpenWebUI-User-Email", "X-Stainless-Api-Key", "Host", "Referer",
        "Content-Length", "Content-Encoding", "Transfer-Encoding",
    ],
)  # fmt: skip
def test_all_other_headers_are_not(name: str) -> None:
    """Credentials least of all; nor what would be untrue of the recorded body."""
    assert describing_headers([(name.encode(), b"hush"), (name.lower().encode(), b"hush")]) == {}


@pytest.mark.parametrize(
    "value", ["Bearer abc", "basic QWxhZGRpbg==", "sk-proj-1234567890", "eyJhbGciOiJIUzI1NiJ9.e30.x"]
)
def test_a_credential_under_a_harmless_name_is_not_kept(value: str) -> None:
    """Some put it where it does not belong."""
    assert describing_headers([(b"x-session-id", value.encode())]) == {}


def test_a_repeated_header_is_joined() -> None:
    """Of one name there is one value."""
    pairs = [(b"Anthropic-Beta", b"a"), (b"anthropic-beta", b"b")]
    assert describing_headers(pairs) == {"anthropic-beta": "a, b"}


def test_what_packs_tell_clients_and_sessions_by_is_kept() -> None:
    """Otherwise `rules test` would not know the client again."""
    named = set()
    for entry in resources.files("kvstack.packs").iterdir():
        if entry.name.endswith(".toml"):
            spec = parse_pack(entry.read_text(encoding="utf-8"), entry.name).spec
            named |= {sign.header for sign in spec.detect if sign.header is not None} | set(spec.session_headers)
    assert len(named) > 5
    assert describing_headers([(name.encode(), b"v") for name in named]).keys() == {name.lower() for name in named}


@pytest.mark.parametrize(
    ("query", "kept", "left_out"),
    [
        (b"", "", 0),
        (b"beta=true", "beta=true", 0),
        (b"key=hush&beta=true&api-version=2024-10-21&code=hush", "beta=true&api-version=2024-10-21", 2),
        (b"hush", "", 1),
        (b"beta=" + b"hush" * 50, "", 1),
        (b"b%65ta=hush;beta=true", "", 1),
        (b"&&", "", 0),
    ],
)
def test_query(query: bytes, kept: str, left_out: int) -> None:
    """Parameters that are not known may be credentials; how many there were is told, and nothing of them."""
    assert describing_query(query) == (kept, left_out)
    row = row_of(b"{}", query=query)
    assert row["path"] == (f"{CHAT}?{kept}" if kept else CHAT)
    assert ("note" in row) == bool(left_out)
    assert "hush" not in json.dumps(row)


def test_an_escaped_question_mark_hides_no_query() -> None:
    """The server hands on the path with its escapes undone."""
    row = row_of(b"{}", replace(RECEIVED, path=f"{CHAT}?key=hush"))
    assert row["path"] == CHAT


def test_the_keys_of_a_line() -> None:
    """In this order, the body last; what is not known is not invented."""
    headers = (("User-Agent", "OpenAI/JS 6.10.0"), ("Authorization", "Bearer hush"))
    line = line_of(b'{"messages": [{"role": "user", "content": "hi"}]}', headers=headers)
    assert b"hush" not in line
    assert list(json.loads(line).items()) == [
        ("client", "openclaw"),
        ("conversation", "c1"),
        ("turn", 1),
        ("method", "POST"),
        ("path", CHAT),
        ("headers", {"user-agent": "OpenAI/JS 6.10.0"}),
        ("time_s", 1700000000.123),
        ("body", {"messages": [{"role": "user", "content": "hi"}]}),
    ]


def test_a_side_request_is_marked() -> None:
    """`warmup.request_file` passes it over."""
    row = row_of(b"{}", replace(RECEIVED, side="title"))
    assert row["kind"] == "side"
    assert "title" in row["note"]


@pytest.mark.parametrize(
    ("client", "user_agent", "version"),
    [
        ("claude-code", "claude-cli/2.1.197 (external, sdk-cli)", "2.1.197"),
        ("codex", "codex_exec/0.171.0 (Debian 12.0.0; x86_64) unknown", "0.171.0"),
        ("qwen-code", "QwenCode/0.24.4 (linux; x64)", "0.24.4"),
        ("opencode", "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "1.18.33"),
        ("openclaw", "OpenAI/JS 6.10.0", None),
        ("open-webui", "OpenAI/1.2.3", None),
        ("pi", "pip/24.0", None),
        ("cline", "ai-sdk/openai-compatible/3.0.37", None),
        (None, "claude-cli/2.1.197", None),
        ("codex", "", None),
    ],
)
def test_version(client: str | None, user_agent: str, version: str | None) -> None:
    """The client's own release, never the one of a library that it uses."""
    row = row_of(b"{}", replace(RECEIVED, client=client), (("User-Agent", user_agent),))
    assert row.get("version") == version
    assert row["client"] == client


@pytest.mark.parametrize(
    ("path", "body", "turn"),
    [
        (CHAT, {"messages": [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]}, 2),
        (CHAT, {"messages": [{"role": role, "content": "x"} for role in ("user", "user")]}, 1),
        (CHAT, {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "tool")]}, 1),
        ("/v1/responses", {"input": "x"}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, 0),
        ("/completion", {"prompt": "x"}, None),
        (CHAT, [], None),
    ],
)
def test_turn(path: str, body: object, turn: int | None) -> None:
    """A loop of tools repeats the number; what a client sends beside the user's words adds none."""
    assert row_of(json.dumps(body).encode(), replace(RECEIVED, path=path))["turn"] == turn


@pytest.mark.parametrize(
    "body",
    [
        b'{"z":1,"n":123456789012345678901,"z":2.50e1,"f":0.1000,"e":1E400}',
        b'{ "t" : "a\\u00e9\\ud800 \\/ \\n" , "u":"\xc3\xa9 \xe2\x80\xa8 \xc2\x85 \x7f \xf0\x9f\x98\x80"}',
        b'{"a":\t[1,\t2]}',
        b'{"n":' + b"7" * 5000 + b"}",
    ],
)
def test_a_body_on_one_line_is_embedded_byte_for_byte(body: bytes) -> None:
    """Key order, doubled keys, numbers, escapes and spaces stay as the client wrote them."""
    line = line_of(body)
    assert raw_body(line) == body
    assert line.count(b"\n") == 1


def test_line_ends_become_spaces() -> None:
    """They stand between values only; nothing else of the body changes."""
    body = b'\r\n{\r\n  "a": "x\\ny",\n\t"b": [\r1]\n}\n'
    line = line_of(body)
    assert line.count(b"\n") == 1
    assert raw_body(line) == b'{    "a": "x\\ny", \t"b": [ 1] }'
    assert json.loads(line)["body"] == json.loads(body)


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    """Inside a line it would be no JSON."""
    assert row_of(b'\xef\xbb\xbf{"a": 1}')["body"] == {"a": 1}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "Expecting value"),
        (b"hello", "Expecting value"),
        (b'{}, "client": "forged"', "Extra data"),
        (b'{}}\n{"client": "forged"', "Extra data"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "Infinity is not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "x\ny"}', "Invalid control character"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 500_000, ""),
        (b'{"a": "' + b"x" * 2_000_000 + b'"}', "is left out, it is larger than 2,000,000"),
    ],
)
def test_what_cannot_be_embedded_is_null(body: bytes, why: str) -> None:
    """With a note that says why; a body cannot forge a line."""
    row = row_of(body)
    assert row["body"] is None
    assert row["turn"] is None
    assert f"a body of {len(body):,} bytes is left out" in row["note"]
    assert why in row["note"]
    assert row["client"] == "openclaw"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(JSON, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_any_json_is_one_line_and_the_same_value(value: Any, indent: int | str | None, escaped: bool) -> None:
    """However it is spelled."""
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    body = text.encode("utf-8", "replace" if not escaped else "strict")
    line = line_of(body)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line)["body"] == json.loads(body)
