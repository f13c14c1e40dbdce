"""What an answer says of itself is read in every dialect, streamed or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstack.llama.response import AnswerTap
from kvstack.state.events import AnswerSeen

GOLDEN = Path(__file__).parents[2] / "golden" / "answers"
BUILDS = ["b10068", "b11434"]
SSE = "text/event-stream"
JSON = "application/json; charset=utf-8"

# prompt, cached, evaluated, generated tokens
TOKENS: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "chat": ("chat", (413, 0, 413, 4)),
    "chat-stream": ("chat", (413, 412, 1, 4)),
    "chat-stream-usage": ("chat", (413, 412, 1, 4)),
    "chat-stream-progress": ("chat", (416, 404, 12, 4)),
    "chat-stream-pertoken": ("chat", (413, 404, 9, 4)),
    "responses": ("responses", (413, 412, 1, 4)),
    "responses-stream": ("responses", (413, 412, 1, 4)),
    "messages": ("messages", (413, 412, 1, 4)),
    "messages-stream": ("messages", (413, 412, 1, 4)),
    "completion": ("completion", (390, 0, 390, 4)),
    "completion-stream": ("completion", (390, 389, 1, 4)),
    "completion-n0": ("completion", (390, 389, 1, 1)),
    "v1completions-stream": ("completion", (390, 389, 1, 4)),
}
# prefill and decode milliseconds, where the answer has them
TIMES: dict[tuple[str, str], tuple[float, float]] = {
    ("b10068", "chat"): (2.706, 0.316),
    ("b10068", "chat-stream"): (0.518, 0.117),
    ("b10068", "chat-stream-progress"): (0.479, 0.15),
    ("b10068", "chat-stream-pertoken"): (0.396, 0.157),
    ("b10068", "responses-stream"): (0.484, 0.12),
    ("b10068", "completion"): (2.115, 0.294),
    ("b11434", "chat"): (2.689, 0.315),
    ("b11434", "chat-stream-usage"): (0.486, 0.36),
    ("b11434", "responses-stream"): (0.236, 0.166),
    ("b11434", "completion-stream"): (0.254, 0.169),
}
WITHOUT_TIMES = {"responses", "messages", "messages-stream"}


def content_type(name: str) -> str:
    """What the server said of the body."""
    return SSE if "stream" in name and not name.startswith("too-long") else JSON


def read(body: bytes, api: str | None = "chat", kind: str = SSE) -> AnswerSeen:
    """What one body says."""
    tap = AnswerTap(1, api, kind)
    tap.feed(body)
    return tap.result()


def sse(*events: object) -> bytes:
    """A stream of JSON events."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", TOKENS)
def test_recorded_answers(build: str, name: str) -> None:
    """The figures of each recorded answer are found."""
    api, tokens = TOKENS[name]
    answer = read((GOLDEN / build / f"{name}.txt").read_bytes(), api, content_type(name))
    found = (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens, answer.generated_tokens)
    assert found == tokens
    assert answer.error is None
    assert (answer.prefill_ms is None) == (name in WITHOUT_TIMES)
    if (build, name) in TIMES:
        assert (answer.prefill_ms, answer.decode_ms) == TIMES[build, name]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", [name for name in TOKENS if "stream" in name])
def test_the_same_for_every_chunking(build: str, name: str) -> None:
    """A stream says the same when it comes byte by byte, and when its lines end otherwise."""
    api, _ = TOKENS[name]
    body = (GOLDEN / build / f"{name}.txt").read_bytes()
    whole = read(body, api)
    for data in (body, body.replace(b"\n", b"\r\n"), body.replace(b"\n", b"\r")):
        tap = AnswerTap(1, api, SSE)
        for byte in data:
            tap.feed(bytes([byte]))
        assert tap.result() == whole


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("chat-stream", b'"delta":{"content":"'),
        ("chat-stream-progress", b'"delta":{"content":"'),
        ("responses-stream", b'"response.output_text.delta"'),
        ("messages-stream", b'"text_delta"'),
        ("completion-stream", b'"content":"'),
        ("v1completions-stream", b'"text":"'),
    ],
)
def test_the_first_token_starts_an_answer(build: str, name: str, token: bytes) -> None:
    """Role chunks, created events, pings and progress come before the first token and do not count."""
    body = (GOLDEN / build / f"{name}.txt").read_bytes()
    event_start = body.rindex(b"data: ", 0, body.index(token))
    tap = AnswerTap(1, TOKENS[name][0], SSE)
    tap.feed(b": ping\n\n" + body[:event_start])
    assert not tap.started
    tap.feed(body[event_start : body.index(b"\n\n", event_start) + 2])
    assert tap.started


@pytest.mark.parametrize("text", [b'{"choices": [{"message": {"content": "Yes."}}]}', b'{"error": {"message": "no"}}'])
@pytest.mark.parametrize("padding", [0, 3 << 20])
def test_a_whole_body_does_not_show_its_first_token(text: bytes, padding: int) -> None:
    """An answer in one piece, short or long, and an error say nothing of when the first token was there."""
    tap = AnswerTap(1, "chat", JSON)
    tap.feed(text + b" " * padding)
    tap.result()
    assert not tap.started


@pytest.mark.parametrize(
    "delta",
    [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}, {"role": "assistant", "content": "x"}],
)
def test_reasoning_and_tool_calls_are_tokens(delta: dict[str, object]) -> None:
    """Whatever the model writes first counts."""
    tap = AnswerTap(1, "chat", SSE)
    tap.feed(sse({"choices": [{"delta": {"role": "assistant", "content": None}}]}))
    assert not tap.started
    tap.feed(sse({"choices": [{"delta": delta}]}))
    assert tap.started


