"""
Exit statuses and last lines become a sentence, a fact and a next step.

The lines are those of b10068 and b11434, of the libraries below them, and of the loader.
"""

from __future__ import annotations

import sys

import pytest

from kvstack.process.exit_report import CAUSES, Death, explain, is_error_line, status_words

MISSING = (
    "0.00.070.518 I srv    load_model: loading model 'nope.gguf'",
    "0.00.070.651 E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)",
    "0.00.070.725 E llama_model_load: error loading model: llama_model_loader: failed to load model from nope.gguf",
    "0.00.070.800 E cmn  common_init_: failed to load model 'nope.gguf'",
    "0.00.070.806 I srv    operator(): operator(): cleaning up before exit...",
    "0.00.074.875 E srv  llama_server: exiting due to model loading error",
)

CASES = [
    (1, MISSING, "The model file cannot be opened", "failed to open GGUF file 'nope.gguf'", "server.model"),
    (
        1,
        (
            "0.00.060.747 E llama_model_load: error loading model: tensor 'output.weight' data is not within the file "
            "bounds, model is corrupted or incomplete",
            "0.00.061.092 E cmn  common_init_: failed to load model 'trunc.gguf'",
        ),
        "The model file is incomplete",
        "tensor 'output.weight'",
        "download it again",
    ),
    (
        1,
        (
            "0.00.014.159 E gguf_init_from_reader: this GGUF file is version 1936617326 but this software only "
            "supports up to version 3",
            "0.00.014.415 E cmn  common_init_: failed to load model 'bad.gguf'",
        ),
        "The model file is not a GGUF file that this llama-server can read",
        "version 1936617326",
        "GGUF file",
    ),
    (1, ("error: invalid argument: --no-mmap",), "does not know an argument", "--no-mmap", "server.extra_args"),
    (
        1,
        (
            'error while handling argument "--device": invalid device: Vulkan7',
            "usage:",
            "-dev,  --device <dev1,dev2,..>          comma-separated list of devices to use for offloading",
            "to show complete usage, run with -h",
        ),
        "llama-server has no device of that name",
        "invalid device: Vulkan7",
        "--list-devices",
    ),
    (
        1,
        (
            'error while handling argument "-fa": expected value for argument',
            "usage:",
            "to show complete usage, run with -h",
        ),
        "rejects the value of an argument",
        'argument "-fa"',
        "--help",
    ),
    (
        1,
        (
            "0.00.019.143 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18120",
            "0.00.019.163 I srv    operator(): operator(): cleaning up before exit...",
            "0.00.019.287 E srv  llama_server: exiting due to HTTP server error",
        ),
        "its port is in use",
        "port: 18120",
        "server.port",
    ),
    (-4, ("AMX is not ready to be used!",), "built for another processor", "SIGILL", "for this processor"),
    (132, (), "an instruction that this processor does not have", "exit status 132 (SIGILL)", "for this processor"),
    (
        -6,
        (
            "terminate called after throwing an instance of 'vk::DeviceLostError'",
            "  what():  vk::Queue::submit: ErrorDeviceLost",
        ),
        "The GPU was lost: its driver reset it",
        "vk::DeviceLostError",
        "server.ubatch_size",
    ),
    (
        139,
        ("ggml_vulkan: device lost on Vulkan0",),
        "The GPU was lost: its driver reset it",
        "exit status 139 (SIGSEGV)",
        "server.ubatch_size",
    ),
    (
        1,
        (
            "ggml_vulkan: Device memory allocation of size 4757131264 failed.",
            "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory",
        ),
        "One buffer was larger than the GPU's driver allows",
        "4757131264",
        "flash_attn",
    ),
    (
        1,
        ("0.03.000.000 E llama_init_from_model: failed to initialize: failed to allocate buffer for kv cache",),
        "Out of memory",
        "buffer for kv cache",
        "server.ctx_size",
    ),
    (
        127,
        ("llama-server: error while loading shared libraries: libvulkan.so.1: cannot open shared object file",),
        "a library is missing",
        "libvulkan.so.1",
        "[server.env]",
    ),
    (
        126,
        ("error: cannot execute /opt/x: Permission denied",),
        "could not be started",
        "Permission denied",
        "executable bit",
    ),
    (-11, ("0.10.000.000 I srv  update_slots: all slots are idle",), "crashed", "SIGSEGV", "kernel log"),
    (-9, ("0.10.000.000 I srv  x",), "killed by another process", "SIGKILL", "memory"),
    (0xC0000005, (), "crashed", "0xc0000005", "kernel log"),
    (-1073741515, (), "a library is missing", "0xc0000135", "DLL"),
    (3, ("something else",), "exited with an error", "something else", "kvstack logs"),
    (0, ("something else",), "exited by itself", "exit status 0", "kvstack logs"),
]


@pytest.mark.parametrize(("returncode", "lines", "what", "fact", "next_step"), CASES)
def test_cause(returncode: int, lines: tuple[str, ...], what: str, fact: str, next_step: str) -> None:
    """The special cause is found among the lines, wherever it stands, and each part of the message says its part."""
    death = explain(returncode, lines, [line for line in lines if is_error_line(line)])
    assert what in death.what
    assert not death.what.endswith(".")
    assert fact in death.fact
    assert next_step in death.next_step
    assert status_words(returncode) in death.fact.splitlines()[0]


def test_usage_is_no_fact() -> None:
    """The usage text that follows a bad value does not push the cause out of the fact."""
    usage = [f"  --option-{number}" for number in range(60)]
    lines = ('error while handling argument "--cache-ram": stoi', "usage:", *usage)
    death = explain(1, lines[-40:], [line for line in lines if is_error_line(line)])
    assert 'argument "--cache-ram": stoi' in death.fact
    assert "--option-59" not in death.fact


