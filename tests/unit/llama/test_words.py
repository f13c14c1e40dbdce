"""What an answer says: its text and tool calls, of recorded answers and of each dialect's form of calls."""

from __future__ import annotations

import json
import re

import pytest

from kvstack.llama.response import AnswerTap
from kvstack.prompt.answering import Answer
from kvstack.prompt.request.document import Api, read_document
from kvstack.prompt.saying import compare, said_after, say
from kvstack.proxy.hearing import Hearing
from tests.unit.llama.test_response import BUILDS, GOLDEN, JSON, SSE, TOKENS, content_type, sse

CALL = ("read", '{"path": "a.txt"}')


def read(body: bytes, kind: str, api: str = "chat") -> AnswerTap:
    """A tap that read a body to its end."""
    tap = AnswerTap(1, api, kind)
    tap.feed(body)
    tap.result()
    return tap


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", TOKENS)
def test_recorded_answers(build: str, name: str) -> None:
    """The text of each recorded answer is what its body spells, in one piece or in deltas; none calls a tool."""
    api, _ = TOKENS[name]
    body = (GOLDEN / build / f"{name}.txt").read_bytes()
    words = read(body, content_type(name), api).words
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")] or [json.loads(body)]
    assert words.text == "".join(spelled(event) for event in events)
    assert (words.calls, words.whole) == ([], True)
    assert words.text or name == "completion-n0"


def spelled(event: dict[str, object]) -> str:
    """The text of one object of these recordings, looked up by the keys that each of them has."""
    match event:
        case {"choices": [{"delta": {"content": str(text)}}]} | {"choices": [{"message": {"content": str(text)}}]}:
            return text
        case {"choices": [{"text": str(text)}]} | {"content": str(text)} | {"content": [{"text": str(text)}]}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)} | {"delta": {"text": str(text)}}:
            return text
        case {"object": "response", "output": [{"content": [{"text": str(text)}]}]}:
            return text
    return ""


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_recorded_calls(build: str, name: str) -> None:
    """The calls of a real stream are as many as it says, each with its own arguments; so are those of a whole body."""
    for body_name, kind in ((f"{name}-calls", JSON), (f"{name}-stream-calls", SSE)):
        body = (GOLDEN / build / f"{body_name}.txt").read_bytes()
        words = read(body, kind, name).words
        ids = set(re.findall(r'"call_id":"(\w+)"' if name == "responses" else r'"id":"(\w{32})"', body.decode()))
        assert len(words.calls) == len(ids) > 1
        assert words.whole
        for called, arguments in words.calls[:-1]:
            spelled = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            assert called in ("read", "ls")
            assert set(spelled) == ({"path", "n"} if called == "read" else set())


def held(body: bytes) -> dict[str, object]:
    """A recorded whole answer as a client keeps it, word for word."""
    value = json.loads(body)
    if "choices" in value:
        return {"messages": [HELLO, value["choices"][0]["message"]]}
    if "output" in value:
        return {"input": [HELLO, *value["output"]]}
    return {"messages": [HELLO, {"role": value["role"], "content": value["content"]}]}


HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", ["chat", "responses", "messages", "chat-calls", "responses-calls", "messages-calls"])
def test_recorded_answers_are_what_their_client_keeps(build: str, name: str) -> None:
    """What went out and what a client sends back of it are the same answer."""
    body, api = (GOLDEN / build / f"{name}.txt").read_bytes(), name.removesuffix("-calls")
    words = read(body, JSON, api).words
    items = read_document(json.dumps(held(body)), Api(api), None, []).items
    assert [compare(say(words.text, words.calls), one) for one in said_after(items, 0)][-1] == "same"


@pytest.mark.parametrize("build", BUILDS)
def test_calls_of_a_stream_that_broke_off(build: str) -> None:
    """The event that says all of it once more never came: the calls are those that had ended."""
    body = (GOLDEN / build / "responses-stream-calls.txt").read_bytes()
    whole = read(body, SSE, "responses").words.calls
    broken = read(body[: body.index(b"event: response.completed")], SSE, "responses").words.calls
    assert len(whole) > 2
    assert broken == whole


