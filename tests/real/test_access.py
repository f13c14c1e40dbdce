"""What real llama-servers make of odd paths and of keys, and that the proxy in front of them is not passed by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstack.proxy.target import ambiguity, path_at_server
from tests.real.stacks import RunningStack, post, run_stack

pytestmark = pytest.mark.real

CHAT = "/v1/completions"
BODY = {"prompt": "Hello", "n_predict": 1}
ERASE = {"/slots/0", "/slots/0/"}
SPELLINGS = (
    "/slots/0", "/slots/0/", "/sl%6fts/0", "/sl%u006fts/0", "/slots%2F0", "/slots%u002f0", "/slots/0#x",
    "/slots%5C0", "//slots/0", "/./slots/0", "/x/../slots/0", "/slots//0", "/Slots/0", "/slots;x/0", "/sl%25u006fts/0",
    "/sl%256fts/0", "/sl%u6fts/0", "/sl%c1%afts/0", "/slots%00/0", "http://x/slots/0",
)  # fmt: skip


def small(llama_server: Path, model_path: dict[str, Path]) -> dict[str, Any]:
    """The server section of a stack that is up at once."""
    return {
        "binary": str(llama_server),
        "model": str(model_path["dense"]),
        "device": "none",
        "ctx_size": 2048,
        "extra_args": ["--no-warmup"],
    }


def everything_written(directory: Path) -> str:
    """All text below a directory."""
    return "".join(path.read_text("utf-8", "replace") for path in directory.rglob("*") if path.is_file())


def commands(stack: RunningStack) -> list[str]:
    """The command lines of the stack's processes, as `ps` shows them."""
    family = psutil.Process(stack.process.pid)
    return [" ".join(process.cmdline()) for process in (family, *family.children(recursive=True))]


def test_no_spelling_of_a_guarded_path_passes_the_proxy(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path
) -> None:
    """What reaches the slots at the server is what `path_at_server` says; through the proxy nothing of it does."""
    warmup = {"system_prompt": "You are a helper."}
    with run_stack(tmp_path, small(llama_server, model_path), warmup=warmup) as stack:
        for spelling in SPELLINGS:
            raw, (path, mark, rest) = spelling.encode(), spelling.partition("#")
            seen = path_at_server(raw)
            reached = post(stack.server_port, f"{path}?action=erase{mark}{rest}", {})[0] != 404
            assert reached == (seen in ERASE), spelling
            status, _ = post(stack.proxy_port, f"{spelling}?action=erase", {})
            assert status == (400 if ambiguity(raw) else 501 if seen.startswith("/slots/") else 404), spelling


def test_the_server_asks_for_the_key_that_no_list_of_processes_shows(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is the config's, not the shell's; the proxy hands the client's on; nothing that is written has it."""
    monkeypatch.setenv("LLAMA_API_KEY", "from-the-shell")
    state = tmp_path / "state"
    monkeypatch.setenv("KVSTACK_STATE_DIR", str(state))
    with run_stack(tmp_path, {**small(llama_server, model_path), "api_key": "s3cret"}) as stack:
        for port in (stack.server_port, stack.proxy_port):
            assert post(port, CHAT, BODY)[0] == 401
            assert post(port, CHAT, BODY, {"Authorization": "Bearer from-the-shell"})[0] == 401
            assert post(port, CHAT, BODY, {"Authorization": "Bearer s3cret"})[0] == 200
        lines = commands(stack)
        assert [line for line in lines if "llama-server" in line and "--port" in line]
        assert "s3cret" not in "".join(lines)
        assert "s3cret" not in str(stack.status())
        assert "s3cret" not in everything_written(state)
    assert "s3cret" not in everything_written(state)


def test_a_key_of_the_shell_does_not_reach_a_server_that_has_none(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config alone decides."""
    monkeypatch.setenv("LLAMA_API_KEY", "from-the-shell")
    with run_stack(tmp_path, small(llama_server, model_path)) as stack:
        assert post(stack.server_port, CHAT, BODY)[0] == 200


def test_the_proxy_asks_for_its_own_key_and_uses_the_servers(
    llama_server: Path, model_path: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients know one key, the server another; kvstack's own verbs need neither, and show neither."""
    state = tmp_path / "state"
    monkeypatch.setenv("KVSTACK_STATE_DIR", str(state))
    server = {**small(llama_server, model_path), "api_key": "s3cret-inner"}
    warmup = {"system_prompt": "You are a helper."}
    with run_stack(tmp_path, server, proxy={"api_key": "s3cret-outer"}, warmup=warmup) as stack:
        for headers, wanted in (
            ({}, 401),
            ({"Authorization": "Bearer s3cret-inner"}, 401),
            ({"Authorization": "Bearer s3cret-outer"}, 200),
            ({"X-Api-Key": "s3cret-outer"}, 200),
        ):
            assert post(stack.proxy_port, CHAT, BODY, headers)[0] == wanted
        assert post(stack.server_port, CHAT, BODY, {"Authorization": "Bearer s3cret-outer"})[0] == 401
        told = [stack.verb("status", "--json"), stack.verb("warmup", "--json")]
        assert told[0]["data"]["totals"]["requests"] == 2
        assert "s3cret" not in str(told) + "".join(commands(stack)) + everything_written(state)
