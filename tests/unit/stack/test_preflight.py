"""
A config's faults in keys, rules, patterns and arguments are named in one pass, and nothing is named that is right.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstack.config.salvage import salvage
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


def test_four_layers_in_one_pass(tmp_path: Path) -> None:
    """A key, a value, an argument that is refused and a token that is none: nothing waits for a correction."""
    text = (
        '[server]\nmodel = "m.gguf"\nport = "x"\nextra_args = ["--port", "5"]\n'
        '[proxy]\nprot = 5\n[[rules.add]]\nname = "mine.a"\npatern = "x"\npattern = "id {uuidd}"\n'
        '[warmup]\nsystem_prompt = " "\n'
    )
    assert places(check(tmp_path, text)) == [
        (3, "server.port"),
        (4, "server.extra_args"),
        (6, "proxy.prot"),
        (9, "rules.add.0.patern"),
        (10, "rules.add.0.pattern"),
        (12, "warmup.system_prompt"),
    ]


def test_single_brackets_hide_nothing(tmp_path: Path) -> None:
    """`[rules.add]`, a token that there is not in it, and an argument that is refused: one round."""
    text = (
        '[server]\nmodel = "m.gguf"\nextra_args = ["--metrics"]\n'
        '[rules.add]\nname = "mine.a"\nwhere = "system"\naction = "drop"\npattern = "id {uuidd}"\n'
    )
    found = check(tmp_path, text)
    assert places(found) == [(3, "server.extra_args"), (4, "rules.add"), (8, "rules.add.0.pattern")]
    assert "{uuidd}" in found[2].message


def test_rules_keep_their_numbers_when_one_is_left_out(tmp_path: Path) -> None:
    """A faulty rule is not there for the compiler; those behind it are named by their place in the file."""
    bad = RULE.format(name="a", pattern="ok {int}").replace('"system"', '"top"')
    text = START + bad + bad.replace("mine.a", "mine.b") + RULE.format(name="c", pattern="id {dat}")
    assert places(check(tmp_path, text)) == [
        (5, "rules.add.0.where"),
        (10, "rules.add.1.where"),
        (17, "rules.add.2.pattern"),
    ]


def test_a_pattern_is_examined_whatever_else_its_rule_lacks(tmp_path: Path) -> None:
    """A rule that does not fit together is not compiled; its patterns are, and are named once."""
    text = START + '[[rules.add]]\nname = "mine.a"\nwhere = "system"\npattern = ["id {dat}", "{tim}"]\n'
    found = places(check(tmp_path, text))
    assert (3, "rules.add.0.action") in found
    assert found.count((6, "rules.add.0.pattern")) == 2
    also = START + '[[rules.add]]\nname = "openclaw.timestamps"\nalso = "id {dat}"\npattern = "at {int}"\n'
    assert len(check(tmp_path, also)) == 1


def test_a_rule_that_is_left_out_is_not_unknown(tmp_path: Path) -> None:
    """What is named for it elsewhere is right; a name of no rule is wrong beside it."""
    bad = RULE.format(name="a", pattern="ok").replace('"system"', '"top"')
    text = START + '[rules]\ndisable = ["mine.a", "mine.z"]\n' + bad
    found = check(tmp_path, text)
    assert places(found) == [(4, "rules.disable"), (7, "rules.add.0.where")]
    assert "'mine.z'" in found[0].message


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
        '[server]\nmodel = "m"\nport = "x"\nextra_args = ["--new-flag", "--ctx-size=5"]\n'
        'env = { LLAMA_ARG_HOST = "x" }\n'
    )
    assert places(check(tmp_path, text)) == [
        (3, "server.port"),
        (4, "server.extra_args"),
        (5, "server.env.LLAMA_ARG_HOST"),
    ]


def test_with_a_binary_its_flags_are_known(llama_server: Path, tmp_path: Path) -> None:
    """A flag that this build has not is named beside a key that is wrong."""
    text = f'[server]\nmodel = "m"\nbinary = "{llama_server}"\nport = "x"\nextra_args = ["--no-warmpu"]\n'
    path = tmp_path / "box.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_config(text, path, Path("/home/ann"), (), os.environ)
    assert places(list(caught.value.problems)) == [(4, "server.port"), (5, "server.extra_args")]
    assert "did you mean --no-warmup?" in caught.value.problems[1].message


def test_a_good_config_is_returned(tmp_path: Path) -> None:
    """And nothing is asked of a binary, which whoever starts it does."""
    text = START + 'extra_args = ["--port", "5"]\n' + RULE.format(name="a", pattern="id {int}")
    path = tmp_path / "box.toml"
    path.write_text(text)
    config = check_config(text, path, Path("/home/ann"), ["proxy.port=19"], {"PATH": ""})
    assert (config.proxy.port, [rule.name for rule in config.rules.add]) == (19, ["mine.a"])


@pytest.mark.parametrize(
    "text",
    [
        "server = 5\n",
        "name = 5\n",
        "rules = 5\nwarmup = [1]\nproxy = 1\n",
        "[rules]\nadd = 5\n",
        "[server.env]\n'A=B' = 1\nC = 2\n",
    ],
)
def test_whatever_is_wrong_the_rest_is_read(text: str) -> None:
    """Parts of any kind can be left out."""
    found = salvage(text, Path("/etc/box.toml"), Path("/home/ann"))
    assert found is not None
    assert found.config.rules.add == ()
    assert found.lost


def test_no_toml_is_nothing() -> None:
    """Of what cannot be read nothing is left."""
    assert salvage("[server", Path("/etc/box.toml"), Path("/home/ann")) is None
