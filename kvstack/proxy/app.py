"""The ASGI application: control routes first, everything else to the upstream."""

from __future__ import annotations

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvstack.proxy.control import Context, Controlled, control_routes, reject_key
from kvstack.proxy.forward import Forward
from kvstack.proxy.metrics import Metrics


def make_app(forward: Forward, stack: Controlled, token: str, version: str = "") -> ASGIApp:
    """
    Compose the application.

    Args:
        forward: Serves what is not ours.
        stack: What the control routes show and act upon.
        token: Secret for the control routes that act; of the others it opens each that the proxy's key opens.
        version: Version of kvstack, for the metrics.
    """
    metrics = Metrics(stack.stack_state, version, lambda: forward.rewrite_failures)
    context = Context(stack, token, metrics, forward.log, forward.captures)
    control = Router(control_routes(context), redirect_slashes=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        ours = path == "/kvstack" or path.startswith("/kvstack/")
        # The stack's token opens what is ours alone: kvstack's own verbs have no other key.
        if not forward.keys.admit(scope, token if ours else None):
            await (reject_key(scope, receive, send) if ours else forward.reject_key(scope, send))
        elif ours:
            await control(scope, receive, send)
        else:
            await forward(scope, receive, send)

    return app
