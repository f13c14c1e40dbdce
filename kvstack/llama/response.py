"""
What an answer says of itself: incremental reading of a response body, streamed or not, in every dialect.

| source | cached | evaluated | where |
| --- | --- | --- | --- |
| `timings` | `cache_n` | `prompt_n` | chat and completion always; responses streamed, beside `response` |
| chat usage | `prompt_tokens_details.cached_tokens` | `prompt_tokens` minus cached | last chunk, if asked for |
| messages usage | `cache_read_input_tokens` | `input_tokens`, which excludes them | `message_start`, `message_delta` |
| responses usage | `input_tokens_details.cached_tokens` | `input_tokens` minus cached | `response.completed` |
| `prompt_progress` | `cache` | `total` minus cache | first chunks, if asked for; counts when nothing better comes |

Each API is one record in `_APIS`; `timings` and `prompt_progress` are llama-server's own and the same in all of them.

A tap sits beside the bytes that go to the client: it never raises, and its memory is bounded.  Of an event or body
that is too long only the end is read, where the servers write `usage` and `timings`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvstack.state.events import AnswerSeen

_HEAD_BYTES = 1 << 20
"""An event or a body up to this length is parsed as a whole."""

_TAIL_BYTES = 1 << 16
"""Of a longer one this much of its end is searched."""

_ERROR_KEPT = 500

_LINE_END = re.compile(rb"\r\n|\r|\n")
_FIGURES = re.compile(r'"(usage|timings)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class _Api:
    """
    How the answers of one API say what was cached.

    Attributes:
        prompt: Key of the prompt's tokens in `usage`.
        cached: Key of the cached tokens, behind the key of their table if they are in one.
        generated: Key of the answer's tokens.
        says_token: Whether an event of a stream holds a token of the answer.
        is_last: Whether an event is the last one of a stream; `[DONE]` always is.
        wrapper: Key of the object that holds `usage` and `error` in some events.
        excludes_cached: Whether the prompt's tokens exclude the cached ones.
    """

    prompt: str
    cached: tuple[str, ...]
    generated: str
    says_token: Callable[[dict[str, Any]], bool]
    is_last: Callable[[dict[str, Any]], bool] = lambda event: False
    wrapper: str = ""
    excludes_cached: bool = False


def _choice_says_token(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    return isinstance(choices, list) and any(
        # The first chunk only names the role.
        bool(choice.get("text")) or any(part for key, part in _table(choice, "delta").items() if key != "role")
        for choice in choices
        if isinstance(choice, dict)
    )


def _content_says_token(event: dict[str, Any]) -> bool:
    return bool(event.get("content") or event.get("tokens")) or _choice_says_token(event)


def _named_delta(event: dict[str, Any]) -> bool:
    kind = event.get("type")
    return isinstance(kind, str) and kind.endswith((".delta", "_delta")) and kind != "message_delta"


_CHAT = _Api("prompt_tokens", ("prompt_tokens_details", "cached_tokens"), "completion_tokens", _choice_says_token)

_APIS = {
    "chat": _CHAT,
    # `/completion` answers in llama-server's own form, `/v1/completions` in that of OpenAI.
    "completion": replace(_CHAT, says_token=_content_says_token, is_last=lambda event: event.get("stop") is True),
    "responses": _Api(
        "input_tokens",
        ("input_tokens_details", "cached_tokens"),
        "output_tokens",
        _named_delta,
        lambda event: event.get("type") in {"response.completed", "response.incomplete", "response.failed"},
        wrapper="response",
    ),
    "messages": _Api(
        "input_tokens",
        ("cache_read_input_tokens",),
        "output_tokens",
        _named_delta,
        lambda event: event.get("type") == "message_stop",
        wrapper="message",
        excludes_cached=True,
    ),
}


class _Bytes:
    """A buffer that keeps everything up to a length, and beyond it only the end."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.cut = False

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > (_HEAD_BYTES if not self.cut else 2 * _TAIL_BYTES):
            self.cut = True
            del self._data[:-_TAIL_BYTES]

    def take(self) -> tuple[bytes, bool]:
        data, cut = bytes(self._data), self.cut
        self._data.clear()
        self.cut = False
        return data, cut

    def __len__(self) -> int:
        return len(self._data)


