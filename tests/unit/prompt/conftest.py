"""Fixtures for tests of the prompt room."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import pytest

from kvstack.prompt.rules.compiler import Pack, compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings


@pytest.fixture(scope="session")
def packs() -> list[Pack]:
    """All packs that kvstack ships."""
    found = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    return [parse_pack(files("kvstack.packs").joinpath(name).read_text("utf-8"), name) for name in found]


@pytest.fixture(scope="session")
def ruled(packs: list[Pack]) -> Callable[..., RuleSet]:
    """Compile all packs with the given settings."""
    return lambda **settings: compile_rules(packs, RuleSettings(**settings))


@pytest.fixture(scope="session")
def rules(ruled: Callable[..., RuleSet]) -> RuleSet:
    """All packs with default settings."""
    return ruled()
