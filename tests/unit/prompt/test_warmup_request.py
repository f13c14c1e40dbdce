"""The warm-up request: a client's request cut down to what all its conversations share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.errors import Problem
from kvstack.prompt.warmup_request import (
    WarmupRequest,
    from_recording,
    from_system_prompt,
    shares_nothing,
    with_user_text,
)

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]


def made(text: str, path: str | None = None) -> WarmupRequest:
    """A request, or the test fails."""
    request = from_recording(text, path)
    assert isinstance(request, WarmupRequest), request
    return request


def body_of(request: WarmupRequest) -> dict[str, Any]:
    """The decoded body."""
    data = json.loads(request.body)
    assert isinstance(data, dict)
    return data


def test_a_system_prompt_becomes_a_chat_request_of_one_token() -> None:
    """The cheapest answer there is: `max_tokens = 0` makes one token too."""
    request = from_system_prompt("You are terse.")
    assert request.path == "/v1/chat/completions"
    assert body_of(request) == {
        "messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "stream": False,
    }


def test_of_a_chat_request_system_texts_tools_and_template_options_stay() -> None:
    """All that the template renders in front of the first user text, and nothing that a user or model said."""
    recorded = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": [{"type": "text", "text": "D"}]},
            {"role": "user", "content": "secret question"},
            {"role": "system", "content": "in the middle"},
            {"role": "assistant", "content": "secret answer"},
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 8192,
        "n": 3,
    }
    body = body_of(made(json.dumps(recorded)))
    assert body == {
        "model": "m",
        "messages": [*recorded["messages"][:2], {"role": "user", "content": "Hi"}],  # type: ignore[index]
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 1,
        "stream": False,
    }
    # The order of keys inside a tool is the order in the rendered prompt.
    assert list(body["tools"][0]["function"]["parameters"]) == ["b", "a"]


def test_of_a_responses_request_instructions_and_leading_items_stay() -> None:
    """Codex puts its prompt into a developer item, others into `instructions`."""
    recorded = {
        "instructions": "I",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "secret"}]},
        ],
        "tools": TOOLS,
        "max_output_tokens": 99,
        "previous_response_id": "resp_1",
    }
    request = made(json.dumps(recorded))
    assert request.path == "/v1/responses"
    assert body_of(request) == {
        "instructions": "I",
        "input": [recorded["input"][0], {"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "max_output_tokens": 1,
        "stream": False,
    }


@pytest.mark.parametrize(
    "mark", [{"system": [{"type": "text", "text": "S"}]}, {"tools": [{"name": "t", "input_schema": {}}]}]
)
def test_a_messages_request_is_told_by_its_shape(mark: dict[str, Any]) -> None:
    """`system` beside `messages`, or Anthropic's tools, mean `/v1/messages`."""
    request = made(json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 64000, **mark}))
    assert request.path == "/v1/messages"
    body = body_of(request)
    assert body["max_tokens"] == 1
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert {key: body[key] for key in mark} == mark


def test_a_raw_prompt_is_evaluated_whole() -> None:
    """It shows no border between what is shared and what is not."""
    body = body_of(made('{"prompt": "abc", "n_predict": 100, "cache_prompt": false}'))
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ("abc", 0, True)


def test_a_recording_brings_its_path_and_headers() -> None:
    """With `path`, `headers` and `body`: the client is recognised as in traffic, the query stays."""
    record = {
        "path": "/v1/messages?beta=true",
        "headers": {"user-agent": "x", "n": 1},
        "body": {"messages": [], "system": "S"},
    }
    request = made(json.dumps(record))
    assert request.path == "/v1/messages?beta=true"
    assert request.headers == (("user-agent", "x"),)


def test_of_json_lines_the_first_normal_model_request_counts() -> None:
    """Probes and title requests come first in many captures; they have another prefix."""
    main = {"path": "/v1/chat/completions", "body": {"messages": [{"role": "system", "content": "main"}]}}
    lines = [
        {"path": "/", "body": None, "kind": "probe"},
        {
            "path": "/v1/chat/completions",
            "kind": "side",
            "body": {"messages": [{"role": "system", "content": "title"}]},
        },
        main,
        {"path": "/v1/chat/completions", "body": {"messages": [{"role": "system", "content": "later"}]}},
    ]
    body = body_of(made("\n".join(json.dumps(line) for line in lines)))
    assert body["messages"][0]["content"] == "main"


