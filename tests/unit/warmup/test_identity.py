"""Prefix snapshots, the pure part: where the prefix ends, what its identity is, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvstack.llama.command.capabilities import parse_capabilities
from kvstack.llama.model.memory import MIB, Kind, ModelShape
from kvstack.prompt.warmup_request import Token, before_boundary, boundary, shared_tokens
from kvstack.warmup.identity import (
    FileStamp,
    Identity,
    SnapshotNote,
    arguments_that_matter,
    conversation_bytes,
    holds,
    snapshot_bytes,
)

HELP = Path(__file__).parents[2] / "golden" / "help"

IDENTITY = Identity(
    files=(FileStamp("/m.gguf", 100, 5), FileStamp("/bin/llama-server", 7, 6)),
    arguments=("-m", "/m.gguf", "--ctx-size", "4096"),
    env=(("GGML_X", "1"),),
    builds=("b1-a", "gcc", "b1-a"),
    ctx_per_slot=4096,
    slots=1,
    chat_template="{{ x }}",
    tokens=(1, 2, 3),
)
QWEN = ModelShape("qwen3next", "", Kind.HYBRID, 48, 262144, (6144, 6144), state_bytes=79_036_416)

SPECIAL = "<s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST]".split()


def tokens_of(text: str) -> list[Token]:
    """Words as tokens; equal words have equal numbers."""
    return [Token(1 + sum(ord(mark) * 7**place for place, mark in enumerate(word)), word) for word in text.split(" ")]


def prefix_of(one: str, other: str, *, exact: bool = True) -> str | None:
    """The prefix of two renderings, as text."""
    first, second = tokens_of(one), tokens_of(other)
    shared = shared_tokens([token.id for token in first], [token.id for token in second])
    special = {token.id for token in before_boundary(first, shared) if token.text in SPECIAL}
    end = boundary(first, shared, special, exact=exact)
    return None if end is None else " ".join(token.text or "" for token in first[:end])


@pytest.mark.parametrize(
    ("rendering", "prefix"),
    [
        (
            "<|im_start|> system \n S <|im_end|> \n <|im_start|> user \n {} <|im_end|>",
            "<|im_start|> system \n S <|im_end|> \n",
        ),
        (
            "<s> <|start_header_id|> system <|end_header_id|> S <|start_header_id|> user <|end_header_id|> \n {}",
            "<s> <|start_header_id|> system <|end_header_id|> S",
        ),
        ("<s> S [INST] {} [/INST]", "<s> S"),
    ],
)
def test_the_prefix_ends_where_the_users_turn_begins(rendering: str, prefix: str) -> None:
    """Before its special token: servers make their checkpoints there, and nothing can merge across."""
    assert prefix_of(rendering.format("0"), rendering.format("1")) == prefix


def test_a_template_without_special_tokens_is_for_models_that_can_be_cut_anywhere() -> None:
    """One token goes back: it might merge with what another user says.  Checkpoints are never at such a place."""
    one, other = "### System: S ### User: 0", "### System: S ### User: 1"
    assert prefix_of(one, other, exact=False) == "### System: S ###"
    assert prefix_of(one, other, exact=True) is None


def test_a_system_text_inside_the_users_turn_is_not_cut_off() -> None:
    """The special token that begins the turn is far away then."""
    system = " ".join(f"w{number}" for number in range(40))
    one, other = f"<s> [INST] {system} 0", f"<s> [INST] {system} 1"
    assert prefix_of(one, other, exact=False) == f"<s> [INST] {system}".rpartition(" ")[0]
    assert prefix_of(one, other, exact=True) is None


def test_where_nothing_is_shared_there_is_no_prefix() -> None:
    """No system text, no tools: the user's turn is the first thing."""
    assert prefix_of("<|im_start|> user 0", "<|im_start|> user 1") is None
    assert prefix_of("0", "1", exact=False) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, files=(FileStamp("/m.gguf", 100, 6), IDENTITY.files[1])),
        replace(IDENTITY, files=(FileStamp("/m.gguf", 101, 5), IDENTITY.files[1])),
        replace(IDENTITY, files=(IDENTITY.files[0],)),
        replace(IDENTITY, arguments=(*IDENTITY.arguments, "--swa-full")),
        replace(IDENTITY, env=()),
        replace(IDENTITY, builds=("b1-a", "gcc", "b2-b")),
        replace(IDENTITY, ctx_per_slot=2048),
        replace(IDENTITY, slots=2),
        replace(IDENTITY, chat_template=None),
        replace(IDENTITY, tokens=(1, 2, 4)),
        replace(IDENTITY, tokens=(1, 2)),
    ],
)
def test_every_part_is_in_the_name(other: Identity) -> None:
    """What differs anywhere has another snapshot; the name is one that a server takes."""
    assert other.name != IDENTITY.name == replace(IDENTITY).name
    assert IDENTITY.name.startswith("kvstack-prefix-")
    assert IDENTITY.name.replace("-", "").isalnum()


