"""A program that shall not outlive kvstack is run through a script that asks the kernel for that."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_the_program_gets_a_signal_when_its_parent_dies() -> None:
    """The script is found beside the module, and the program that it becomes has the signal set."""
    from kvstack.process._posix import _guarded

    asks = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    argv, env = _guarded([sys.executable, "-c", asks], {"LD_BIND_NOW": "1"})
    assert argv[0] == sys.executable
    assert "LD_BIND_NOW=1" in argv
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout == "9\n"