CALLING = {
    "chat": (
        JSON,
        {
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "content": "Let me see.",
                        "reasoning_content": "hm",
                        "tool_calls": [{"function": {"name": CALL[0], "arguments": CALL[1]}}],
                    },
                }
            ]
        },
    ),
    "responses": (
        JSON,
        {
            "object": "response",
            "output": [
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "name": CALL[0], "arguments": CALL[1]},
            ],
        },
    ),
    "messages": (
        JSON,
        {
            "type": "message",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "name": CALL[0], "input": json.loads(CALL[1])},
            ],
        },
    ),
}
STREAMED = {
    "chat": [
        {"choices": [{"index": 0, "delta": delta}]}
        for delta in (
            {"role": "assistant", "content": None},
            {"reasoning_content": "hm"},
            {"content": "Let me "},
            {"content": "see."},
            {"tool_calls": [{"index": 0, "function": {"name": CALL[0], "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": CALL[1][:5]}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": CALL[1][5:]}}]},
        )
    ],
    "responses": [
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.output_text.delta", "delta": "Let me "},
        {"type": "response.output_text.delta", "delta": "see."},
        {"type": "response.output_item.done", "item": {"id": "msg_1", "type": "message", "content": []}},
        {
            "type": "response.output_item.done",
            "item": {"id": "fc_1", "type": "function_call", "name": CALL[0], "arguments": CALL[1]},
        },
    ],
    "messages": [
        {"type": "message_start", "message": {"type": "message", "content": [], "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me "}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "see."}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "name": CALL[0], "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": CALL[1][:5]}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": CALL[1][5:]}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    ],
}
BODIES = {
    **{name: (kind, json.dumps(value).encode()) for name, (kind, value) in CALLING.items()},
    **{f"{name}, streamed": (SSE, sse(*events)) for name, events in STREAMED.items()},
    "responses, whole at the end": (
        SSE,
        sse(*STREAMED["responses"], {"type": "response.completed", "response": CALLING["responses"][1]}),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_text_and_calls(name: str) -> None:
    """Thinking stays out, and of a call name and arguments are known, as text or as a value."""
    kind, body = BODIES[name]
    words = read(body, kind).words
    assert words.text == "Let me see."
    ((called, arguments),) = words.calls
    spelled = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert (called, spelled) == ("read", {"path": "a.txt"})


def test_several_calls_of_one_answer() -> None:
    """Pieces go to the call that they belong to."""
    pieces = [(0, "one", '{"a"'), (1, "two", '{"b"'), (0, None, ": 1}"), (1, None, ": 2}")]
    events = [
        {"choices": [{"delta": {"tool_calls": [{"index": index, "function": {"name": name, "arguments": text}}]}}]}
        for index, name, text in pieces
    ]
    assert read(sse(*events), SSE).words.calls == [("one", '{"a": 1}'), ("two", '{"b": 2}')]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, b'{"choices": [{"index": 0, "message": {"content": "a"}}, {"index": 1, "message": {"content": "b"}}]}'),
        (JSON, b'[{"content": "a"}, {"content": "b"}]'),
        (JSON, b'{"content": "' + b"x" * (1 << 21) + b'"}'),
        (JSON, b'{"choices": [{"message": {"content": "a'),
        (JSON, b'{"tokens": [1]}'),
        (SSE, b'data: {"index": 0, "content": "a"}\n\ndata: {"index": 1, "content": "b"}\n\n'),
        ("text/plain", b"a"),
    ],
    ids=["choices", "prompts", "too long", "half", "without text", "streamed prompts", "no JSON"],
)
def test_what_is_not_known_whole_is_said_so(kind: str, body: bytes) -> None:
    """Of several answers only the client knows which one it takes; of a body that is too long the words are lost."""
    assert not read(body, kind).words.whole


@pytest.mark.parametrize(
    ("delta", "count"),
    [
        ({"content": "x" * 10_000}, 10),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "x" * 10_000}}]}, 30),
    ],
    ids=["text", "arguments"],
)
def test_words_are_bounded(delta: dict[str, object], count: int) -> None:
    """However long an answer and its calls are, a bounded part of them is kept, and it is known that it is a part."""
    tap = AnswerTap(1, "chat", SSE)
    for _ in range(count):
        tap.feed(sse({"choices": [{"delta": delta}]}))
    assert len(tap.words.text) + sum(len(arguments) for _, arguments in tap.words.calls) <= 1 << 18
    assert tap.words.cut