@pytest.mark.parametrize("build", ["b10068", "b11434"])
def test_arguments_that_change_nothing_are_passed_over(build: str) -> None:
    """Ports, log, key, host memory; by any of their names, with their values."""
    capabilities = parse_capabilities("", (HELP / f"{build}.txt").read_text(), None)
    argv = (
        "llama-server --host 127.0.0.1 --port 1 -m /m.gguf --device Vulkan0 -ngl 99 -c 4096 -np 1 --cache-prompt "
        "--metrics -lv 4 -t 8 -ub 512 -ctk q8_0 -cram 512 -ctxcp 4 --slot-save-path /d --api-key secret "
        "--lora /l.gguf --swa-full --rope-scaling yarn --unknown x"
    )
    kept = "-m /m.gguf --device Vulkan0 -ngl 99 -c 4096 -np 1 -ub 512 -ctk q8_0 --lora /l.gguf --swa-full"
    assert arguments_that_matter(argv.split(), capabilities) == tuple(f"{kept} --rope-scaling yarn --unknown x".split())


def test_what_it_takes_on_the_disk() -> None:
    """24 KiB per token and 75 MiB of state; the host prompt cache needs the checkpoints besides."""
    size = snapshot_bytes(QWEN, 16_500, "f16", "f16")
    assert size == 16_500 * (24 * 1024 + 16) + 79_036_416
    assert size // MIB == 462
    assert snapshot_bytes(QWEN, 16_500, "q8_0", "q8_0") < 0.65 * size
    assert conversation_bytes(QWEN, 16_500, "f16", "f16", 32) == size + 32 * 79_036_416
    dense = replace(QWEN, kind=Kind.DENSE, state_bytes=0)
    assert conversation_bytes(dense, 10, "f16", "f16", 32) == snapshot_bytes(dense, 10, "f16", "f16")


def test_an_answer_proves_it_up_to_four_tokens() -> None:
    """A checkpoint may lie four tokens before the end."""
    assert holds(5480, 5480)
    assert holds(5476, 5480)
    assert holds(6000, 5480)
    assert not holds(5475, 5480)
    assert not holds(0, 5480)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"tokens": 1, "size_bytes": 2, "modified_ns": 3}',
        '{"tokens": 1, "size_bytes": "2", "modified_ns": 3, "digest": "4"}',
        '{"tokens": 1, "size_bytes": 2, "modified_ns": 3, "digest": 4}',
    ],
)
def test_what_is_no_note_is_none(text: str) -> None:
    """A note that was cut off is no note."""
    assert SnapshotNote.from_json(text) is None


def test_a_note_can_be_read_again() -> None:
    """Fields of a later kvstack are passed over."""
    note = SnapshotNote(1, 2, 1_700_000_000_123_456_789, "4")
    assert SnapshotNote.from_json(note.to_json()) == note
    text = '{"tokens": 1, "size_bytes": 2, "modified_ns": 3, "digest": "4", "x": 5}'
    assert SnapshotNote.from_json(text) == SnapshotNote(1, 2, 3, "4")
