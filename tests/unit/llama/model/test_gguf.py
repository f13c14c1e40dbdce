"""The reader of a model file's header."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstack.llama.model import gguf as gguf_module
from kvstack.llama.model.gguf import GgufArray, GgufError, read_header
from kvstack.llama.model.memory import Kind, MemorySum, shape_of
from kvstack.process.machine import look_at_model

MODELS = Path(__file__).parents[3] / "models"


def text(value: str) -> bytes:
    """A string as the format writes it."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key_value(key: str, kind: int, payload: bytes) -> bytes:
    """One entry of the header."""
    return text(key) + struct.pack("<I", kind) + payload


def file(
    *entries: bytes, version: int = 3, tensors: bytes = b"", tensor_count: int = 0, count: int | None = None
) -> bytes:
    """A header with these entries."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", version, tensor_count, len(entries) if count is None else count)
        + b"".join(entries)
        + tensors
    )


def read(data: bytes) -> gguf_module.GgufHeader:
    """Read a header from bytes."""
    return read_header(io.BytesIO(data).read)


def test_every_kind_of_value() -> None:
    """Scalars, texts, booleans and arrays are read; arrays of texts are counted."""
    header = read(
        file(
            key_value("u8", 0, b"\xff"),
            key_value("i32", 5, struct.pack("<i", -5)),
            key_value("f32", 6, struct.pack("<f", 0.5)),
            key_value("bool", 7, b"\x01"),
            key_value("text", 8, text("käse")),
            key_value("u64", 10, struct.pack("<Q", 2**40)),
            key_value("numbers", 9, struct.pack("<IQ", 4, 3) + struct.pack("<3I", 1, 2, 3)),
            key_value("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
            key_value("last", 4, struct.pack("<I", 7)),
        )
    )
    assert header.values == {
        "u8": 255,
        "i32": -5,
        "f32": 0.5,
        "bool": True,
        "text": "käse",
        "u64": 2**40,
        "numbers": GgufArray(3, (1, 2, 3)),
        "texts": GgufArray(2),
        "last": 7,
    }
    assert header.integer("i32") == -5
    assert header.integer("bool") is None
    assert header.text("text") == "käse"


def test_long_arrays_are_skipped() -> None:
    """An array as long as a vocabulary is counted and not kept, and what follows is read."""
    many = 100_000
    header = read(
        file(
            key_value("scores", 9, struct.pack("<IQ", 6, many) + b"\0" * 4 * many),
            key_value("after", 4, struct.pack("<I", 9)),
        )
    )
    assert header.values == {"scores": GgufArray(many), "after": 9}


HUGE = struct.pack("<Q", 2**62)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends inside"),
        (b"GGU", "ends inside"),
        (b"GGML" + b"\0" * 40, 'starts with "GGML" instead of "GGUF"'),
        (b"\x7fELF" + b"\0" * 40, 'starts with the bytes 7f 45 4c 46 instead of "GGUF"'),
        (file(version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "big-endian"),
        (file(count=2**60), "key-values"),
        (file(tensor_count=2**60), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE, "bytes in a text"),
        (file(key_value("k", 8, HUGE)), "bytes in a text"),
        (file(key_value("k", 9, struct.pack("<I", 4) + HUGE)), "items of 'k'"),
        (file(key_value("k", 9, struct.pack("<IQ", 8, 1) + HUGE)), "bytes in an item"),
        (file(key_value("k", 9, struct.pack("<IQ", 9, 1))), "unknown type 9"),
        (file(key_value("k", 77, b"")), "unknown type 77"),
        (file(key_value("k", 4, b"\0")), "ends inside"),
        (file(key_value("general.alignment", 4, struct.pack("<I", 0))), "alignment"),
        (file(tensors=text("t") + struct.pack("<I", 4_000_000), tensor_count=1), "dimensions"),
    ],
)
def test_malformed_headers_are_errors(data: bytes, says: str) -> None:
    """Whatever is wrong gives an error that says so, without reading or allocating what the header claims."""
    asked: list[int] = []
    stream = io.BytesIO(data)

    def counting(count: int) -> bytes:
        asked.append(count)
        return stream.read(count)

    with pytest.raises(GgufError, match=says):
        read_header(counting)
    assert max(asked) <= 1 << 20


def test_header_as_a_whole_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that never ends is left at a limit."""
    monkeypatch.setattr(gguf_module, "HEADER_LIMIT_BYTES", 1000)
    endless: Callable[[int], bytes] = lambda count: b"\0" * count  # noqa: E731
    entries = file(key_value("k", 9, struct.pack("<IQ", 0, 100_000)))
    head = io.BytesIO(entries)
    with pytest.raises(GgufError, match="header of more than"):
        read_header(lambda count: head.read(count) or endless(count))


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    """Any bytes behind the magic give a header or an error of ours."""
    with contextlib.suppress(GgufError):
        read(b"GGUF\x03\0\0\0" + data)


