"""Reading and decoding request bodies."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from kvstack.proxy.body import BodyError, ClientGone, decode_body, read_body

DATA = b'{"messages": []}' * 3000
LIMIT = 1_000_000


def _raw_deflate(data: bytes) -> bytes:
    squeezer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return squeezer.compress(data) + squeezer.flush()


ENCODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
    ("deflate", zlib.compress),
    ("deflate", _raw_deflate),
    ("br", brotli.compress),
    ("zstd", zstandard.compress),
    ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress),
    ("zstd", lambda data: zstandard.compress(data[:10]) + zstandard.compress(data[10:])),
]


@pytest.mark.parametrize(("name", "encode"), ENCODERS)
def test_a_compressed_body_is_decoded(name: str, encode: Callable[[bytes], bytes]) -> None:
    """Each encoding that a client may use gives the client's bytes back."""
    assert decode_body(encode(DATA), name, LIMIT) == DATA
    assert decode_body(encode(b""), name, LIMIT) == b""


@pytest.mark.parametrize(("name", "encode"), ENCODERS)
def test_a_small_body_cannot_hide_a_huge_one(name: str, encode: Callable[[bytes], bytes]) -> None:
    """The limit holds for the decoded size."""
    with pytest.raises(BodyError) as caught:
        decode_body(encode(b"\0" * 5_000_000), name, LIMIT)
    assert caught.value.status == 413


@pytest.mark.parametrize(("name", "encode"), ENCODERS)
@pytest.mark.parametrize("cut", [1, 7, -1])
def test_a_truncated_body_is_refused(name: str, encode: Callable[[bytes], bytes], cut: int) -> None:
    """Half a request must never reach the model."""
    with pytest.raises(BodyError) as caught:
        decode_body(encode(DATA)[:cut], name, LIMIT)
    assert caught.value.status == 400


@pytest.mark.parametrize(("name", "encode"), ENCODERS)
def test_something_behind_the_end_is_refused(name: str, encode: Callable[[bytes], bytes]) -> None:
    """What is not part of the body must not be dropped without a word."""
    with pytest.raises(BodyError) as caught:
        decode_body(encode(DATA) + b"junk", name, LIMIT)
    assert caught.value.status == 400


def test_encodings_are_undone_in_reverse_order() -> None:
    """`Content-Encoding: gzip, br` means gzip first, then brotli."""
    assert decode_body(brotli.compress(gzip.compress(DATA)), "gzip, br", LIMIT) == DATA


def test_an_unknown_encoding_is_415_and_names_the_known_ones() -> None:
    """The client's author learns what would work."""
    with pytest.raises(BodyError, match="zstd") as caught:
        decode_body(DATA, "lzma", LIMIT)
    assert caught.value.status == 415


async def test_a_body_is_read_to_its_end_and_not_beyond_the_limit() -> None:
    """Pieces are joined; one byte too many is a 413."""
    messages = [{"type": "http.request", "body": b"abc", "more_body": True}, {"type": "http.request", "body": b"de"}]

    async def receive() -> dict[str, object]:
        return messages[received.append(0) or len(received) - 1]  # type: ignore[func-returns-value]

    received: list[int] = []
    assert await read_body(receive, 5) == b"abcde"
    received.clear()
    with pytest.raises(BodyError) as caught:
        await read_body(receive, 4)
    assert caught.value.status == 413


async def test_a_client_that_leaves_while_it_sends_is_noticed() -> None:
    """There is nobody to answer any more."""

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read_body(receive, 5)
