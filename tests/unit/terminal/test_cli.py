"""Tests of the command line without a running stack: usage, exit codes, envelopes, what is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvstack import __version__
from kvstack.process.identity import identify
from kvstack.rundir import EndFile, RunDir, RunFile
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView, ServerView
from kvstack.state.stack_state import StackState
from kvstack.state.status_json import encode
from kvstack.terminal import control_client
from kvstack.terminal.cli import main

_BROKEN_URLS = (
    "http://127.0.0.1:99999",
    "http://127.0.0.1:x",
    "ftp://[::1",
    "ftp://127.0.0.1:9",
    "http://:9",
    "http://a..b:9",
    "http://a b:9",
    "http://\x00:9",
    "http://\ud800:9",
    "",
)
CONFIG = '[server]\nurl = "http://127.0.0.1:9"\n[proxy]\nport = 18\n'


def run(*arguments: str) -> int:
    """Run the command line in this process; give its exit code."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


def write_run_file(
    name: str, *, alive: bool = True, url: str = "http://127.0.0.1:9", attached: bool = False
) -> RunFile:
    """Write the run file of a stack that runs in this process, or of one that was killed."""
    me = identify(os.getpid())
    assert me is not None
    directory = RunDir(name)
    directory.path.mkdir(parents=True)
    run_file = RunFile(
        name, me.pid, me.started_s if alive else me.started_s - 100.0, url, "token", f"/etc/{name}.toml",
        str(directory.log_path), __version__, attached=attached,
    )  # fmt: skip
    directory.write(run_file)
    return run_file


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is data, and no error."""
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvstack {__version__}\n"


@pytest.mark.parametrize("verb", ["up", "status", "warmup", "down", "logs", "check", "capture"])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb has a help text."""
    assert run(verb, "--help") == 0
    assert f"kvstack {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["up"],
        ["logs", "-n", "many"],
        ["up", "x.toml", "--wait"],
        ["down", "a", "b"],
        ["capture"],
        ["capture", "box", "c.jsonl", "more"],
        ["capture", "box.toml"],
        ["capture", "c.jsonl", "--count", "0"],
        ["capture", "c.jsonl", "--force"],
    ],
)
def test_usage_errors_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What the command line cannot mean is said on stderr in three parts, exit 2, and no traceback."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "\nnext:  " in captured.err
    assert "Traceback" not in captured.err


def test_usage_error_as_envelope(capsys: pytest.CaptureFixture[str]) -> None:
    """Where --json was asked for, a usage error is an envelope too."""
    assert run("status", "--json", "--nonsense") == 2
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["command"], envelope["status"], envelope["exit_code"]) == ("status", "error", 2)
    assert envelope["errors"][0]["what"].startswith("No such option")


