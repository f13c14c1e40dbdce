"""Problems in a config are named a layer at a time, all of a layer at once, and nothing is named that is right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstack.errors import ConfigError, Problem
from kvstack.stack.preflight import check_config

START = '[server]\nmodel = "m.gguf"\n'
RULE = '[[rules.add]]\nname = "mine.{name}"\nwhere = "system"\naction = "drop"\npattern = "{pattern}"\n'


def check(tmp_path: Path, text: str, *overrides: str) -> list[Problem]:
    """What is wrong with a config of this text; there is no llama-server to ask."""
    path = tmp_path / "box.toml"
    path.write_text(text, encoding="utf-8")
    environ = {"PATH": str(tmp_path), "KVSTACK_LLAMA_SERVER": str(tmp_path / "none")}
    try:
        check_config(text, path, Path("/home/ann"), overrides, environ)
    except ConfigError as error:
        return list(error.problems)
    return []


def places(problems: list[Problem]) -> list[tuple[int | None, str]]:
    """Where they are."""
    return [(problem.line, problem.path) for problem in problems]


def test_keys_come_first(tmp_path: Path) -> None:
    """All problems with keys and values at once; rules and prompts are read when these are right."""
    text = (
        '[server]\nmodel = "m.gguf"\nport = "x"\nextra_args = ["--port", "5"]\n'
        '[proxy]\nprot = 5\n[[rules.add]]\nname = "mine.a"\npatern = "x"\npattern = "id {uuidd}"\n'
    )
    assert places(check(tmp_path, text)) == [(3, "server.port"), (6, "proxy.prot"), (9, "rules.add.0.patern")]


def test_then_rules_prompt_and_arguments(tmp_path: Path) -> None:
    """Patterns that cannot be compiled, a name of no rule, an empty prompt and a refused argument: one round."""
    text = (
        '[server]\nmodel = "m.gguf"\nextra_args = ["--port", "5"]\n[warmup]\nsystem_prompt = " "\n'
        '[rules]\ndisable = ["mine.z"]\n'
        + RULE.format(name="a", pattern="id {dat}")
        + RULE.format(name="b", pattern="{tim}")
    )
    assert places(check(tmp_path, text)) == [
        (3, "server.extra_args"),
        (5, "warmup.system_prompt"),
        (7, "rules.disable"),
        (12, "rules.add.0.pattern"),
        (17, "rules.add.1.pattern"),
    ]


def test_a_regular_expression_is_one_problem(tmp_path: Path) -> None:
    """What it has in braces is no token that somebody got wrong."""
    text = START + RULE.format(name="a", pattern="X").replace('"X"', "'\\w+ \\d{4}'")
    (problem,) = check(tmp_path, text)
    assert "looks like a regular expression" in problem.message


def test_nothing_is_concluded_from_what_was_left_out(tmp_path: Path) -> None:
    """With a faulty `path` the recorded request is not read, and a stack that attaches has no arguments."""
    (tmp_path / "r.json").write_text('{"odd": 1}')
    text = START + '[warmup]\nrequest_file = "r.json"\npath = 5\n'
    assert places(check(tmp_path, text)) == [(5, "warmup.path")]
    attached = '[server]\nurl = "http://127.0.0.1:9"\nextra_args = ["--port", "5"]\nport = "x"\n'
    assert places(check(tmp_path, attached)) == [(4, "server.port")]


def test_without_a_binary_no_flag_is_called_unknown(tmp_path: Path) -> None:
    """Only what no llama-server may get is named then."""
    text = (
        '[server]\nmodel = "m"\nextra_args = ["--new-flag", "--ctx-size=5"]\n'
        'env = { LLAMA_ARG_HOST = "x" }\n[warmup]\nsystem_prompt = " "\n'
    )
    assert places(check(tmp_path, text)) == [
        (3, "server.extra_args"),
        (4, "server.env.LLAMA_ARG_HOST"),
        (6, "warmup.system_prompt"),
    ]


def test_with_a_binary_its_flags_are_known(llama_server: Path, tmp_path: Path) -> None:
    """A flag that this build does not have is named beside a prompt that is empty."""
    server = f'[server]\nmodel = "m"\nbinary = "{llama_server}"\nextra_args = ["--no-warmpu"]\n'
    text = server + '[warmup]\nsystem_prompt = " "\n'
    path = tmp_path / "box.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_config(text, path, Path("/home/ann"), (), os.environ)
    assert places(list(caught.value.problems)) == [(4, "server.extra_args"), (6, "warmup.system_prompt")]
    assert "did you mean --no-warmup?" in caught.value.problems[0].message


def test_a_good_config_is_returned(tmp_path: Path) -> None:
    """And nothing is asked of a binary, which whoever starts it does."""
    text = START + 'extra_args = ["--port", "5"]\n' + RULE.format(name="a", pattern="id {int}")
    path = tmp_path / "box.toml"
    path.write_text(text)
    config = check_config(text, path, Path("/home/ann"), ["proxy.port=19"], {"PATH": ""})
    assert (config.proxy.port, [rule.name for rule in config.rules.add]) == (19, ["mine.a"])
