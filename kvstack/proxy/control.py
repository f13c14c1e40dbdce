"""
The control routes: what another terminal asks of a running stack.

| route | what it gives |
| --- | --- |
| `GET /kvstack/status` | the Snapshot, as JSON |
| `GET /kvstack/events` | the Snapshot, then every event, as server-sent events without a gap |
| `GET /kvstack/metrics` | the Snapshot, for Prometheus |
| `GET /kvstack/rules` | every rule as this stack has it, and how often it acted since the start |
| `GET /kvstack/requests/N` | one request's figures, and their explanation; N may be `last` |
| `GET /kvstack/requests/N?text=1` | with sixty characters around where it left its conversation; needs the token |
| `GET /kvstack/requests/N/diff` | original against stripped, if `proxy.keep_bodies` kept it; needs the token |
| `GET /kvstack/capture` | every model request from now on, as JSON Lines; needs the token |
| `POST /kvstack/warmup`, `POST /kvstack/stop` | act, and need the run file's token as `Authorization: Bearer TOKEN` |

`last` is the newest request that began, also while it runs.  Its verdict is waited for, but no longer than a second:
who has just got an answer means that one, and a prefill may take minutes.

The open routes hold figures and no prompts.  With `proxy.api_key` they ask for that key or for the token; the others
ask for the token in any case.  Routes that act answer `{"status", "message", "data"}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstack.bus import Subscription
from kvstack.errors import KvstackError
from kvstack.prompt.report.listing import RuleLine
from kvstack.proxy.capture import Captures, CaptureStream
from kvstack.proxy.history import History
from kvstack.proxy.metrics import CONTENT_TYPE, Metrics
from kvstack.state.events import Event, LogFactSeen, LogLineSeen, StateChanged, WarmupEnded
from kvstack.state.explain import explain
from kvstack.state.lifecycle import State
from kvstack.state.records import RequestRow
from kvstack.state.stack_state import StackState
from kvstack.state.totals import is_late

EVENT_PAUSE_S = 15.0
LAST_WAIT_S = 1.0
"""So long `last` waits for a verdict; a prefill may take minutes, and then there is none yet."""
LAST_PAUSE_S = 0.02

Endpoint = Callable[[Request], Awaitable[Response]]


class AsciiJson(JSONResponse):
    """JSON in ASCII: a client may have sent half a surrogate pair, which has no other spelling."""

    def render(self, content: Any) -> bytes:
        """Spell *content*."""
        return json.dumps(content).encode()


class Controlled(Protocol):
    """What the control routes need of a stack."""

    def stack_state(self) -> StackState:
        """The stack as it is now."""

    def rules(self) -> Sequence[RuleLine]:
        """All rules, in force or not."""

    async def warm_up(self) -> WarmupEnded:
        """
        Warm up now.

        Raises:
            KvstackError: The stack is not ready.
        """

    def request_stop(self, reason: str) -> None:
        """Begin to stop."""

    def subscribe(self) -> Subscription:
        """Begin to listen to events."""


def control_routes(
    stack: Controlled, token: str, metrics: Metrics, history: History, captures: Captures
) -> list[Route]:
    """
    The routes below `/kvstack/`.

    Args:
        stack: The stack that is shown and acted upon.
        metrics: Makes the metrics.
        history: Remembers the requests.
        captures: Hands the requests to who listens.
        token: Secret for the routes that act.
    """

    def may_act(request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def check(request: Request) -> Response:
            return await endpoint(request) if may_act(request) else _unauthorized(stack.stack_state().name)

        return check

    async def status(_: Request) -> Response:
        return AsciiJson(stack.stack_state().to_dict(), headers={"cache-control": "no-store"})

    async def warmup(_: Request) -> Response:
        try:
            ended = await stack.warm_up()
        except KvstackError as error:
            return _answer(503, "error", str(error))
        data = {
            "outcome": ended.outcome,
            "prompt_tokens": ended.prompt_tokens,
            "evaluated_tokens": ended.evaluated_tokens,
            "boundary_tokens": ended.boundary_tokens,
            "snapshot": ended.snapshot,
            "duration_ms": ended.duration_ms,
            "detail": ended.detail,
        }
        ok = ended.outcome == "done"
        text = ended.detail or ended.outcome
        if ended.outcome == "no prefix known":
            text += ": set warmup.request_file, warmup.system_prompt_file or warmup.system_prompt in the config"
        return _answer(200 if ok else 409, "success" if ok else "error", text, data)

    async def stop(_: Request) -> Response:
        stack.request_stop("asked by `kvstack down`")
        return _answer(202, "success", "stopping")

    async def events(_: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_event_stream(stack.subscribe()), media_type="text/event-stream", headers=headers)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def rules(_: Request) -> Response:
        hits = dict(stack.stack_state().totals.rules)
        lines = [asdict(line) | {"hits": hits.get(line.name, 0)} for line in stack.rules()]
        active = sum(line["active"] for line in lines)
        return _answer(200, "success", f"{len(lines)} rules, {active} on", {"rules": lines})

    async def one_request(request: Request) -> Response:
        wants_text = "text" in request.query_params
        if wants_text and not may_act(request):
            return _unauthorized(stack.stack_state().name)
        number = request.path_params["number"]
        if number == "last":
            await _last_is_judged(stack)
        stack_state = stack.stack_state()
        row = _row(stack_state, number)
        if row is None:
            return _answer(404, "error", _which(stack_state, number))
        before = stack_state.row(row.before) if row.before is not None else None
        server = stack_state.server
        explanation = explain(row, before, stack_state.prefill_tokens_per_s, server.slots, attached=server.is_attached)
        data: dict[str, Any] = {"explanation": explanation.to_dict()}
        data["request"] = next(one for one in stack_state.to_dict()["requests"] if one["id"] == row.id)
        divergence = history.divergence(row.id)
        if wants_text and divergence is not None:
            data["divergence"] = asdict(divergence)
        return _answer(200, "success", explanation.headline, data)

    async def diff(request: Request) -> Response:
        stack_state = stack.stack_state()
        row = _row(stack_state, request.path_params["number"])
        kept = history.body(row.id) if row is not None else None
        if row is None:
            return _answer(404, "error", _which(stack_state, request.path_params["number"]))
        if kept is None:
            return _answer(404, "error", _not_kept(row, history))
        edits = kept.edits()
        data: dict[str, Any] = {
            "request": row.id,
            "path": kept.path,
            "original": kept.original.decode("utf-8", "replace"),
            "stripped": kept.stripped.body.decode("utf-8", "replace"),
            "edits": [asdict(edit) for edit in edits],
            "hits": [asdict(hit) for hit in kept.stripped.hits],
        }
        return _answer(200, "success", f"{len(edits)} edits", data)

    async def capture(_: Request) -> Response:
        listener = captures.listen()
        if listener is None:
            return _answer(429, "error", f"{captures.listeners} captures run already")
        return CaptureStream(listener)

    async def unknown(request: Request) -> Response:
        return _answer(404, "error", f"{request.url.path} is no route of kvstack")

    return [
        Route("/kvstack/status", status, methods=["GET"]),
        Route("/kvstack/events", events, methods=["GET"]),
        Route("/kvstack/metrics", show_metrics, methods=["GET"]),
        Route("/kvstack/rules", rules, methods=["GET"]),
        Route("/kvstack/requests/{number}", one_request, methods=["GET"]),
        Route("/kvstack/requests/{number}/diff", guarded(diff), methods=["GET"]),
        Route("/kvstack/capture", guarded(capture), methods=["GET"]),
        Route("/kvstack/warmup", guarded(warmup), methods=["POST"]),
        Route("/kvstack/stop", guarded(stop), methods=["POST"]),
        Route("/kvstack/{rest:path}", unknown),
        Route("/kvstack", unknown),
    ]


refuse_key = AsciiJson(
    {
        "status": "error",
        "message": "this needs proxy.api_key, or the token of the stack's run file, as `Authorization: Bearer ...`",
        "data": None,
    },
    401,
    headers={"www-authenticate": "Bearer"},
)
"""Answers a request that came with neither."""


def _unauthorized(name: str) -> Response:
    text = (
        "this needs the header `Authorization: Bearer TOKEN`, with the token of the stack's run file "
        f"({name}/run.json in kvstack's state directory)"
    )
    return _answer(401, "error", text)


def _not_kept(row: RequestRow, history: History) -> str:
    """Why a request's bodies cannot be shown, and the setting that it takes."""
    if not history.keeps_bodies:
        return (
            f"the bodies of request {row.id} were not kept: set proxy.keep_bodies to a number of requests, "
            "and start the stack again"
        )
    return f"the bodies of request {row.id} are not kept any more: proxy.keep_bodies says of how many requests they are"


