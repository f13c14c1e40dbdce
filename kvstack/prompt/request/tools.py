"""Where each dialect keeps names and descriptions of tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstack.prompt.rawjson.scan import JsonPath
from kvstack.prompt.request.message import Text


def tool_names(tools: Any) -> frozenset[str]:
    """Return the names of the tools of a request, in whichever form its dialect has."""
    if not isinstance(tools, list):
        return frozenset()
    return frozenset(name for tool in tools if (name := tool_name(tool)) is not None)


def tool_name(tool: Any) -> str | None:
    """Return the name of a tool, in whichever form its dialect has."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None


def tool_texts(tools: Any) -> Iterator[Text]:
    """Yield the descriptions of tools, in whichever form the dialect has."""
    if not isinstance(tools, list):
        return
    for index, tool in enumerate(tools):
        if isinstance(tool, dict):
            path: JsonPath = ("tools", index)
            holder = tool
            if isinstance(tool.get("function"), dict):
                holder, path = tool["function"], (*path, "function")
            if type(holder.get("description")) is str:
                yield Text((*path, "description"), holder["description"])
