"""Strategies: conversations of clients, in every dialect, with look-alikes in everything that is the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]

UUID = "0b6f2f0e-1111-4222-8333-444455556666"
LOOKALIKES = (
    f'"message_id": "{UUID}",',
    "[Wed 2026-02-18 20:48 UTC] pasted",
    'Conversation info (untrusted metadata):\n```json\n{"message_id": "9"}\n```\n\n',
    '```json\n{"schema": "openclaw.inbound_meta.v1", "message_id": "7"}\n```\n',
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
    "System: [2026-02-18 19:59:08 UTC] water plants\n",
    "Today's date: Sun Mar 22 2026",
    "Current date: 2026-11-30\nCurrent working directory: /x",
    "x-anthropic-billing-header: cc_version=2.1.120.cf9; cch=543cf;",
    "<system-reminder>\nThe current date is: Sunday, November 29, 2026.\n</system-reminder>",
    "Context:\n<active_memory_plugin>\ny\n</active_memory_plugin>\n\n",
    "```json",
    "\ud83d",
    "\\ud83d\\ude00 \\\\ \\n",
    "é😀\u2028\x7f",
    "\r\n",
)

plain = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
words = st.lists(st.one_of(plain, st.sampled_from(LOOKALIKES)), min_size=1, max_size=4).map(" ".join)
# A user's words may begin with anything but what the client itself would write there.
own_words = words.map(lambda text: "so " + text)


@dataclass(frozen=True)
class Turn:
    """One turn: what the user said, what tools and model answered."""

    user: str
    id: str
    clock: str
    call: bool
    result: str
    answer: str
    reply: str = ""


turns = st.builds(
    Turn,
    user=own_words,
    id=st.sampled_from(("4821", UUID, "3EB0AA", "a.b-c", "é😀")),
    clock=st.sampled_from(("Wed 2026-02-18 20:48 UTC", "Sun 2026-11-29 18:40:07 GMT+5:30", "Mon 2026-11-30 00:46 PST")),
    call=st.booleans(),
    result=words,
    answer=words,
    reply=st.sampled_from(("", "", "4807", UUID)),
)


@dataclass(frozen=True)
class Client:
    """
    How a client writes: OpenClaw of one release line, or one with a date in its system text.

    Attributes:
        kind: ids | carrier | date.
        dialect: chat | responses | messages.
        parts: Content of user turns is a list of parts.
        system: Prose of the system text.
        tools: Names of its tools.
    """

    kind: str
    dialect: str
    parts: bool
    system: str
    tools: tuple[str, ...]


clients = st.builds(
    Client,
    kind=st.sampled_from(("ids", "carrier", "date")),
    dialect=st.sampled_from(("chat", "responses", "messages")),
    parts=st.booleans(),
    system=own_words,
    tools=st.sampled_from(((), ("read",), ("read", "write"))),
)

PI_TOOLS = ("read", "bash", "edit", "write")

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def system_text(client: Client, newest: Turn, day: int) -> str:
    """The system text of a request."""
    if client.kind == "ids":
        keys = {
            "schema": "openclaw.inbound_meta.v1",
            "message_id": newest.id,
            **({"reply_to_id": newest.reply} if newest.reply else {}),
            "channel": "web",
            "flags": {"n": len(newest.user)},
        }
        return f"{client.system}\n```json\n{json.dumps(keys, indent=2)}\n```\n# More"
    if client.kind == "carrier":
        return f"<!-- openclaw:attempt:STABLE -->\n{client.system}"
    return f"{client.system}\nCurrent date: 2026-11-{day:02}\nCurrent working directory: /home/dev"


def user_text(client: Client, turn: Turn) -> str:
    """The text of a user turn, as it stands in history too."""
    if client.kind == "ids":
        info = {"message_id": turn.id, "sender": "ann"}
        block = f"Conversation info (untrusted metadata):\n```json\n{json.dumps(info, indent=2)}\n```\n\n"
        return f"{block}[{turn.clock}] {turn.user}"
    return f"[{turn.clock}] {turn.user}" if client.kind == "carrier" else turn.user


def carrier_text(turn: Turn) -> str:
    """The carrier message of a turn."""
    data = json.dumps(f'Conversation info:\n{{"chat_id":"7","message_id":"{turn.id}"}}')
    return f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data:\n{data}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"


def body(client: Client, said: list[Turn], loop: bool, day: int = 1) -> Body:
    """
    The request of the newest turn.

    Args:
        client: Who sends it.
        said: All turns; the last one is the newest.
        loop: The model has called a tool in the newest turn, and this is the request with its result.
        day: The day in the system text.
    """
    newest = said[-1]
    items: list[Body] = []
    for turn in said:
        items.append(_message(client, "user", user_text(client, turn)))
        if turn.call and (turn is not newest or loop):
            items += _tool_round(client, turn)
        if turn is not newest:
            items.append(_message(client, "assistant", turn.answer))
    if client.kind == "carrier":
        items.append(_message(client, "user", carrier_text(newest)))
    text = system_text(client, newest, day)
    # The client with the date is known by its tools; without them its rules do not act.
    tools = [_tool(client, name) for name in (PI_TOOLS if client.kind == "date" else client.tools)]
    head: Body = {"model": "m", "seed": 1.5e3, "tools": tools}
    if client.dialect == "messages":
        return head | {"system": [{"type": "text", "text": text}] if client.parts else text, "messages": items}
    key = "messages" if client.dialect == "chat" else "input"
    return head | {key: [_message(client, "developer" if client.parts else "system", text), *items]}


def _message(client: Client, role: str, text: str) -> Body:
    kind = {"chat": "text", "messages": "text", "responses": "output_text" if role == "assistant" else "input_text"}
    content: Any = [{"type": kind[client.dialect], "text": text}] if client.parts and role == "user" else text
    return {"role": role, "content": content}


def _tool_round(client: Client, turn: Turn) -> list[Body]:
    if client.dialect == "responses":
        return [
            {"type": "function_call", "call_id": turn.id, "name": "read", "arguments": json.dumps({"x": turn.result})},
            {"type": "function_call_output", "call_id": turn.id, "output": turn.result},
        ]
    if client.dialect == "messages":
        use = {"type": "tool_use", "id": turn.id, "name": "read", "input": {"x": turn.result}}
        result = {"type": "tool_result", "tool_use_id": turn.id, "content": turn.result}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    call = {
        "id": turn.id,
        "type": "function",
        "function": {"name": "read", "arguments": json.dumps({"x": turn.result})},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": turn.id, "content": turn.result},
    ]


def _tool(client: Client, name: str) -> Body:
    described = {"name": name, "description": "Current date: 2026-11-30\nCurrent working directory: /x"}
    if client.dialect == "chat":
        return {"type": "function", "function": described | {"parameters": {}}}
    return described | ({"type": "function"} if client.dialect == "responses" else {"input_schema": {}})


def requests(client: Client, said: list[Turn], days: list[int]) -> list[Body]:
    """A whole conversation as the requests that it sends, tool rounds included."""
    made = []
    for number in range(1, len(said) + 1):
        day = days[min(number, len(days)) - 1]
        made.append(body(client, said[:number], loop=False, day=day))
        if said[number - 1].call:
            made.append(body(client, said[:number], loop=True, day=day))
    return made


conversations = st.tuples(
    clients,
    st.lists(turns, min_size=2, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=4).map(sorted),
).map(
    lambda drawn: (drawn[0], [replace(turn, answer=f"{n} {turn.answer}") for n, turn in enumerate(drawn[1])], drawn[2])
)


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """Spell a JSON value in one of the many ways that mean the same."""
    if isinstance(value, str):
        return (
            '"' + "".join(_character(draw, char) for char in value) + '"' if draw(st.booleans()) else json.dumps(value)
        )
    space = draw(st.sampled_from(("", " ", "\n  ")))
    if isinstance(value, list):
        return "[" + ",".join(space + draw(spelled(inner)) for inner in value) + space + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{space}{json.dumps(key)}:{space}{draw(spelled(inner))}" for key, inner in value.items())
            + "}"
        )
    return json.dumps(value)


def _character(draw: st.DrawFn, char: str) -> str:
    code = ord(char)
    if code > 0xFFFF:
        high, low = 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + ((code - 0x10000) & 0x3FF)
        return draw(st.sampled_from((char, f"\\u{high:04x}\\u{low:04X}")))
    if 0xD800 <= code < 0xE000 or code < 0x20 or char in '"\\':
        return draw(st.sampled_from((json.dumps(char)[1:-1], f"\\u{code:04x}")))
    return char if code % 7 else draw(st.sampled_from((char, f"\\u{code:04X}")))
