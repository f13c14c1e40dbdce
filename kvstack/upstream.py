"""
HTTP to the llama-server: health, facts, whole requests, streams.  The only module that knows httpx.

Every model request gets a fresh connection: llama-server closes idle ones after 5 s, and a closed socket is how a
request is cancelled.  No connection cap (a queue here would hide the server's own), no read timeout (a cold prefill
takes minutes), no proxy settings from the environment.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

from kvstack.errors import out_of_descriptors

Headers = Sequence[tuple[bytes, bytes]]
"""Header pairs in their order, names as they came; a header may stand more than once."""

PROBE_TIMEOUT_S = 5.0
"""How long a question of our own may stay without an answer, in seconds."""

CONNECT_TIMEOUT_S = 5.0


class UpstreamError(Exception):
    """
    The upstream cannot be reached, or broke off.

    Attributes:
        reached: Whether a connection was made: False means that the server never saw the request.
        out_of_descriptors: kvstack had no file descriptor left: that says nothing about the server.
    """

    def __init__(self, message: str, *, reached: bool, out_of_descriptors: bool = False) -> None:
        super().__init__(message)
        self.reached = reached
        self.out_of_descriptors = out_of_descriptors


class Health(Enum):
    """What `/health` says."""

    REFUSED = "refused"
    """Nobody listens (yet)."""
    LOADING = "loading"
    """503: the model is being loaded."""
    OK = "ok"
    """200."""
    ERROR = "error"
    """Something else answers, or the answer did not come in time."""
    UNASKED = "unasked"
    """It could not be asked: kvstack had no file descriptor left for that."""


@dataclass(frozen=True, slots=True)
class Props:
    """
    What `/props` says; None where it does not.

    Attributes:
        build: `build_info`, for example `b1-571d0d5`.
        model: Path of the model file, as the server names it.
        ctx_per_slot: Context of one slot, in tokens.
        slots: Number of slots.
        chat_template: The Jinja text.
    """

    build: str | None = None
    model: str | None = None
    ctx_per_slot: int | None = None
    slots: int | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    content_type: str


class Stream:
    """
    An answer whose body comes piece by piece.

    Attributes:
        status: HTTP status.
        headers: Header pairs as the upstream sent them.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: list[tuple[bytes, bytes]] = list(response.headers.raw)

    async def pieces(self) -> AsyncIterator[bytes]:
        """
        The body's bytes as they come, not decoded.

        Raises:
            UpstreamError: The connection broke before the body's end.
        """
        try:
            async for piece in self._response.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            raise UpstreamError(_said(error), reached=True) from error


class Upstream:
    """One llama-server, by its base URL."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._base = httpx.URL(url)
        self._auth = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close whatever is open."""
        await self._client.aclose()

    @asynccontextmanager
    async def open(self, method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Stream]:
        """
        Send a request and hold its answer open; leaving the block closes the connection.

        Args:
            method: HTTP method.
            target: Path and query, as the client sent them.
            headers: Header pairs; `host` and `content-length` are made here.
            body: The body; empty for none.

        Raises:
            UpstreamError: No connection, or it broke before the answer's head.
        """
        try:
            response = await self._client.send(self._request(method, target, headers, body), stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _not_reached(error) from error
        except httpx.HTTPError as error:
            raise UpstreamError(_said(error), reached=True) from error
        try:
            yield Stream(response)
        finally:
            await response.aclose()

    async def request(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, timeout_s: float | None = None
    ) -> Answer:
        """
        Send a request of our own, with our key, and read the whole answer.

        Args:
            method: HTTP method.
            path: Path and query.
            body: A JSON value, or None.
            raw: The body's bytes, instead of *body*.
            timeout_s: Limit for each read in seconds, None for no limit.

        Raises:
            UpstreamError: No connection, it broke, or it took too long.
        """
        content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        headers = [*self._auth, (b"accept-encoding", b"identity")]
        if content:
            headers.append((b"content-type", b"application/json"))
        request = self._request(method, path.encode(), headers, content)
        request.extensions["timeout"] = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S).as_dict()
        try:
            response = await self._client.send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _not_reached(error) from error
        except httpx.HTTPError as error:
            raise UpstreamError(_said(error), reached=True) from error
        return Answer(response.status_code, response.content, response.headers.get("content-type", ""))

    async def health(self) -> Health:
        """Ask `/health`; never raises."""
        try:
            answer = await self.request("GET", "/health", timeout_s=PROBE_TIMEOUT_S)
        except UpstreamError as error:
            if error.out_of_descriptors:
                return Health.UNASKED
            return Health.ERROR if error.reached else Health.REFUSED
        if answer.status == 200:
            return Health.OK
        return Health.LOADING if answer.status == 503 else Health.ERROR

    async def props(self) -> Props:
        """
        Ask `/props`.

        Raises:
            UpstreamError: No answer, or not that of a llama-server.
        """
        answer = await self.request("GET", "/props", timeout_s=PROBE_TIMEOUT_S)
        data = _object(answer.body)
        if answer.status != 200 or data is None:
            raise UpstreamError(f"/props answered {answer.status}", reached=True)
        settings = data.get("default_generation_settings")
        return Props(
            build=_text(data.get("build_info")),
            model=_text(data.get("model_path")),
            ctx_per_slot=_whole(settings.get("n_ctx")) if isinstance(settings, dict) else None,
            slots=_whole(data.get("total_slots")),
            chat_template=_text(data.get("chat_template")),
        )

    def _request(self, method: str, target: bytes, headers: Headers, body: bytes) -> httpx.Request:
        pairs = [(b"host", self._base.netloc), *headers]
        if not body and method in {"POST", "PUT", "PATCH"}:
            pairs.append((b"content-length", b"0"))  # httpx leaves it out for an empty body; some servers wait then
        # Built directly: a client's own request() would add headers of its own.
        request = httpx.Request(method, self._base, headers=pairs, content=body or None)
        # As a URL the target would be rewritten: dot segments folded, odd characters escaped, long ones refused.
        request.extensions["target"] = target
        request.extensions["timeout"] = self._client.timeout.as_dict()
        return request


_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (httpx.ConnectTimeout, "the connection timed out"),
    (httpx.TimeoutException, "no answer in time"),
    (httpx.ConnectError, "connection refused"),
    (httpx.ReadError, "the connection closed before the answer was complete"),
    (httpx.WriteError, "the connection closed before the request was sent"),
    (httpx.NetworkError, "the connection closed"),
    (httpx.ProtocolError, "the answer is not valid HTTP, or incomplete"),
)
"""What the library's errors mean that have no words of their own, the special before the general."""


def _not_reached(error: Exception) -> UpstreamError:
    if out_of_descriptors(error):
        text = "kvstack is out of file descriptors"
        return UpstreamError(text, reached=False, out_of_descriptors=True)
    return UpstreamError(_said(error), reached=False)


def _said(error: Exception) -> str:
    words = next((text for kind, text in _WORDS if isinstance(error, kind)), "the exchange failed")
    return str(error) or words


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        data: Any = json.loads(body)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
