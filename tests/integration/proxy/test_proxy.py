"""The proxy over real sockets: what reaches the upstream and the client, and who notices when one of them leaves."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading

import pytest

from kvstack.prompt.engine import RewriteResult
from kvstack.state.events import AnswerSeen, FirstByteSent, Notice, RequestEnded, RequestReceived
from tests.integration.proxy.proxy_rig import (
    BODY,
    CHAT,
    answer,
    closed_port,
    exchange,
    http,
    openclaw_strip,
    plain_strip,
    proxy,
)
from tests.integration.stub_upstream import Received, run_stub


async def test_an_unmatched_body_reaches_the_upstream_byte_for_byte() -> None:
    """Odd spellings survive: key order, escapes, duplicate keys, big integers, lone surrogates, CRLF."""
    message = b'{"role":"user","content":"a\\u00e9\\ud800 \\/"}'
    body = b'{"z":1,"messages":[' + message + b'],\r\n "n":123456789012345678901,"z":2.50e1}'
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        await exchange(running.port, http("POST", CHAT + "?a=%2F&b", body))
    (received,) = stub.received
    assert received.body == body
    assert received.request_line == f"POST {CHAT}?a=%2F&b HTTP/1.1"


@pytest.mark.parametrize("more", ["", ', "id_slot": 2'])
async def test_ids_of_tool_calls_and_slots_are_the_clients_affair(more: str) -> None:
    """FR-27, FR-44: no id is rewritten, and no slot is chosen for a request that chose none."""
    call = '{"id": "1697377797897", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
    body = (
        '{"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] hi"}, '
        f'{{"role": "assistant", "content": null, "tool_calls": [{call}]}}, '
        f'{{"role": "tool", "tool_call_id": "1697377797897", "content": "1"}}]{more}}}'
    )
    async with run_stub(answer(b"{}")) as stub, proxy(stub, strip=openclaw_strip) as running:
        await exchange(running.port, http("POST", CHAT, body.encode()))
    assert stub.received[0].body.decode() == body.replace("[Wed 2026-02-18 20:48 UTC] ", "")


async def test_headers_are_kept_except_those_of_the_hop() -> None:
    """Auth, unknown and repeated headers go through in order; hop-by-hop ones and those named in Connection do not."""
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: proxy.example\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\n"
        "Authorization: Bearer k\r\nX-Two: a\r\nX-Two: b\r\nAccept-Encoding: gzip, br\r\nKeep-Alive: 5\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        await exchange(running.port, request)
    (received,) = stub.received
    headers = received.headers()
    assert received.header("authorization") == "Bearer k"
    assert [value for name, value in headers if name == "x-two"] == ["a", "b"]
    assert received.header("accept-encoding") == "identity"
    assert received.header("host") == f"127.0.0.1:{stub.port}"
    assert received.header("content-length") == str(len(BODY))
    assert not {"x-hop", "te", "keep-alive", "user-agent", "accept"} & {name for name, _ in headers}


async def test_an_edited_body_gets_its_own_length() -> None:
    """FR-37: the client's Content-Length would cut or hang an edited request."""

    def shorten(body: bytes, _path: str, _headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
        return RewriteResult(body.replace(b"hi", b""), api="chat")  # type: ignore[arg-type]

    async with run_stub(answer(b"{}")) as stub, proxy(stub, strip=shorten) as running:
        status, _, _ = await exchange(running.port, http("POST", CHAT, BODY))
    assert status == 200
    assert stub.received[0].body == BODY.replace(b"hi", b"")
    assert stub.received[0].header("content-length") == str(len(BODY) - 2)


async def test_status_headers_and_body_of_the_answer_are_kept() -> None:
    """FR-41, FR-42: an upstream error is the client's to read, verbatim."""
    error = b'{"error":{"code":400,"message":"\'type\' of tool must be \'function\'"}}'
    handler = answer(error, "400 Bad Request", "X-Up: 1", "Set-Cookie: a=1", "Set-Cookie: b=2", "Server: llama.cpp")
    async with run_stub(handler) as stub, proxy(stub) as running:
        status, headers, body = await exchange(running.port, http("POST", CHAT, BODY))
    assert (status, body) == (400, error)
    assert ("x-up", "1") in headers
    assert [value for name, value in headers if name == "set-cookie"] == ["a=1", "b=2"]
    assert [value for name, value in headers if name == "server"] == ["llama.cpp"]
    (ended,) = running.of(RequestEnded)
    assert isinstance(ended, RequestEnded)
    assert (ended.status, ended.outcome) == (400, "failed")


async def test_a_stream_comes_piece_by_piece_and_byte_for_byte() -> None:
    """FR-38, FR-42: each event arrives while the next is still to be made; comments, blank lines and CRLF survive."""
    pieces = [b": ping\r\n\r\n", b'event: x\ndata: {"a": 1}\n\n', b"data: [DO", b"NE]\n\n"]
    seen: list[bytes] = []
    go_on = asyncio.Event()

    async def handle(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.wait_for(go_on.wait(), 5)  # the next piece is not sent before the client has this one
            go_on.clear()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with run_stub(handle) as stub, proxy(stub) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        for _ in pieces:
            size = int(await asyncio.wait_for(reader.readline(), 5), 16)
            seen.append((await reader.readexactly(size + 2))[:-2])
            go_on.set()
        assert await asyncio.wait_for(reader.read(), 5) == b"0\r\n\r\n"
        writer.close()
    assert b"text/event-stream" in head
    assert seen == pieces


async def test_the_upstream_is_closed_when_the_client_leaves_before_the_first_byte() -> None:
    """A closed socket is how llama-server learns that a prefill is for nobody."""

    async def silent(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with run_stub(silent) as stub, proxy(stub) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        while not stub.received:  # noqa: ASYNC110 - the stub has no event for it
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)
        while not running.of(RequestEnded):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (ended,) = running.of(RequestEnded)
    assert isinstance(ended, RequestEnded)
    assert (ended.status, ended.outcome) == (None, "cancelled")
    assert running.forward.open_requests == 0


async def test_the_upstream_is_closed_when_the_client_leaves_in_mid_stream() -> None:
    """Decoding for nobody ends at once."""

    async def endless(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    async with run_stub(endless) as stub, proxy(stub) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 5)
        writer.close()
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)


_LAST = {
    CHAT: b"data: [DONE]",
    "/v1/responses": b'event: response.completed\ndata: {"type": "response.completed", "response": {}}',
    "/v1/messages": b'event: message_stop\ndata: {"type": "message_stop"}',
    "/completion": b'data: {"content": "", "stop": true}',
}


@pytest.mark.parametrize("path", _LAST)
@pytest.mark.parametrize("last", [True, False])
async def test_a_client_that_leaves_behind_the_last_event_has_its_answer(path: str, last: bool) -> None:
    """Many clients close at the last event and wait for no line end; before it an answer is cut off."""
    event = _LAST[path] if last else b'data: {"type": "x"}'

    async def unfinished(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(60)

    async with run_stub(unfinished) as stub, proxy(stub) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", path, BODY))
        await asyncio.wait_for(reader.readuntil(event), 5)
        writer.close()
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)
        while not running.of(RequestEnded):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (ended,) = running.of(RequestEnded)
    assert isinstance(ended, RequestEnded)
    assert (ended.status, ended.outcome) == (200, "done" if last else "cancelled")


async def test_a_waiting_request_of_a_client_that_left_never_reaches_the_upstream() -> None:
    """FR-36: the server must not work for nobody."""
    ready = asyncio.Event()
    waiting = asyncio.Event()

    async def wait_ready(_: float) -> bool:
        waiting.set()
        await ready.wait()
        return True

    async with run_stub(answer(b"{}")) as stub, proxy(stub, wait_ready=wait_ready) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        await asyncio.wait_for(waiting.wait(), 5)
        writer.close()
        while not running.of(RequestEnded):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.sleep(0.05)
    assert stub.connections == 0


async def test_an_upstream_that_breaks_off_breaks_the_answer_off() -> None:
    """The client must be able to tell half an answer from a whole one."""

    async def break_off(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        writer.close()

    async with run_stub(break_off) as stub, proxy(stub) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        raw = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert b"data: 1\n\n" in raw
    assert not raw.endswith(b"0\r\n\r\n")
    (ended,) = running.of(RequestEnded)
    assert isinstance(ended, RequestEnded)
    assert ended.outcome == "failed"


@pytest.mark.parametrize(
    ("path", "kind"),
    [(CHAT, "error"), ("/v1/responses", "error"), ("/completion", "error"), ("/v1/messages", "type")],
)
async def test_a_server_that_is_not_there_is_a_503_in_the_clients_dialect(path: str, kind: str) -> None:
    """Marked as kvstack's, with Retry-After, readable by the client's own error handling."""
    async with proxy(None) as running:
        status, headers, body = await exchange(running.port, http("POST", path, BODY))
    assert status == 503
    assert ("retry-after", "5") in headers
    data = json.loads(body)
    assert kind in data
    assert data["error"]["message"].startswith("kvstack: ")
    if path == "/v1/messages":
        assert (data["type"], data["error"]["type"]) == ("error", "overloaded_error")


async def test_a_request_that_the_server_never_saw_is_sent_again() -> None:
    """A server that has just died and is being restarted: the client waits and is answered."""
    port = closed_port()
    async with proxy(None, upstream_port=port, ready_timeout_s=5.0) as running:
        asking = asyncio.ensure_future(exchange(running.port, http("POST", CHAT, BODY)))
        await asyncio.sleep(0.3)
        async with run_stub(answer(b'{"late": 1}'), port) as stub:
            status, _, body = await asking
            assert (status, body, stub.connections) == (200, b'{"late": 1}', 1)


async def test_a_request_that_the_server_saw_is_not_sent_again() -> None:
    """It may be the very request that kills the server."""

    async def hang_up(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with run_stub(hang_up) as stub, proxy(stub, ready_timeout_s=5.0) as running:
        status, _, body = await exchange(running.port, http("POST", CHAT, BODY))
    assert status == 502
    assert json.loads(body)["error"]["message"].startswith("kvstack: ")
    assert stub.connections == 1


async def test_a_model_request_waits_for_the_server_and_then_gets_503() -> None:
    """While the model loads, a request is not lost at once."""
    asked: list[float] = []

    async def never(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return False

    async with run_stub(answer(b"{}")) as stub, proxy(stub, wait_ready=never) as running:
        status, headers, _ = await exchange(running.port, http("POST", CHAT, BODY))
    assert status == 503
    assert asked == [pytest.approx(0.2, abs=0.05)]
    assert ("retry-after", "5") in headers
    assert stub.connections == 0


@pytest.mark.parametrize(("stopping", "words"), [(False, "not ready yet"), (True, "the stack is stopping")])
async def test_a_request_that_finds_no_server_is_told_why(stopping: bool, words: str) -> None:
    """Who asks a stack that is about to end is not told to wait for it."""

    async def never(_: float) -> bool:
        return False

    async with proxy(None, wait_ready=never, is_stopping=stopping) as running:
        status, _, body = await exchange(running.port, http("POST", CHAT, BODY))
    assert (status, words in body.decode()) == (503, True)
    (ended,) = running.of(RequestEnded)
    assert isinstance(ended, RequestEnded)
    assert words in (ended.error or "")


@pytest.mark.parametrize("path", ["/", "/api/hello", "/health", "/v1/messages"])
async def test_head_probes_are_answered_at_once(path: str) -> None:
    """FR-39: a client's preflight must not fail while the model loads."""

    async def never(_: float) -> bool:
        return False

    async with proxy(None, wait_ready=never) as running:
        status, _, body = await exchange(running.port, http("HEAD", path))
    assert (status, body) == (200, b"")


PREFLIGHT = ("Origin: http://ui.example", "Access-Control-Request-Headers: x-api-key,anthropic-version")


async def test_a_preflight_needs_no_key_and_follows_the_config() -> None:
    """FR-40: OPTIONS is answered without the upstream; only configured origins are let in."""
    async with proxy(None, cors_origins=("http://ui.example",)) as running:
        status, headers, _ = await exchange(running.port, http("OPTIONS", "/v1/messages", b"", *PREFLIGHT))
    assert status == 204
    assert ("access-control-allow-origin", "http://ui.example") in headers
    assert ("access-control-allow-headers", "x-api-key,anthropic-version") in headers
    async with proxy(None) as running:
        status, headers, _ = await exchange(running.port, http("OPTIONS", "/v1/messages", b"", *PREFLIGHT))
    assert status == 204
    assert not [name for name, _ in headers if name.startswith("access-control-")]


async def test_the_upstreams_own_cors_headers_are_dropped() -> None:
    """llama-server echoes any origin: every web page could read its answers."""
    handler = answer(b"{}", "200 OK", "Access-Control-Allow-Origin: http://evil.example")
    async with run_stub(handler) as stub, proxy(stub) as running:
        _, headers, _ = await exchange(running.port, http("POST", CHAT, BODY, "Origin: http://evil.example"))
    assert not [name for name, _ in headers if name.startswith("access-control-")]


async def test_everything_else_is_passed_through() -> None:
    """Models, props, embeddings, unknown paths: method, path and body as sent, and no request row."""
    async with run_stub(answer(b'{"data": []}')) as stub, proxy(stub) as running:
        for request in (
            http("GET", "/v1/models"),
            http("GET", "/props?x=1"),
            http("POST", "/v1/embeddings", b'{"input": "message_id"}'),
            http("DELETE", "/some%20thing/odd"),
        ):
            status, _, body = await exchange(running.port, request)
            assert (status, body) == (200, b'{"data": []}')
    assert [received.request_line for received in stub.received] == [
        "GET /v1/models HTTP/1.1",
        "GET /props?x=1 HTTP/1.1",
        "POST /v1/embeddings HTTP/1.1",
        "DELETE /some%20thing/odd HTTP/1.1",
    ]
    assert stub.received[2].body == b'{"input": "message_id"}'
    assert running.events == []


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../health",
        "/x/../v1/chat/completions",
        "/a//b/./c",
        "http://other.example/health",
        "/%2e%2e/%00?q=%20&r=a b".replace(" ", "%20"),
        "/" + "long/" * 5000,
        "*",
    ],
)
async def test_the_target_is_sent_as_it_came(target: str) -> None:
    """Folded dot segments would reach another resource than the client asked for, past the rules."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        status, _, _ = await exchange(running.port, http("GET", target))
    assert status == 200
    assert [received.request_line for received in stub.received] == [f"GET {target} HTTP/1.1"]


async def test_a_page_may_come_compressed() -> None:
    """The server's own web page is there in compressed form only; answers to models must come as they are."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        await exchange(running.port, http("GET", "/", b"", "Accept-Encoding: gzip, br"))
        await exchange(running.port, http("GET", "/"))
        await exchange(running.port, http("POST", CHAT, BODY, "Accept-Encoding: gzip, br"))
    assert [received.header("accept-encoding") for received in stub.received] == ["gzip, br", None, "identity"]


async def test_connect_is_refused() -> None:
    """It is in front of one server, and no way to others."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        status, _, body = await exchange(running.port, http("CONNECT", "example.org:443"))
    assert status == 405
    assert json.loads(body)["error"]["message"].startswith("kvstack: ")
    assert stub.connections == 0


@pytest.mark.parametrize("slot_actions", [False, True])
async def test_slots_are_saved_and_restored_for_clients_only_where_the_user_set_that_up(slot_actions: bool) -> None:
    """`--slot-save-path` may be there for our own snapshots; to look at the slots is free."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, slot_actions=slot_actions) as running:
        for action in ("save", "restore", "erase"):
            status, _, body = await exchange(running.port, http("POST", f"/slots/0?action={action}", b"{}"))
            assert status == (200 if slot_actions else 501)
            assert slot_actions or json.loads(body)["error"]["message"].startswith("kvstack: ")
        assert (await exchange(running.port, http("GET", "/slots")))[0] == 200
    assert stub.connections == (4 if slot_actions else 1)


@pytest.mark.parametrize(
    "path",
    [
        "/sl%u006fts/0",
        "/slots%u002f0",
        "/v1/chat/complet%u0069ons",
        "/v1/mess%u0061ges",
        "/v1/chat/completions#x",
        "/health#part",
        "/slots/0%ff",
        "/sl%c1%afts/0",
        "/%zz",
        "/kvst%u0061ck/stop",
        "/a%",
    ],
)
async def test_a_path_that_the_server_may_read_as_another_is_refused(path: str) -> None:
    """A 400 from kvstack in the client's dialect, and nothing reaches the server."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, slot_actions=False) as running:
        status, _, body = await exchange(running.port, http("POST", path + "?action=save", BODY))
    told = json.loads(body)
    assert status == 400
    assert stub.connections == 0
    assert told["error"]["message"].startswith("kvstack: the path ")
    assert told["error"]["type"] == "invalid_request_error"
    assert (told.get("type") == "error") == ("mess" in path)


@pytest.mark.parametrize("path", ["/sl%6fts/0", "/%73lots/0", "/slots%2F0", "/slots%2f0/", "/slots/0;x", "/slots/0%00"])
async def test_slots_are_guarded_in_every_spelling_that_the_server_takes(path: str) -> None:
    """Escapes that both read alike change nothing."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, slot_actions=False) as running:
        status, _, _ = await exchange(running.port, http("POST", path + "?action=save", b"{}"))
    assert (status, stub.connections) == (501, 0)


@pytest.mark.parametrize("path", ["/v1/chat/complet%69ons", "/v1/chat%2Fcompletions"])
async def test_rules_act_on_a_model_route_in_every_spelling_that_the_server_takes(path: str) -> None:
    """An escaped path is the same route, and goes on as it came."""
    body = b'{"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] hi"}]}'
    async with run_stub(answer(b"{}")) as stub, proxy(stub, strip=openclaw_strip) as running:
        await exchange(running.port, http("POST", path, body))
        assert len(running.of(RequestReceived)) == 1
    (received,) = stub.received
    assert received.request_line == f"POST {path} HTTP/1.1"
    assert b"UTC" not in received.body


@pytest.mark.parametrize(
    "path",
    ["/v1/models/org%2Fname", "/caf%C3%A9", "/a%20b", "/100%25", "/sl%25u006fts/0", "//slots/0", "/x/../y", "/A;b"],
)
async def test_a_path_with_one_reading_goes_through_as_it_came(path: str) -> None:
    """Honest escapes, and what llama-server does not fold either."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, slot_actions=False) as running:
        assert (await exchange(running.port, http("POST", path, b"{}")))[0] == 200
    assert stub.received[0].request_line == f"POST {path} HTTP/1.1"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_request_that_waits_while_the_stack_stops_is_told_so(path: str) -> None:
    """A 503 in the client's dialect, not a bare 500."""
    seen = asyncio.Event()

    async def silent(_: Received, __: asyncio.StreamWriter) -> None:
        seen.set()
        await asyncio.sleep(60)

    async with run_stub(silent) as stub, proxy(stub) as running:
        asking = asyncio.ensure_future(exchange(running.port, http("POST", path, BODY)))
        await asyncio.wait_for(seen.wait(), 5)
        await running.forward.close_exchanges(0)
        status, headers, body = await asyncio.wait_for(asking, 5)
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)
    assert status == 503
    assert ("retry-after", "5") in headers
    assert json.loads(body)["error"]["message"] == "kvstack: the stack is stopping"


async def test_a_huge_request_does_not_keep_others_waiting() -> None:
    """The rules of a large body run beside the loop: the status answers meanwhile."""
    working = threading.Event()
    done = threading.Event()

    def slow(body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
        working.set()
        assert done.wait(10)
        return plain_strip(body, path, headers, number)

    large = BODY[:-1] + b', "x": "' + b"y" * 300_000 + b'"}'
    async with run_stub(answer(b"{}")) as stub, proxy(stub, strip=slow) as running:
        asking = asyncio.ensure_future(exchange(running.port, http("POST", CHAT, large)))
        assert await asyncio.to_thread(working.wait, 5)
        status, _, _ = await asyncio.wait_for(exchange(running.port, http("GET", "/kvstack/status")), 5)
        assert status == 200
        done.set()
        status, _, _ = await asyncio.wait_for(asking, 10)
    assert (status, stub.received[0].body) == (200, large)


async def test_rules_that_fail_never_fail_a_request() -> None:
    """Fail open: the original bytes go out, a counter rises, a person is told once."""

    def broken(_body: bytes, _path: str, _headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
        raise RuntimeError("bug")

    async with run_stub(answer(b"{}")) as stub, proxy(stub, strip=broken) as running:
        for _ in range(3):
            status, _, _ = await exchange(running.port, http("POST", CHAT, BODY))
            assert status == 200
    assert [received.body for received in stub.received] == [BODY] * 3
    assert running.forward.rewrite_failures == 3
    assert len(running.of(Notice)) == 1
    assert len(running.of(RequestReceived)) == 3


async def test_a_compressed_request_is_decoded_for_the_rules() -> None:
    """The upstream gets plain JSON without the encoding header."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        request = http("POST", CHAT, gzip.compress(BODY), "Content-Encoding: gzip")
        status, _, _ = await exchange(running.port, request)
    assert status == 200
    assert stub.received[0].body == BODY
    assert stub.received[0].header("content-encoding") is None


async def test_a_body_over_the_limit_is_413_in_the_dialect() -> None:
    """The limit's key is named, so that a person can raise it."""
    async with run_stub(answer(b"{}")) as stub, proxy(stub, max_body_bytes=10) as running:
        status, _, body = await exchange(running.port, http("POST", CHAT, BODY))
    assert status == 413
    assert "proxy.max_body_mib" in json.loads(body)["error"]["message"]
    assert stub.connections == 0


async def test_a_chunked_upload_is_accepted() -> None:
    """Clients behind other proxies may send without a length."""
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"{len(BODY):x}\r\n{BODY.decode()}\r\n0\r\n\r\n"
    ).encode()
    async with run_stub(answer(b"{}")) as stub, proxy(stub) as running:
        status, _, _ = await exchange(running.port, request)
    assert status == 200
    assert stub.received[0].body == BODY


async def test_an_answers_figures_become_events() -> None:
    """Received, first token of the stream, answer, ended: in that order, with the answer's own timings."""
    timings = {"cache_n": 90, "prompt_n": 10, "prompt_ms": 5.0, "predicted_n": 1}
    last = json.dumps({"choices": [], "timings": timings})
    body = 'data: {"choices": [{"delta": {"content": "Yes"}}]}\n\n' + f"data: {last}\n\n"
    async with run_stub(answer(body.encode(), content_type="text/event-stream")) as stub, proxy(stub) as running:
        await exchange(running.port, http("POST", CHAT, BODY))
    (seen,) = running.of(AnswerSeen)
    assert isinstance(seen, AnswerSeen)
    assert (seen.prompt_tokens, seen.cached_tokens, seen.evaluated_tokens, seen.prefill_ms) == (100, 90, 10, 5.0)
    kinds = [type(event) for event in running.events]
    assert (
        kinds.index(RequestReceived) < kinds.index(FirstByteSent) < kinds.index(AnswerSeen) < kinds.index(RequestEnded)
    )


async def test_an_error_names_itself_and_has_no_first_token() -> None:
    """An answer in one piece, whole or an error, shows no first token; a server that is gone is named at the end."""
    refusal = answer(b'{"error": {"message": "too long"}}', "400 Bad Request")
    ends: list[RequestEnded] = []
    async with run_stub(refusal) as stub, proxy(stub) as refusing, proxy(None) as lonely:
        for running in (refusing, lonely):
            await exchange(running.port, http("POST", CHAT, BODY))
            assert running.of(FirstByteSent) == []
            ends += [event for event in running.of(RequestEnded) if isinstance(event, RequestEnded)]
    refused, gone = ends
    assert (refused.status, refused.outcome, refused.error) == (400, "failed", "too long")
    assert (gone.status, gone.outcome) == (503, "failed")
    assert "cannot be reached" in (gone.error or "")


async def test_open_streams_get_their_grace_and_are_closed_then() -> None:
    """Stop: a stream that goes on is cut, and the upstream's socket with it."""

    async def endless(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    async with run_stub(endless) as stub, proxy(stub) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(http("POST", CHAT, BODY))
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 5)
        assert running.forward.open_requests == 1
        await running.forward.close_exchanges(0.1)
        await asyncio.wait_for(stub.closed_by_peer.wait(), 5)
        assert running.forward.open_requests == 0
        writer.close()
