"""
What a prefix snapshot spares: a whole warm-up that evaluates and saves, one that restores, and the chat form.

    python benchmarks/warmup.py [--runs N]

Starts `kvstack up` with the tests' tiny models and an OpenClaw prefix of 16,000 tokens on each llama-server that the
tests find.  Times are medians of all runs, side by side on this machine; the ratio is what carries over, and it grows
with the model, for a restore reads a file and a prefill computes.  Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvstack.llama.model.gguf import read_header  # noqa: E402
from kvstack.llama.model.memory import shape_of  # noqa: E402
from kvstack.warmup.identity import snapshot_bytes  # noqa: E402
from tests.conftest import MODELS, SERVERS  # noqa: E402
from tests.real.openclaw import OpenClaw  # noqa: E402
from tests.real.stacks import post, run_stack  # noqa: E402

CHAT = "/v1/chat/completions"


def start(directory: Path, server: dict[str, Any], warmup: dict[str, Any]) -> tuple[dict[str, Any], int, float | None]:
    """Start a stack; give its warm-up, what its first request evaluates, and how long a bare restore takes."""
    with run_stack(directory, server, warmup=warmup) as stack:
        _, data = post(stack.proxy_port, CHAT, OpenClaw(session=8).ask("Hello, what can you do for me?"))
        restore_ms: float | None = None
        for path in Path(os.environ["KVSTACK_CACHE_DIR"]).glob("snapshots/*.bin"):
            _, said = post(stack.server_port, "/slots/0?action=restore", {"filename": path.name})
            restore_ms = said["timings"]["restore_ms"]
        return stack.status()["warmup"], data["timings"]["prompt_n"], restore_ms


def measure(kind: str, binary: Path, runs: int) -> str:
    """One line of the table."""
    server = {"binary": str(binary), "model": str(MODELS / f"tiny-{kind}.gguf"), "ctx_size": 32768}
    took: dict[str, list[float]] = {"saved": [], "restored": [], "chat": [], "bare": []}
    new: dict[str, int] = {}
    tokens = size = 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            os.environ["KVSTACK_STATE_DIR"], os.environ["KVSTACK_CACHE_DIR"] = f"{name}/state", f"{name}/cache"
            recording = directory / "request.json"
            recording.write_text(json.dumps(OpenClaw(session=7).ask("Something else.")), encoding="utf-8")
            warmup: dict[str, Any] = {"request_file": str(recording)}
            for how, section in (("chat", {**warmup, "snapshot": False}), ("saved", warmup), ("restored", warmup)):
                view, new[how], restore_ms = start(directory, server, section)
                assert (view["snapshot"] or "chat") == how, view
                took[how].append(view["duration_ms"])
                if restore_ms is not None:
                    took["bare"].append(restore_ms)
                tokens = view["boundary_tokens"]
            (path,) = (directory / "cache" / "snapshots").glob("*.bin")
            size = path.stat().st_size
    with (MODELS / f"tiny-{kind}.gguf").open("rb") as file:
        shape = shape_of(read_header(file.read))
    assert shape is not None
    chat, saved, restored, bare = (statistics.median(took[how]) for how in ("chat", "saved", "restored", "bare"))
    expected = snapshot_bytes(shape, tokens, "f16", "f16")
    return (
        f"| {binary.parent.name} | {kind} | {tokens:,} | {chat:,.0f} | {saved:,.0f} | {restored:,.0f} | "
        f"{saved / restored:.1f} | {bare:.1f} | {new['chat']} / {new['saved']} / {new['restored']} | "
        f"{size:,} ({expected:,}) |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(
        "| server | model | prefix | chat form, ms | evaluate + save, ms | restore, ms | ratio | server's part, ms | "
        "first request, new tokens | file, bytes (reckoned) |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
    )
    for _, binary in sorted(SERVERS.items()):
        for kind in ("dense", "hybrid"):
            print(measure(kind, binary, arguments.runs), flush=True)


if __name__ == "__main__":
    main()
