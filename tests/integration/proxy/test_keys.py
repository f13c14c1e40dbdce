"""The proxy's key over real sockets: who is let in, and with which key a request goes on."""

from __future__ import annotations

import json

import pytest

from kvstack.proxy.keys import Keys
from kvstack.state.events import RequestReceived
from tests.integration.proxy.proxy_rig import BODY, CHAT, answer, exchange, http, proxy
from tests.integration.stub_upstream import Received, run_stub

BEARER = "Authorization: Bearer outer"
TOKEN = "Authorization: Bearer t0ken"


def credentials(received: Received) -> list[tuple[str, str]]:
    """The headers of a request that may hold a key."""
    return [(name, value) for name, value in received.headers() if name in {"authorization", "x-api-key"}]


@pytest.mark.parametrize(
    "header", [BEARER, "authorization: bearer  outer", "X-Api-Key: outer", f"X-Api-Key: other\r\n{BEARER}"]
)
async def test_the_key_lets_a_client_in_and_the_servers_takes_its_place(header: str) -> None:
    """In either header, as OpenAI's and Anthropic's clients send it."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, keys=Keys("outer", "inner")) as running:
        assert (await exchange(running.port, http("POST", CHAT, BODY, header)))[0] == 200
        assert (await exchange(running.port, http("GET", "/props", b"", header)))[0] == 200
    assert [credentials(one) for one in stub.received] == [[("authorization", "Bearer inner")]] * 2


@pytest.mark.parametrize(
    "header",
    ["X-None: 1", "Authorization: Bearer wrong", "Authorization: Basic outer", "Authorization: outer", "X-Api-Key: ",
     "X-Api-Key: oute", "Authorization: Bearer inner", TOKEN, "Proxy-Authorization: Bearer outer"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/props", "/slots/0?action=save", "/sl%u006fts/0"])
async def test_without_the_key_a_client_is_told_so_in_its_dialect(header: str, path: str) -> None:
    """A 401 from kvstack; the request reaches nobody and is no row."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, keys=Keys("outer", "inner")) as running:
        status, headers, body = await exchange(running.port, http("POST", path, BODY, header))
        assert running.of(RequestReceived) == []
    told = json.loads(body)
    assert (status, stub.connections) == (401, 0)
    assert told["error"]["type"] == "authentication_error"
    assert told["error"]["message"].startswith("kvstack: ")
    assert (told.get("type") == "error") == (path == "/v1/messages")
    assert ("www-authenticate", "Bearer") in headers
    assert b"outer" not in body
    assert b"inner" not in body


async def test_a_browser_may_read_why_it_is_refused() -> None:
    """The preflight needs no key, and the refusal has the origin's leave."""
    origin = "Origin: http://ui.example"
    async with proxy(None, keys=Keys("outer"), cors_origins=("http://ui.example",)) as running:
        assert (await exchange(running.port, http("OPTIONS", CHAT, b"", origin)))[0] == 204
        status, headers, _ = await exchange(running.port, http("POST", CHAT, BODY, origin))
    assert status == 401
    assert ("access-control-allow-origin", "http://ui.example") in headers


async def test_what_is_public_at_the_server_is_public_here() -> None:
    """Health and the root, for reading only; the server's key does not go with them."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, keys=Keys("outer", "inner")) as running:
        for path in ("/", "/health", "/v1/health"):
            assert (await exchange(running.port, http("GET", path)))[0] == 200
            assert (await exchange(running.port, http("HEAD", path)))[0] == 200
            assert (await exchange(running.port, http("POST", path, b"{}")))[0] == 401
        for path in ("/health/", "//health", "/models", "/v1/models", "/metrics", "/slots", "/index.html"):
            assert (await exchange(running.port, http("GET", path)))[0] == 401
        assert (await exchange(running.port, http("HEAD", CHAT)))[0] == 401
    assert [credentials(one) for one in stub.received] == [[]] * 3


async def test_the_proxys_key_does_not_reach_a_server_without_one() -> None:
    """It is removed; a key that is meant for somebody behind the server is not."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, keys=Keys("outer")) as running:
        await exchange(running.port, http("POST", CHAT, BODY, BEARER))
        await exchange(running.port, http("POST", CHAT, BODY, "X-Api-Key: outer", "Authorization: Bearer theirs"))
        await exchange(running.port, http("GET", "/health", b"", BEARER))
    assert [credentials(one) for one in stub.received] == [[], [("authorization", "Bearer theirs")], []]


async def test_without_a_key_of_the_proxy_the_clients_own_goes_on() -> None:
    """The server judges it; nothing is put in its place."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, keys=Keys(None, "inner")) as running:
        await exchange(running.port, http("POST", CHAT, BODY, "Authorization: Bearer theirs", "X-Api-Key: more"))
        await exchange(running.port, http("POST", CHAT, BODY))
    assert [credentials(one) for one in stub.received] == [
        [("authorization", "Bearer theirs"), ("x-api-key", "more")],
        [],
    ]


async def test_control_routes_ask_for_the_key_or_the_token_and_those_that_act_for_the_token() -> None:
    """Kvstack's own verbs know the token alone; a client's key shows figures, and stops nothing."""
    async with proxy(None, keys=Keys("outer")) as running:

        async def ask(method: str, path: str, *headers: str) -> int:
            return (await exchange(running.port, http(method, path, b"", *headers)))[0]

        for path in ("/kvstack/status", "/kvstack/metrics", "/kvstack/rules", "/%6bvstack/status"):
            assert [await ask("GET", path, *one) for one in ((), (BEARER,), (TOKEN,), ("X-Api-Key: outer",))] == [
                401, 200, 200, 200,
            ]  # fmt: skip
        assert await ask("GET", "/kvstack/nope") == 401
        assert await ask("GET", "/kvstack/capture", BEARER) == 401
        assert await ask("POST", "/kvstack/stop") == 401
        assert await ask("POST", "/kvstack/stop", BEARER) == 401
        assert running.stack.stopped == []
        assert await ask("POST", "/kvstack/stop", TOKEN) == 202
        assert await ask("POST", "/kvstack/stop", "X-Api-Key: outer", TOKEN) == 202
        _, _, body = await exchange(running.port, http("GET", "/kvstack/status"))
    assert set(json.loads(body)) == {"status", "message", "data"}
