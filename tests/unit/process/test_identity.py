"""Which process is which, and the kernel's evidence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstack.process.identity import (
    MARK_VARIABLE,
    ProcessIdentity,
    descendants,
    end_all,
    holds_port,
    identify,
    is_alive,
    mark,
    marked,
    port_owners,
    sweep,
)

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_identity_of_ourselves() -> None:
    """It is stable, and a process that started at another time is another one."""
    me = identify(os.getpid())
    assert me is not None
    assert me == identify(os.getpid())
    assert is_alive(me)
    assert not is_alive(ProcessIdentity(me.pid, me.started_s + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="start times since boot are Linux's")
def test_identity_does_not_follow_the_wall_clock() -> None:
    """The start time is told since boot: setting the clock does not turn a process into another one."""
    me = identify(os.getpid())
    assert me is not None
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = time.time() - psutil.Process().create_time()
    assert me.started_s == pytest.approx(since_boot_s - age_s, abs=2)


@pytest.mark.parametrize("pid", [-1, 999_999_999, 2**70])
def test_no_such_process(pid: int) -> None:
    """A pid that nobody has, or can have, is nobody."""
    assert identify(pid) is None
    assert not is_alive(ProcessIdentity(pid, 1.0))
    assert descendants(pid) == set()
    assert holds_port(pid, 1) is None


def test_zombie_is_dead() -> None:
    """A process that has ended, but was not collected yet, does not live."""
    process = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE)
    identity = identify(process.pid)
    assert identity is not None
    process.kill()
    deadline = time.monotonic() + 5
    while is_alive(identity) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(identity)
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def test_mark_is_inherited() -> None:
    """A process is found by the mark in its environment, by owner and by child; other owners' are not."""
    owner, other = ProcessIdentity(111_111_111, 5.25), ProcessIdentity(11_111_111, 5.25)
    processes = [
        subprocess.Popen(SLEEP, env={**os.environ, MARK_VARIABLE: mark(owner, serial)}, start_new_session=True)
        for serial in (1, 12)
    ]
    try:
        time.sleep(0.1)
        first, second = (identify(process.pid) for process in processes)
        assert marked(owner) == {first, second}
        assert marked(owner, 1) == {first}
        assert marked(owner, 2) == set()
        assert marked(other) == set()
        assert sweep(None, None, owner, timeout_s=2)
        assert marked(owner) == set()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_descendants(sleeper: subprocess.Popen[bytes]) -> None:
    """Children are found from their parent."""
    assert identify(sleeper.pid) in descendants(os.getpid())


def test_end_all_spares_the_successor(sleeper: subprocess.Popen[bytes]) -> None:
    """A pid that belongs to another process by now is not ended."""
    now = identify(sleeper.pid)
    assert now is not None
    end_all([ProcessIdentity(now.pid, now.started_s - 1)], kill=True)
    assert sleeper.poll() is None
    end_all([now], kill=True)
    assert sleeper.wait(5) != 0


def test_port_owner() -> None:
    """Who listens on a port is told, and who does not."""
    with socket.socket() as listener, socket.socket() as silent:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent.bind(("127.0.0.1", 0))
        port, free = listener.getsockname()[1], silent.getsockname()[1]
        assert holds_port(os.getpid(), port) is True
        assert holds_port(os.getpid(), free) is False
        assert port_owners(port) == {os.getpid()}
        assert port_owners(free) == set()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's kernels")
class TestKernelEvidence:
    """What the kernel says of the OOM killer."""

    def test_kernel_log(self, tmp_path: Path) -> None:
        """The log names the pid that was ended, and no other."""
        from kvstack.process._posix import oom_killed

        log = tmp_path / "kmsg"
        log.write_text(
            "6,1,1,-;Linux version 6\n"
            "3,900,5,-;Out of memory: Killed process 4711 (llama-server) total-vm:1kB\n"
            "3,901,6,-;Memory cgroup out of memory: Killed process 4712 (llama-server) total-vm:1kB\n"
        )
        assert oom_killed(4711, log) is True
        assert oom_killed(4712, log) is True
        assert oom_killed(471, log) is False
        assert oom_killed(47111, log) is False
        assert oom_killed(4711, tmp_path / "none") is None

    def test_control_group(self, tmp_path: Path) -> None:
        """The control group's counter is read where there is one."""
        from kvstack.process._posix import oom_kill_count

        assert oom_kill_count(tmp_path) is None
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/kvstack.service\n")
        assert oom_kill_count(tmp_path) is None
        group = tmp_path / "sys/fs/cgroup/user.slice/kvstack.service"
        group.mkdir(parents=True)
        (group / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
        assert oom_kill_count(tmp_path) == 2
