"""Tests of `kvstack rules list` and `kvstack rules test`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstack.rundir import RunFile
from kvstack.terminal import control_client
from kvstack.terminal.cli import main

SYSTEM = 'You help.\n```json\n{{\n  "schema": "openclaw.inbound_meta.v1",\n  "message_id": "{id}"\n}}\n```\n'


@pytest.fixture(autouse=True)
def no_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack runs, whatever runs on this machine."""
    for name in ("XDG_STATE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "state"))


def run(*arguments: str) -> int:
    """Run the command line in this process; give its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


def conversation(path: Path) -> Path:
    """Write two requests whose system text differs in an id."""
    turns = [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] hi"}, {"role": "assistant", "content": "yes"}]
    bodies = [
        {"messages": [{"role": "system", "content": SYSTEM.format(id=n)}, *turns[: 2 * n - 1], *turns[:1][: n - 1]]}
        for n in (1, 2)
    ]
    rows = [{"path": "/v1/chat/completions", "headers": {}, "body": body} for body in bodies]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return path


def envelope(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON envelope that was printed."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_list_without_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    """The packed rules with their default switches; how often they acted is not known."""
    assert run("rules", "list", "--json") == 0
    rules = {rule["name"]: rule for rule in envelope(capsys)["data"]["rules"]}
    assert rules["openclaw.timestamps"] == {
        "name": "openclaw.timestamps",
        "client": "any",
        "where": "user head",
        "action": "drop",
        "origin": "openclaw 1",
        "active": True,
        "switch": "strip_timestamps",
        "summary": rules["openclaw.timestamps"]["summary"],
        "digest": rules["openclaw.timestamps"]["digest"],
        "effect": "It is dropped.",
        "hits": None,
    }


def test_list_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Switches, disabled rules and the user's own ones show."""
    config = tmp_path / "kv.toml"
    config.write_text(
        '[server]\nurl = "http://127.0.0.1:9"\n[proxy]\nstrip_timestamps = false\n[rules]\ndisable = ["pi.date"]\n'
        '[[rules.add]]\nname = "mine"\nwhere = "user head"\naction = "drop"\npattern = "at {time}: "\n',
        "utf-8",
    )
    assert run("rules", "list", str(config)) == 0
    text = capsys.readouterr().out
    assert "off  openclaw.timestamps" in text
    assert "off  pi.date" in text
    assert "on   mine  (user head, drop, for any, from config)" in text


def test_list_of_what_is_no_rule_of_a_pack(capsys: pytest.CaptureFixture[str]) -> None:
    """What is counted like a rule can be looked up, and so can clients for which there is nothing to do."""
    assert run("rules", "list", "--json") == 0
    data = envelope(capsys)["data"]
    assert data["clients_without_rules"] == ["cline", "codex"]
    built_in = {rule["name"]: (rule["action"], rule["active"]) for rule in data["rules"] if rule["origin"] == "kvstack"}
    assert built_in == {"cache-prompt": ("constant", True), "raw-prompt": ("observe", True)}
    assert run("rules", "list") == 0
    text = capsys.readouterr().out
    assert "\n-    codex  (nothing to do)\n" in text
    assert "\non   raw-prompt  (prompt, observe, for any, from kvstack)\n" in text
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("place", "It stays where it first stood, and comes back when its turn is history."),
        ("drop", "It is dropped, as long as no earlier one stands that says something else."),
        ("sticky", "It becomes the end of the user text that it follows, and stays there."),
        ("observe", "Nothing is changed; it is only counted."),
    ],
)
def test_a_description_fits_the_action_in_force(
    action: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A packed rule whose action the user changed is described by the new one, and not by the old one."""
    config = tmp_path / "kv.toml"
    config.write_text(
        '[server]\nurl = "http://127.0.0.1:9"\n[[rules.add]]\nname = "openclaw.carrier"\n'
        f"action = {json.dumps(action)}\n",
        "utf-8",
    )
    assert run("rules", "list", str(config), "--json") == 0
    (rule,) = [rule for rule in envelope(capsys)["data"]["rules"] if rule["name"] == "openclaw.carrier"]
    assert rule["effect"] == says
    assert "stay" not in rule["summary"]
    assert "drop" not in rule["summary"]


def test_the_effect_of_each_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each action of a system text is said in words of its own, with what goes with it."""
    actions = {
        "drop": 'action = "drop"',
        "constant": 'action = "constant"\nconstant = "x"',
        "freeze": 'action = "freeze"',
        "told": 'action = "freeze"\nannounce = true\ntext = "{value}"',
        "coarsen": 'action = "coarsen"',
        "tail": 'action = "tail"',
        "sticky": 'action = "sticky"',
        "keys": 'action = "sticky"\nkeys = ["a", "b"]',
    }
    config = tmp_path / "kv.toml"
    rules = "".join(
        f'[[rules.add]]\nname = "mine.{name}"\nwhere = "system"\npattern = "x: {{json}}"\n{keys}\n'
        for name, keys in actions.items()
    )
    config.write_text('[server]\nurl = "http://127.0.0.1:9"\n' + rules, "utf-8")
    assert run("rules", "list", str(config), "--json") == 0
    found = {rule["name"].removeprefix("mine."): rule["effect"] for rule in envelope(capsys)["data"]["rules"]}
    assert {name: found[name] for name in actions} == {
        "drop": "It is dropped.",
        "constant": "The text 'x' always stands in its place.",
        "freeze": "The first value of each conversation is repeated.",
        "told": "The first value of each conversation is repeated; the model is told once of each other one, behind "
        "the newest user text.",
        "coarsen": "A clock is shortened to its day.",
        "tail": "It moves to the end of the newest user text, as long as that turn is the newest.",
        "sticky": "It moves to the end of the newest user text and stays there.",
        "keys": "Its keys a, b move to the end of the newest user text and stay there.",
    }


@pytest.mark.parametrize(
    ("now", "differs", "says"),
    [
        ("{time}: ", [], "on in the running stack 'box', as {file} has them"),
        (
            "{date}: ",
            ["mine"],
            "on in the running stack 'box'\n{file} differs: 1 rule (mine). Listed is what the running",
        ),
        (None, ["mine"], "{file} differs: 1 rule (mine). "),
        ("{nonsense}", None, "has read {file} before: that cannot be used now"),
    ],
)
def test_list_of_a_running_stack_with_another_file(
    now: str | None,
    differs: list[str] | None,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listed is what the stack applies; that its file would make other rules, if only in a pattern, is said."""
    config = tmp_path / "box.toml"

    def write(pattern: str | None) -> None:
        rule = f'[[rules.add]]\nname = "mine"\nwhere = "user head"\naction = "drop"\npattern = "at {pattern}"\n'
        config.write_text('[server]\nurl = "http://127.0.0.1:9"\n' + (rule if pattern is not None else ""), "utf-8")

    write("{time}: ")
    assert run("rules", "list", str(config), "--json") == 0
    applied = [rule | {"hits": 3} for rule in envelope(capsys)["data"]["rules"]]
    stack = RunFile("box", 1, 1.0, "http://127.0.0.1:9", "token", str(config), "", "1.0")
    monkeypatch.setattr(control_client, "find", lambda _: stack)
    monkeypatch.setattr(control_client, "fetch", lambda *_: control_client.Answer(True, "", {"rules": applied}))
    write(now)
    assert run("rules", "list", str(config), "--json") == 0
    data = envelope(capsys)["data"]
    assert (data["stack"], data["rules"], data["file_differs"]) == ("box", applied, differs)
    assert run("rules", "list", str(config)) == 0
    assert says.replace("{file}", str(config)) in capsys.readouterr().out


def test_list_of_a_file_whose_name_another_file_runs_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names a file hears of that file."""
    config = tmp_path / "copy.toml"
    rule = '[[rules.add]]\nname = "mine"\nwhere = "user head"\naction = "drop"\npattern = "at {time}: "\n'
    config.write_text(f'name = "box"\n[server]\nurl = "http://127.0.0.1:9"\n{rule}', "utf-8")
    stack = RunFile("box", 1, 1.0, "http://127.0.0.1:9", "token", str(tmp_path / "box.toml"), "", "1.0")
    monkeypatch.setattr(control_client, "find", lambda _: stack)
    assert run("rules", "list", str(config), "--json") == 0
    data = envelope(capsys)["data"]
    assert (data["stack"], data["config_path"]) == (None, str(config))
    assert "mine" in [rule["name"] for rule in data["rules"]]


def test_list_of_a_running_stack_that_tells_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version: nothing is claimed."""
    config = tmp_path / "box.toml"
    config.write_text('[server]\nurl = "http://127.0.0.1:9"\n', "utf-8")
    assert run("rules", "list", str(config), "--json") == 0
    applied = [{key: rule[key] for key in rule if key != "digest"} for rule in envelope(capsys)["data"]["rules"]]
    stack = RunFile("box", 1, 1.0, "http://127.0.0.1:9", "token", str(config), "", "0.1")
    monkeypatch.setattr(control_client, "find", lambda _: stack)
    monkeypatch.setattr(control_client, "fetch", lambda *_: control_client.Answer(True, "", {"rules": applied}))
    assert run("rules", "list", str(config)) == 0
    assert f"whether {config} says the same" in capsys.readouterr().out


def test_list_of_an_unknown_stack(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is neither a file nor a running stack is said to be none."""
    assert run("rules", "list", "nowhere") == 4
    assert "nowhere" in capsys.readouterr().err


def test_a_captured_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every edit is shown, and what consecutive requests share before and after."""
    file = conversation(tmp_path / "captured.jsonl")
    assert run("rules", "test", str(file), "--json") == 0
    first, second = envelope(capsys)["data"]["requests"]
    assert first["client"] == "openclaw"
    assert first["stripped"] == {"ts_removed": 1, "msg_ids_removed": 1, "items_modified": 2}
    assert first["common_prefix_ratio"] == {"before": None, "after": None}
    assert second["common_prefix_ratio"]["after"] == 1.0
    assert second["common_prefix_ratio"]["before"] < 0.9
    assert {edit["removed"] for edit in first["edits"]} == {
        "[Wed 2026-02-18 20:48 UTC] ",
        ',\\n  \\"message_id\\": \\"1\\"',
    }
    assert second["compared_with"] == 1
    assert second["common_prefix"]["before"]["differs"]["cause"] == "counter"
    assert second["common_prefix"]["after"]["differs"] is None
    assert second["new_conversation"] is None
    assert [edit["rules"] for edit in first["edits"]] == [["openclaw.system-ids"], ["openclaw.timestamps"]]
    assert {hit["rule"]: hit["edits"] for hit in first["hits"]} == {
        "openclaw.system-ids": [0],
        "openclaw.timestamps": [1],
    }
    assert run("rules", "test", str(file)) == 0
    assert capsys.readouterr().out == CAPTURED


CAPTURED = r"""1. /v1/chat/completions | openclaw | first of its conversation (c1) | 2 edits
   @110 openclaw.system-ids
     aw.inbound_meta.v1\"[-,\n  \"message_id\": \"1\"-]\n}\n```\n"}, {"role
   @179 openclaw.timestamps
     "user", "content": "[-[Wed 2026-02-18 20:48 UTC] -]hi"}]}