@pytest.mark.parametrize("oom", [True, None])
def test_out_of_memory(oom: bool | None) -> None:
    """FR-30: the kernel's word makes it certain; without it, a SIGKILL while a prompt is saved makes it likely."""
    lines = (
        "1.00.000.000 I srv  get_availabl: updating prompt cache",
        "1.00.000.001 I srv   prompt_save:  - saving prompt with length 28960, total state size = 3462.850 MiB",
    )
    death = explain(137, lines, [], out_of_memory=oom)
    assert "out of memory" in death.what
    assert ("probably" in death.what) == (oom is None)
    assert "saving prompt with length 28960" in death.fact
    assert "cache_ram_mib" in death.next_step


def test_asked_to_end() -> None:
    """A server that cleans up and ends with 0 was asked by somebody, whatever it had complained of before."""
    lines = (
        "0.01 E srv send_error: failed to allocate",
        "9.00.000.000 I srv    operator(): cleaning up before exit...",
    )
    death = explain(0, lines, [lines[0]])
    assert death.what == "llama-server was told to stop by another process"
    assert "kvstack down" in death.next_step


def test_old_complaints_are_not_blamed_for_a_kill() -> None:
    """A SIGKILL has no cause among the lines."""
    lines = ("ggml_vulkan: Device memory allocation of size 1 failed.",)
    assert explain(-9, lines, lines).what == "llama-server was killed by another process"


@pytest.mark.parametrize(
    ("returncode", "meaning"),
    [
        (-9, "SIGKILL: usually the system's out-of-memory killer, else a person"),
        (137, "exit status 137 (SIGKILL): usually the system's out-of-memory killer, else a person"),
        (-15, "SIGTERM: usually a service manager, a shutdown or a person"),
        (-1, "SIGHUP: usually a terminal that was closed"),
        (-2, "SIGINT: usually a Ctrl-C"),
        (-3, "SIGQUIT: usually a Ctrl-\\"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_who_was_ended_from_outside_is_not_explained_by_its_work(returncode: int, meaning: str) -> None:
    """What it did last has nothing to do with it: the signal's usual sender is named instead."""
    death = explain(returncode, ("1.00.000.000 I srv  update_slots: all slots are idle",) * 3, ())
    assert "by another process" in death.what
    assert death.fact == death.brief == meaning


def test_an_error_before_a_kill_is_quoted() -> None:
    """It looks like a reason; nobody knows, so no cause is claimed."""
    error = "1.00.000.001 E ggml_vulkan: Device memory allocation of size 1 failed."
    death = explain(-9, ("1.00.000.000 I srv  update_slots: all slots are idle", error), ())
    assert death.fact == f"SIGKILL\n  {error}"
    assert death.brief == f"SIGKILL; {error}"


@pytest.mark.parametrize("returncode", [-11, -6, 0, 3])
def test_a_notice_quotes_reasons_alone(returncode: int) -> None:
    """On one line there is no room for context; the whole error still shows where it happened."""
    line = "1.00.000.000 I srv  update_slots: all slots are idle"
    death = explain(returncode, (line,), ())
    assert line in death.fact
    assert death.brief == status_words(returncode)


def test_of_what_is_no_log_the_notice_says_two_lines() -> None:
    """An error of our own may take two."""
    assert Death("x", "one\ntwo\nthree", "y").brief == "one; two"
    assert Death("x", "", "y").brief == ""


def test_left_behind() -> None:
    """A wrapper that left its server behind is told to exec."""
    death = explain(0, (), (), left_behind=(41, 42))
    assert "left the server it had started running" in death.what
    assert "it had started processes 41, 42, now stopped" in death.fact
    assert "exec" in death.next_step


def test_facts_are_short() -> None:
    """However much was said, the fact stays readable."""
    lines = tuple(f"0.00.000.{number:03d} E srv  x: failed to load model number {number}" for number in range(200))
    assert len(explain(1, lines[-40:], lines[:24]).fact.splitlines()) <= 9


def test_table_is_sound() -> None:
    """Every cause says something in both parts, and none hides a later one completely."""
    for number, cause in enumerate(CAUSES):
        assert cause.what
        assert not cause.what.endswith(".")
        assert cause.next_step.endswith(".")
        for text in cause.texts:
            first = next(other for other in CAUSES if any(needle in text for needle in other.texts))
            assert first is cause, f"cause {number} ({text}) is hidden by {first.what}"


@pytest.mark.parametrize(
    ("line", "telling"),
    [
        ("error: invalid argument: --x", True),
        ("0.00.001.000 E srv  x: y", True),
        ("[51234] 0.00.001.000 E srv  x: y", True),
        ("0.00.001.000 I srv  x: error rate 0", False),
        ("0.00.001.000 W srv  llama_server: security: no API key is set", False),
        ("E", False),
        ("Every line is not an error", False),
        ("terminate called without an active exception", True),
    ],
)
def test_telling_lines(line: str, telling: bool) -> None:
    """Errors are told from other lines by level letter, first word, or a known text."""
    assert is_error_line(line) is telling


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exit status 0"),
        (1, "exit status 1"),
        (-15, "SIGTERM"),
        (143, "exit status 143 (SIGTERM)"),
        (-63, "signal 63"),
    ],
)
def test_status_words(returncode: int, words: str) -> None:
    """Statuses are said as a shell's user knows them."""
    assert status_words(returncode) == words
