"""
What the rules cost: all packs on bodies of 64 KB, 512 KB and 4 MB, against `json.loads` + `json.dumps` of the same.

    python benchmarks/rules.py

Prints one Markdown row per body: the processor time of a request whose turns are all new, and of one whose earlier
turns came before: its newest turn is new, and so is the id in OpenClaw's system text.  The goal is a ratio of 2.0 at
most once turns are known, and no growth of the ratio with the size.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.resources import files

from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet

WORDS = "amber birch cloud delta ember frost grove heath iris jade kayak lemon maple north olive".split()  # noqa: SIM905
NEWEST = "go on 000000"
SYSTEM_ID = "0b6f2f0e-1111-4222-8333-000000000000"
PATH = "/v1/chat/completions"
SIZES = {"64 KB": 64 * 1024, "512 KB": 512 * 1024, "4 MB": 4 * 1024 * 1024}


def load_rules() -> RuleSet:
    """Compile all packs."""
    packs = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    return compile_rules([parse_pack(files("kvstack.packs").joinpath(p).read_text("utf-8"), p) for p in packs])


def prose(rng: random.Random, size: int, newline: float = 0.1) -> str:
    """Make filler text."""
    out: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(WORDS)
        out.append(word + ("\n" if rng.random() < newline else " "))
        length += len(word) + 1
    return "".join(out)[:size]


def openclaw(size: int, message: int) -> bytes:
    """An OpenClaw conversation of about this many bytes, in messages of about *message* characters."""
    rng = random.Random(size + message)
    ids = f'  "message_id": "{SYSTEM_ID}",\n  "channel": "web"\n'
    block = '```json\n{\n  "schema": "openclaw.inbound_meta.v1",\n' + ids + "}\n```\n"
    info = 'Conversation info (untrusted metadata):\n```json\n{\n  "message_id": "m-1",\n  "sender": "cli"\n}\n```\n\n'
    system = prose(rng, min(size // 3, 25_000)) + "\n" + block
    tool = {"type": "function", "function": {"name": "read", "description": prose(rng, 900), "parameters": {}}}
    messages: list[dict[str, object]] = [{"role": "system", "content": system}]
    total = len(system) + 23_000
    turn = 0
    while total < size:
        turn += 1
        text = f"{info}[Wed 2026-02-18 20:{turn % 60:02} UTC] {prose(rng, 60)}"
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "read", "arguments": '{"path":"a.txt"}'}}
        result = prose(rng, min(message, max(0, size - total)))
        messages += [
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": result},
            {"role": "assistant", "content": prose(rng, 80)},
        ]
        total += len(result) + 700
    messages.append(
        {"role": "user", "content": [{"type": "text", "text": f"{info}[Wed 2026-02-18 21:48 UTC] {NEWEST}"}]}
    )
    return json.dumps({"model": "m", "messages": messages, "stream": True, "tools": [tool] * 23}).encode()


def plain(size: int) -> bytes:
    """A body that no rule touches."""
    rng = random.Random(size)
    messages: list[dict[str, object]] = [{"role": "system", "content": prose(rng, size // 4)}]
    while sum(len(str(message["content"])) for message in messages) < size:
        messages += [{"role": "user", "content": prose(rng, 400)}, {"role": "assistant", "content": prose(rng, 2000)}]
    messages.append({"role": "user", "content": NEWEST})
    return json.dumps({"model": "m", "messages": messages}).encode()


def later(body: bytes, number: int) -> bytes:
    """The body with another newest turn, and another id in its system text."""
    body = body.replace(NEWEST.encode(), f"go on {number:06}".encode())
    return body.replace(SYSTEM_ID.encode(), f"{SYSTEM_ID[:-6]}{number:06}".encode())


def seconds(run: Callable[[bytes], object], bodies: Iterable[bytes]) -> float:
    """Return the median processor time of a call, in seconds."""
    times = []
    for body in bodies:
        start = time.process_time()
        run(body)
        times.append(time.process_time() - start)
    return statistics.median(times)


def row(kind: str, body: bytes, rules: RuleSet) -> str:
    """Measure one body: as the first request of a conversation, and as one whose earlier turns are known."""
    repeats = max(7, 4_000_000 // len(body))
    memory = ConversationMemory()
    apply_rules(body, PATH, rules, memory)
    first = seconds(lambda body: apply_rules(body, PATH, rules, ConversationMemory()), [body] * repeats)
    again = seconds(lambda body: apply_rules(body, PATH, rules, memory), (later(body, n) for n in range(1, repeats)))
    base = seconds(lambda body: json.dumps(json.loads(body)), [body] * repeats)
    cells = f"{base * 1000:.2f} | {first * 1000:.2f} | {first / base:.2f} | {again * 1000:.2f} | {again / base:.2f}"
    return f"| {kind} | {len(body):,} | {cells} |"


def main() -> None:
    """Print the table."""
    rules = load_rules()
    print("| body | bytes | loads + dumps, ms | first time, ms | ratio | turns known, ms | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, size in SIZES.items():
        print(row(f"{name}, no rule matches", plain(size), rules))
        print(row(f"{name}, OpenClaw, tool results of 8,000 characters", openclaw(size, 8_000), rules))
        print(row(f"{name}, OpenClaw, tool results of 300 characters", openclaw(size, 300), rules))


if __name__ == "__main__":
    main()
