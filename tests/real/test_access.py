"""What real llama-servers make of odd paths and of keys, and that the proxy in front of them is not passed by."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstack.proxy.target import ambiguity, path_at_server
from tests.real.stacks import post, run_stack

pytestmark = pytest.mark.real

ERASE = {"/slots/0", "/slots/0/"}
SPELLINGS = (
    "/slots/0", "/slots/0/", "/sl%6fts/0", "/sl%u006fts/0", "/slots%2F0", "/slots%u002f0", "/slots/0#x",
    "/slots%5C0", "//slots/0", "/./slots/0", "/x/../slots/0", "/slots//0", "/Slots/0", "/slots;x/0", "/sl%25u006fts/0",
    "/sl%256fts/0", "/sl%u6fts/0", "/sl%c1%afts/0", "/slots%00/0", "http://x/slots/0",
)  # fmt: skip


def test_no_spelling_of_a_guarded_path_passes_the_proxy(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """What reaches the slots at the server is what `path_at_server` says; through the proxy nothing of it does."""
    config = {"binary": str(llama_server), "model": str(model_path["dense"]), "device": "none", "ctx_size": 2048}
    warmup = {"system_prompt": "You are a helper."}
    with run_stack(tmp_path, {**config, "extra_args": ["--no-warmup"]}, warmup=warmup) as stack:
        for spelling in SPELLINGS:
            raw, (path, mark, rest) = spelling.encode(), spelling.partition("#")
            seen = path_at_server(raw)
            reached = post(stack.server_port, f"{path}?action=erase{mark}{rest}", {})[0] != 404
            assert reached == (seen in ERASE), spelling
            status, _ = post(stack.proxy_port, f"{spelling}?action=erase", {})
            assert status == (400 if ambiguity(raw) else 501 if seen.startswith("/slots/") else 404), spelling
