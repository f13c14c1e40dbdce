"""The README says what is true: its examples load, its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.config.rules import RuleSpec
from kvstack.errors import ExitCode
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.stack.rules_loader import load_rules

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TOML = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
CHAT = "/v1/chat/completions"


def rules_of(text: str, tmp_path: Path) -> RuleSet:
    """The rules of a config with this text in it."""
    path = tmp_path / "box.toml"
    path.write_text(text if "[server]" in text else f'[server]\nmodel = "m"\n{text}', encoding="utf-8")
    return load_rules(parse_config(path.read_text(encoding="utf-8"), path, Path("/home/ann")), path)


@pytest.mark.parametrize("text", TOML)
def test_every_toml_example_loads(text: str, tmp_path: Path) -> None:
    """A reader copies them."""
    assert rules_of(text, tmp_path).rules


def test_the_changed_timestamp_pattern_does_what_it_says(tmp_path: Path) -> None:
    """The original project's users changed TIMESTAMP_PATTERN; this is the same change as a rule."""
    (example,) = [text for text in TOML if "openclaw.timestamps" in text and "also" in text]
    ruleset = rules_of(example, tmp_path)
    for written in ("(2026-02-18 20:48 UTC) hello", "[Wed 2026-02-18 20:48 UTC] hello"):
        body = json.dumps({"messages": [{"role": "user", "content": written}]}).encode()
        stripped = apply_rules(body, CHAT, ruleset)
        assert json.loads(stripped.body)["messages"][0]["content"] == "hello"


def test_the_frozen_clock_does_what_it_says(tmp_path: Path) -> None:
    """From the second turn on the value stays; the newest user text hears of the new one."""
    (example,) = [text for text in TOML if "mine.clock" in text]
    ruleset, memory = rules_of(example, tmp_path), ConversationMemory()
    messages = [{"role": "user", "content": "one"}]
    seen: list[list[dict[str, str]]] = []
    for minute in ("01", "02", "03"):
        system = {"role": "system", "content": f"Rules.\nCurrent time: 2026-02-18 20:{minute}\nMore."}
        body = json.dumps({"messages": [system, *messages]}).encode()
        seen.append(json.loads(apply_rules(body, CHAT, ruleset, memory).body)["messages"])
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "two"}]
    assert seen[2][: len(seen[1])] == seen[1]
    assert seen[2][-1]["content"].endswith("[time: 2026-02-18 20:03]")


def test_the_actions_are_all_explained() -> None:
    """One row each."""
    table = set(re.findall(r"^\| `(\w+)` \| ", TEXT[TEXT.index("| action |") :], re.MULTILINE))
    annotation = RuleSpec.model_fields["action"].annotation
    assert set(getattr(annotation, "__args__", ())) <= table


def test_the_exit_codes_are_those_of_the_program() -> None:
    """Others script against them."""
    section = TEXT[TEXT.index("## Exit codes") : TEXT.index("## Words")]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for code in row.split(",")}
    assert listed == {int(code) for code in ExitCode}


def test_every_verb_is_listed() -> None:
    """A verb that nobody finds does not exist."""
    from kvstack.terminal.cli import app  # the module that imports every verb

    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    names += [group.name or group.typer_instance.info.name or "" for group in app.registered_groups]
    section = TEXT[TEXT.index("## Verbs") : TEXT.index("## For programs")]
    assert len(names) > 8
    for name in names:
        assert f"`kvstack {name}" in section


def test_the_control_routes_are_listed() -> None:
    """With the method that they take."""
    from kvstack.proxy.control import control_routes

    routes = control_routes(None)  # type: ignore[arg-type]  # no route is called
    section = TEXT[TEXT.index("## For programs") : TEXT.index("## Exit codes")]
    for route in routes:
        if route.methods is None or "rest" in route.path or route.path == "/kvstack":
            continue
        method = "POST" if "POST" in route.methods else "GET"
        assert f"`{method} {route.path.replace('{number}', 'N')}`" in section