@pytest.mark.parametrize("verb", ["status", "warmup", "down", "logs"])
def test_no_stack_exits_4(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a running stack the verbs that need one say so and exit 4."""
    assert run(verb) == 4
    assert capsys.readouterr().err.startswith("error: No stack is running\n")
    assert run(verb, "box", "--json") == 4
    envelope = json.loads(capsys.readouterr().out)
    assert envelope["errors"][0]["what"] == "No stack named 'box' is running"


@pytest.mark.parametrize("arguments", [("status",), ("logs",), ("down",), ("capture", "killed", "c.jsonl")])
def test_quick_verbs_import_little(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Status, logs, down and capture do not pay for what only a running stack needs."""
    code = (
        "import sys\n"
        "from kvstack.terminal.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'httpx', 'starlette', 'uvicorn', 'pydantic', 'kvstack.stack.stack'} & set(sys.modules)))"
    )
    write_run_file("killed", alive=False)
    result = subprocess.run(
        [sys.executable, "-c", code, *(arguments if len(arguments) > 1 else (*arguments, "killed"))],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert result.stdout.strip() == ""
    assert "'killed' is not running" in result.stderr


def test_stale_run_file_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    """A run file whose process has ended is no running stack, and the message says why."""
    stale = write_run_file("box", alive=False)
    assert run("status") == 4
    said = capsys.readouterr().err
    assert f"its run file names pid {stale.pid}, which ended" in said
    assert "kvstack up /etc/box.toml" in said


def test_a_pid_that_is_somebody_elses_is_not_signalled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`down` leaves a process alone that only has the pid of a stack that is gone."""
    write_run_file("box", alive=False)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signalled"))
    assert run("down", "box") == 4
    assert "not running" in capsys.readouterr().err


def test_one_living_among_stale_ones_is_taken() -> None:
    """Without a name the only living stack is meant, whatever killed ones have left."""
    write_run_file("dead", alive=False)
    living = write_run_file("living")
    assert control_client.find(None) == living


def test_several_stacks_must_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name and with several stacks the message names them."""
    write_run_file("one", url="http://127.0.0.1:1")
    write_run_file("two", url="http://127.0.0.1:2")
    assert run("status") == 2
    said = capsys.readouterr().err
    assert "one  http://127.0.0.1:1" in said
    assert "two  http://127.0.0.1:2" in said


def test_a_stack_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A living stack whose port is closed is not ready, and its log is pointed to."""
    write_run_file("box")
    assert run("status", "box") == 3
    said = capsys.readouterr().err
    assert said.startswith("error: The stack 'box' does not answer\n")
    assert "kvstack logs box" in said


@pytest.mark.parametrize("verb", ["status", "warmup", "explain"])
def test_nobody_is_sent_to_a_log_that_there_is_not(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is attached to keeps its own."""
    write_run_file("box", attached=True)
    assert run(verb, *(["last", "--stack", "box"] if verb == "explain" else ["box"])) == 3
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "kvstack logs" not in said


def test_who_is_attached_and_not_ready_is_sent_to_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is named; one of our own has a log."""
    attached, own = write_run_file("box", attached=True), write_run_file("own")
    stack = replace(StackState("box", ProxyView(attached.proxy_url)), server=ServerView(url="http://10.0.0.5:8080"))
    status = encode(replace(stack, state=State.LOADING))
    monkeypatch.setattr(control_client, "fetch_status", lambda _: status)
    assert run("status", attached.name) == 3
    said = capsys.readouterr().err
    assert "next:  Check llama-server at http://10.0.0.5:8080" in said
    assert "kvstack logs" not in said
    assert run("status", own.name) == 3
    assert "kvstack logs -f own" in capsys.readouterr().err


def test_a_failed_warm_up_of_a_server_that_is_attached_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is in that server's log."""
    write_run_file("box", attached=True)
    monkeypatch.setattr(
        control_client, "act", lambda *_: control_client.Answer(False, "HTTP 500: no", {"outcome": "failed"})
    )
    monkeypatch.setattr(control_client, "fetch_status", lambda _: {"state": "ready"})
    assert run("warmup", "box") == 1
    said = capsys.readouterr().err
    assert "attached to" in said
    assert "kvstack logs" not in said


def test_nothing_to_warm_names_the_file_and_its_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to set, and where."""
    write_run_file("box")
    monkeypatch.setattr(
        control_client, "act", lambda *_: control_client.Answer(False, "no", {"outcome": "no prefix known"})
    )
    monkeypatch.setattr(control_client, "fetch_status", lambda _: {"state": "ready"})
    assert run("warmup", "box") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: There is nothing to warm up\n  no prefix known\n")
    assert "Set warmup.request_file or warmup.system_prompt in /etc/box.toml" in said


@pytest.mark.parametrize(
    "broken",
    [
        *({"proxy_url": url} for url in _BROKEN_URLS),
        *({"token": token} for token in ("a\r\nX: y", "a\n", "20 \N{EURO SIGN}", "\ud800", "")),
    ],
)
def test_a_broken_run_file_is_named(broken: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """An address or a token that cannot be used is the file's fault: it is named, and what to do."""
    good = write_run_file("box")
    RunDir("box").write(
        replace(good, proxy_url=broken.get("proxy_url", good.proxy_url), token=broken.get("token", good.token))
    )
    for verb in ("status", "warmup", "explain"):
        assert run(verb) == 3
        said = capsys.readouterr().err
        assert said.startswith("error: The run file of the stack 'box' is broken\n")
        assert str(RunDir("box").path / "run.json") in said
        assert "kvstack down box" in said
        assert "\nnext:  " in said
        if "token" in broken:
            assert repr(broken["token"])[1:-1] not in said or not broken["token"]


@pytest.mark.parametrize("request_name", ["a b", "\N{EURO SIGN}", "1\r\nX: y", "../status", "?", "\udce4"])
def test_what_a_person_asks_for_is_sent_as_a_path(request_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that cannot be is asked for as it was typed, not taken for a stack that is away by its spelling."""
    write_run_file("box")
    assert run("explain", request_name) == 3  # nothing listens there
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [('name = "other"\n' + CONFIG, "other"), (CONFIG, "box"), ("not [ toml", "box"), ("name = 5\n", "box")],
)
def test_a_config_path_means_its_stack(text: str, name: str, tmp_path: Path) -> None:
    """A config file stands for the stack that it names, also when it is broken by now."""
    path = tmp_path / "box.toml"
    path.write_text(text)
    assert control_client.stack_name(str(path)) == name


@pytest.mark.parametrize("target", ["../etc", "a/b", "..", ".hidden", "a:b", ""])
def test_names_do_not_leave_the_state_directory(target: str) -> None:
    """Whatever is given as a name, only stacks' own directories are read."""
    assert run("status", target) == 4
    assert run("logs", target) == 4


def test_log_of_a_stack_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """The log outlives its stack: it is printed, and the exit code says that nothing runs."""
    directory = RunDir("box")
    directory.path.mkdir(parents=True)
    directory.log_path.write_bytes(b"one\ntwo\x1b[31m\nthree\n")
    assert run("logs", "box", "-n", "2") == 4
    captured = capsys.readouterr()
    assert captured.out == "two [31m\nthree\n"
    assert captured.err.startswith("error: No stack named 'box' is running")
    assert run("logs", "box", "--json") == 4
    envelope = json.loads(capsys.readouterr().out)
    assert envelope["data"]["lines"] == ["one", "two [31m", "three"]


def test_logs_that_are_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing runs, and nothing or something else is named: the error says whose logs can be read, and how."""
    for name in ("demo", "box"):
        RunDir(name).path.mkdir(parents=True)
        RunDir(name).log_path.write_text("a line\n")
    for arguments in ((), ("other",), ("-f",)):
        assert run("logs", *arguments) == 4
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "available logs: box, demo" in captured.err
        assert "`kvstack logs box`, `kvstack logs demo`" in captured.err


def test_watch_with_json_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """What the two options do together is said where a person looks."""
    assert run("status", "--help") == 0
    assert "JSON Lines" in " ".join(capsys.readouterr().out.split())


def test_follow_and_json_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    """A stream of lines is no envelope."""
    assert run("logs", "-f", "--json") == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_check_accepts_a_good_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good config is called right, with what it would do."""
    path = tmp_path / "box.toml"
    path.write_text(CONFIG)
    assert run("check", str(path)) == 0
    assert "attaches to http://127.0.0.1:9 behind http://127.0.0.1:18" in capsys.readouterr().out
    assert run("check", str(path), "--set", "proxy.port=19", "--json") == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["name"], data["proxy_url"], data["attached"]) == ("box", "http://127.0.0.1:19", True)


def test_check_names_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad config gets all its problems named at once, with lines, exit 2; a missing one too."""
    path = tmp_path / "box.toml"
    path.write_text('[server]\nurl = "http://127.0.0.1:9"\nctx_sise = 4096\n[proxy]\nport = "many"\n')
    assert run("check", str(path)) == 2
    said = capsys.readouterr().err
    assert "line 3: server.ctx_sise" in said
    assert "did you mean server.ctx_size?" in said
    assert "line 5: proxy.port" in said
    assert run("check", str(tmp_path / "none.toml")) == 2
    assert "cannot be read: No such file or directory" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    assert run("check", str(path)) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[[rules.add]]\nname = "mine.x"\nwhere = "system"\n', 6, "rules.add.0.action: is missing"),
        ('[rules]\ndisable = ["nobodys"]\n', 7, "rules.disable"),
        ('[warmup]\nenabled = false\nrequest_file = "none.json"\n', 8, "none.json: No such file or directory"),
        ('[warmup]\nsystem_prompt_file = "none.txt"\n', 7, "none.txt: No such file or directory"),
        ('[warmup]\nrequest_file = "box.toml"\n', 7, "box.toml is no recorded request"),
        ('[warmup]\nrequest_file = "empty.json"\n', 7, "empty.json holds no model request"),
        ('[warmup]\nrequest_file = "silent.json"\n', 7, "silent.json holds a request without a prompt"),
        ('[warmup]\nsystem_prompt_file = "blank.txt"\n', 7, "blank.txt is empty"),
        ('[warmup]\nsystem_prompt = " "\n', 7, "warmup.system_prompt: is empty"),
    ],
)
def test_check_and_doctor_refuse_what_up_refuses(
    text: str, line: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rules and the warm-up's prompt are part of the file."""
    path = tmp_path / "box.toml"
    for name, content in (("empty.json", "{}"), ("silent.json", '{"messages": []}'), ("blank.txt", "\n")):
        (tmp_path / name).write_text(content)
    path.write_text(CONFIG.replace("port = 18", "port = 18\n") + text)
    told = []
    for verb in ("check", "doctor", "up"):
        assert run(verb, str(path)) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] == told[2]
    assert f"line {line}: " in told[0]
    assert says in told[0]


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (None, "The model file does not exist"),
        (b"garbage", "The model is not a GGUF file"),
        (b"", "The model is not a GGUF file"),
        (b"GGUF\x03\0\0\0", "The model file cannot be used"),
    ],
)
def test_check_says_what_is_not_here(
    model: bytes | None, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be right and its start fail all the same: check says so, and names the doctor for the rest."""
    path = tmp_path / "box.toml"
    path.write_text('[server]\nmodel = "m.gguf"\nbinary = "./nowhere"\n')
    if model is not None:
        (tmp_path / "m.gguf").write_bytes(model)
    assert run("check", str(path)) == 0
    said = capsys.readouterr().out
    assert "is right" not in said
    assert "on this machine it would not start" in said
    assert "llama-server was not found" in said
    assert what in said
    assert f"kvstack doctor {path}" in said
    assert "b'" not in said
    assert run("check", str(path), "--json") == 0
    missing = json.loads(capsys.readouterr().out)["data"]["missing"]
    assert [item["what"] for item in missing] == ["llama-server was not found", what]


def test_check_says_what_a_start_would_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would start, somebody has its port, or it runs already: then what is so after its end."""
    path = tmp_path / "box.toml"

    def checked(*more: str) -> str:
        assert run("check", str(path), *more) == 0
        return capsys.readouterr().out

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(CONFIG.replace("port = 18", f"port = {port}"))
        said = checked()
        assert "on this machine it would not start" in said
        assert f"in the way: The proxy's port {port}" in said
        assert str(port) in json.loads(checked("--json"))["data"]["refused"]["what"]
        write_run_file("box")
        said = checked()
    assert f"It runs already: pid {os.getpid()}" in said
    assert "A second start would be refused" in said
    assert "nothing that was found would keep it from starting with this file" in said
    assert "in the way" not in said
    assert json.loads(checked("--json"))["data"]["running"]["pid"] == os.getpid()
    path.write_text('[server]\nmodel = "none.gguf"\nbinary = "./nowhere"\n')
    assert "After `kvstack down box` it would not start on this machine" in checked()
    RunDir("box").clear()
    path.write_text(CONFIG.replace("port = 18", f"port = {port}"))
    assert "It does not run. Nothing was found that would keep it from starting." in checked()


def test_check_refuses_an_argument_also_without_a_binary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What no llama-server may get is wrong on every machine."""
    path = tmp_path / "box.toml"
    path.write_text('[server]\nmodel = "m.gguf"\nbinary = "./nowhere"\nextra_args = ["--port", "5"]\n')
    assert run("check", str(path)) == 2
    assert "line 4: server.extra_args: --port would move the server away" in capsys.readouterr().err


def test_a_name_where_a_file_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that may be meant are named: beside it, in `configs/`, or that of the stack of this name."""
    monkeypatch.chdir(tmp_path)
    assert run("check", "box") == 2
    assert "next:  Give the path of a config file; `configs/` has examples" in capsys.readouterr().err
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "box.toml").write_text(CONFIG)
    for verb in ("check", "doctor", "up"):
        for target in ("box", "config/box.toml"):
            assert run(verb, target) == 2
            assert "next:  Give the path of a config file: `configs/box.toml`?\n" in capsys.readouterr().err
    (tmp_path / "box.toml").write_text(CONFIG)
    write_run_file("other")
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(CONFIG)
    RunDir("other").write(replace(write_run_file("more"), name="other", config_path=str(elsewhere)))
    assert run("check", "box") == 2
    assert "`box.toml` or `configs/box.toml`?" in capsys.readouterr().err
    assert run("check", "other") == 2
    assert f": `{elsewhere}`?" in capsys.readouterr().err