@given(st.sampled_from(["dense", "swa", "hybrid"]), st.integers(0, 60_000), st.integers(1, 255))
def test_damaged_models_never_crash_the_reader(name: str, place: int, flip: int) -> None:
    """A real model with one changed byte, or cut off, gives a header or an error of ours."""
    data = bytearray((MODELS / f"tiny-{name}.gguf").read_bytes()[:60_000])
    data[place % len(data)] ^= flip
    for variant in (bytes(data), bytes(data[:place])):
        with contextlib.suppress(GgufError):
            shape_of(read(variant))


@pytest.mark.parametrize("name", ["dense", "swa", "hybrid"])
def test_length_is_that_of_the_file(name: str) -> None:
    """The needed length is exact for whole files, so a file that misses its last byte is noticed."""
    path = MODELS / f"tiny-{name}.gguf"
    assert read(path.read_bytes()).needed_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "kind", "state_bytes", "kv_mib"),
    [("dense", Kind.DENSE, 0, 8.0), ("swa", Kind.SLIDING_WINDOW, 0, 4.625), ("hybrid", Kind.HYBRID, 29184, 4.0)],
)
def test_shapes_of_the_tiny_models(name: str, kind: Kind, state_bytes: int, kv_mib: float) -> None:
    """
    Kind, state and KV size are those that llama-server logs.

    At -c 32768: `KV buffer size = 8.00 MiB` (dense), `4.00` and `0.62` (swa), `4.00` and a checkpoint `size = 0.028
    MiB` (hybrid), on both builds.
    """
    shape = shape_of(read((MODELS / f"tiny-{name}.gguf").read_bytes()))
    assert shape is not None
    assert shape.kind == kind
    assert shape.training_ctx_tokens == 262144
    assert shape.state_bytes == state_bytes
    assert shape.chat_template is not None
    needed = MemorySum.of(
        shape,
        1,
        ctx_tokens=32768,
        slots=1,
        unified=False,
        ubatch_tokens=512,
        key_type="f16",
        value_type="f16",
        checkpoints=32,
        cache_ram_bytes=0,
    )
    assert needed.kv_bytes == kv_mib * 2**20


def test_cut_off_file_is_found(tmp_path: Path) -> None:
    """A model that misses its end has a problem, one that misses parts names them, a whole one has neither."""
    whole = (MODELS / "tiny-dense.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    assert look_at_model(path).problem is None
    path.write_bytes(whole[:-1])
    assert "at least 205,120" in (look_at_model(path).problem or "")
    path.write_bytes(whole[:5000])
    assert look_at_model(path).problem == "ends inside its header"
    split = tmp_path / "m-00001-of-00003.gguf"
    split.write_bytes(whole)
    found = look_at_model(split)
    assert found.missing_parts == ("m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
    assert found.size_bytes == len(whole)
