"""
The streaming pass-through: rules on the way in, a tap on the way out.

An exchange is read, rewritten and logged, waits for the server, is sent, its answer is relayed, and it ends.  The
client gets the upstream's bytes as they come; the tap reads along and may lose data, the client may not.  A client that
leaves, also before the first byte, closes the upstream's connection, which is how llama-server is told.  If the rules
fail, the original bytes are sent: kvstack is never the reason that a request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from kvstack.llama.response import AnswerTap
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.request.apis import api_of
from kvstack.proxy.body import BodyError, ClientGone, cancel_when_gone, decode_body, read_body
from kvstack.proxy.capture import Captures
from kvstack.proxy.headers import client_headers, header, upstream_headers
from kvstack.proxy.keys import Keys
from kvstack.proxy.replies import Replies
from kvstack.proxy.request_log import Bodies, LoggedRequest, RequestLog
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

Rewrite = Callable[[bytes, str, list[tuple[str, str]], int | None], RewriteResult]
"""Applies the rules: body, path, header pairs; the number of a model request."""

RESEND_PAUSE_S = 0.1
STOPPING = "the stack is stopping"
LARGE_BYTES = 256 * 1024

_SIDE_ROUTES = ("/apply-template", "/tokenize", "/count_tokens", "/input_tokens")
_PROBED = frozenset({"/", "/health", "/v1/health", "/api/hello"})


@dataclass(slots=True)
class _Exchange:
    """
    One request, and how far it came.

    Attributes:
        scope: The request's ASGI scope.
        receive: Gives its body, then its client's leaving.
        send: Sends to its client.
        api: Its API; None if it carries no prompt.
        number: Its number; None if it is no model request.
        body: What goes to the upstream.
        status: HTTP status that the client got.
        is_answering: The status line is out.
        is_cancelled: The client left, or the stack stopped.
        is_whole: The last event of a streamed answer went out: who leaves then has got everything.
        error: What went wrong.
    """

    scope: Scope
    receive: Receive
    send: Send
    api: str | None
    number: int | None = None
    body: bytes = b""
    status: int | None = None
    is_answering: bool = False
    is_cancelled: bool = True
    is_whole: bool = False
    error: str | None = None

    @property
    def outcome(self) -> Literal["done", "cancelled", "failed"]:
        """How it ended."""
        if self.is_cancelled and not self.is_whole:
            return "cancelled"
        return "failed" if self.error is not None or (self.status or 0) >= 400 else "done"


class Forward:
    """
    An ASGI application that hands every request to the upstream.

    Args:
        upstream: The llama-server.
        rewrite: Applies the rules.
        wait_ready: Waits until the stack is ready, at most so many seconds; returns whether it is.
        publish: Takes events.
        max_body_bytes: Largest request body.
        ready_timeout_s: How long a model request waits for the server.
        cors_origins: Browser origins that may use the proxy.
        log: Remembers the requests.
        is_stopping: Whether the stack is about to end: who waits for it to be ready waits in vain.
        slot_actions: Whether clients may save, restore and erase slots.
        keys: Which key the upstream gets.
        on_out_of_descriptors: Called when no file descriptor is left for a connection to the upstream.

    Attributes:
        captures: Who listens to the requests.
        keys: Who may use the proxy.
        log: The requests, by number.
        rewrite_failures: On how many requests the rules failed.
    """

    def __init__(
        self,
        upstream: Upstream,
        rewrite: Rewrite,
        wait_ready: Callable[[float], Awaitable[bool]],
        publish: Callable[[Event], None],
        *,
        max_body_bytes: int,
        ready_timeout_s: float,
        cors_origins: tuple[str, ...] = (),
        log: RequestLog | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        slot_actions: bool = True,
        keys: Keys | None = None,
        on_out_of_descriptors: Callable[[], None] = lambda: None,
    ) -> None:
        self.keys = keys if keys is not None else Keys()
        self.log = log if log is not None else RequestLog()
        self.captures = Captures()
        self.rewrite_failures = 0
        self._upstream = upstream
        self._rewrite_body = rewrite
        self._wait_ready = wait_ready
        self._publish = publish
        self._is_stopping = is_stopping
        self._slot_actions = slot_actions
        self._on_out_of_descriptors = on_out_of_descriptors
        self._max_body_bytes = max_body_bytes
        self._ready_timeout_s = ready_timeout_s
        self._replies = Replies(cors_origins)
        self._numbers = itertools.count(1)
        self._warned: set[str] = set()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._in_order = asyncio.Lock()

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
        if method == "HEAD" and (scope["path"] in _PROBED or api_of(scope["path"]) is not None):
            await self._replies.probe(scope, send)
        elif method == "OPTIONS":
            await self._replies.preflight(scope, send)
        elif (refusal := self._refusal(scope)) is not None:
            await self._replies.error(scope, send, *refusal)
        else:
            async with asyncio.TaskGroup() as group:
                exchange = group.create_task(self._exchange(_Exchange(scope, receive, send, api_of(scope["path"]))))
                self._exchanges.add(exchange)
                exchange.add_done_callback(self._exchanges.discard)

    async def reject_key(self, scope: Scope, send: Send) -> None:
        """Answer a request that came without the proxy's key."""
        text = "the key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key: KEY` (proxy.api_key)"
        await self._replies.error(scope, send, api_of(scope["path"]), 401, text)

    def _refusal(self, scope: Scope) -> tuple[str | None, int, str] | None:
        """The API, status and message with which a request is refused before it is read; None if it is not."""
        if scope["method"] == "CONNECT":
            return None, 405, "CONNECT is not supported"
        if (fault := ambiguity(_raw_path(scope))) is not None:
            # The path decides what is guarded and which rules act: it must be the one that the server sees.
            return api_of(path_at_server(_raw_path(scope))), 400, f"{fault}: llama-server may read it differently"
        if scope["method"] == "POST" and scope["path"].startswith("/slots/") and not self._slot_actions:
            # As without --slot-save-path, which is set for our own snapshots: the disk is not for clients to fill.
            return None, 501, "slots are not saved or restored for clients: server.slot_save_path is not set"
        return None

    # The steps of an exchange

    async def _exchange(self, exchange: _Exchange) -> None:
        try:
            original = await self._read(exchange)
        except ClientGone:
            return
        except BodyError as error:
            await self._replies.error(exchange.scope, exchange.send, exchange.api, error.status, str(error))
            return
        exchange.body = original
        number = next(self._numbers) if _is_model_request(exchange) else None
        rewritten = await self._rewrite(exchange, number)
        exchange.body, exchange.number = rewritten.body, number
        try:
            if number is not None:
                self._log(exchange, number, Bodies(original, rewritten))
            # From here on the client may leave at any time, also while we wait for the server or its first byte.
            exchange.is_cancelled = await _cancelled_when_gone(exchange.receive, self._answer(exchange))
        except asyncio.CancelledError:
            if exchange.status is None:  # we stop, and this client has heard nothing yet
                exchange.status = 503
                await self._replies.error(exchange.scope, exchange.send, exchange.api, 503, STOPPING)
            raise
        finally:
            self._end(exchange)

    async def _read(self, exchange: _Exchange) -> bytes:
        body = await read_body(exchange.receive, self._max_body_bytes)
        encodings = header(exchange.scope, b"content-encoding")
        if body and encodings and exchange.api is not None:
            return decode_body(body, encodings, self._max_body_bytes)
        return body

    async def _rewrite(self, exchange: _Exchange, number: int | None) -> RewriteResult:
        """Apply the rules to a prompt; anything else stays as it is."""
        scope, body = exchange.scope, exchange.body
        if exchange.api is None or scope["method"] != "POST":
            return RewriteResult(body)
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            # One after the other: the memory of conversations must see the requests in their order.
            async with self._in_order:
                if len(body) < LARGE_BYTES:
                    rewritten = self._rewrite_body(body, scope["path"], pairs, number)
                else:  # beside the loop, so that other clients are served meanwhile
                    rewritten = await asyncio.to_thread(self._rewrite_body, body, scope["path"], pairs, number)
        except Exception as error:  # fail open: whatever it was, the client's own bytes go out
            self.rewrite_failures += 1
            self._warn(f"The rules failed on a request ({type(error).__name__}); it was sent unchanged")
            return RewriteResult(body)
        for warning in rewritten.warnings:
            self._warn(warning)
        return rewritten

    def _log(self, exchange: _Exchange, number: int, bodies: Bodies) -> None:
        """Log a request, publish its facts, and hand it to the captures."""
        self.log.add(LoggedRequest.of(number, exchange.scope["path"], bodies))
        received = _received(number, exchange.scope, bodies.rewritten)
        self._publish(received)
        try:
            self.captures.add(received, exchange.scope, bodies.original, bodies.rewritten.document)
        except Exception as error:  # fail open here too: only a record is lost
            self._warn(f"A request could not be recorded ({type(error).__name__})")

    async def _answer(self, exchange: _Exchange) -> None:
        """Wait for the server, send the request, relay the answer; again if the server cannot have seen it."""
        deadline = time.monotonic() + self._ready_timeout_s
        while await self._is_ready(exchange, deadline):
            if exchange.number is not None:
                self._publish(RequestForwarded(time.time(), exchange.number))
            try:
                await self._send(exchange)
                return
            except UpstreamError as error:
                if exchange.api is None or not _may_resend(error) or time.monotonic() >= deadline:
                    await self._reply_broken(exchange, error)
                    return
            await asyncio.sleep(RESEND_PAUSE_S)

    async def _is_ready(self, exchange: _Exchange, deadline: float) -> bool:
        if exchange.api is None or await self._wait_ready(max(0.0, deadline - time.monotonic())):
            return True
        exchange.status = 503
        exchange.error = STOPPING if self._is_stopping() else "llama-server is not ready yet, try again later"
        await self._replies.error(exchange.scope, exchange.send, exchange.api, 503, exchange.error)
        return False

    async def _send(self, exchange: _Exchange) -> None:
        scope = exchange.scope
        target = _raw_path(scope)
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = self.keys.for_upstream(upstream_headers(scope, exchange.api))
        async with self._upstream.open(scope["method"], target, headers, exchange.body) as stream:
            exchange.status = stream.status
            await self._relay(exchange, stream)

    async def _relay(self, exchange: _Exchange, stream: Stream) -> None:
        number = exchange.number
        tap = AnswerTap(number, exchange.api, _content_type(stream)) if number is not None else None
        exchange.is_answering = True
        headers = [*client_headers(stream.headers), *self._replies.cors(exchange.scope)]
        await exchange.send({"type": "http.response.start", "status": stream.status, "headers": headers})
        first_byte_sent = False
        try:
            async for piece in stream.pieces():
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
                if tap is not None and number is not None:
                    tap.feed(piece)
                    if tap.started and not first_byte_sent:
                        first_byte_sent = True
                        self._publish(FirstByteSent(time.time(), number))
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if tap is not None:
                answer = tap.result()
                exchange.is_whole = tap.is_whole
                exchange.error = exchange.error or answer.error
                self._publish(answer)

    async def _reply_broken(self, exchange: _Exchange, error: UpstreamError) -> None:
        if error.out_of_descriptors:
            self._on_out_of_descriptors()
        happened = "broke off" if error.reached else "cannot be reached"
        exchange.error = f"the llama-server {happened}: {error}"
        if exchange.is_answering:
            # Ending here without a last piece makes the server close the connection, which tells the client that the
            # answer is not whole.
            return
        exchange.status = 502 if error.reached else 503
        await self._replies.error(
            exchange.scope,
            exchange.send,
            exchange.api,
            exchange.status,
            exchange.error,
            close=error.out_of_descriptors,
        )

    def _end(self, exchange: _Exchange) -> None:
        number = exchange.number
        if number is not None:
            self._publish(RequestEnded(time.time(), number, exchange.status, exchange.outcome, exchange.error))
            self.log.end(number)

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 1000:
            self._warned.add(text)
            self._publish(Notice(time.time(), "warning", text))


