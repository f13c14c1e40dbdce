"""
The control routes: what another terminal asks of a running stack.

`GET /kvstack/status` is open to whoever reaches the proxy: it holds figures and no prompts.  Routes that act need the
run file's token as `Authorization: Bearer TOKEN`.  Answers are `{"status", "message", "data"}`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstack.core.events import WarmupEnded
from kvstack.core.snapshot import Snapshot
from kvstack.errors import KvstackError

__all__ = ["Controlled", "control_routes"]

Endpoint = Callable[[Request], Awaitable[Response]]


class Controlled(Protocol):
    """
    What the control routes need of a stack.
    """

    def snapshot(self) -> Snapshot:
        """
        The stack as it is now.
        """

    async def warm_up(self) -> WarmupEnded:
        """
        Warm up now.

        Raises:
            KvstackError: The stack is not ready.
        """

    def request_stop(self, reason: str) -> None:
        """
        Begin to stop.
        """


def control_routes(stack: Controlled, token: str) -> list[Route]:
    """
    The routes below `/kvstack/`.

    Args:
        stack: The stack that is shown and acted upon.
        token: Secret for the routes that act.
    """

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def check(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return _answer(401, "error", "this needs the token of the stack's run file")
            return await endpoint(request)

        return check

    async def status(_: Request) -> Response:
        return JSONResponse(stack.snapshot().to_dict(), headers={"cache-control": "no-store"})

    async def warmup(_: Request) -> Response:
        try:
            ended = await stack.warm_up()
        except KvstackError as error:
            return _answer(503, "error", str(error))
        data = {
            "outcome": ended.outcome,
            "prompt_tokens": ended.prompt_tokens,
            "evaluated_tokens": ended.evaluated_tokens,
            "duration_ms": ended.duration_ms,
            "detail": ended.detail,
        }
        ok = ended.outcome == "done"
        return _answer(200 if ok else 409, "success" if ok else "error", ended.detail or ended.outcome, data)

    async def stop(_: Request) -> Response:
        stack.request_stop("asked by `kvstack down`")
        return _answer(202, "success", "stopping")

    async def unknown(request: Request) -> Response:
        return _answer(404, "error", f"{request.url.path} is no route of kvstack")

    return [
        Route("/kvstack/status", status, methods=["GET"]),
        Route("/kvstack/warmup", guarded(warmup), methods=["POST"]),
        Route("/kvstack/stop", guarded(stop), methods=["POST"]),
        Route("/kvstack/{rest:path}", unknown),
        Route("/kvstack", unknown),
    ]


def _answer(http_status: int, status: str, message: str, data: dict[str, Any] | None = None) -> JSONResponse:
    return JSONResponse({"status": status, "message": message, "data": data}, http_status)