def test_progress_with_stale_timings() -> None:
    """b10068 leaves the figures of the request before in the timings beside `prompt_progress`."""
    stale = {"prompt_progress": {"total": 900, "cache": 100, "processed": 300}, "timings": {"predicted_n": 77}}
    answer = read(sse(stale))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens) == (900, 100, 800)
    assert answer.generated_tokens is None


def test_timings_win_over_usage() -> None:
    """The server's own figures are the truth."""
    answer = read(
        sse(
            {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}},
            {"timings": {"cache_n": 90, "prompt_n": 10, "prompt_ms": 5.5, "predicted_n": 3, "predicted_ms": 2.5}},
        )
    )
    assert answer == AnswerSeen(1, 100, 90, 10, 3, 5.5, 2.5)


def test_timings_without_cache_n() -> None:
    """Builds of 2025 say only what was evaluated; the usage has the prompt's length."""
    answer = read(sse({"usage": {"prompt_tokens": 100}, "timings": {"prompt_n": 10, "prompt_ms": 5.5}}))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens) == (100, 90, 10)


def test_usage_without_details_does_not_claim_a_miss() -> None:
    """Cached tokens that nobody mentioned are unknown, not zero."""
    answer = read(sse({"usage": {"prompt_tokens": 100, "completion_tokens": 5}}))
    assert (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens) == (100, None, None)


@pytest.mark.parametrize(
    ("api", "kind", "body", "text"),
    [
        (
            "chat",
            SSE,
            sse({"choices": [{"delta": {"content": "x"}}]})
            + sse({"error": {"code": 500, "message": "Invalid diff: now finding less tool calls!", "type": "x"}}),
            "Invalid diff: now finding less tool calls!",
        ),
        ("chat", SSE, b'error: {"error":{"message":"slot is gone"}}\n\n', "slot is gone"),
        ("messages", SSE, b'event: error\ndata: {"type":"error","error":{"message":"overloaded"}}\n\n', "overloaded"),
        ("responses", SSE, sse({"type": "response.failed", "response": {"error": {"message": "bad"}}}), "bad"),
        ("responses", SSE, sse({"type": "error", "message": "worse"}), "worse"),
        ("chat", JSON, b'{"error":{"code":400,"message":"too long","n_prompt_tokens":14429,"n_ctx":8192}}', "too long"),
        ("chat", JSON, b'{"error":"plain"}', "plain"),
        ("chat", JSON, b'{"error":{"code":7}}', '{"code": 7}'),
    ],
)
def test_errors_in_bodies_and_streams(api: str, kind: str, body: bytes, text: str) -> None:
    """FR-43, FR-45: an error object counts wherever it stands, and whatever the status said."""
    assert read(body, api, kind).error == text


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", ["too-long", "too-long-stream"])
def test_a_prompt_that_is_too_long(build: str, name: str) -> None:
    """The refusal has both numbers."""
    error = read((GOLDEN / build / f"{name}.txt").read_bytes(), "chat", JSON).error
    assert error is not None
    assert "3036 tokens" in error
    assert "2048 tokens" in error


def test_a_response_without_an_error() -> None:
    """`"error": null`, as responses write it, is none."""
    assert read(sse({"type": "response.completed", "response": {"error": None}}), "responses").error is None


def test_a_large_last_event_is_read_from_its_end() -> None:
    """An event that echoes everything costs no memory and still gives its figures."""
    event = {
        "type": "response.completed",
        "response": {
            "instructions": "x" * 3_000_000,
            "usage": {"input_tokens": 50, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 40}},
        },
        "timings": {"cache_n": 40, "prompt_n": 10},
    }
    tap = AnswerTap(1, "responses", SSE)
    data = sse(event)
    for start in range(0, len(data), 4096):
        tap.feed(data[start : start + 4096])
        assert len(tap._line) + len(tap._event) < 1_300_000
    answer = tap.result()
    assert (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens) == (50, 40, 10)


def test_a_large_body_is_read_from_its_end() -> None:
    """The same for a body that is not streamed."""
    body = json.dumps({"content": "x" * 3_000_000, "timings": {"cache_n": 40, "prompt_n": 10}}).encode()
    assert read(body, "completion", JSON).prompt_tokens == 50


def test_a_stream_that_breaks_off() -> None:
    """What came counts; half an event does no harm."""
    body = (GOLDEN / "b11434" / "messages-stream.txt").read_bytes()
    answer = read(body[: body.index(b'"content_block_start"') + 40], "messages")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.evaluated_tokens) == (413, 412, 1)
    assert answer.error is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"data: \n\n",
        b"data: {\n\n",
        b"data: [1,2]\n\n",
        b"\xff\xfe\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        sse({"timings": {"cache_n": "many", "prompt_n": -1, "prompt_ms": 1e999, "predicted_n": True}}),
        sse({"timings": None, "usage": 7, "choices": 3, "response": "x"}),
        sse({"usage": {"prompt_tokens": 10**400}}),
    ],
)
def test_nonsense_says_nothing(body: bytes) -> None:
    """Bytes that make no sense are no figures, and no exception."""
    assert read(body) == AnswerSeen(1)


def test_other_content_is_not_kept() -> None:
    """A download is not an answer."""
    tap = AnswerTap(1, None, "application/octet-stream")
    tap.feed(b"x" * 1000)
    assert len(tap._body) == 0
    assert tap.result() == AnswerSeen(1)


def test_the_result_is_final() -> None:
    """Bytes after the result change nothing."""
    tap = AnswerTap(1, "chat", SSE)
    tap.feed(sse({"timings": {"cache_n": 1, "prompt_n": 2}}))
    first = tap.result()
    tap.feed(sse({"timings": {"cache_n": 5, "prompt_n": 6}}))
    assert tap.result() == first
