"""Where each API keeps its texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.request.apis import Api, api_of
from kvstack.prompt.request.chat_template import turn_markers
from kvstack.prompt.request.document import read_document
from kvstack.prompt.rules.ruleset import RuleSet

STAMP = "[Wed 2026-02-18 20:48 UTC] "


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/chat/completions", Api.CHAT),
        ("/v1/chat/completions/input_tokens", Api.CHAT),
        ("/v1/responses/input_tokens", Api.RESPONSES),
        ("/apply-template", Api.CHAT),
        ("/v1/responses", Api.RESPONSES),
        ("/v1/messages?beta=true", Api.MESSAGES),
        ("/v1/messages/count_tokens", Api.MESSAGES),
        ("/completion", Api.COMPLETION),
        ("/v1/completions/", Api.COMPLETION),
        ("/tokenize", Api.COMPLETION),
        ("/v1/models", None),
        ("/v1/embeddings", None),
        ("/", None),
    ],
)
def test_paths(path: str, api: Api | None) -> None:
    """Main and side routes that see the same text speak the same dialect."""
    assert api_of(path) is api


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": STAMP + "a"}]}, ("messages", 0, "content")),
        ("/apply-template", {"messages": [{"role": "user", "content": STAMP + "a"}]}, ("messages", 0, "content")),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": STAMP + "a"}]},
            ("messages", 0, "content"),
        ),
        ("/v1/responses", {"input": STAMP + "a"}, ("input",)),
        ("/v1/responses", {"input": [{"role": "user", "content": STAMP + "a"}]}, ("input", 0, "content")),
        (
            "/v1/responses",
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": STAMP + "a"}]}]},
            ("input", 0, "content", 0, "text"),
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {}}, {"type": "text", "text": STAMP + "a"}],
                    }
                ]
            },
            ("messages", 0, "content", 1, "text"),
        ),
    ],
)
def test_every_place_of_a_user_text(
    rules: RuleSet, path: str, body: dict[str, Any], where: tuple[str | int, ...]
) -> None:
    """The prefix goes wherever a dialect puts the user's words."""
    found = json.loads(apply_rules(json.dumps(body).encode(), path, rules).body)
    for step in where:
        found = found[step]
    assert found == "a"


TEMPLATES = {
    "chatml": (
        "{{ '<|im_start|>' }}",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{0}a<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma": ("'<start_of_turn>'", "<bos><start_of_turn>user\n{0}a<end_of_turn>\n<start_of_turn>model\n"),
    "llama3": ("<|start_header_id|>", "<|start_header_id|>user<|end_header_id|>\n\n{0}a<|eot_id|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/tokenize"])
def test_raw_prompt_is_split_by_the_templates_markers(rules: RuleSet, name: str, path: str) -> None:
    """A raw prompt has turns where the model's own template marks them."""
    template, prompt = TEMPLATES[name]
    key = "content" if path == "/tokenize" else "prompt"
    body = json.dumps({key: prompt.format(STAMP), "n_predict": 1}).encode()
    result = apply_rules(body, path, rules, chat_template=template)
    assert json.loads(result.body) == {key: prompt.format(""), "n_predict": 1}
    assert (result.items, result.ts_removed) == (1, 1)


@pytest.mark.parametrize("prompt", [f"<|im_start|>user\n{STAMP}a", [1, 2, 3], ["a", "b"], f"{STAMP}a", None])
@pytest.mark.parametrize("template", [None, "no markers here"])
def test_raw_prompt_without_markers_passes_and_is_counted(rules: RuleSet, prompt: object, template: str | None) -> None:
    """Without markers, or with tokens instead of text, nobody knows who speaks."""
    body = json.dumps({"prompt": prompt}).encode()
    result = apply_rules(body, "/completion", rules, chat_template=template)
    assert result.body is body
    assert [hit.rule for hit in result.hits] == ["raw-prompt"]


def test_tail_goes_inside_the_users_turn(rules: RuleSet) -> None:
    """What is appended to a turn of a raw prompt stands before the mark that closes it."""
    block = '```json\n{"schema": "openclaw.inbound_meta.v1", "reply_to_id": "7"}\n```'
    prompt = f"<|im_start|>system\n{block}\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    body = json.dumps({"prompt": prompt}).encode()
    found = json.loads(apply_rules(body, "/completion", rules, chat_template="<|im_start|>").body)["prompt"]
    assert "<|im_start|>user\nhi\n\n[reply_to_id: 7]<|im_end|>" in found
    assert '{"schema": "openclaw.inbound_meta.v1"}' in found


def test_roles() -> None:
    """Roles are told alike in all dialects; results of tools are no words of the user."""
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "o"},
        {"role": "user", "content": [{"type": "tool_result", "content": "r"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "r"}, {"type": "text", "text": "t"}]},
        {"role": "model", "content": "m"},
        {"role": "system", "content": "late"},
        {"kind": "unknown"},
    ]
    document = read_document(json.dumps({"instructions": "i", "input": items}), Api.RESPONSES)
    roles = [item.role for item in document.items]
    assert roles == [
        "system",
        "system",
        "user",
        "reasoning",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
        "system",
        "other",
    ]
    assert [item.leading for item in document.items] == [True, True, *[False] * 9]
    assert document.count == 10


def test_markers_of_unknown_templates() -> None:
    """A template without known markers has none."""
    assert turn_markers(None) is None
    assert turn_markers("{{ messages }}") is None


def test_a_list_that_comes_again_as_an_empty_one(rules: RuleSet) -> None:
    """Of two lists of messages the last one counts, also if it is empty and the first one is known."""
    memory = ConversationMemory()
    said = '{"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] hi"}]'
    for body in (said + "}", said + ', "messages": []}'):
        first = apply_rules(body.encode(), "/v1/chat/completions", rules, memory)
    assert first.body == (said + ', "messages": []}').encode()


CHATML = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"


def raw(*turns: tuple[str, str]) -> bytes:
    """A raw prompt that asks the model to go on."""
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return json.dumps({"prompt": said + "<|im_start|>assistant\n"}).encode()


def test_a_raw_prompt_continues_its_conversation(rules: RuleSet) -> None:
    """The opened turn at the end is what the model shall say, and no part of what was said."""
    memory = ConversationMemory()
    system = 'You are an agent in the Continue CLI.\nToday\'s date: 2026-11-{}\n<context name="gitStatus">\nx</context>'
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "ok"), ("user", "more")]

    def send(day: int, n: int) -> tuple[str, str | None]:
        body = raw(("system", system.format(day)), *turns[:n])
        done = apply_rules(body, "/completion", rules, memory, chat_template=CHATML)
        return json.loads(done.body)["prompt"], done.conversation

    first, name = send(29, 1)
    send(29, 3)
    second, again = send(30, 5)
    assert again == name
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n"))
    assert "2026-11-30" in second.partition("more")[2]
    other, another = send(30, 1)
    assert another != name, "no model has spoken in it, so it is a new conversation"
    assert "2026-11-29" not in other
