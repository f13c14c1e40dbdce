"""A request's body: read with a limit, decoded if the client compressed it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import zstandard
from starlette.types import Receive


class ClientGone(Exception):
    """The client closed the connection."""


class BodyError(Exception):
    """
    The body cannot be used.

    Attributes:
        status: HTTP status that says why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """
    Read the whole body.

    Raises:
        BodyError: It is larger than *max_bytes* (413).
        ClientGone: The client left before its end.
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise BodyError(413, _too_large(max_bytes))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def cancel_when_gone(receive: Receive, work: asyncio.Task[None]) -> None:
    """Wait until the client leaves, then cancel what is done for it.  The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


def decode_body(body: bytes, encodings: str, max_bytes: int) -> bytes:
    """
    Undo a `Content-Encoding`.

    Args:
        body: The body as it came.
        encodings: The header's value: names in the order in which they were applied.
        max_bytes: Limit of the decoded size; a small body may hide a huge one.

    Raises:
        BodyError: Unknown encoding (415), broken data (400) or too large (413).
    """
    names = [name.strip().lower() for name in encodings.split(",") if name.strip()]
    for name in reversed(names):
        if name == "identity":
            continue
        decoder = _DECODERS.get(name)
        if decoder is None:
            known = ", ".join(sorted(_DECODERS))
            raise BodyError(415, f"the request's Content-Encoding {name!r} is not supported (supported: {known})")
        try:
            body = decoder(body, max_bytes)
        except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
            raise BodyError(400, f"the request's body is no valid {name}: {error}") from None
    return body


def _too_large(max_bytes: int) -> str:
    return f"the request's body is larger than {max_bytes / 1048576:g} MiB (proxy.max_body_mib)"


def _inflate(body: bytes, max_bytes: int, window_bits: int) -> tuple[bytes, bytes]:
    """One stream, decoded, and what stands behind it."""
    inflater = zlib.decompressobj(window_bits)
    # One byte more than allowed: a limit of 0 would mean none to zlib.
    decoded = inflater.decompress(body, max_bytes + 1)
    if len(decoded) > max_bytes:
        raise BodyError(413, _too_large(max_bytes))
    if not inflater.eof:
        raise EOFError("it ends too early")
    return decoded, inflater.unused_data


def _gzip(body: bytes, max_bytes: int) -> bytes:
    decoded = b""
    while True:  # RFC 1952: a file is a series of members
        member, body = _inflate(body, max_bytes - len(decoded), 16 + zlib.MAX_WBITS)
        decoded += member
        if not body:
            return decoded


def _deflate(body: bytes, max_bytes: int) -> bytes:
    # RFC 9110 means the zlib format; some clients send the bare stream.
    try:
        decoded, rest = _inflate(body, max_bytes, zlib.MAX_WBITS)
    except zlib.error:
        decoded, rest = _inflate(body, max_bytes, -zlib.MAX_WBITS)
    if rest:
        raise zlib.error("there is data behind its end")
    return decoded


def _brotli(body: bytes, max_bytes: int) -> bytes:
    decompressor: Any = brotli.Decompressor()
    decoded: bytes = decompressor.process(body, output_buffer_limit=max_bytes + 1)
    if len(decoded) > max_bytes:
        raise BodyError(413, _too_large(max_bytes))
    while not decompressor.is_finished():
        piece: bytes = decompressor.process(b"", output_buffer_limit=max_bytes + 1)
        if not piece:
            raise EOFError("it ends too early")
        decoded += piece
        if len(decoded) > max_bytes:
            raise BodyError(413, _too_large(max_bytes))
    return decoded


def _zstd(body: bytes, max_bytes: int) -> bytes:
    decoded: list[bytes] = []
    size = 0
    while body:  # a body may be several frames
        frame = zstandard.ZstdDecompressor().decompressobj()
        position = 0
        while not frame.eof:
            # Few bytes at a time: four of them can stand for a block of 128 KiB.
            piece = body[position : position + 512]
            if not piece:
                raise EOFError("it ends too early")
            position += len(piece)
            decoded.append(frame.decompress(piece))
            size += len(decoded[-1])
            if size > max_bytes:
                raise BodyError(413, _too_large(max_bytes))
        body = frame.unused_data + body[position:]
    return b"".join(decoded)


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "br": _brotli,
    "deflate": _deflate,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
}
