"""Where prefix snapshots go, and why there are none: a reason, never a failure."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.doctor import Facts
from kvstack.llama.command.capabilities import parse_capabilities
from kvstack.process.machine import look_at_model
from kvstack.prompt.warmup_request import WarmupRequest
from kvstack.stack.plan import _place_snapshots, make_plan

HELP = Path(__file__).parents[2] / "golden" / "help" / "b10068.txt"
MODELS = Path(__file__).parents[2] / "models"
REQUEST = WarmupRequest("/v1/chat/completions", b"{}")


def place(
    server: str = "", warmup: str = "", kind: str = "dense", text: str | None = None, request: WarmupRequest = REQUEST
) -> tuple[Path | None, str]:
    """Plan a stack's snapshots."""
    source = f'name = "t"\n[server]\nmodel = "m.gguf"\n{server}\n[warmup]\n{warmup}\n'
    config = parse_config(source, Path("/etc/t.toml"), Path("/home/ann"))
    capabilities = parse_capabilities("", HELP.read_text() if text is None else text, None)
    model = look_at_model(MODELS / f"tiny-{kind}.gguf")
    return _place_snapshots(config, Facts(config, capabilities=capabilities, model=model), request, dry_run=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory."""
    path = tmp_path / "cache"
    monkeypatch.setenv("KVSTACK_CACHE_DIR", str(path))
    return path


def test_they_are_in_the_cache_directory_for_the_owner_alone(cache: Path) -> None:
    """Also if it was there before, with other rights."""
    (cache / "snapshots").mkdir(parents=True, mode=0o755)
    assert place() == (cache / "snapshots", "")
    assert sys.platform == "win32" or stat.S_IMODE((cache / "snapshots").stat().st_mode) == 0o700
    assert place('slot_save_path = "slots"') == (Path("/etc/slots"), "")
    assert place(warmup="snapshot = false") == (None, "")


def test_a_cache_directory_that_cannot_be_used_is_a_reason(cache: Path) -> None:
    """The stack starts, and warms up in the chat form."""
    cache.write_text("a file", encoding="utf-8")
    directory, why = place()
    assert directory is None
    assert str(cache / "snapshots") in why


def test_what_a_server_model_or_request_cannot_do_is_a_reason(cache: Path) -> None:
    """An old binary, a sliding window, another dialect."""
    assert place(text=HELP.read_text().replace("--slot-save-path", "--slots-elsewhere")) == (
        None,
        "this llama-server has no --slot-save-path",
    )
    assert place(kind="swa") == (None, "a sliding-window model's cache cannot be restored")
    assert place(request=WarmupRequest("/v1/messages", b"{}")) == (
        None,
        "only chat completions can be rendered, not /v1/messages",
    )
    assert not cache.exists()


def test_a_server_that_is_only_attached_to_has_none(cache: Path) -> None:
    """Its files are not ours to know."""
    source = 'name = "t"\n[server]\nurl = "http://127.0.0.1:1"\n[warmup]\nsystem_prompt = "S"\n'
    plan = make_plan(parse_config(source, Path("/etc/t.toml"), Path("/home/ann")), Path("/etc/t.toml"), {})
    assert (plan.snapshot_dir, plan.no_snapshot) == (None, "kvstack did not start this server")
    assert not cache.exists()
