"""
The state as JSON and back: one codec for both directions, by the type hints of the dataclasses.

A dataclass is an object with its fields, without those marked `INTERNAL`, and with the properties that its `derived`
names, which are written and never read.  The reader may be of another version than the writer: unknown fields are
passed over, and what is missing or of another type (an enum's unknown value, say) keeps its default.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal, TypeVar

T = TypeVar("T")

INTERNAL: Mapping[str, Any] = {"internal": True}
"""Metadata of a field that is no part of the JSON."""

_PLAIN = {str, int, float, bool, type(None)}


def encode(value: object) -> Any:
    """Spell a value of the state in what JSON knows: objects, lists, texts, numbers, null."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _published(type(value))}  # type: ignore[arg-type]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    raise TypeError(f"no part of the state: {value!r}")


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """
    Build a *kind* of what *data* has of it.

    Raises:
        TypeError: A field without a default is missing, or of another type.
    """
    values: dict[str, Any] = {}
    for name, hint in _fields(kind):  # type: ignore[arg-type]
        if name in data:
            values.update((name, value) for value in _readable(hint, [data[name]]))
    return kind(**values)


@functools.cache
def _published(kind: type[Any]) -> tuple[str, ...]:
    return (
        *(name for name, _ in _fields(kind)),  # type: ignore[arg-type]
        *getattr(kind, "derived", ()),
    )


@functools.cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return tuple((field.name, hints[field.name]) for field in fields if "internal" not in field.metadata)


def _readable(hint: Any, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that can be read as what *hint* wants."""
    for value in values:
        try:
            yield _decode_value(hint, value)
        except (TypeError, ValueError):
            continue


def _decode_value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        if value is None:
            return None
        return _decode_value(next(kind for kind in arguments if kind is not type(None)), value)
    if origin is Literal:
        return arguments[arguments.index(value)]
    if origin is tuple:
        return tuple(_readable(arguments[0], _checked(value, list)))
    if origin is collections.abc.Mapping:
        items = _checked(value, dict).items()
        return {key: read for key, item in items for read in _readable(arguments[1], [item])}
    if dataclasses.is_dataclass(hint):
        return decode(hint, _checked(value, dict))  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    return _checked(value, hint)


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"no {kind.__name__}")
    return value
