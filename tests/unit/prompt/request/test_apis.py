"""The APIs that carry a prompt: one record each, found by a path or by the shape of a body."""

from __future__ import annotations

from typing import Any

import pytest

from kvstack.prompt.request.apis import REQUEST_FORMATS, Api, api_by_shape, api_of, can_be_rendered


@pytest.mark.parametrize("api", Api)
def test_each_api_has_one_record(api: Api) -> None:
    """Its own endpoint is one of its paths, and it keeps its prompt in a list or in a raw prompt."""
    its = REQUEST_FORMATS[api]
    assert api_of(its.endpoint) is api
    assert all(api_of(prefix + path) is api for path in its.paths for prefix in ("", "/v1"))
    assert bool(its.items_key) != bool(its.prompt_keys)


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"input": "hi", "messages": []}, Api.RESPONSES),
        ({"messages": [], "system": "s"}, Api.MESSAGES),
        ({"messages": [], "tools": [1, {"name": "f", "input_schema": {}}]}, Api.MESSAGES),
        ({"messages": [], "tools": {"input_schema": {}}}, Api.CHAT),
        ({"messages": []}, Api.CHAT),
        ({"prompt": "p"}, Api.COMPLETION),
        ({"content": "text to count"}, None),
        ({}, None),
    ],
)
def test_the_shape_of_a_body_tells_its_api(body: dict[str, Any], api: Api | None) -> None:
    """Two APIs have a list of messages: one of them is told by its system text, or by the form of its tools."""
    assert api_by_shape(body) is api


def test_only_chat_bodies_can_be_rendered() -> None:
    """`/apply-template` reads chat completions; where a prefix of another API ends cannot be asked."""
    rendered = {api for api, its in REQUEST_FORMATS.items() if can_be_rendered(its.endpoint)}
    assert rendered == {Api.CHAT}
    assert not can_be_rendered("/health")