def _may_resend(error: UpstreamError) -> bool:
    """
    Whether a request may be sent again: the server died a moment ago, nobody has noticed, and it never saw the request.

    One that was seen may be what killed it; and without file descriptors, who waits holds those that others wait for.
    """
    return not (error.reached or error.out_of_descriptors)


async def _cancelled_when_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do *work* until its client leaves; return whether it was cancelled."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        watch = group.create_task(cancel_when_gone(receive, task))
        task.add_done_callback(lambda _: watch.cancel())
    return task.cancelled()


def _is_model_request(exchange: _Exchange) -> bool:
    """Whether a model answers a prompt, instead of it being only counted or rendered."""
    scope = exchange.scope
    is_prompt = exchange.api is not None and scope["method"] == "POST"
    return is_prompt and not scope["path"].rstrip("/").endswith(_SIDE_ROUTES)


def _received(number: int, scope: Scope, rewritten: RewriteResult) -> RequestReceived:
    return RequestReceived(
        time.time(),
        number,
        scope["method"],
        scope["path"],
        rewritten.api,
        rewritten.client,
        rewritten.conversation,
        rewritten.items,
        rewritten.stream,
        rewritten.ts_removed,
        rewritten.msg_ids_removed,
        rewritten.items_modified,
        _by_rule(rewritten),
        rewritten.side,
        rewritten.found_difference.difference if rewritten.found_difference is not None else None,
        # (of all others it is that of their conversation: to digest long tools takes its time)
        rewritten.head_fingerprint if rewritten.starts else None,
    )


def _by_rule(rewritten: RewriteResult) -> tuple[RuleHit, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    for hit in rewritten.hits:
        counts[hit.rule, hit.action] += hit.n
    return tuple(RuleHit(rule, action, count) for (rule, action), count in counts.items())


def _raw_path(scope: Scope) -> bytes:
    """The path as it came."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw


def _content_type(stream: Stream) -> str:
    values = (value.decode("latin-1") for name, value in stream.headers if name.lower() == b"content-type")
    return next(values, "")