class AnswerTap:
    """
    Reader of one answer.

    Attributes:
        started: Whether the first token of a stream came; pings, comments and prefill progress do not count.  Of an
            answer in one piece nobody can tell.
        is_whole: Whether the last event of a stream came; whether its line ends came does not matter.  Known with the
            result.
    """

    def __init__(self, id: int, api: str | None, content_type: str) -> None:
        self.started = False
        self.is_whole = False
        self._id = id
        self._api = _APIS.get(api or "", _CHAT)
        self._stream = "event-stream" in content_type.lower()
        self._readable = self._stream or "json" in content_type.lower() or not content_type
        self._line = _Bytes()
        self._after_cr = False
        self._event = _Bytes()
        self._event_has_data = False
        self._body = _Bytes()
        self._closed = False
        self._timings: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._progress: dict[str, Any] = {}
        self._error: str | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if not data or self._closed:
            return
        if not self._stream:
            if self._readable:
                self._body.add(data)
            return
        if self._after_cr:
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
                if not data:
                    return
        pieces = data.split(b"\n") if b"\r" not in data else _LINE_END.split(data)
        self._after_cr = data[-1:] == b"\r"
        for piece in pieces[:-1]:
            self._line.add(piece)
            self._end_line()
        self._line.add(pieces[-1])

    def result(self) -> AnswerSeen:
        """What the answer said, as far as it came."""
        self._close()
        timings, usage, api = self._timings, self._usage, self._api
        *tables, key = api.cached
        cached = _count(_table(usage, tables[0]) if tables else usage, key)
        prompt, evaluated = _count(usage, api.prompt), None
        if api.excludes_cached and prompt is not None and cached is not None:
            prompt, evaluated = prompt + cached, prompt
        # `timings` are the server's own figures and win over the dialect's usage.
        evaluated = _first(_count(timings, "prompt_n"), evaluated)
        cached = _first(_count(timings, "cache_n"), cached)
        if "cache_n" in timings and cached is not None and evaluated is not None:
            prompt = cached + evaluated
        if prompt is None and not timings and self._progress:
            prompt = _count(self._progress, "total")
            cached = _count(self._progress, "cache")
        if evaluated is None and prompt is not None and cached is not None:
            evaluated = max(prompt - cached, 0)
        if cached is None and prompt is not None and evaluated is not None:
            cached = max(prompt - evaluated, 0)
        if prompt is None and cached is not None and evaluated is not None:
            prompt = cached + evaluated
        return AnswerSeen(
            id=self._id,
            prompt_tokens=prompt,
            cached_tokens=cached,
            evaluated_tokens=evaluated,
            generated_tokens=_first(_count(timings, "predicted_n"), _count(usage, api.generated)),
            prefill_ms=_amount(timings, "prompt_ms"),
            decode_ms=_amount(timings, "predicted_ms"),
            decode_tokens_per_s=_amount(timings, "predicted_per_second"),
            error=self._error,
        )

    # --- server-sent events ----------------------------------------------------------------------------------------

    def _end_line(self) -> None:
        line, cut = self._line.take()
        if cut:
            # The field name is gone; only a data line can be so long.
            self._event_data(line, cut=True)
            return
        if not line:
            self._end_event()
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name.removeprefix(b"\xef\xbb\xbf") == b"data":
            self._event_data(value, cut=False)
        elif name == b"error":
            self._object(value)  # llama-server up to 2025 wrote errors in a field of their own

    def _event_data(self, value: bytes, *, cut: bool) -> None:
        if self._event_has_data:
            self._event.add(b"\n")
        self._event.add(value)
        self._event.cut = self._event.cut or cut
        self._event_has_data = True

    def _end_event(self) -> None:
        if not self._event_has_data:
            return
        self._event_has_data = False
        data, cut = self._event.take()
        if data == b"[DONE]":
            self.is_whole = True
        else:
            self._object(data, cut=cut)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._stream:
            # A stream may end without the blank line; half an event does no harm, it is no JSON.
            if len(self._line):
                self._end_line()
            self._end_event()
        else:
            data, cut = self._body.take()
            self._object(data, cut=cut)

    # --- what an object says ---------------------------------------------------------------------------------------

    def _object(self, data: bytes, *, cut: bool = False) -> None:
        text = data.decode("utf-8", errors="replace")
        if cut:
            self.started = self.started or self._stream
            self._search(text)
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(value, list):  # `/completion` with several prompts
            value = value[0] if value else None
        if isinstance(value, dict):
            self._take(value)

    def _search(self, text: str) -> None:
        decoder = json.JSONDecoder()
        for match in _FIGURES.finditer(text):
            try:
                value, _ = decoder.raw_decode(text, match.end())
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                (self._usage if match.group(1) == "usage" else self._timings).update(value)

    def _take(self, value: dict[str, Any]) -> None:
        self._take_error(value)
        inner = _table(value, self._api.wrapper)
        self._take_error(inner)
        for source in (value, inner):
            usage = _table(source, "usage")
            self._usage.update({key: part for key, part in usage.items() if part is not None})
        progress = value.get("prompt_progress")
        if isinstance(progress, dict):
            # The timings beside it are left over from the request before (b10068).
            self._progress = progress
            return
        timings = value.get("timings")
        if isinstance(timings, dict):
            self._timings.update(timings)
        if self._stream:
            self.started = self.started or self._api.says_token(value)
            self.is_whole = self.is_whole or self._api.is_last(value)

    def _take_error(self, value: dict[str, Any]) -> None:
        error = value.get("error")
        if error is None and value.get("type") == "error":
            error = value  # responses: the event itself carries the message
        if isinstance(error, dict):
            text = error.get("message")
            error = text if isinstance(text, str) else _spell(error)
        if isinstance(error, str) and error:
            self._error = error[:_ERROR_KEPT]


def _spell(error: dict[str, Any]) -> str:
    try:
        return json.dumps(error)
    except RecursionError:  # it was read with a few frames less
        return "an error that is nested too deeply"


def _table(value: dict[str, Any], key: str) -> dict[str, Any]:
    part = value.get(key)
    return part if isinstance(part, dict) else {}


def _amount(value: dict[str, Any], key: str) -> float | None:
    part = value.get(key)
    if isinstance(part, bool) or not isinstance(part, int | float):
        return None
    try:
        amount = float(part)
    except OverflowError:
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None


def _count(value: dict[str, Any], key: str) -> int | None:
    amount = _amount(value, key)
    return None if amount is None else int(amount)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