@pytest.mark.parametrize("ended", [False, True])
def test_doctor_takes_the_name_of_a_stack(ended: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that runs, or one that an error has ended, has a config file."""
    path = tmp_path / "some.toml"
    path.write_text('name = "box"\n' + CONFIG)
    run_file = replace(write_run_file("box"), config_path=str(path))
    if ended:
        RunDir("box").clear()
        RunDir("box").write_end(EndFile("box", 1, 2.0, 3.0, str(path), "what", "fact", "next"))
    else:
        RunDir("box").write(run_file)
    for target in ("box", str(path)):
        code = run("doctor", target, "--json")
        envelope = json.loads(capsys.readouterr().out)
        assert code == envelope["exit_code"]
        assert envelope["data"]["name"] == "box"


def test_the_next_step_fits_the_kind_of_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no key is named, `correct the keys` is no help."""
    path = tmp_path / "box.toml"

    def told(text: str, *overrides: str) -> list[str]:
        path.write_text(text)
        assert run("check", str(path), *overrides, "--json") == 2
        return [line.partition(":")[0] for line in _next_step(capsys).splitlines()]

    keys = "Correct the keys named above; configs/README.md explains every key."
    override = "Correct the --set"
    assert told("[server\n")[0].startswith("Correct that line.")
    assert told(CONFIG + "x = 1\n") == [keys]
    for malformed in ("server.ctx_size", "server.ctx_size=many", "server.a.b=1", "server.url.a=1"):
        assert told(CONFIG, "--set", malformed) == [override]
    assert told(CONFIG + "x = 1\n", "--set", "server.ctx_size=many") == [keys, override]


def _next_step(capsys: pytest.CaptureFixture[str]) -> str:
    text = json.loads(capsys.readouterr().out)["errors"][0]["next_step"]
    assert isinstance(text, str)
    return text


def test_up_with_a_bad_config_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the foreground and in the background a bad config ends the start with exit 2."""
    path = tmp_path / "box.toml"
    path.write_text("[server]\n")
    for more in ([], ["-d"], ["-d", "--wait"], ["--dry-run"]):
        assert run("up", str(path), *more) == 2
        assert "no model configured" in capsys.readouterr().err
    assert not RunDir("box").path.exists()


def test_up_in_the_background_of_a_running_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second stack of one name is refused with exit 4, and the first one is named."""
    first = write_run_file("box")
    path = tmp_path / "box.toml"
    path.write_text(CONFIG)
    assert run("up", "-d", str(path)) == 4
    said = capsys.readouterr().err
    assert f"pid {first.pid}" in said
    assert "kvstack down box" in said


def test_dry_run_of_an_attached_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is started there is no command to print."""
    path = tmp_path / "box.toml"
    path.write_text(CONFIG)
    assert run("up", str(path), "--dry-run") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "attaches to http://127.0.0.1:9" in captured.err
