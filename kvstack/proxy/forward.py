"""
The streaming pass-through: rules on the way in, a tap on the way out.

The client gets the upstream's bytes as they come; the tap reads along and may lose data, the client may not.  A
client that leaves, also before the first byte, closes the upstream's connection, which is how llama-server is told.
If the rules fail, the original bytes are sent: kvstack is never the reason that a request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from kvstack.llama.response import AnswerTap
from kvstack.prompt.diff.previous import Compared
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.request.apis import api_of
from kvstack.proxy.body import BodyError, ClientGone, cancel_when_gone, decode_body, read_body
from kvstack.proxy.capture import Captures
from kvstack.proxy.error_bodies import error_body
from kvstack.proxy.headers import client_headers, header, upstream_headers
from kvstack.proxy.history import History
from kvstack.proxy.keys import Keys
from kvstack.proxy.target import ambiguity, path_at_server
from kvstack.state.events import (
    Event,
    FirstByteSent,
    Notice,
    RequestEnded,
    RequestForwarded,
    RequestReceived,
    RuleHit,
)
from kvstack.upstream import Stream, Upstream, UpstreamError

Strip = Callable[[bytes, str, list[tuple[str, str]]], RewriteResult]
"""Applies the rules: body, path, header pairs."""

RETRY_AFTER_S = 5
RETRY_S = 0.1
LARGE_BYTES = 256 * 1024

_SIDE_ROUTES = ("/apply-template", "/tokenize", "/count_tokens", "/input_tokens")
_PROBED = frozenset({"/", "/health", "/v1/health", "/api/hello"})


@dataclass(slots=True)
class _Progress:
    """How far one request came, for its last event."""

    status: int | None = None
    answering: bool = False
    error: str | None = None


class Forward:
    """
    An ASGI application that hands every request to the upstream.

    Args:
        upstream: The llama-server.
        strip: Applies the rules.
        wait_ready: Waits until the stack is ready, at most so many seconds; says whether it is.
        publish: Takes events.
        max_body_bytes: Largest request body.
        ready_timeout_s: How long a model request waits for the server.
        cors_origins: Browser origins that may use the proxy.
        history: Remembers requests.
        slot_actions: Whether clients may save, restore and erase slots.
        sent: Told of each model request that goes to the upstream: its number, its path, its body after the rules.
        keys: Which key the upstream gets.
        on_out_of_descriptors: Told when there is no file descriptor left for a connection to the upstream.

    Attributes:
        captures: Who listens to the requests.
        keys: Who may use the proxy.
    """

    def __init__(
        self,
        upstream: Upstream,
        strip: Strip,
        wait_ready: Callable[[float], Awaitable[bool]],
        publish: Callable[[Event], None],
        *,
        max_body_bytes: int,
        ready_timeout_s: float,
        cors_origins: tuple[str, ...] = (),
        history: History | None = None,
        slot_actions: bool = True,
        sent: Callable[[int, str, bytes], None] = lambda number, path, body: None,
        keys: Keys | None = None,
        on_out_of_descriptors: Callable[[], None] = lambda: None,
    ) -> None:
        self._upstream = upstream
        self._strip = strip
        self._wait_ready = wait_ready
        self._publish = publish
        self._slot_actions = slot_actions
        self._sent = sent
        self.keys = keys if keys is not None else Keys()
        self._on_out_of_descriptors = on_out_of_descriptors
        self._max_body_bytes = max_body_bytes
        self._ready_timeout_s = ready_timeout_s
        self._cors_origins = frozenset(cors_origins)
        self.history = history if history is not None else History()
        self.captures = Captures()
        self._numbers = itertools.count(1)
        self._warned: set[str] = set()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._stripping = asyncio.Lock()
        self.strip_failures = 0

    @property
    def open_requests(self) -> int:
        """Exchanges that are under way."""
        return len(self._exchanges)

    async def close_exchanges(self, grace_s: float) -> int:
        """
        Let open exchanges end by themselves, then close them and with them the upstream's connections.  No more come,
        so captures end too.

        Args:
            grace_s: How long they get, in seconds.

        Returns:
            How many were cut off.
        """
        self.captures.close()
        waiting = set(self._exchanges)
        if waiting and grace_s > 0:
            await asyncio.wait(waiting, timeout=grace_s)
        cut_off = set(self._exchanges)
        for exchange in cut_off:
            exchange.cancel()
        if cut_off:
            await asyncio.wait(cut_off, timeout=5.0)
        return len(cut_off)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        method: str = scope["method"]
        path: str = scope["path"]
        if method == "HEAD" and (path in _PROBED or api_of(path) is not None):
            await self._reply(scope, send, 200, b"", "text/plain; charset=utf-8")
            return
        if method == "OPTIONS":
            await self._reply(scope, send, 204, b"", None, self._preflight(scope))
            return
        if method == "CONNECT":
            await self._reply_error(scope, send, None, 405, "this is no proxy for other servers")
            return
        if (fault := ambiguity(_raw_path(scope))) is not None:
            # What is guarded and what rules act on is told by the path: it must be the one that the server sees.
            api = api_of(path_at_server(_raw_path(scope)))
            await self._reply_error(scope, send, api, 400, f"{fault}: llama-server may read it as another one")
            return
        if method == "POST" and path.startswith("/slots/") and not self._slot_actions:
            # As without --slot-save-path, which is set for our own snapshots: the disk is not for clients to fill.
            text = "slots are not saved or restored for clients: server.slot_save_path is not set"
            await self._reply_error(scope, send, None, 501, text)
            return
        async with asyncio.TaskGroup() as group:
            exchange = group.create_task(self._exchange(scope, receive, send))
            self._exchanges.add(exchange)
            exchange.add_done_callback(self._exchanges.discard)

    async def refuse(self, scope: Scope, send: Send) -> None:
        """Answer a request that came without the proxy's key."""
        text = "the key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key: KEY` (proxy.api_key)"
        await self._reply_error(scope, send, api_of(scope["path"]), 401, text)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = api_of(scope["path"])
        try:
            body = await self._body(scope, receive)
        except ClientGone:
            return
        except BodyError as error:
            await self._reply_error(scope, send, api, error.status, str(error))
            return
        stripped = await self._stripped(body, scope) if api is not None and scope["method"] == "POST" else None
        counted = stripped is not None and not scope["path"].rstrip("/").endswith(_SIDE_ROUTES)
        number = next(self._numbers) if counted else None
        progress = _Progress()
        cancelled = True
        try:
            if stripped is not None and number is not None:
                await self._publish_received(number, scope, body, stripped)
            # From here on the client may leave at any time, also while we wait for the server or its first byte.
            async with asyncio.TaskGroup() as group:
                work = group.create_task(
                    self._answer(scope, send, api, stripped.body if stripped else body, number, progress)
                )
                watch = group.create_task(cancel_when_gone(receive, work))
                work.add_done_callback(lambda _: watch.cancel())
            cancelled = work.cancelled()
        except asyncio.CancelledError:
            if progress.status is None:  # we stop, and this client has heard nothing yet
                progress.status = 503
                await self._reply_error(scope, send, api, 503, "the stack is stopping")
            raise
        finally:
            if number is not None:
                failed = progress.error is not None or (progress.status or 0) >= 400
                self._publish(
                    RequestEnded(
                        time.time(),
                        number,
                        progress.status,
                        "cancelled" if cancelled else "failed" if failed else "done",
                        progress.error,
                    )
                )

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        body = await read_body(receive, self._max_body_bytes)
        encodings = header(scope, b"content-encoding")
        if body and encodings and api_of(scope["path"]) is not None:
            return decode_body(body, encodings, self._max_body_bytes)
        return body

    async def _stripped(self, body: bytes, scope: Scope) -> RewriteResult:
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            # One after the other: the memory of conversations must see the requests in their order.
            async with self._stripping:
                if len(body) < LARGE_BYTES:
                    stripped = self._strip(body, scope["path"], pairs)
                else:  # beside the loop, so that other clients are served meanwhile
                    stripped = await asyncio.to_thread(self._strip, body, scope["path"], pairs)
        except Exception as error:  # fail open: whatever it was, the client's own bytes go out
            self.strip_failures += 1
            self._warn(f"The rules failed on a request ({type(error).__name__}); it was sent unchanged")
            return RewriteResult(body)
        for warning in stripped.warnings:
            self._warn(warning)
        return stripped

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 1000:
            self._warned.add(text)
            self._publish(Notice(time.time(), "warning", text))

    async def _publish_received(self, number: int, scope: Scope, body: bytes, stripped: RewriteResult) -> None:
        try:
            async with self._stripping:
                add = self.history.add
                if len(body) < LARGE_BYTES:
                    compared = add(number, scope["path"], body, stripped)
                else:
                    compared = await asyncio.to_thread(add, number, scope["path"], body, stripped)
        except Exception as error:  # fail open here too: it is only an explanation that is lost
            self._warn(f"A request could not be compared with its former one ({type(error).__name__})")
            compared = Compared(stripped.conversation)
        divergence = compared.divergence
        received = RequestReceived(
            time.time(),
            number,
            scope["method"],
            scope["path"],
            stripped.api,
            stripped.client,
            compared.conversation,
            stripped.items,
            stripped.stream,
            stripped.ts_removed,
            stripped.msg_ids_removed,
            stripped.items_modified,
            _by_rule(stripped),
            stripped.side,
            divergence.difference if divergence is not None else None,
        )
        self._publish(received)
        try:
            self.captures.add(received, scope, body)
        except Exception as error:  # and here: it is only a record that is lost
            self._warn(f"A request could not be recorded ({type(error).__name__})")

    async def _answer(
        self, scope: Scope, send: Send, api: str | None, body: bytes, number: int | None, progress: _Progress
    ) -> None:
        target = _raw_path(scope)
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = self.keys.for_upstream(upstream_headers(scope, api))
        deadline = time.monotonic() + self._ready_timeout_s
        while True:
            if api is not None and not await self._wait_ready(max(0.0, deadline - time.monotonic())):
                progress.status, progress.error = 503, "the llama-server is not ready yet, try again later"
                await self._reply_error(scope, send, api, 503, progress.error)
                return
            if number is not None:
                self._publish(RequestForwarded(time.time(), number))
                self._sent(number, scope["path"], body)
            try:
                async with self._upstream.open(scope["method"], target, headers, body) as stream:
                    progress.status = stream.status
                    await self._relay(scope, send, api, stream, number, progress)
                    return
            except UpstreamError as error:
                if not (error.reached or error.out_of_descriptors) and api is not None and time.monotonic() < deadline:
                    # It died a moment ago and nobody has noticed yet.  The server never saw this request, so it may
                    # be sent again; one that was seen may be what killed it.
                    await asyncio.sleep(RETRY_S)
                    continue
                await self._reply_broken(scope, send, api, error, progress)
                return

    async def _reply_broken(
        self, scope: Scope, send: Send, api: str | None, error: UpstreamError, progress: _Progress
    ) -> None:
        if error.out_of_descriptors:  # not tried again: whoever waits here holds the descriptors that others wait for
            self._on_out_of_descriptors()
        happened = "broke off" if error.reached else "cannot be reached"
        progress.error = f"the llama-server {happened}: {error}"
        if progress.answering:
            # The head is out already: ending here without a last piece makes the server close the connection, which
            # tells the client that the answer is not whole.
            return
        progress.status = 502 if error.reached else 503
        await self._reply_error(scope, send, api, progress.status, progress.error, is_last=error.out_of_descriptors)

    async def _relay(
        self, scope: Scope, send: Send, api: str | None, stream: Stream, number: int | None, progress: _Progress
    ) -> None:
        tap = AnswerTap(number, api, _content_type(stream)) if number is not None else None
        progress.answering = True
        await send(
            {
                "type": "http.response.start",
                "status": stream.status,
                "headers": [*client_headers(stream.headers), *self._cors(scope)],
            }
        )
        started = False
        try:
            async for piece in stream.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if tap is not None:
                    tap.feed(piece)
                    if tap.started and not started and number is not None:
                        started = True
                        self._publish(FirstByteSent(time.time(), number))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if tap is not None:
                answer = tap.result()
                progress.error = progress.error or answer.error
                self._publish(answer)

    async def _reply_error(
        self, scope: Scope, send: Send, api: str | None, status: int, message: str, *, is_last: bool = False
    ) -> None:
        known = {503: [(b"retry-after", str(RETRY_AFTER_S).encode())], 401: [(b"www-authenticate", b"Bearer")]}
        extra = list(known.get(status, ()))
        if is_last:  # the connection is closed, which gives its descriptor back
            extra.append((b"connection", b"close"))
        await self._reply(scope, send, status, error_body(api, status, message), "application/json", extra)

    async def _reply(
        self,
        scope: Scope,
        send: Send,
        status: int,
        body: bytes,
        content_type: str | None,
        extra: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        headers = [*extra, *self._cors(scope)]
        if status != 204:
            headers.append((b"content-length", str(len(body)).encode()))
        if content_type is not None:
            headers.append((b"content-type", content_type.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = header(scope, b"origin")
        if not origin or not ({origin, "*"} & self._cors_origins):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    def _preflight(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        if not self._cors(scope):
            return []
        wanted = header(scope, b"access-control-request-headers") or "*"
        return [
            (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]


def _raw_path(scope: Scope) -> bytes:
    """The path as it came."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def _content_type(stream: Stream) -> str:
    return next((value for name, value in stream.headers if name.lower() == b"content-type"), b"").decode("latin-1")


def _by_rule(stripped: RewriteResult) -> tuple[RuleHit, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    for hit in stripped.hits:
        counts[hit.rule, hit.action] += hit.n
    return tuple(RuleHit(rule, action, count) for (rule, action), count in counts.items())
