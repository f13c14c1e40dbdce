"""
Recorded conversations of real clients against a real llama-server: how many tokens are evaluated, raw and ruled.

    python benchmarks/replay.py [--server NAME=PATH ...] [--model dense|hybrid|swa ...] [--only TEXT] [--captures DIR]

Each conversation gets a fresh server (`-c 131072 -np 1 -t 1`).  Its bodies are sent in order with an answer of one
token; counted are the tokens that the server evaluated from the second request on, side requests included.  Prints a
Markdown table.  Without `--captures` the golden corpus of the tests is sent, prose filled in; with it, every
`*.jsonl` of a folder, as `kvstack capture` writes it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvstack.prompt.engine import apply_rules  # noqa: E402
from kvstack.prompt.memory.store import ConversationMemory  # noqa: E402
from kvstack.prompt.rules.compiler import compile_rules, parse_pack  # noqa: E402
from kvstack.prompt.rules.ruleset import RuleSet  # noqa: E402
from tests.conftest import SERVERS  # noqa: E402
from tests.golden.rules.corpus import Request, load, names  # noqa: E402

MODELS = ROOT / "tests" / "models"


@dataclass(frozen=True)
class Replayed:
    """
    What one conversation cost.

    Attributes:
        first: Tokens evaluated for the first request.
        evaluated: Tokens evaluated for all later ones.
        grown: Tokens by which the prompts grew from the first request to the last one: what a conversation that only
            extends its prompts has to evaluate.
        refused: Requests that the server did not accept.
    """

    first: int
    evaluated: int
    grown: int
    refused: int


def load_rules() -> RuleSet:
    """Compile all packs."""
    found = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    return compile_rules([parse_pack(files("kvstack.packs").joinpath(name).read_text("utf-8"), name) for name in found])


@contextlib.contextmanager
def serving(binary: Path, model: Path) -> Iterator[int]:
    """Run a llama-server for as long as needed; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    arguments = ["-m", str(model), "-c", "131072", "-np", "1", "-t", "1", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
    process = subprocess.Popen(
        [str(binary), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if ask(port, "GET", "/health", None)[0] == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{binary} does not serve {model.name} (exit status {process.poll()})")
            time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def ask(port: int, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    """Send one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None
    finally:
        connection.close()


def shortened(body: bytes) -> bytes:
    """Ask for one token at once instead of a streamed answer; nothing of the prompt changes."""
    value = json.loads(body)
    limits = [key for key in ("max_tokens", "max_completion_tokens", "max_output_tokens") if key in value]
    for key in limits or [("max_output_tokens" if "input" in value else "max_tokens")]:
        value[key] = 1
    value["stream"] = False
    value.pop("stream_options", None)
    return json.dumps(value).encode()


def prompt_tokens(answer: Any) -> tuple[int, int]:
    """Read from an answer how many tokens its prompt has, and how many of them the server evaluated."""
    if "timings" in answer:
        timings = answer["timings"]
        return int(timings["cache_n"]) + int(timings["prompt_n"]), int(timings["prompt_n"])
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"]), int(usage["input_tokens"])
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
    return int(usage["input_tokens"]), int(usage["input_tokens"]) - int(cached)


def replay(binary: Path, model: Path, requests: Sequence[Request], rules: RuleSet | None) -> Replayed:
    """
    Send a conversation to a fresh server.

    Args:
        binary: The llama-server.
        model: The model file.
        requests: The conversation.
        rules: What is applied to it; None to send it raw.
    """
    memory = ConversationMemory()
    counts: list[tuple[int, int]] = []
    refused = 0
    with serving(binary, model) as port:
        for request in requests:
            body = request.body
            if rules is not None:
                body = apply_rules(body, request.path, rules, memory, request.headers).body
            status, answer = ask(port, "POST", request.path, shortened(body))
            if status == 200:
                counts.append(prompt_tokens(answer))
            else:
                refused += 1
    if not counts:
        return Replayed(0, 0, 0, refused)
    return Replayed(counts[0][1], sum(new for _, new in counts[1:]), counts[-1][0] - counts[0][0], refused)


def captured(folder: Path) -> dict[str, tuple[Request, ...]]:
    """Read the captures of a folder."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        found[path.stem] = tuple(
            Request(
                row["path"],
                list((row.get("headers") or {}).items()),
                json.dumps(row["body"]).encode(),  # ASCII: a text may hold half a character
                str(row.get("conversation")),
                row.get("kind") == "side",
            )
            for row in rows
            if row.get("body") is not None
        )
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Tokens evaluated for recorded conversations, raw and ruled.")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--model", action="append", choices=("dense", "hybrid", "swa"))
    parser.add_argument("--only", default="", metavar="TEXT", help="only conversations with this in their name")
    parser.add_argument("--captures", type=Path, metavar="DIR")
    chosen = parser.parse_args()
    servers = {name: Path(path) for name, _, path in (entry.partition("=") for entry in chosen.server)} or SERVERS
    conversations = captured(chosen.captures) if chosen.captures else {name: load(name) for name in names()}
    rules = load_rules()
    columns = [(name, kind) for name in servers for kind in chosen.model or ("dense", "hybrid")]
    print("| conversation |" + "".join(f" {name}, {kind}: raw | ruled | times |" for name, kind in columns))
    print("| --- |" + " ---: | ---: | ---: |" * len(columns))
    for name, requests in conversations.items():
        if chosen.only not in name or len(requests) < 2:
            continue
        cells = []
        for server, kind in columns:
            model = MODELS / f"tiny-{kind}.gguf"
            raw = replay(servers[server], model, requests, None)
            ruled = replay(servers[server], model, requests, rules)
            if raw.refused or ruled.refused:
                cells.append(" refused | refused | |")
            else:
                times = raw.evaluated / max(1, ruled.evaluated)
                cells.append(f" {raw.evaluated:,} | {ruled.evaluated:,} | {times:,.1f} |")
        print(f"| {name} |" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
