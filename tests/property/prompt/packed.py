"""The packs that kvstack ships, compiled once; as a constant, so that a failing example is not printed with them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings


@cache
def compiled(**settings: Any) -> RuleSet:
    """Compile all packs with these settings."""
    found = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    packs = [parse_pack(files("kvstack.packs").joinpath(name).read_text("utf-8"), name) for name in found]
    return compile_rules(packs, RuleSettings(**settings))


RULES = compiled()
