"""
The warm-up: sends the known prefix through the rules that traffic goes through, and says what it cost.

Where it can, `kvstack.warmup.snapshots` restores or makes a prefix snapshot; else the chat form is sent: a client's
request cut down to the prefix and a short user text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from kvstack.llama.response import AnswerTap
from kvstack.prompt.engine import RewriteResult
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.warmup_request import WarmupRequest, with_user_text
from kvstack.state.events import WarmupEnded
from kvstack.upstream import Upstream, UpstreamError
from kvstack.warmup.prefix import NoSnapshot
from kvstack.warmup.snapshots import PrefixSnapshots

DEFAULT_UBATCH_TOKENS = 512
SPARE_TOKENS = 64


class Warmer:
    """
    Warms one upstream.

    Args:
        upstream: The llama-server.
        rewrite: Applies the rules: body, path, header pairs.
        request: What to evaluate, before the rules; None if no prefix is known.
        long_user_text: Whether to put a user text of more than one batch behind the prefix.  A model that rewinds to
            checkpoints keeps the first one of a prompt for good; behind a long user text that one lies exactly at the
            end of system text and tools, behind a short one a batch before it.
        ubatch_tokens: The server's physical batch.
        snapshots: Tried first, where they are wanted.
    """

    def __init__(
        self,
        upstream: Upstream,
        rewrite: Callable[[bytes, str, list[tuple[str, str]]], RewriteResult],
        request: WarmupRequest | None,
        *,
        long_user_text: bool = False,
        ubatch_tokens: int | None = None,
        snapshots: PrefixSnapshots | None = None,
    ) -> None:
        self._upstream = upstream
        self._rewrite = rewrite
        self._request = request
        self._snapshots = snapshots
        self._long_user_text = long_user_text
        self._filler_tokens = (ubatch_tokens or DEFAULT_UBATCH_TOKENS) + SPARE_TOKENS

    async def warm_up(self) -> WarmupEnded:
        """Evaluate the prefix; never raises."""
        request = self._request
        if request is None:
            return WarmupEnded(time.time(), "no prefix known")
        begun = time.monotonic()
        try:
            # Through the rules that traffic goes through: only the same bytes are the same prefix.
            rewritten = self._rewrite(request.body, request.path, list(request.headers))
            head = rewritten.head_fingerprint
            why_chat_form = ""
            if self._snapshots is not None:
                try:
                    ended = await self._snapshots.warm_up(replace(request, body=rewritten.body), head)
                    return replace(ended, head_fingerprint=head)
                except NoSnapshot as error:
                    why_chat_form = f"no snapshot: {error}" if str(error) else ""
            return replace(await self._send_chat_form(request, begun, why_chat_form), head_fingerprint=head)
        except UpstreamError as error:
            return WarmupEnded(time.time(), "failed", detail=str(error))

    async def _send_chat_form(self, request: WarmupRequest, begun: float, why: str) -> WarmupEnded:
        if self._long_user_text:
            request = with_user_text(request, await self._filler())
        rewritten = self._rewrite(request.body, request.path, list(request.headers))
        answer = await self._upstream.request("POST", request.path, raw=rewritten.body)
        duration_ms = (time.monotonic() - begun) * 1000.0
        if answer.status != 200:
            text = answer.body[:300].decode("utf-8", "replace")
            return WarmupEnded(time.time(), "failed", detail=f"HTTP {answer.status}: {text}", duration_ms=duration_ms)
        tap = AnswerTap(0, rewritten.api, answer.content_type)
        tap.feed(answer.body)
        facts = tap.result()
        boundary = await self._boundary(request, rewritten.body)
        return WarmupEnded(
            time.time(), "done", facts.prompt_tokens, facts.evaluated_tokens, duration_ms, why, boundary_tokens=boundary
        )

    async def _filler(self) -> str:
        """A text of as many tokens as are wanted, or a little more; counted by the server's own tokenizer."""
        numbers = [str(number % 10) for number in range(self._filler_tokens)]
        count = await self._count(" ".join(numbers)) or 0
        if count > self._filler_tokens:  # a digit and its space may be a token each
            numbers = numbers[: len(numbers) * self._filler_tokens // count + 1]
        return " ".join(numbers)

    async def _boundary(self, request: WarmupRequest, body: bytes) -> int | None:
        """
        Where the prefix ends, in tokens: what two renderings with different user texts have in common.

        None where that cannot be asked: `/apply-template` takes chat completions only.
        """
        if not can_be_rendered(request.path):
            return None
        prompts: list[str] = []
        try:
            for text in ("0", "1"):
                other = with_user_text(WarmupRequest(request.path, body), text)
                answer = await self._upstream.request("POST", "/apply-template", raw=other.body)
                prompts.append(json.loads(answer.body)["prompt"])
            return await self._count(_common_prefix(*prompts))
        except (UpstreamError, ValueError, KeyError, TypeError):
            return None

    async def _count(self, text: str) -> int | None:
        answer = await self._upstream.request(
            "POST", "/tokenize", {"content": text, "add_special": True, "parse_special": True}
        )
        try:
            return len(json.loads(answer.body)["tokens"])
        except (ValueError, KeyError, TypeError):
            return None


def _common_prefix(one: str, other: str) -> str:
    length = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one if length is None else one[:length]
