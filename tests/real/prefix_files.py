"""The files of prefix snapshots, and what shows that one holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.real.openclaw import OpenClaw
from tests.real.stacks import RunningStack, post
from tests.real.test_main_job import CHAT, tokens

WORDS = ("Hello, what can you do for me?", "Which files are there?", "What is the weather like?")


def snapshot_dir() -> Path:
    """Where the snapshots are."""
    return Path(os.environ["KVSTACK_CACHE_DIR"]) / "snapshots"


def files(ending: str = ".bin") -> list[Path]:
    """The snapshots that there are."""
    return sorted(path for path in snapshot_dir().glob("*") if path.suffix == ending)


def first_turn(stack: RunningStack, session: int, words: str) -> tuple[int, int, int]:
    """Begin a conversation; give cached and evaluated tokens, and those of the user's text."""
    client = OpenClaw(session=session)
    status, data = post(stack.proxy_port, CHAT, client.ask(words))
    assert status == 200, data
    return data["timings"]["cache_n"], data["timings"]["prompt_n"], tokens(stack.server_port, client.user_text)


def wait_until_proved(stack: RunningStack) -> dict[str, Any]:
    """Wait for the judgement of the restored prefix."""
    deadline = time.monotonic() + 10
    warmup: dict[str, Any] = {}
    while time.monotonic() < deadline:
        warmup = stack.status()["warmup"]
        if warmup["is_proved"] or warmup["outcome"] == "failed":
            break
        time.sleep(0.05)
    return warmup
