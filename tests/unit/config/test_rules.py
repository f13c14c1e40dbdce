"""The user's own rules in a config file: laid over the packs, and refused with key path and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstack.config.parse import parse_config
from kvstack.errors import ConfigError, Problem
from kvstack.prompt.engine import apply_rules
from kvstack.prompt.rules.ruleset import RuleSet
from kvstack.stack.rules_loader import load_rules

START = '[server]\nmodel = "x"\n'


def rules(tmp_path: Path, text: str) -> RuleSet:
    """The rules of a config file with this text."""
    path = tmp_path / "box.toml"
    path.write_text(START + text, encoding="utf-8")
    return load_rules(parse_config(START + text, path, Path("/home/ann")), path)


def problems(tmp_path: Path, text: str) -> tuple[Problem, ...]:
    """What is wrong with them."""
    with pytest.raises(ConfigError) as caught:
        rules(tmp_path, text)
    assert caught.value.source == str(tmp_path / "box.toml")
    return caught.value.problems


def system_after(ruleset: RuleSet, system: str) -> str:
    """A system text after the rules."""
    body = json.dumps({"messages": [{"role": "system", "content": system}, {"role": "user", "content": "x"}]}).encode()
    stripped = apply_rules(body, "/v1/chat/completions", ruleset)
    text = json.loads(stripped.body)["messages"][0]["content"]
    assert isinstance(text, str)
    return text


def test_a_packed_rule_can_be_switched_off(tmp_path: Path) -> None:
    """By its name, which `kvstack rules list` shows."""
    assert rules(tmp_path, "").by_name["openclaw.timestamps"].active
    assert not rules(tmp_path, '[rules]\ndisable = ["openclaw.timestamps"]').by_name["openclaw.timestamps"].active


def test_a_rule_of_ones_own_works(tmp_path: Path) -> None:
    """Position, pattern and action are enough."""
    ruleset = rules(
        tmp_path,
        '[[rules.add]]\nname = "mine.build"\nwhere = "system"\npattern = "Build {int} of {date}\\n"\naction = "drop"\n',
    )
    assert system_after(ruleset, "A\nBuild 17 of 2026-02-18\nB") == "A\nB"
    assert system_after(ruleset, "A\nBuild x of 2026-02-18\nB") == "A\nBuild x of 2026-02-18\nB"


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ('[rules]\ndisable = ["openclaw.timestampz"]', "rules.disable", 4),
        ('[[rules.add]]\nname = "a.b"\npatern = "x"', "rules.add.0.patern", 5),
        ('[[rules.add]]\nname = "a.b"\nwhere = "top"', "rules.add.0.where", 5),
        (
            '[[rules.add]]\nname = "a.b"\nwhere = "system"\naction = "drop"\npattern = "{dat}"',
            "rules.add.0.pattern",
            7,
        ),
    ],
)
def test_a_rule_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, text: str, path: str, line: int) -> None:
    """Unknown names, keys, values and tokens."""
    assert [(problem.path, problem.line) for problem in problems(tmp_path, text)] == [(path, line)]


@pytest.mark.parametrize(
    "pattern",
    [r"job=\d+", "Build .* of today", "id [0-9][0-9]", r"\w+ \d{4}", "(?:a|b)", "^Build [A-Za-z]+$", r"Build \d\d"],
)
def test_a_regular_expression_is_refused(tmp_path: Path, pattern: str) -> None:
    """It would be taken for literal text and never match anything, without a word."""
    text = f"[[rules.add]]\nname = 'a.b'\nwhere = 'system'\naction = 'drop'\npattern = '{pattern}'\n"
    (problem,) = problems(tmp_path, text)
    assert (problem.path.removesuffix(".0"), problem.line) == ("rules.add.0.pattern", 7)
    assert "regular expression" in problem.message


@pytest.mark.parametrize("pattern", [r"C:\data\{word}", "Wait ... {int} s", "a+b", "[{date}] {line}", "cost: 5.*{int}"])
def test_text_that_only_resembles_one_is_not(tmp_path: Path, pattern: str) -> None:
    """Backslashes, dots and brackets are text."""
    text = f"[[rules.add]]\nname = 'a.b'\nwhere = 'system'\naction = 'drop'\npattern = '{pattern}'\n"
    assert rules(tmp_path, text).by_name["a.b"].active


def test_a_misspelt_key_of_a_rule_names_the_right_one(tmp_path: Path) -> None:
    """As for every other key."""
    (problem,) = problems(tmp_path, '[[rules.add]]\nname = "a.b"\npatern = "x"')
    assert "did you mean pattern?" in problem.message
