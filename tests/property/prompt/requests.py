"""Strategies: conversations of clients, in every dialect, with look-alikes in everything that is the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet

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
# A user's words may begin with anything but what the client itself would write there: another timestamp.
own_words = words.filter(lambda text: not text.lstrip("\r\n").startswith("[Wed "))
prose = words.map(lambda text: "so " + text)


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
    How a client writes: OpenClaw of one release line, one with a date in its system text, one that tells the date with
    its newest turn, or one with a checksum in front of everything and the date in its first turn.

    Attributes:
        kind: ids | carrier | date | reminder | checksum.
        dialect: chat | responses | messages | completion.
        parts: Content of user turns is a list of parts.
        system: Prose of the system text.
        tools: Names of its tools.
    """

    kind: str
    dialect: str
    parts: bool
    system: str
    tools: tuple[str, ...]


# What sends carriers sends messages; raw prompts are made by simple clients.
forms = [(kind, dialect) for kind in ("ids", "carrier", "date") for dialect in ("chat", "responses", "messages")]
clients = st.builds(
    lambda form, **rest: Client(*form, **rest),
    form=st.sampled_from(
        (*forms, ("ids", "completion"), ("date", "completion"), ("reminder", "chat"), ("checksum", "messages"))
    ),
    parts=st.booleans(),
    system=prose,
    tools=st.sampled_from(((), ("read",), ("read", "write"))),
)

# Clients that are known by their tools; without them their rules do not act.
TOOLS = {
    "date": ("read", "bash", "edit", "write"),
    "reminder": ("run_shell_command", "grep_search", "read_file"),
    "checksum": ("Agent", "Bash", "Edit", "Read", "ScheduleWakeup", "Skill", "Write"),
}

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completion": "/completion",
}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


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
    if client.kind == "reminder":
        return f"git: Current branch: main\n{client.system}"
    if client.kind == "checksum":
        return f"x-anthropic-billing-header: cc_version=2.1.197.bb9; cc_entrypoint=cli; cch={len(newest.user):05x};"
    dated = f"Current date: 2026-11-{day:02}\nCurrent working directory: /home/dev"
    if client.dialect == "completion":
        # Raw prompts have no tools that tell the client: its system text must not look like another one's.
        prose = client.system.replace("openclaw.", "other.")
        return f"operating inside pi, a coding agent harness\n{prose}\n{dated}"
    return f"{client.system}\n{dated}"


def user_text(client: Client, turn: Turn) -> str:
    """The text of a user turn, as it stands in history too."""
    if client.kind == "ids":
        info = {"message_id": turn.id, "sender": "ann"}
        block = f"Conversation info (untrusted metadata):\n```json\n{json.dumps(info, indent=2)}\n```\n\n"
        return f"{block}[{turn.clock}] {turn.user}"
    if client.kind == "reminder":
        return turn.user or "so"
    return f"[{turn.clock}] {turn.user}" if client.kind == "carrier" else turn.user


def beside_words(client: Client, day: int, *, first: bool, newest: bool) -> str:
    """What a client writes into a content part of its own in front of a user's words; empty if nothing."""
    if client.kind == "reminder" and newest:
        return f"<system-reminder>\nThe current date is: Sunday, March {day}, 2026. Note.\n</system-reminder>"
    if client.kind == "checksum" and first:
        return f"<system-reminder>\n# currentDate\nToday's date is 2026-11-{day:02}.\n</system-reminder>"
    return ""


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
    for number, turn in enumerate(said):
        message = _message(client, "user", user_text(client, turn))
        beside = beside_words(client, day, first=number == 0, newest=turn is newest)
        if beside:
            message["content"] = [{"type": "text", "text": text} for text in (beside, user_text(client, turn))]
        items.append(message)
        if turn.call and (turn is not newest or loop):
            items += _tool_round(client, turn)
        if turn is not newest:
            items.append(_message(client, "assistant", turn.answer))
    if client.kind == "carrier":
        items.append(_message(client, "user", carrier_text(newest)))
    text = system_text(client, newest, day)
    tools = [_tool(client, name) for name in TOOLS.get(client.kind, client.tools)]
    head: Body = {"model": "m", "seed": 1.5e3, "tools": tools}
    if client.dialect == "completion":
        items = [{"role": "system", "content": text}, *items]
        turns = [f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in items]
        return {"prompt": "".join(turns) + "<|im_start|>assistant\n", "seed": 1.5e3}
    if client.dialect == "messages":
        return head | {"system": [{"type": "text", "text": text}] if client.parts else text, "messages": items}
    key = "messages" if client.dialect == "chat" else "input"
    return head | {key: [_message(client, "developer" if client.parts else "system", text), *items]}


def items_of(value: Body) -> list[Body]:
    """The list of messages or input items, or the turns of a raw prompt but for the one that is to be answered."""
    if "prompt" not in value:
        found: list[Body] = value.get("messages") or value["input"]
        return found
    turns = [turn.partition("\n") for turn in str(value["prompt"]).split("<|im_start|>")[1:]]
    closed = "<|im_end|>\n"
    return [{"role": role, "content": text.removesuffix(closed)} for role, _, text in turns if text.endswith(closed)]


def strip(raw: bytes, client: Client, rules: RuleSet, memory: ConversationMemory | None = None) -> RewriteResult:
    """Send a client's request through the rules, in front of a model with the ChatML template."""
    return apply_rules(raw, PATHS[client.dialect], rules, memory, chat_template=CHATML)


def _message(client: Client, role: str, text: str) -> Body:
    kind = {"chat": "text", "messages": "text", "responses": "output_text" if role == "assistant" else "input_text"}
    parts = (client.parts or client.kind == "reminder") and role == "user" and client.dialect != "completion"
    content: Any = [{"type": kind[client.dialect], "text": text}] if parts else text
    return {"role": role, "content": content}


def _tool_round(client: Client, turn: Turn) -> list[Body]:
    if client.dialect == "responses":
        return [
            {"type": "function_call", "call_id": turn.id, "name": "read", "arguments": json.dumps({"x": turn.result})},
            {"type": "function_call_output", "call_id": turn.id, "output": turn.result},
        ]
    if client.dialect == "completion":
        return [{"role": "assistant", "content": f"<tool_call>{turn.result}"}, {"role": "tool", "content": turn.result}]
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
        day = days[max(min(number - 1, len(days)), 1) - 1]  # another one at the second turn begins anew
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