2. /v1/chat/completions | openclaw | conversation c1 | 3 edits
   to evaluate after request 1: 73 of 150 -> 7 of 75 characters
   without the rules, a number changed in messages[0].content @77
     [-1-]{+2+}
   with the rules it begins with all of request 1
   @110 openclaw.system-ids
     aw.inbound_meta.v1\"[-,\n  \"message_id\": \"2\"-]\n}\n```\n"}, {"role
   @282 openclaw.timestamps
     "user", "content": "[-[Wed 2026-02-18 20:48 UTC] -]hi"}]}
   1 edit as in request 1: openclaw.timestamps 1

2 requests, 5 edits; to evaluate in 1 of them: 73 -> 7 characters
edits by rule: openclaw.timestamps 3, openclaw.system-ids 2
"""


def test_rules_that_match_and_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A frozen clock beside a changing id: it matched, the id is what makes each request a new conversation."""
    config, file = tmp_path / "kv.toml", tmp_path / "captured.jsonl"
    config.write_text(
        '[server]\nurl = "http://127.0.0.1:9"\n'
        '[[rules.add]]\nname = "mine.clock"\nwhere = "system"\naction = "freeze"\n'
        'pattern = "Current time: [[{date} {time}]]"\n'
        '[[rules.add]]\nname = "mine.build"\nwhere = "system"\naction = "drop"\npattern = "Request: {line}"\n',
        "utf-8",
    )
    turns: list[dict[str, str]] = []
    lines = []
    for n, uuid in enumerate(("0e7c9a52-6c1f-4a1e-9b7e-3f0a51c2d8e4", "b1946ac9-2492-4d23-8f4c-6d2f5e8a7c10")):
        system = f"You help with plants.\nRequest id {uuid}\nCurrent time: 2026-02-18 20:48\nAnswer in one sentence."
        turns = [*turns, {"role": "user", "content": f"question {n}"}]
        lines.append(json.dumps({"messages": [{"role": "system", "content": system}, *turns]}))
        turns = [*turns, {"role": "assistant", "content": f"answer {n}"}]
    file.write_text("\n".join(lines), "utf-8")
    assert run("rules", "test", str(file), "--config", str(config), "--json") == 0
    data = envelope(capsys)["data"]
    first, second = data["requests"]
    why = "first value of a new conversation, kept for its next requests"
    place = {"rule": "mine.clock", "path": "messages[0].content", "action": "freeze"}
    assert first["idle"] == second["idle"] == [place | {"why": why}]
    assert first["new_conversation"] == {"like_request": None, "why": None, "differs": None}
    assert second["new_conversation"] == {
        "like_request": 1,
        "why": "the system text differs @33 (id) in messages[0].content",
        "differs": {"path": "messages[0].content", "offset": 33, "cause": "id"},
    }
    assert data["unmatched"] == [{"rule": "mine.build", "active": True, "origin": "config", "begins_in": None}]
    assert run("rules", "test", str(file), "--config", str(config)) == 0
    assert capsys.readouterr().out == IDLE