def _row(stack_state: StackState, number: str) -> RequestRow | None:
    if number == "last":
        return stack_state.requests[-1] if stack_state.requests else None
    return stack_state.row(int(number)) if number.isascii() and number.isdigit() and len(number) < 19 else None


async def _last_is_judged(stack: Controlled) -> None:
    """Wait for the verdict of the newest request: who has just got its answer is a moment ahead of it."""
    deadline = time.monotonic() + LAST_WAIT_S
    while time.monotonic() < deadline:
        row = _row(stack.stack_state(), "last")
        if row is None or row.settled or is_late(row, time.time()):
            return
        await asyncio.sleep(LAST_PAUSE_S)


def _which(stack_state: StackState, number: str) -> str:
    rows = stack_state.requests
    if not rows:
        return "there has been no request yet"
    return f"there is no request {number}: known are {rows[0].id} to {rows[-1].id}"


async def _event_stream(subscription: Subscription) -> AsyncIterator[str]:
    """
    Snapshot first, then each event: `event:` is its class name, `data:` its fields.

    Log lines are left out: they are many, and `kvstack logs -f` follows them.  The stream ends when the stack stops.
    """
    with subscription:
        yield _message("Snapshot", subscription.stack_state.to_dict())
        dropped = 0
        while True:
            try:
                event = await asyncio.wait_for(anext(subscription), EVENT_PAUSE_S)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if subscription.dropped > dropped:
                # This reader was too slow and has a gap: the whole picture again closes it.
                dropped = subscription.dropped
                yield _message("Snapshot", subscription.current().to_dict())
            if isinstance(event, LogLineSeen):
                continue
            yield _message(type(event).__name__, _fields(event))
            if isinstance(event, StateChanged) and event.state in {State.STOPPING, State.FAILED, State.STOPPED}:
                return


def _fields(event: Event) -> dict[str, Any]:
    fields = asdict(event)
    if isinstance(event, LogFactSeen):
        fields["kind"] = type(event.fact).__name__
    return fields


def _message(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _answer(http_status: int, status: str, message: str, data: dict[str, Any] | None = None) -> AsciiJson:
    return AsciiJson({"status": status, "message": message, "data": data}, http_status)
