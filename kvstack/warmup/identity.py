"""
Prefix snapshots: an evaluated prefix as a file that a later llama-server restores instead of evaluating it.

The server believes whatever file it is given.  One of another model or cache type would fill the slot with nonsense
that no figure shows, so a snapshot's name is a digest of everything that its content depends on, and what has changed
has no snapshot.  Nor does it check a file's content: a shortened one ends some builds, and one with other bytes fills
the slot with nonsense, so length, time and a digest of the content are noted beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvstack.llama.command.capabilities import Capabilities, spelling
from kvstack.llama.command.reserved_flags import SECRET_FLAGS
from kvstack.llama.model.memory import CACHE_TYPE_BYTES, ModelShape

NAME_PREFIX = "kvstack-prefix-"
"""All files of ours in the directory begin so."""

SLACK_TOKENS = 4
"""A checkpoint may lie so much before the end of what it was made for."""

FORMAT = 1
TOKEN_BYTES = 16
"""Of each token besides K and V: its id, its position, and whose it is."""

# What listens, logs, counts, shows, or says how fast and where from: none of it changes what a cache holds.
_FLAGS_WITHOUT_EFFECT = (
    "--host",
    "--port",
    "--api-key",
    "--api-key-file",
    "--metrics",
    "--slots",
    "--props",
    "--timeout",
    "--threads-http",
    "--alias",
    "--webui",
    "--no-webui",
    "--ui",
    "--no-ui",
    "--verbosity",
    "--log-file",
    "--log-colors",
    "--log-prefix",
    "--no-log-prefix",
    "--log-timestamps",
    "--no-log-timestamps",
    "--log-jsonl",
    "--slot-save-path",
    "--cache-prompt",
    "--cache-ram",
    "--ctx-checkpoints",
    "--checkpoint-min-step",
    "--slot-prompt-similarity",
    "--sse-ping-interval",
    "--cors-origins",
    "--threads",
    "--threads-batch",
    "--load-mode",
    "--mmap",
    "--no-mmap",
    "--mlock",
    "--direct-io",
    "--warmup",
    "--no-warmup",
    "--prio",
    "--prio-batch",
    "--sleep-idle-seconds",
)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """
    One file as it was.

    Attributes:
        path: Where.
        size_bytes: Its length.
        modified_ns: When it was written, in nanoseconds since the epoch.
    """

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Identity:
    """
    Everything that the content of a snapshot depends on.

    Attributes:
        files: The model, all parts; the server and its libraries; whatever else its arguments name.
        arguments: The server's, without those that change nothing.
        env: The variables that the config sets.
        builds: What the binary and the running server call themselves.
        ctx_per_slot: Context of one slot, as the running server says.
        slots: Number of slots, as it says.
        chat_template: Its template.
        tokens: The prefix.
    """

    files: tuple[FileStamp, ...]
    arguments: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    builds: tuple[str | None, ...]
    ctx_per_slot: int | None
    slots: int | None
    chat_template: str | None
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """The snapshot's name, without an ending."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return NAME_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SnapshotNote:
    """
    What is noted beside a snapshot: one without a note, or that is not as noted, is not restored.

    Attributes:
        tokens: How many the prefix has.
        size_bytes: Length of the file.
        modified_ns: When it was written, in nanoseconds since the epoch.
        digest: Of its content.
    """

    tokens: int
    size_bytes: int
    modified_ns: int
    digest: str

    def to_json(self) -> str:
        """The note's text."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SnapshotNote | None:
        """Read a note's text; None if it is none."""
        try:
            data: Any = json.loads(text)
            values = {field.name: data[field.name] for field in fields(cls)}
        except (ValueError, KeyError, TypeError):
            return None
        is_whole = all(type(values[name]) is int for name in ("tokens", "size_bytes", "modified_ns"))
        return cls(**values) if is_whole and isinstance(values["digest"], str) else None


def arguments_that_matter(argv: Sequence[str], capabilities: Capabilities) -> tuple[str, ...]:
    """
    A server's arguments without those that leave the content of its cache alone, and without secrets.

    Args:
        argv: The command, the program first.
        capabilities: Of the binary.
    """
    passed_over = {
        name
        for flag in (*_FLAGS_WITHOUT_EFFECT, *SECRET_FLAGS)
        if (option := capabilities.option(flag)) is not None
        for name in option.names
    }
    kept: list[str] = []
    items = list(argv[1:])
    position = 0
    while position < len(items):
        name = spelling(items[position])
        option = capabilities.option(name)
        length = 2 if option is not None and option.takes_value else 1
        if name not in passed_over:
            kept += items[position : position + length]
        position += length
    return tuple(kept)


def snapshot_bytes(shape: ModelShape, tokens: int, key_type: str, value_type: str) -> int:
    """
    How large a snapshot will be: the attention's K and V of each token, and one recurrent state.

    Args:
        shape: Of the model.
        tokens: Of the prefix.
        key_type: `--cache-type-k`.
        value_type: `--cache-type-v`.
    """
    keys, values = shape.full_values_per_token
    per_token = keys * CACHE_TYPE_BYTES.get(key_type, 4.0) + values * CACHE_TYPE_BYTES.get(value_type, 4.0)
    return int((per_token + TOKEN_BYTES) * tokens) + shape.state_bytes


def conversation_bytes(shape: ModelShape, tokens: int, key_type: str, value_type: str, checkpoints: int) -> int:
    """
    What the host prompt cache needs at most to take a conversation: its state, and a full list of checkpoints.

    Args:
        shape: Of the model.
        tokens: Of the conversation.
        key_type: `--cache-type-k`.
        value_type: `--cache-type-v`.
        checkpoints: `--ctx-checkpoints`.
    """
    listed = shape.state_bytes * checkpoints if shape.needs_checkpoints else 0
    return snapshot_bytes(shape, tokens, key_type, value_type) + listed


def holds(cached_tokens: int, boundary_tokens: int) -> bool:
    """
    Whether an answer proves a restored prefix.

    Args:
        cached_tokens: What the server did not evaluate again.
        boundary_tokens: Length of the prefix.
    """
    return cached_tokens >= boundary_tokens - SLACK_TOKENS