def test_calls_are_bounded() -> None:
    """Of a thousand calls the first are kept."""
    calls = [{"index": n, "function": {"name": "f", "arguments": "{}"}} for n in range(1000)]
    words = read(sse({"choices": [{"delta": {"tool_calls": calls}}]}), SSE).words
    assert (len(words.calls), words.cut) == (64, True)


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [None, {"delta": None}, {"index": 0, "delta": {"content": 1, "tool_calls": [None, {}, 1]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": {}, "function": {"name": [], "arguments": {}}}]}}]},
        {"type": "content_block_delta", "index": [], "delta": None},
        {"type": "content_block_start", "content_block": []},
        {"type": "response.completed", "response": {"output": [None, {"type": []}]}},
        {"type": "response.output_item.done", "item": 1},
        {"object": "response", "output": {}},
        {"content": {"a": 1}},
    ],
)
def test_it_never_raises(value: object) -> None:
    """Whatever a server sends, there are no words in it at worst."""
    for kind, body in ((SSE, sse(value)), (JSON, json.dumps(value).encode())):
        assert read(body, kind).words.text == ""


def test_when_the_client_may_have_heard() -> None:
    """Of a stream with its first token, of a body with its first byte."""
    stream, whole = AnswerTap(1, "chat", SSE), AnswerTap(1, "chat", JSON)
    stream.feed(b": ping\n\n" + sse({"choices": [{"delta": {"role": "assistant"}}]}))
    assert not stream.heard
    assert not whole.heard
    stream.feed(sse({"choices": [{"delta": {"content": "a"}}]}))
    whole.feed(b"{")
    assert stream.heard
    assert whole.heard


@pytest.mark.parametrize(
    ("event", "broken"),
    [
        ({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]}, True),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False),
        ({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}, True),
        ({"content": "a", "stop": True, "stop_type": "eos"}, False),
        ({"content": "a", "stop": True, "stop_type": "limit"}, True),
        ({"type": "response.completed", "response": {"output": []}}, False),
        ({"type": "response.incomplete", "response": {"output": []}}, True),
        ({"error": {"message": "no"}}, True),
    ],
)
def test_whether_it_ended_by_itself(event: dict[str, object], broken: bool) -> None:
    """Each dialect says so in its own way."""
    assert read(sse(event), SSE).broken == broken


def test_figures_behind_the_first_of_several_answers_count() -> None:
    """Of several prompts each ends with a stop of its own."""
    ends = [{"index": n, "content": "", "stop": True, "timings": {"prompt_n": n + 3, "cache_n": 7}} for n in range(2)]
    answer = Answer()
    answer.expect()
    hearing = Hearing(1, "completion", [(b"content-type", SSE.encode())], answer)
    for end in ends:
        hearing.feed(sse(end))
    assert hearing.close(broken_off=False).prompt_tokens == 11


def test_an_error_behind_the_last_event_is_told() -> None:
    """The memory knows the answer by then, and the person the error."""
    hearing = Hearing(1, "completion", [(b"Content-Type", SSE.encode())], Answer())
    hearing.feed(sse({"content": "a", "stop": True}))
    hearing.feed(sse({"error": {"message": "the second failed"}}))
    assert hearing.close(broken_off=False).error == "the second failed"
