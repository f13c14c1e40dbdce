"""Run file, lock and raw log."""

from __future__ import annotations

import errno
import stat
import sys
from pathlib import Path

import pytest

from kvstack.errors import AlreadyRunning, ExitCode, KvstackError
from kvstack.rundir import RawLog, RunDir, RunFile, names, state_dir

RUN = RunFile("box", 4711, 1700000000.5, "http://127.0.0.1:1234", "t0ken", "/etc/box.toml", "/log", "1.0")


def test_a_run_file_comes_back_as_written() -> None:
    """What `up` writes, `status` reads."""
    directory = RunDir("box")
    directory.lock()
    directory.write(RUN)
    directory.set_server(4712, 1700000001.0, "llama-server")
    run = directory.read()
    assert run is not None
    assert (run.pid, run.token, run.server_pid, run.server_argv0) == (4711, "t0ken", 4712, "llama-server")
    assert names() == ["box"]
    directory.clear()
    assert directory.read() is None
    assert names() == []
    directory.unlock()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_the_token_is_for_the_owner_alone() -> None:
    """Who can read the run file can stop the stack."""
    directory = RunDir("box")
    directory.lock()
    directory.write(RUN)
    assert stat.S_IMODE((directory.path / "run.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.unlock()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"name": 1}',
        RUN.to_json().replace("4711", '"4711"'),
        RUN.to_json().replace('"t0ken"', "null"),
    ],
)
def test_a_broken_run_file_is_no_run_file(text: str) -> None:
    """A full disk or a curious hand must not crash `status`."""
    assert RunFile.from_json(text) is None


def test_a_run_file_of_a_newer_kvstack_is_read() -> None:
    """Fields that are not known yet are ignored."""
    assert RunFile.from_json(RUN.to_json().replace("{", '{"new": [1],', 1)) == RUN


def test_a_run_file_that_cannot_be_written_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the old file stays, no half one beside it."""
    directory = RunDir("box")
    directory.lock()
    directory.write(RUN)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvstack.rundir.os.fdopen", full)
    with pytest.raises(OSError, match="No space"):
        directory.set_server(1, 2.0, "x")
    assert directory.read() == RUN
    assert sorted(path.name for path in directory.path.iterdir()) == ["lock", "run.json"]
    directory.unlock()


def test_a_second_lock_names_the_first_holder() -> None:
    """Exit 4, and the message says who it is and how to end it."""
    first = RunDir("box")
    first.lock()
    first.write(RUN)
    with pytest.raises(AlreadyRunning) as caught:
        RunDir("box").lock()
    assert caught.value.exit_code is ExitCode.NOT_RUNNING
    assert "4711" in caught.value.fact
    assert "kvstack down box" in caught.value.next_step
    first.unlock()
    again = RunDir("box")
    again.lock()
    again.unlock()


def test_a_state_directory_that_is_a_file_is_said_so() -> None:
    """Three parts, no traceback."""
    state_dir().parent.mkdir(parents=True, exist_ok=True)
    state_dir().write_text("in the way")
    with pytest.raises(KvstackError) as caught:
        RunDir("box").lock()
    assert str(state_dir()) in caught.value.fact


def test_the_raw_log_keeps_every_byte_over_rotation(tmp_path: Path) -> None:
    """Rotated by size, oldest thrown away, nothing lost in between."""
    log = RawLog(tmp_path / "server.log", max_bytes=100, kept=2)
    for number in range(10):
        log.write(b"%02d" % number * 20 + b"\n")  # 41 bytes: two fit
    log.close()
    kept = [tmp_path / name for name in ("server.log.2", "server.log.1", "server.log")]
    assert b"".join(path.read_bytes() for path in kept) == b"".join(
        b"%02d" % number * 20 + b"\n" for number in range(4, 10)
    )
    assert not (tmp_path / "server.log.3").exists()


def test_a_line_longer_than_the_limit_goes_in_whole(tmp_path: Path) -> None:
    """Rotation never cuts a write."""
    log = RawLog(tmp_path / "server.log", max_bytes=10)
    log.write(b"x" * 50)
    log.write(b"y")
    log.close()
    assert (tmp_path / "server.log.1").read_bytes() == b"x" * 50
    assert (tmp_path / "server.log").read_bytes() == b"y"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_log_bytes_and_nothing_else(tmp_path: Path) -> None:
    """The child must never wait for its log."""
    log = RawLog(tmp_path / "server.log")
    (tmp_path / "server.log").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space") as caught, Path("/dev/full").open("ab", buffering=0) as full:
        full.write(b"x")
    assert caught.value.errno == errno.ENOSPC
    log.write(b"lost")
    assert log.lost_bytes == 4
    log.close()


def test_a_log_directory_that_cannot_be_made_loses_log_bytes_and_nothing_else(tmp_path: Path) -> None:
    """Rights that were taken away, a file in the way: the pump goes on, and the log again as soon as it can."""
    (tmp_path / "box").write_text("in the way")
    log = RawLog(tmp_path / "box" / "server.log")
    log.write(b"lost")
    assert log.lost_bytes == 4
    (tmp_path / "box").unlink()
    log.write(b"kept")
    log.close()
    assert log.lost_bytes == 4
    assert (tmp_path / "box" / "server.log").read_bytes() == b"kept"
