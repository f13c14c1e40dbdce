"""
The warm-up's better form: evaluates exactly the prefix, saves it, and restores it at later starts.

A restored slot has no checkpoint of its own, so the first request makes its first one where it starts: at the prefix's
end, where every later conversation finds it.  That holds for one that was saved a moment ago too, so it is restored
in the same process as well.  The server's word for a restore proves nothing: `kvstack.warmup.validation` waits for an
answer.

From the moment that a server is asked to do any of this until its first answer to a client, a snapshot is *on trial*:
if the server dies in that time, the snapshot goes, and this stack makes no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Literal

from kvstack.llama.model.memory import MIB
from kvstack.prompt.request.apis import can_be_rendered
from kvstack.prompt.warmup_request import WarmupRequest
from kvstack.state.events import WarmupEnded
from kvstack.upstream import Props, Upstream
from kvstack.warmup.identity import FileStamp, SnapshotNote, conversation_bytes, snapshot_bytes
from kvstack.warmup.pause import Pause
from kvstack.warmup.prefix import NoSnapshot, Prefix, WarmupContext, find_prefix, server_files
from kvstack.warmup.store import DamagedSnapshot, SnapshotFiles

PUSH_PROMPT = "zz"
"""Too short to be like anything: the server moves what its slot holds to the host prompt cache."""


class PrefixSnapshots:
    """
    The snapshots of one stack's prefix.

    Args:
        context: What is known of the stack.
        upstream: The server.
        props: What the running server says of itself.
        pause: Holds clients back, and knows which conversations have a slot.
        warn: Tells a person of a snapshot that was lost.

    Attributes:
        prefix: The one that the last warm-up put into the slot; None if it was none of these.
    """

    def __init__(
        self,
        context: WarmupContext,
        upstream: Upstream,
        props: Callable[[], Props],
        pause: Pause,
        warn: Callable[[str], None],
    ) -> None:
        self.prefix: Prefix | None = None
        self._context = context
        self._upstream = upstream
        self._props = props
        self._pause = pause
        self._warn = warn
        self._server_files: tuple[FileStamp, ...] = ()
        self._on_trial: Prefix | None = None
        self._failed = ""
        self._files: SnapshotFiles | None = None
        if context.snapshot_dir is not None:
            limit_bytes = context.facts.config.warmup.snapshots_max_mib * MIB
            self._files = SnapshotFiles(context.snapshot_dir, limit_bytes)

    def server_started(self) -> None:
        """Note what the server is started from."""
        self.prefix = self._on_trial = None
        self._server_files = server_files(self._context.facts)

    async def warm_up(self, request: WarmupRequest, head_fingerprint: str | None = None) -> WarmupEnded:
        """
        Put the prefix into slot 0.

        Args:
            request: The warm-up request after the rules.
            head_fingerprint: Digest of its system texts and tools.

        Raises:
            NoSnapshot: Not this time; the chat form is to be used.
            UpstreamError: The server is gone.
        """
        begun = time.monotonic()
        self.prefix = None
        files = self._files
        if files is None:
            raise NoSnapshot(self._context.no_snapshot)
        if self._failed:
            raise NoSnapshot(self._failed)
        prefix = await find_prefix(self._upstream, request, self._context.facts, self._props(), self._server_files)
        if self._pause.is_taken():
            number = self._find_conversation(head_fingerprint)
            if number is not None:
                return _ended(begun, prefix, detail=f"request {number} began with it, so it is in the cache already")
            await self._check_push()
        evaluated = 0
        restored = await self._restore(files, prefix)
        if not restored:
            evaluated = await self._make(files, prefix)
        self.prefix = prefix
        return _ended(begun, prefix, evaluated, "restored" if restored else "saved")

    def answered(self) -> None:
        """A client has an answer: what the server does from now on is no snapshot's fault."""
        self._on_trial = None

    def fail(self, prefix: Prefix, reason: str) -> None:
        """Remove a snapshot that failed; this stack makes no others, the next one does."""
        self.prefix = self._on_trial = None
        self._failed = reason
        if self._files is not None:
            self._files.remove(prefix.name)

    def on_death(self) -> str | None:
        """
        The server has died: remove the snapshot that was on trial.

        Returns:
            What happened, for a person; None if there was none.
        """
        prefix = self._on_trial
        if prefix is None:
            return None
        reason = "llama-server died after it was given a prefix snapshot, before its first answer"
        self.fail(prefix, reason)
        return reason

    # A conversation in the slot

    def _find_conversation(self, head_fingerprint: str | None) -> int | None:
        """
        Which request of a conversation in a slot begins with the prefix.

        To fill the slot would be of no use then, and cost that conversation all that stands behind the prefix: with the
        prefix in its slot the server does not look into the host prompt cache.
        """
        for conversation in self._pause.conversations():
            number, path = conversation.request, conversation.path
            if not can_be_rendered(path):
                raise NoSnapshot(f"it is not known whether request {number} ({path}) begins with the prefix")
            if head_fingerprint is not None and conversation.head_fingerprint == head_fingerprint:
                return number
        return None

    async def _check_push(self) -> None:
        """Whether the conversation in the slot would survive in the host prompt cache."""
        shape, settings = self._context.facts.shape, self._context.facts.settings
        assert shape is not None
        if self._context.facts.config.server.parallel > 1:
            raise NoSnapshot("there are conversations in several slots")
        if settings.cache_ram_bytes == 0:
            raise NoSnapshot("the conversation in the slot would be lost: the host prompt cache is off (--cache-ram)")
        answer = await self._upstream.request("GET", "/slots")
        try:
            tokens = int(json.loads(answer.body)[0]["n_prompt_tokens"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise NoSnapshot("the server does not report the size of the conversation in the slot") from None
        needed = conversation_bytes(shape, tokens, settings.key_type, settings.value_type, settings.checkpoints)
        if 0 < settings.cache_ram_bytes < needed:
            raise NoSnapshot(
                f"the conversation in the slot ({tokens:,} tokens, up to {needed // MIB:,} MiB) is larger than the "
                f"host prompt cache ({settings.cache_ram_bytes // MIB:,} MiB)"
            )

    async def _push(self) -> None:
        """Let the server move the conversation in its slot to the host prompt cache: a restore would overwrite it."""
        if not self._pause.is_taken():
            return
        # Without id_slot: a pinned request skips that cache.
        prompt, evaluated = await self._evaluate({"prompt": PUSH_PROMPT})
        self._pause.step(prompt, evaluated)

    # The slot and the file

    async def _restore(self, files: SnapshotFiles, prefix: Prefix) -> bool:
        try:
            note = await asyncio.to_thread(files.check, prefix.name, len(prefix.tokens))
        except DamagedSnapshot as error:
            self._tell_lost(files, prefix, f"was damaged: {error}")
            return False
        if note is None:
            return False
        async with self._pause.quiet() as quiet:
            if not quiet:
                raise NoSnapshot("a request is being served")
            await self._push()
            if not files.take(prefix.name):
                return False
            self._on_trial = prefix
            try:
                said = await self._slot("restore", files.file_name(prefix.name))
            except (asyncio.CancelledError, NoSnapshot):
                files.give_back(prefix.name, note)  # a stop in this moment; if the server died, `on_death` removes it
                raise
            if _is_restored(said, note):
                files.give_back(prefix.name, note)
                return True
            files.remove(prefix.name)
            self._tell_lost(files, prefix, f"could not be used: {said.get('error') or 'the server read another one'}")
            if "error" not in said:
                await self._slot("erase", "")  # nobody knows what it has put there
            return False

    def _tell_lost(self, files: SnapshotFiles, prefix: Prefix, why: str) -> None:
        path = files.directory / files.file_name(prefix.name)
        self._warn(f"The prefix snapshot {path} {why}. It was removed, and the prefix is evaluated again")

    async def _make(self, files: SnapshotFiles, prefix: Prefix) -> int:
        """Evaluate the prefix, save it, and restore it; say how many tokens were evaluated."""
        shape, settings = self._context.facts.shape, self._context.facts.settings
        assert shape is not None
        size = snapshot_bytes(shape, len(prefix.tokens), settings.key_type, settings.value_type)
        if size > files.limit_bytes:
            raise NoSnapshot(f"it would take {size // MIB:,} MiB, more than warmup.snapshots_max_mib")
        if not files.has_room(size):
            raise NoSnapshot(f"there is no room for {size // MIB:,} MiB in {files.directory}")
        self._on_trial = prefix
        request: dict[str, Any] = {"prompt": list(prefix.tokens)}
        if self._pause.is_taken():
            async with self._pause.quiet() as quiet:
                if not quiet:
                    raise NoSnapshot("a request is being served")
                await self._push()
        else:
            request["id_slot"] = 0
        prompt, evaluated = await self._evaluate(request)
        self._pause.step(prompt, evaluated)
        if prompt != len(prefix.tokens):
            raise NoSnapshot(f"the server evaluated {prompt:,} tokens instead of {len(prefix.tokens):,}")
        async with self._pause.quiet() as quiet:
            if not quiet:
                raise NoSnapshot("a request arrived in between")
            await self._save(files, prefix)
            await asyncio.to_thread(files.tidy, prefix.name)
        return evaluated

    async def _save(self, files: SnapshotFiles, prefix: Prefix) -> None:
        try:
            draft = files.begin(prefix.name)
        except OSError as error:
            raise NoSnapshot(f"{files.directory}: {error.strerror or error}") from None
        try:
            self._on_trial = prefix
            said = await self._slot("save", draft)
            if said.get("n_saved") != len(prefix.tokens):
                raise NoSnapshot(said.get("error") or "a request arrived in between")
            written = said.get("n_written")
            size = written if isinstance(written, int) else 0
            note = await asyncio.to_thread(files.accept, draft, prefix.name, len(prefix.tokens), size)
        finally:
            files.drop(draft)
        if note is None:
            raise NoSnapshot(f"it could not be written completely to {files.directory}")
        said = await self._slot("restore", files.file_name(prefix.name))
        if not _is_restored(said, note):
            files.remove(prefix.name)
            if "error" not in said:
                await self._slot("erase", "")
            raise NoSnapshot(said.get("error") or "the server did not restore what it had saved")
        files.give_back(prefix.name, note)

    async def _slot(self, action: str, file_name: str) -> dict[str, Any]:
        """What the server says; an error as its text at `error`."""
        answer = await self._upstream.request("POST", f"/slots/0?action={action}", {"filename": file_name})
        if answer.status == 503:  # it was started again meanwhile: that says nothing of the file
            raise NoSnapshot("the server is loading")
        with contextlib.suppress(ValueError):
            data: Any = json.loads(answer.body)
            if isinstance(data, dict):
                error = data.get("error")
                if answer.status == 200 and error is None:
                    return data
                if isinstance(error, dict) and isinstance(error.get("message"), str):
                    return {"error": f"the server does not {action} it: {error['message']}"}
        return {"error": f"the server does not {action} it: HTTP {answer.status}"}

    async def _evaluate(self, request: dict[str, Any]) -> tuple[int, int]:
        """Evaluate a prompt; give its tokens, and how many of them were evaluated."""
        body = {**request, "n_predict": 0, "cache_prompt": True, "stream": False}
        answer = await self._upstream.request("POST", "/completion", body)
        try:
            timings = json.loads(answer.body)["timings"]
            evaluated = int(timings["prompt_n"])
            return evaluated + int(timings["cache_n"]), evaluated
        except (ValueError, KeyError, TypeError):
            raise NoSnapshot(f"the server does not evaluate a raw prompt: HTTP {answer.status}") from None


def _is_restored(said: dict[str, Any], note: SnapshotNote) -> bool:
    return (said.get("n_restored"), said.get("n_read")) == (note.tokens, note.size_bytes)


def _ended(
    begun: float,
    prefix: Prefix,
    evaluated_tokens: int = 0,
    snapshot: Literal["saved", "restored"] | None = None,
    detail: str = "",
) -> WarmupEnded:
    return WarmupEnded(
        time.time(),
        "done",
        len(prefix.tokens),
        evaluated_tokens,
        (time.monotonic() - begun) * 1000.0,
        detail,
        len(prefix.tokens),
        snapshot,
    )
