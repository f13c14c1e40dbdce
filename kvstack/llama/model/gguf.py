"""
Reads the header of a GGUF file: its key-values, and how long the file must be.

No tensor data is read, and a header is never believed: counts and lengths are checked against limits before anything
is read or kept, so a broken file gives an error, never a crash or a huge allocation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAGIC = b"GGUF"
HEADER_LIMIT_BYTES = 512 * 1024 * 1024
"""The largest vocabularies make headers of some tens of megabytes."""
VALUES_LIMIT = 65_536
KEY_LIMIT_BYTES = 65_535
STRING_LIMIT_BYTES = 16 * 1024 * 1024
ARRAY_LIMIT = 4 * 1024 * 1024
TENSORS_LIMIT = 1_000_000
DIMENSIONS_LIMIT = 8
KEPT_ITEMS = 4096
"""Longer arrays (vocabularies) are skipped; the shapes of layers are far shorter."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# ggml type: values per block, bytes per block
_TENSOR_TYPES = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}


class GgufError(ValueError):
    """The file is no GGUF file that can be read; the text says why."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """
    An array in the header.

    Attributes:
        count: How many items it has.
        items: The items; None of an array of strings or a long one, which are skipped.
    """

    count: int
    items: tuple[int | float | bool, ...] | None = None


GgufValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """
    What a GGUF file says of itself.

    Attributes:
        version: Of the format.
        tensors: How many tensors the file has.
        values: The key-values.
        needed_bytes: How long the file must be at least, by its tensors' places.
    """

    version: int
    tensors: int
    values: Mapping[str, GgufValue]
    needed_bytes: int

    def integer(self, key: str) -> int | None:
        """The value of *key* if it is a whole number."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """The value of *key* if it is a text."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None


def read_header(read: Callable[[int], bytes]) -> GgufHeader:
    """
    Read the header of a GGUF file.

    Args:
        read: Gives the next bytes of the file, at most as many as asked for; fewer only at its end.

    Raises:
        GgufError: The header is malformed, cut off, or of a format that is not read here.
    """
    return _Reader(read).header()


def beginning(data: bytes) -> str:
    """The first bytes of a file, for a person: as text where they are text, else in hex."""
    text = data.decode("ascii", "replace")
    return f'"{text}"' if data.isascii() and text.isprintable() else f"the bytes {data.hex(' ')}"


class _Reader:
    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._position = 0

    def header(self) -> GgufHeader:
        magic = self._bytes(4)
        if magic != MAGIC:
            raise GgufError(f"starts with {beginning(magic)} instead of {beginning(MAGIC)}")
        version = self._u32()
        if version not in {2, 3}:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise GgufError("is big-endian" if swapped in {2, 3} else f"has format version {version}; 2 and 3 are read")
        tensors = self._count(TENSORS_LIMIT, "tensors")
        count = self._count(VALUES_LIMIT, "key-values")
        values: dict[str, GgufValue] = {}
        for _ in range(count):
            key = self._string(KEY_LIMIT_BYTES)
            values[key] = self._value(self._u32(), key)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise GgufError(f"has an impossible alignment: {alignment!r}")
        data_bytes = max((self._tensor_end() for _ in range(tensors)), default=0)
        data_start = -(-self._position // alignment) * alignment
        return GgufHeader(version, tensors, values, data_start + data_bytes if tensors else self._position)

    def _tensor_end(self) -> int:
        """The end of one tensor's data, counted from the start of all data."""
        self._string(KEY_LIMIT_BYTES)
        dimensions = self._u32()
        if dimensions > DIMENSIONS_LIMIT:
            raise GgufError(f"has a tensor of {dimensions} dimensions")
        values = 1
        for _ in range(dimensions):
            values *= self._u64()
        block_values, block_bytes = _TENSOR_TYPES.get(self._u32(), (1, 0))
        return self._u64() + values // block_values * block_bytes

    def _value(self, kind: int, key: str) -> GgufValue:
        if kind == _STRING:
            return self._string(STRING_LIMIT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise GgufError(f"has a value of unknown type {kind} for {key!r}")
        value: int | float | bool = scalar.unpack(self._bytes(scalar.size))[0]
        return value

    def _array(self, key: str) -> GgufArray:
        kind = self._u32()
        count = self._count(ARRAY_LIMIT, f"items of {key!r}")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._count(STRING_LIMIT_BYTES, f"bytes in an item of {key!r}"))
            return GgufArray(count)
        scalar = _SCALARS.get(kind)
        if scalar is None:  # arrays of arrays are in no file that llama.cpp reads
            raise GgufError(f"has an array of unknown type {kind} for {key!r}")
        if count > KEPT_ITEMS:
            self._skip(count * scalar.size)
            return GgufArray(count)
        data = self._bytes(count * scalar.size)
        return GgufArray(count, tuple(item[0] for item in scalar.iter_unpack(data)))

    def _string(self, limit_bytes: int) -> str:
        return self._bytes(self._count(limit_bytes, "bytes in a text")).decode("utf-8", errors="replace")

    def _count(self, limit: int, of: str) -> int:
        count = self._u64()
        if count > limit:
            raise GgufError(f"says that it has {count:,} {of}")
        return count

    def _u32(self) -> int:
        value: int = _U32.unpack(self._bytes(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._bytes(8))[0]
        return value

    def _bytes(self, count: int) -> bytes:
        self._position += count
        if self._position > HEADER_LIMIT_BYTES:
            raise GgufError(f"has a header of more than {HEADER_LIMIT_BYTES // 2**20} MiB")
        data = self._read(count)
        if len(data) != count:
            raise GgufError("ends inside its header")
        return data

    def _skip(self, count: int) -> None:
        while count > 0:
            step = min(count, 1 << 20)
            self._bytes(step)
            count -= step