IDLE = r"""1. /v1/chat/completions | unknown client | first of its conversation (c1) | 0
   edits
   mine.clock matched, no edit: first value of a new conversation, kept for its
     next requests (freeze, messages[0].content)
2. /v1/chat/completions | unknown client | another conversation (c2) | 0 edits
   a new conversation, although similar to request 1: the system text differs
     @33 (id) in messages[0].content
   to evaluate after request 1: 123 of 156 -> 123 of 156 characters
   without and with the rules, an id changed in messages[0].content @33
     [-0e7c9a52-6c1f-4a1e-9 ... 0a51c2d8e4-]{+b1946ac9-2492-4d23-8 ... 2f5e8a7c
     10+}
   mine.clock matched, no edit: first value of a new conversation, kept for its
     next requests (freeze, messages[0].content)

2 requests, 0 edits; to evaluate in 1 of them: 123 -> 123 characters
matched, but never an edit: mine.clock 2
1 request taken as a new conversation, although similar to an earlier one: what
     was frozen or placed before does not apply there.  A conversation is known
     by its texts, without what rules take out, freeze or make constant; a rule
     for a difference that does not matter keeps the conversation together.
never matched: mine.build of the config (system, drop)
"""


def test_freezing_where_each_request_is_a_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Voice commands have no second turn: there is nothing to keep, and what helps is named."""
    config, file = tmp_path / "box.toml", tmp_path / "asked.jsonl"
    rule = '[[rules.add]]\nname = "mine.clock"\nwhere = "system"\naction = "freeze"\npattern = "Now: {time}\\n"\n'
    config.write_text(f'[server]\nurl = "http://127.0.0.1:9"\n{rule}', "utf-8")
    asked = [("20:48", "light on"), ("20:49", "what is the weather"), ("20:50", "stop")]
    bodies = [
        {"messages": [{"role": "system", "content": f"Now: {now}\nBe brief."}, {"role": "user", "content": words}]}
        for now, words in asked
    ]
    file.write_text("\n".join(map(json.dumps, bodies)), "utf-8")
    assert run("rules", "test", str(file), "--config", str(config)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "matched, but never an edit: mine.clock 3" in out
    assert (
        "no first value that `freeze` could keep (mine.clock): `drop`, `coarsen` and `tail` act on each request." in out
    )
    config.write_text(config.read_text("utf-8").replace("freeze", "drop"), "utf-8")
    assert run("rules", "test", str(file), "--config", str(config)) == 0
    assert "could keep" not in capsys.readouterr().out


def test_help_says_what_the_figures_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Offsets, marks of an edit and the ratio are explained where one looks for them."""
    assert run("rules", "test", "--help") == 0
    text = capsys.readouterr().out
    for said in ("@10,296", "[-...-]", "{+...+}", "common_prefix_ratio", "Evaluated anew"):
        assert said in text


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"input": "x"}, "/v1/responses"),
        ({"system": "s", "messages": []}, "/v1/messages"),
        ({"prompt": "x"}, "/completion"),
    ],
)
def test_a_bare_body_tells_its_dialect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: dict[str, Any], path: str
) -> None:
    """A file with nothing but a body is enough."""
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body, indent=2), "utf-8")
    assert run("rules", "test", str(file), "--json") == 0
    assert [request["path"] for request in envelope(capsys)["data"]["requests"]] == [path]


