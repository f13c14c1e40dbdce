"""Recordings: what is read is what was sent."""

from __future__ import annotations

import json

import pytest

from kvstack.prompt.recording import RecordingError, read_recording

STRANGE = (
    '{ "model":"m",\r\n\t"a":1,"a":2, "n": 12345678901234567890123, "x": 1.50e400, "messages": [ {"role":"user",\n'
    ' "content":"\\ud800 \u2028 \x85 \\u00e9 \\/"} ]\n}'
)


def test_a_body_keeps_its_spelling() -> None:
    """Key order, numbers, escapes, duplicate keys and Unicode's line ends are as sent."""
    body = STRANGE.replace("\r", " ").replace("\n", " ")
    (one,) = read_recording(
        f'{{"headers": {{"user-agent": "x"}}, "body": 1, "path": "/v1/messages", "body": {body}}}\n'
    )
    assert one.body == body
    assert one.value == json.loads(STRANGE)
    assert (one.endpoint, one.headers) == ("/v1/messages", (("user-agent", "x"),))


def test_what_a_recording_may_be() -> None:
    """A bare body over many lines, JSON Lines of bodies and records, a title request, a health check."""
    pretty = '{\n  "messages": []\n}\n'
    assert [one.body for one in read_recording(pretty)] == [pretty.strip()]
    lines = '\ufeff{"prompt": "a"}\r\n\r\n{"body": {"input": "b"}, "kind": "side", "headers": [["A", "b"], 1]}\n'
    bare, record = read_recording(lines + '{"path": "/health", "body": null}')
    assert (bare.body, bare.endpoint, bare.line) == ('{"prompt": "a"}', "/completion", 1)
    assert (record.body, record.endpoint, record.kind) == ('{"input": "b"}', "/v1/responses", "side")
    assert (record.headers, record.line) == ((("A", "b"),), 3)
    assert read_recording(" \n") == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{bad", 1),
        ("[]", 1),
        ("12", 1),
        ('{"messages": []}\n{"messages": [}\n', 2),
        ('{"messages": []}\n"text"\n', 2),
        ('{"path": "/v1/messages", "body": "text"}', 1),
        ("[" * 100_000, 1),
    ],
)
def test_what_is_no_recording(text: str, line: int) -> None:
    """The message names the line."""
    with pytest.raises(RecordingError, match=f"line {line}: "):
        read_recording(text)


def test_a_number_of_any_length() -> None:
    """Python reads no number of five thousand digits; the body has it all the same."""
    body = '{"prompt": "x", "seed": ' + "9" * 5000 + "}"
    for text in (body, f'{{"path": "/completion", "body": {body}}}\n{body}\n'):
        assert all(one.body == body for one in read_recording(text))
