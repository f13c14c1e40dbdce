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
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstack.bus import Subscription
from kvstack.errors import KvstackError
from kvstack.prompt.report.listing import RuleLine
from kvstack.proxy.capture import Captures, CaptureStream
from kvstack.proxy.metrics import CONTENT_TYPE, Metrics
from kvstack.proxy.request_log import RequestLog
from kvstack.state.events import Event, LogFactSeen, LogLineSeen, StateChanged, WarmupEnded
from kvstack.state.explain import explain
from kvstack.state.lifecycle import State
from kvstack.state.records import RequestRow
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import encode
from kvstack.state.totals import is_late

EVENT_PAUSE_S = 15.0
LAST_WAIT_S = 1.0
"""So long `last` waits for a verdict; a prefill may take minutes, and then there is none yet."""
LAST_PAUSE_S = 0.02


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


@dataclass(frozen=True, slots=True)
class Context:
    """
    What the routes work with.

    Attributes:
        stack: The stack that is shown and acted upon.
        token: Secret for the guarded routes.
        metrics: Makes the metrics.
        log: The requests.
        captures: Hands the requests to who listens.
    """

    stack: Controlled
    token: str
    metrics: Metrics
    log: RequestLog
    captures: Captures

    def may_act(self, request: Request) -> bool:
        """Whether a request brings the token."""
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())


Endpoint = Callable[[Context, Request], Awaitable[Response]]


async def _status(context: Context, _: Request) -> Response:
    return AsciiJson(encode(context.stack.stack_state()), headers={"cache-control": "no-store"})


async def _warmup(context: Context, _: Request) -> Response:
    try:
        ended = await context.stack.warm_up()
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


async def _stop(context: Context, _: Request) -> Response:
    context.stack.request_stop("requested by `kvstack down`")
    return _answer(202, "success", "stopping")


async def _events(context: Context, _: Request) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    stream = _event_stream(context.stack.subscribe())
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _show_metrics(context: Context, _: Request) -> Response:
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def _rules(context: Context, _: Request) -> Response:
    hits = dict(context.stack.stack_state().totals.rules)
    lines = [asdict(line) | {"hits": hits.get(line.name, 0)} for line in context.stack.rules()]
    active = sum(line["active"] for line in lines)
    return _answer(200, "success", f"{len(lines)} rules, {active} on", {"rules": lines})


async def _request(context: Context, request: Request) -> Response:
    stack = context.stack
    wants_text = "text" in request.query_params
    if wants_text and not context.may_act(request):
        return _unauthorized(stack.stack_state().name)
    number = request.path_params["number"]
    if number == "last":
        await _last_is_judged(stack)
    stack_state = stack.stack_state()
    row = _row(stack_state, number)
    if row is None:
        return _answer(404, "error", _which(stack_state, number))
    before = stack_state.row(row.change.before) if row.change.before is not None else None
    server = stack_state.server
    # A server that was started again may have another number of slots.
    slots = server.slots if row.run == stack_state.join.run else None
    explanation = explain(row, before, stack_state.prefill_tokens_per_s, slots, attached=server.is_attached)
    data: dict[str, Any] = {"explanation": encode(explanation), "request": encode(row)}
    logged = context.log.get(row.id)
    if wants_text and logged is not None and logged.found_difference is not None:
        data["divergence"] = logged.found_difference.flat()
    return _answer(200, "success", explanation.headline, data)


async def _diff(context: Context, request: Request) -> Response:
    stack_state, number = context.stack.stack_state(), request.path_params["number"]
    row = _row(stack_state, number)
    if row is None:
        return _answer(404, "error", _which(stack_state, number))
    logged = context.log.get(row.id)
    if not context.log.keeps_bodies or logged is None or logged.bodies is None:
        return _answer(404, "error", _not_kept(row, context.log))
    bodies = logged.bodies
    edits = bodies.edits()
    data: dict[str, Any] = {
        "request": row.id,
        "path": logged.path,
        "original": bodies.original.decode("utf-8", "replace"),
        "stripped": bodies.rewritten.body.decode("utf-8", "replace"),
        "edits": [asdict(edit) for edit in edits],
        "hits": [asdict(hit) for hit in bodies.rewritten.hits],
    }
    return _answer(200, "success", f"{len(edits)} edit{'' if len(edits) == 1 else 's'}", data)


async def _capture(context: Context, _: Request) -> Response:
    listener = context.captures.listen()
    if listener is None:
        return _answer(429, "error", f"{context.captures.listeners} captures are already running")
    return CaptureStream(listener)


async def _unknown(_: Context, request: Request) -> Response:
    return _answer(404, "error", f"{request.url.path} is not a kvstack route")


_OPEN: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/kvstack/status", _status),
    ("GET", "/kvstack/events", _events),
    ("GET", "/kvstack/metrics", _show_metrics),
    ("GET", "/kvstack/rules", _rules),
    ("GET", "/kvstack/requests/{number}", _request),
)
_GUARDED: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/kvstack/requests/{number}/diff", _diff),
    ("GET", "/kvstack/capture", _capture),
    ("POST", "/kvstack/warmup", _warmup),
    ("POST", "/kvstack/stop", _stop),
)
"""These need the token: they act, or show what users wrote."""


def control_routes(context: Context) -> list[Route]:
    """The routes below `/kvstack/`."""

    def served(endpoint: Endpoint, *, guarded: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            if guarded and not context.may_act(request):
                return _unauthorized(context.stack.stack_state().name)
            return await endpoint(context, request)

        return serve

    return [
        *(Route(path, served(endpoint), methods=[method]) for method, path, endpoint in _OPEN),
        *(Route(path, served(endpoint, guarded=True), methods=[method]) for method, path, endpoint in _GUARDED),
        Route("/kvstack/{rest:path}", served(_unknown)),
        Route("/kvstack", served(_unknown)),
    ]


reject_key = AsciiJson(
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


def _not_kept(row: RequestRow, log: RequestLog) -> str:
    """Why a request's bodies cannot be shown, and the setting that it takes."""
    if not log.keeps_bodies:
        return (
            f"the bodies of request {row.id} were not kept: set proxy.keep_bodies to a number of requests, "
            "and start the stack again"
        )
    return f"the bodies of request {row.id} are no longer kept: proxy.keep_bodies limits how many"


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
        yield _message("Snapshot", encode(subscription.stack_state))
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
                yield _message("Snapshot", encode(subscription.current()))
            if isinstance(event, LogLineSeen):
                continue
            yield _message(type(event).__name__, _fields(event))
            if isinstance(event, StateChanged) and event.state in {State.STOPPING, State.FAILED, State.STOPPED}:
                return


def _fields(event: Event) -> dict[str, Any]:
    fields: dict[str, Any] = encode(event)
    if isinstance(event, LogFactSeen):
        fields["kind"] = type(event.fact).__name__
    return fields


def _message(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _answer(http_status: int, status: str, message: str, data: dict[str, Any] | None = None) -> AsciiJson:
    return AsciiJson({"status": status, "message": message, "data": data}, http_status)