@pytest.mark.parametrize("text", ["[1, 2]", "{broken", '{"a": 1}\n{broken'])
def test_files_that_hold_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """What is no request is a usage error with the reason."""
    file = tmp_path / "bad.jsonl"
    file.write_text(text, "utf-8")
    assert run("rules", "test", str(file)) == 2
    assert capsys.readouterr().err
    assert run("rules", "test", str(tmp_path / "missing.json")) == 2


def test_raw_prompts_split_by_the_template_of_the_configs_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the config of a ChatML model a raw prompt is read in turns, without one it says what is missing."""
    prompt = "<|im_start|>user\n[Wed 2026-02-18 20:48 UTC] hi<|im_end|>\n<|im_start|>assistant\n"
    file, config = tmp_path / "raw.json", tmp_path / "kv.toml"
    file.write_text(json.dumps({"path": "/completion", "headers": {}, "body": {"prompt": prompt}}), "utf-8")
    model = Path(__file__).parents[3] / "models" / "tiny-dense.gguf"
    config.write_text(f"[server]\nmodel = {json.dumps(str(model))}\n", "utf-8")
    assert run("rules", "test", str(file)) == 0
    assert "not split into turns: its model's chat template is not known" in capsys.readouterr().out
    assert run("rules", "test", str(file), "--config", str(config), "--json") == 0
    (found,) = envelope(capsys)["data"]["requests"]
    assert [hit["rule"] for hit in found["hits"]] == ["openclaw.timestamps"]
    assert found["stripped"]["ts_removed"] == 1
    config.write_text("[server]\nmodel = '/nowhere/x.gguf'\n", "utf-8")
    assert run("rules", "test", str(file), "--config", str(config)) == 0


def test_a_body_without_a_prompt_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON object that is no request is not passed over as one that needs no edit."""
    file = tmp_path / "x.json"
    file.write_text('{"foo": 1}', "utf-8")
    assert run("rules", "test", str(file)) == 0
    assert "no prompt in it" in capsys.readouterr().out
