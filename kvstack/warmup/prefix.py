"""The exact prefix of a chat request, in the tokens of the running server, and the identity of its snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstack.doctor.facts import Facts
from kvstack.process.models import model_parts
from kvstack.prompt.warmup_request import Token, WarmupRequest, before_boundary, boundary, shared_tokens, with_user_text
from kvstack.upstream import Props, Upstream
from kvstack.warmup.identity import FileStamp, Identity, arguments_that_matter
from kvstack.warmup.store import stamp

_LIBRARIES = ("llama", "ggml")


class NoSnapshot(Exception):
    """Why there is no snapshot this time; the text is for a person."""


@dataclass(frozen=True, slots=True)
class WarmupContext:
    """
    What the warm-up needs to know of its stack.

    Attributes:
        facts: Config, command, binary and model.
        snapshot_dir: Where prefix snapshots are kept; None if there are none.
        no_snapshot: Why there are none; empty if they are not wanted.
    """

    facts: Facts
    snapshot_dir: Path | None = None
    no_snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """
    What is to be restored.

    Attributes:
        name: Of its snapshot.
        tokens: The prompt's beginning that all conversations share.
    """

    name: str
    tokens: tuple[int, ...]


async def find_prefix(
    upstream: Upstream, request: WarmupRequest, facts: Facts, props: Props, files: tuple[FileStamp, ...]
) -> Prefix:
    """
    Find the exact prefix of a chat request, and the name of its snapshot.

    Args:
        upstream: The server.
        request: After the rules.
        facts: What the server was started with.
        props: What it says of itself.
        files: What it was started from, as that was then.

    Raises:
        NoSnapshot: It has no such prefix, or the server cannot tell.
        UpstreamError: The server is gone.
    """
    rendering, other = [await render(upstream, request, text) for text in "01"]
    tokens = await tokenize(upstream, rendering)
    ids = [token.id for token in tokens]
    shared = shared_tokens(ids, await token_ids(upstream, other))
    special = {token.id for token in before_boundary(tokens, shared) if await _is_special(upstream, token)}
    shape = facts.shape
    end = boundary(tokens, shared, special, exact=shape is None or shape.needs_checkpoints)
    if end is None:
        raise NoSnapshot("the template does not mark the start of a user's turn with a special token")
    prefix = tuple(ids[:end])
    if await asyncio.to_thread(server_files, facts) != files:
        # The running server knows nothing of it, but the next one would take its snapshot for its own.
        raise NoSnapshot("the model or the llama-server has changed on the disk since it was started")
    return Prefix(_identity(facts, props, files, prefix).name, prefix)


async def _is_special(upstream: Upstream, token: Token) -> bool:
    """Whether a token is one that plain text cannot spell."""
    return await token_ids(upstream, token.text or "", as_text=True) != [token.id]


def _identity(facts: Facts, props: Props, files: tuple[FileStamp, ...], tokens: tuple[int, ...]) -> Identity:
    capabilities = facts.capabilities
    assert capabilities is not None
    return Identity(
        files=files,
        arguments=arguments_that_matter(facts.argv, capabilities),
        env=tuple(sorted(facts.config.server.env.items())),
        builds=(capabilities.build, capabilities.compiler, props.build),
        ctx_per_slot=props.ctx_per_slot,
        slots=props.slots,
        chat_template=props.chat_template,
        tokens=tokens,
    )


def server_files(facts: Facts) -> tuple[FileStamp, ...]:
    """What a server is started from, as it is now: program and libraries, model, files that its arguments name."""
    argv = facts.argv
    if not argv:
        return ()
    paths = [*_program_files(Path(argv[0])), *(Path(name) for item in argv[1:] for name in _names_in(item))]
    if facts.model is not None:
        paths += model_parts(Path(facts.model.path))
    stamps = {found for path in paths if (found := stamp(path)) is not None}
    return tuple(sorted(stamps, key=_by_path))


async def begins_with(upstream: Upstream, request: WarmupRequest, prefix: Prefix) -> bool:
    """
    Whether a chat request's prompt begins with the prefix, token for token, and may find it cached.

    Args:
        upstream: The server.
        request: As it was sent.
        prefix: What it may begin with.

    Raises:
        UpstreamError: The server is gone.
    """
    try:
        data: Any = json.loads(request.body)
        if data.get("cache_prompt") is False or data.get("lora"):
            return False  # it wants to be evaluated whole
        ids = await token_ids(upstream, await render(upstream, request))
    except (NoSnapshot, ValueError, AttributeError):
        return False
    return tuple(ids[: len(prefix.tokens)]) == prefix.tokens


async def render(upstream: Upstream, request: WarmupRequest, user_text: str | None = None) -> str:
    """
    What a chat request becomes by the server's template.

    Args:
        upstream: The server.
        request: A chat completion.
        user_text: In place of what the user says; None for the request as it is.

    Raises:
        NoSnapshot: The server cannot tell.
        UpstreamError: It is gone.
    """
    body = request.body if user_text is None else with_user_text(request, user_text).body
    answer = await upstream.request("POST", "/apply-template", raw=body)
    try:
        prompt = json.loads(answer.body)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise NoSnapshot(f"the server does not render the request: HTTP {answer.status}")
    return prompt


async def tokenize(upstream: Upstream, text: str) -> list[Token]:
    """
    The tokens of a prompt, as the server evaluates it.

    Raises:
        NoSnapshot: The server cannot tell.
        UpstreamError: It is gone.
    """
    items = await _tokenize(upstream, text, as_text=False, with_pieces=True)
    try:
        return [Token(int(item["id"]), item["piece"] if isinstance(item["piece"], str) else None) for item in items]
    except (KeyError, TypeError):
        raise NoSnapshot("the server does not return the text of its tokens") from None


async def token_ids(upstream: Upstream, text: str, *, as_text: bool = False) -> list[int]:
    """
    The ids alone.

    Args:
        upstream: The server.
        text: A prompt.
        as_text: Whether it is plain text, in which special tokens are but their letters.

    Raises:
        NoSnapshot: The server cannot tell.
        UpstreamError: It is gone.
    """
    return await _tokenize(upstream, text, as_text=as_text, with_pieces=False)


async def _tokenize(upstream: Upstream, text: str, *, as_text: bool, with_pieces: bool) -> list[Any]:
    question = {"content": text, "add_special": not as_text, "parse_special": not as_text, "with_pieces": with_pieces}
    answer = await upstream.request("POST", "/tokenize", question)
    try:
        items = json.loads(answer.body)["tokens"]
    except (ValueError, KeyError, TypeError):
        items = None
    if not isinstance(items, list):
        raise NoSnapshot(f"the server does not tokenize: HTTP {answer.status}")
    return items


def _program_files(program: Path) -> Iterator[Path]:
    """The binary, and the libraries beside it: those are replaced while it stays the same."""
    program = program.resolve()
    yield program
    with contextlib.suppress(OSError):
        for path in program.parent.iterdir():
            if any(mark in path.name.lower() for mark in _LIBRARIES):
                yield path


def _names_in(item: str) -> Iterator[str]:
    """What in an argument may be a file: `a.gguf`, `a.gguf,b.gguf`, `a.gguf:0.5`."""
    for part in {item, *item.split(",")}:
        yield part
        yield part.rpartition(":")[0]


def _by_path(found: FileStamp) -> str:
    return found.path
