"""
A stack's state from the JSON of `GET /kvstack/status`, so that `status` draws with the dashboard's own hand.

The other process may be of another version: unknown fields are passed over, missing ones keep their defaults.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from dataclasses import replace
from enum import Enum
from typing import Any

from kvstack.state.attribution import Join
from kvstack.state.records import SlotView
from kvstack.state.stack_state import StackState


def snapshot_from_dict(data: dict[str, Any]) -> StackState:
    """The inverse of `StackState.to_dict`, as far as *data* goes."""
    flat = dict(data)
    proxy = flat.pop("proxy", None)
    flat["proxy_url"] = proxy.get("url") if isinstance(proxy, dict) else None
    flat["name"] = str(flat.get("name") or "?")
    flat["proxy_url"] = str(flat["proxy_url"] or "?")
    server = flat.get("server")
    if isinstance(server, dict):
        flat["server"] = {**server, "buffers": server.get("buffers_bytes")}
    stack_state = _build(StackState, flat)
    assert isinstance(stack_state, StackState)
    return replace(stack_state, join=_join(data))


def _join(data: dict[str, Any]) -> Join:
    """The slots and the measured rate, which a stack's state derives from what is known of its log."""
    rate = data.get("prefill_tokens_per_s")
    join = Join()
    if isinstance(rate, int | float) and rate > 0:
        join = Join(rate_tokens=round(rate * 1000), rate_ms=1_000_000.0)
    slots = data.get("slots")
    for item in slots if isinstance(slots, list) else ():
        if isinstance(item, dict) and isinstance(item.get("slot"), int):
            # Which task works there is not told, only whether one does.
            more = {"tokens_per_s": item.get("prefill_tokens_per_s"), "task": 0 if item.get("is_busy") else None}
            join = replace(join, slots=(*join.slots, _build(SlotView, {**item, **more})))
    return join


def _build(kind: type[Any], data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    stripped = data.get("stripped")
    source = {**data, **stripped} if isinstance(stripped, dict) else data
    for field in dataclasses.fields(kind):
        if not field.init or field.name not in source:
            continue
        try:
            values[field.name] = _value(hints[field.name], source[field.name])
        except (TypeError, ValueError, KeyError):
            continue
    return kind(**values)


def _value(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        if value is None:
            return None
        return _value(next(kind for kind in arguments if kind is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, list | tuple | dict):
            raise TypeError("no list")
        if isinstance(value, dict):  # a record that the state keeps as a tuple of pairs, or as one tuple
            value = list(value.items()) if typing.get_origin(arguments[0]) is tuple else list(value.values())
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_value(arguments[0], item) for item in value)
        return tuple(_value(kind, item) for kind, item in zip(arguments, value, strict=True))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise TypeError("no object")
        return _build(hint, value)
    if origin in {dict, collections.abc.Mapping}:
        if not isinstance(value, dict):
            raise TypeError("no object")
        return {str(key): _value(arguments[1], item) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and not isinstance(value, hint):
        raise TypeError(f"no {hint.__name__}")
    return value