def test_the_configs_path_wins() -> None:
    """A recording without a path may be ambiguous."""
    assert made('{"messages": [{"role": "user", "content": "x"}]}', "/v1/messages").path == "/v1/messages"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", None),
        ("not json", None),
        ("[]", None),
        ('{"model": "m"}', None),
        ('{"messages": "x"}', None),
        ('{"messages": []}', "/v1/models"),
    ],
)
def test_what_is_no_model_request_is_a_problem(text: str, path: str | None) -> None:
    """It is found before the model is loaded."""
    assert isinstance(from_recording(text, path), Problem)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, None),
        ({"messages": [{}, 1]}, None),
        ({"messages": [{"role": "system", "content": ""}], "tools": []}, None),
        ({"messages": [{"role": "user", "content": []}], "system": ""}, None),
        ({"input": "", "instructions": ""}, None),
        ({"input": [{"type": "message", "role": "user", "content": []}]}, None),
        ({"prompt": ""}, None),
        ({"prompt": 5}, None),
        ({"messages": [{"role": "system", "content": "S"}]}, "/completion"),
    ],
)
def test_a_request_without_a_prompt_is_a_problem(body: dict[str, Any], path: str | None) -> None:
    """To warm the bare template up would look like a warm-up and be none."""
    found = from_recording(json.dumps(body), path)
    assert isinstance(found, Problem)
    assert "without a prompt" in found.message


def test_a_request_without_a_prompt_is_passed_over_in_a_recording() -> None:
    """As long as there is one with a prompt behind it."""
    lines = [{"messages": []}, {"messages": [{"role": "system", "content": "S"}]}]
    assert body_of(made("\n".join(map(json.dumps, lines))))["messages"][0]["content"] == "S"


@pytest.mark.parametrize(
    ("body", "nothing"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, True),
        ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]}, True),
        ({"input": "x"}, True),
        ({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}, False),
        ({"messages": [{"role": "user", "content": "x"}], "system": "S"}, False),
        ({"messages": [{"role": "developer", "content": "D"}]}, False),
        ({"input": "x", "instructions": "I"}, False),
        ({"prompt": "x"}, False),
    ],
)
def test_whether_requests_share_what_is_warmed(body: dict[str, Any], nothing: bool) -> None:
    """What stands behind the user's words is nobody else's."""
    assert shares_nothing(made(json.dumps(body))) == nothing


def test_text_outside_ascii_and_lone_surrogates_survive() -> None:
    """The warmed bytes must be the ones that traffic has."""
    request = made('{"messages": [{"role": "system", "content": "caf\\u00e9 \\ud83d\\ude00"}]}')
    assert body_of(request)["messages"][0]["content"] == "café 😀"
    assert made('{"messages": [{"role": "system", "content": "\\ud800"}]}').body


@pytest.mark.parametrize(
    ("recorded", "key"),
    [
        ({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}]}, "messages"),
        ({"instructions": "I", "input": "x"}, "input"),
        ({"system": "S", "messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_the_user_text_alone_can_be_replaced(recorded: dict[str, Any], key: str) -> None:
    """A long user text moves the checkpoint; what stands before it must not move."""
    short = made(json.dumps(recorded))
    long = with_user_text(short, "1 2 3")
    before, after = body_of(short), body_of(long)
    assert after[key][-1] == {"role": "user", "content": "1 2 3"}
    assert after[key][:-1] == before[key][:-1]
    assert {**after, key: None} == {**before, key: None}
    assert long.path == short.path


def test_a_raw_prompt_has_no_user_text_to_replace() -> None:
    """It is left as it is."""
    request = made('{"prompt": "abc"}')
    assert with_user_text(request, "1 2 3") == request
