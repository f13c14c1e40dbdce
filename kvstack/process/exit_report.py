"""
Why a llama-server died, in three parts: a sentence, the fact that shows it, the next step.

The causes are a table.  Each names the texts (of llama-server, of the libraries below it, of the loader) that show it;
the first cause whose text stands in the output is taken, so the special ones stand before the general ones.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

FACT_LINES = 6
LAST_LINES = 8

_QUOTED = "  "

_TIMESTAMP = re.compile(r"^(?:\[\d+\] )?(?:\d+(?:\.\d+){3} +)?")


@dataclass(frozen=True, slots=True)
class Death:
    """
    The end of a llama-server, for a person.

    Attributes:
        what: One sentence without a trailing dot.
        fact: Exit status and the lines that show the cause.
        next_step: What to do.
    """

    what: str
    fact: str
    next_step: str

    @property
    def brief(self) -> str:
        """The fact on one line: the exit status, and the first line that shows the cause, if one does."""
        head, *quoted = self.fact.splitlines() or [""]
        shown = [line for line in quoted if not line.startswith(_QUOTED) or _is_reason(line.strip())]
        return "; ".join([head.strip(), *(line.strip() for line in shown[:1])])


@dataclass(frozen=True, slots=True)
class Cause:
    """
    One way to die.

    Attributes:
        texts: Each of them shows this cause where it stands in a line.
        what: The sentence.
        next_step: What to do.
    """

    texts: tuple[str, ...]
    what: str
    next_step: str


CAUSES: tuple[Cause, ...] = (
    # error: invalid argument: --no-mmap
    Cause(
        ("error: invalid argument:", "error: unknown argument:"),
        "llama-server does not know an argument that it was given",
        "Remove it from server.extra_args, or use a build that has it: see `llama-server --help`.",
    ),
    # error while handling argument "--device": invalid device: Vulkan7
    Cause(
        ("invalid device:",),
        "llama-server has no device of that name",
        'See `llama-server --list-devices` and set server.device to one of them, or to "none" for the CPU alone.',
    ),
    # error while handling argument "--cache-ram": stoi
    Cause(
        ("error while handling argument", "error while parsing arguments"),
        "llama-server rejects the value of an argument",
        "Correct the value in the config; `llama-server --help` lists what is allowed.",
    ),
    Cause(
        ("couldn't bind HTTP server socket", "couldn't bind to server socket"),
        "llama-server could not listen: its port is in use",
        "Stop the program that uses the port, or set server.port to a free one.",
    ),
    Cause(
        ("error: cannot execute",),
        "llama-server could not be started",
        "Check that server.binary is a program for this machine and that its executable bit is set.",
    ),
    Cause(
        ("error while loading shared libraries", "symbol lookup error", "Library not loaded", "version `GLIBC"),
        "llama-server could not be started: a library is missing or too old",
        "Use a build for this system, or set LD_LIBRARY_PATH under [server.env].",
    ),
    Cause(
        ("AMX is not ready to be used",),
        "This llama-server was built for another processor",
        "Use a build for this processor: a generic release build, or one compiled on this machine.",
    ),
    # error loading model: tensor 'output.weight' data is not within the file bounds, model is corrupted or incomplete
    Cause(
        ("data is not within the file bounds", "model is corrupted or incomplete", "failed to read key-value pairs"),
        "The model file is incomplete",
        "Compare its size with the original's, and download it again.",
    ),
    Cause(
        (
            "invalid magic characters",
            "invalid magic number",
            "but this software only supports up to version",
            "failed to read magic",
        ),
        "The model file is not a GGUF file that this llama-server can read",
        "Check that server.model names a GGUF file (not a web page or a pointer to one), or use a newer llama-server.",
    ),
    Cause(
        ("unknown model architecture", "unknown pre-tokenizer type", "missing tensor"),
        "This llama-server is too old for the model",
        "Use a newer llama-server.",
    ),
    Cause(
        ("failed to open GGUF file",),
        "The model file cannot be opened",
        "Check server.model: the path, and that this user may read it.",
    ),
    Cause(
        ("read error: Bad address",),
        "This llama-server cannot read the model without mmap: a bug in this build",
        "Use a newer llama-server, or set server.no_mmap = false.",
    ),
    Cause(
        ("HTTPS is not supported", "built without SSL", "failed to download", "curl: "),
        "llama-server could not download the model",
        "Download the file yourself and set server.model to it, or use a build with TLS.",
    ),
    # terminate called after throwing an instance of 'vk::DeviceLostError'
    Cause(
        ("DeviceLost", "device lost on", "context is lost"),
        "The GPU was lost: its driver reset it",
        "Check the kernel log. If a submit took too long, lower server.ubatch_size (256, then 128) or raise "
        "amdgpu.lockup_timeout; if memory ran out, lower server.ctx_size or server.cache_ram_mib.",
    ),
    Cause(
        ("exceeds device memory allocation limit", "exceeds device buffer size limit"),
        "One buffer was larger than the GPU's driver allows",
        'Set server.flash_attn = "on" and lower server.ubatch_size.',
    ),
    Cause(
        ("Not enough memory for command submission",),
        "The GPU ran out of memory",
        "Stop other programs that use the GPU, lower server.cache_ram_mib or server.ctx_size, or raise the GTT limit.",
    ),
    Cause(
        (
            "failed to allocate",
            "Failed to allocate a buffer",
            "unable to allocate",
            "Device memory allocation of size",
            "OutOfDeviceMemory",
            "OutOfHostMemory",
            "std::bad_alloc",
            "out of memory",
        ),
        "Out of memory",
        "Use a smaller quantisation, or lower server.ctx_size, server.parallel or server.ubatch_size: the line above "
        "says which.",
    ),
    Cause(
        ("GGML_ASSERT(", "GGML_ABORT", "ggml_abort"),
        "llama-server hit an internal error",
        "Report the line to the llama.cpp project; another build may not have the bug.",
    ),
    Cause(
        ("failed to load model", "unable to load model", "exiting due to model loading error"),
        "llama-server could not load the model",
        "Read the lines above; `kvstack logs` has the rest.",
    ),
    Cause(
        ("terminate called after throwing",),
        "llama-server hit an internal error",
        "Report the line to the llama.cpp project; another build may not have the bug.",
    ),
)
"""All known causes, the special before the general."""

_SIGNALS = {
    "SIGILL": (
        "llama-server used an instruction that this processor does not have",
        "Use a build for this processor: a generic release build, or one compiled on this machine.",
    ),
    "SIGSEGV": (
        "llama-server crashed (segmentation fault)",
        "Another build may not crash. A GPU reset can look like this too: check the kernel log.",
    ),
    "SIGBUS": (
        "llama-server crashed: a mapped file or its memory disappeared",
        "Check that the model file was not changed or truncated while it was in use, and that the disk is healthy.",
    ),
    "SIGABRT": (
        "llama-server aborted",
        "Read the lines above; `kvstack logs` has the rest.",
    ),
    "SIGKILL": (
        "llama-server was killed by another process",
        "Was memory short? Lower server.cache_ram_mib or server.ctx_size, or stop other programs.",
    ),
    **{
        name: (
            "llama-server was told to stop by another process",
            f"It received {name}; use `kvstack down` to stop the stack.",
        )
        for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")
    },
    "missing DLL": (
        "llama-server could not be started: a library is missing",
        "Keep the DLLs of its download beside it, and install the Visual C++ runtime.",
    ),
}

_FROM_OUTSIDE = {
    "SIGKILL": "usually the system's out-of-memory killer, else a person",
    "SIGTERM": "usually a service manager, a shutdown or a person",
    "SIGHUP": "usually a terminal that was closed",
    "SIGINT": "usually a Ctrl-C",
    "SIGQUIT": "usually a Ctrl-\\",
}
"""Signals that say nothing of the program that they end, and who sends them."""

_SAVING = "saving prompt with length"
"""Takes gigabytes of memory at once."""

_WINDOWS = {
    0xC0000005: "SIGSEGV",
    0xC000001D: "SIGILL",
    0xC0000409: "SIGABRT",
    0xC0000135: "missing DLL",
}
"""Windows ends a process with these where other systems send a signal."""

_OUT_OF_MEMORY = (
    "The kernel killed llama-server: out of memory",
    "Lower server.cache_ram_mib, server.ctx_checkpoints or server.ctx_size, or stop other programs. With a GPU that "
    "shares the memory, the model and the KV cache count as well.",
)


def is_error_line(line: str) -> bool:
    """Whether an output line tells of an error."""
    text = _TIMESTAMP.sub("", line, count=1)
    if text.startswith(("error", "E ", "terminate called", "fatal")):
        return True
    return any(needle in text for cause in CAUSES for needle in cause.texts)


def _is_reason(line: str) -> bool:
    return is_error_line(line) or _SAVING in line


def status_words(returncode: int) -> str:
    """
    An exit status in words.

    Args:
        returncode: Exit status, or the negative number of a signal.
    """
    name = _name(returncode)
    if abs(returncode) > 0xFFFF:  # Windows
        return f"exit status {returncode & 0xFFFFFFFF:#010x}"
    if returncode < 0:
        return name or f"signal {-returncode}"
    return f"exit status {returncode} ({name})" if name else f"exit status {returncode}"


def explain(
    returncode: int | None,
    last_lines: Sequence[str],
    error_lines: Sequence[str],
    *,
    out_of_memory: bool | None = None,
    left_behind: Sequence[int] = (),
) -> Death:
    """
    Say why a llama-server died.

    Args:
        returncode: Exit status, or the negative number of a signal; None if it could not be run at all.
        last_lines: The end of its output.
        error_lines: The lines for which `is_error_line` holds.
        out_of_memory: Whether the kernel says that it ended it for want of memory.
        left_behind: Pids of processes that it had started and that outlived it.
    """
    name = _name(returncode) if returncode is not None else None
    # Who was killed, or was asked to end, did not die of what it complained about before.
    cause = None if returncode == 0 or name in _FROM_OUTSIDE else _cause(error_lines)
    # The last words of one that was ended by somebody else are about its work, as a rule.
    reasons = [line for line in last_lines[-LAST_LINES:] if _is_reason(line)]
    asked = returncode == 0 and any("cleaning up before exit" in line for line in last_lines)
    if out_of_memory:
        what, next_step = _OUT_OF_MEMORY
        shown = reasons
    elif cause is not None:
        what, next_step = cause.what, cause.next_step
        first = [line for line in error_lines if any(text in line for text in cause.texts)]
        others = [line for line in error_lines if line not in first]
        shown = [*dict.fromkeys(first), *dict.fromkeys(others)][:FACT_LINES]
    elif name in _SIGNALS:
        what, next_step = _SIGNALS[name]
        if name == "SIGKILL" and any(_SAVING in line for line in last_lines[-3:]):
            what = "llama-server was killed while it saved a prompt in host memory: probably out of memory"
        shown = reasons if name in _FROM_OUTSIDE else list(last_lines[-LAST_LINES:])
    elif left_behind:
        what = "The command exited, but left the server it had started running"
        next_step = "If server.binary is a script, let it `exec` llama-server as its last step."
        shown = list(last_lines[-LAST_LINES:])
    elif asked:
        what, next_step = _SIGNALS["SIGTERM"]
        shown = reasons
    elif returncode == 0:
        what = "llama-server exited by itself"
        next_step = "Read the lines above; `kvstack logs` has the rest."
        shown = list(last_lines[-LAST_LINES:])
    else:
        what = "llama-server exited with an error"
        next_step = "Read the lines above; `kvstack logs` has the rest."
        shown = list(dict.fromkeys(error_lines))[:FACT_LINES] or list(last_lines[-LAST_LINES:])
    facts = [] if returncode is None else [status_words(returncode)]
    if facts and name in _FROM_OUTSIDE and not (shown or out_of_memory):
        facts[0] += f": {_FROM_OUTSIDE[name]}"
    if left_behind:
        facts.append(f"it had started {_pids(left_behind)}, now stopped")
    head = "; ".join(facts)
    return Death(what, "\n".join([*([head] if head else []), *(f"{_QUOTED}{line}" for line in shown)]), next_step)


def stalled(silence: str) -> Death:
    """
    Say that a start makes no progress.

    Args:
        silence: What does not move, and since when.
    """
    return Death(
        "llama-server is stalled: it makes no progress while starting",
        silence,
        "One busy core and silence is a shader compile that hangs: try another build or driver. Loading more than 20 "
        "GB with mmap can look like this too: set server.no_mmap = true. If it only needs more time, raise "
        "server.stall_timeout_s.",
    )


def span_words(seconds: float) -> str:
    """A length of time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _cause(lines: Sequence[str]) -> Cause | None:
    for cause in CAUSES:
        if any(text in line for text in cause.texts for line in lines):
            return cause
    return None


def _pids(pids: Sequence[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def _name(returncode: int) -> str | None:
    """The signal, or what Windows has instead of it, under the signal's name."""
    if returncode & 0xFFFFFFFF in _WINDOWS:
        return _WINDOWS[returncode & 0xFFFFFFFF]
    if -64 <= returncode < 0:
        number = -returncode
    elif 128 < returncode <= 128 + 64:  # a shell in between says it so; llama-server's own statuses are small
        number = returncode - 128
    else:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
