"""
Gathers what the doctor looks at: memory, kernel, drivers, the model file, the server's port.

Everything is read without special rights, and whatever cannot be read is unknown.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvstack.doctor.facts import Machine, ModelFile
from kvstack.llama.model.gguf import GgufError, read_header
from kvstack.llama.model.memory import ModelShape, shape_of
from kvstack.process.models import model_parts

AMD_VENDOR = "0x1002"
CONNECT_TIMEOUT_S = 0.5
KERNEL_RECORDS = 20_000
_ICD_DIRECTORIES = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")


def look_at_machine(root: Path = Path("/")) -> Machine:
    """
    Look at this machine.

    Args:
        root: Where `/proc` and `/sys` are.
    """
    system = {"win32": "windows", "darwin": "darwin"}.get(sys.platform, "linux")
    memory = psutil.virtual_memory()
    if system != "linux":
        adapters = _windows_adapters()
        return Machine(
            system=system,
            kernel=platform.release(),
            ram_bytes=memory.total,
            available_bytes=memory.available,
            carve_out_bytes=max((size for _, size in adapters), default=None),
            amd_gpu=any("AMD" in name or "Radeon" in name for name, _ in adapters),
        )
    meminfo = _meminfo(root)
    cards = list(_amd_cards(root))
    vram = [value for value in (_number(card / "mem_info_vram_total") for card in cards) if value is not None]
    gtt = [value for value in (_number(card / "mem_info_gtt_total") for card in cards) if value is not None]
    lockup_timeout = _text(root / "sys/module/amdgpu/parameters/lockup_timeout")
    return Machine(
        system=system,
        kernel=_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        ram_bytes=meminfo.get("MemTotal", memory.total),
        available_bytes=meminfo.get("MemAvailable", memory.available),
        contiguous_free_bytes=meminfo.get("CmaFree"),
        carve_out_bytes=max(vram, default=None),
        gtt_bytes=max(gtt, default=None),
        lockup_timeout=lockup_timeout,
        amd_gpu=bool(cards),
        vulkan_drivers=tuple(_vulkan_drivers(root)),
    )


def look_at_model(path: Path) -> ModelFile:
    """
    Look at a model file: its size, its parts, its header.

    Args:
        path: Of a split model, part 1.
    """
    parts = model_parts(path)
    there = [part for part in parts if part.is_file()]
    missing = tuple(part.name for part in parts if part not in there)
    problem: str | None = None
    shape: ModelShape | None = None
    sizes: list[int] = []
    for part in there:
        try:
            size = part.stat().st_size
            with part.open("rb") as file:
                header = read_header(file.read)
        except OSError as error:
            problem = problem or f"cannot be read: {error.strerror or error}"
            continue
        except GgufError as error:
            problem = problem or str(error)
            continue
        sizes.append(size)
        if size < header.needed_bytes:
            problem = problem or f"has {size:,} bytes, and its header says at least {header.needed_bytes:,}"
        if part == parts[0]:
            shape = shape_of(header)
    return ModelFile(str(path), sum(sizes), missing, problem, shape)


def port_answers(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with contextlib.suppress(OSError), socket.create_connection((target, port), timeout=CONNECT_TIMEOUT_S):
        return True
    return False


def _windows_adapters() -> list[tuple[str, int]]:
    """Names and dedicated memory of the display adapters, from the registry (WMI's figure has 32 bits)."""
    adapters: list[tuple[str, int]] = []
    if sys.platform == "win32":
        import winreg  # noqa: PLC0415 - only there

        display = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
        for number in range(16):
            with (
                contextlib.suppress(OSError),
                winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, rf"{display}\{number:04d}") as key,
            ):
                name = str(winreg.QueryValueEx(key, "DriverDesc")[0])
                size = winreg.QueryValueEx(key, "HardwareInformation.qwMemorySize")[0]
                if isinstance(size, int):
                    adapters.append((name, size))
    return adapters


def _meminfo(root: Path) -> dict[str, int]:
    text = _text(root / "proc/meminfo") or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _amd_cards(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*")):
            device = card / "device"
            if re.fullmatch(r"card\d+", card.name) and _text(device / "vendor") == AMD_VENDOR:
                yield device


def _vulkan_drivers(root: Path) -> Iterator[str]:
    for directory in _ICD_DIRECTORIES:
        with contextlib.suppress(OSError):
            for path in sorted((root / directory.lstrip("/")).glob("*.json")):
                yield f"{directory}/{path.name}"


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def last_run(path: Path, limit_bytes: int = 8 * 1024 * 1024) -> bytes:
    """
    What the raw log holds of the llama-server's last run.

    Args:
        path: The raw log.
        limit_bytes: How much of its end to look at.

    Returns:
        Whole lines; empty if the log cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - limit_bytes))
            data = file.read()
    except OSError:
        return b""
    if size > limit_bytes:
        data = data.partition(b"\n")[2]
    # Among the first lines of every run: `... verbosity = 4 (adjust with the `-lv N` CLI arg)`
    start = data.rfind(b"(adjust with the `-lv N` CLI arg)")
    return data[data.rfind(b"\n", 0, start) + 1 :] if start >= 0 else data


@dataclass(frozen=True, slots=True)
class LastLog:
    """
    The raw log of a stack's last run.

    Attributes:
        path: The file.
        data: Its lines; empty if there are none, or if they are of no use.
        age_s: How long ago it was written to; None if there is none.
        left_out: Why it says nothing of the config in question; None if it does.
    """

    path: Path
    data: bytes = b""
    age_s: float | None = None
    left_out: str | None = None


def look_at_log(path: Path, config_path: Path, model: Path | None, runs_from: str | None, now_s: float) -> LastLog:
    """
    Read the log of the last run of a stack's name, if it is about this config.

    A name says little: the run may have been one of another config, or of this one as it was before it was changed.

    Args:
        path: The raw log.
        config_path: The config in question.
        model: The model that it names, or None if that is not known.
        runs_from: The config file of the stack that runs under this name now, or None.
        now_s: The time.
    """
    try:
        age_s = max(0.0, now_s - path.stat().st_mtime)
    except OSError:
        return LastLog(path)
    data = last_run(path)
    if runs_from is not None and runs_from != str(config_path):
        return LastLog(path, age_s=age_s, left_out=f"the stack of this name was started from {runs_from}")
    loaded = _LOADED.findall(data)
    served = loaded[-1].decode("utf-8", "replace") if loaded else None
    if model is not None and served is not None and os.path.normpath(served) != os.path.normpath(model):
        return LastLog(path, age_s=age_s, left_out=f"it is of a run with another model, {served}")
    with contextlib.suppress(OSError):
        if runs_from is None and config_path.stat().st_mtime > now_s - age_s:
            return LastLog(path, age_s=age_s, left_out="it is older than the config file")
    return LastLog(path, data, age_s)


# srv    load_model: loading model '/models/m.gguf'
_LOADED = re.compile(rb"load_model: loading model '([^'\n]+)'")


def kernel_lines() -> tuple[str, ...]:
    """Lines of the kernel's log about the GPU and about memory, where this user may read it."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ()
    records: list[bytes] = []
    try:
        while len(records) < KERNEL_RECORDS:
            records.append(os.read(log, 8192))  # one record each; BlockingIOError behind the last one
    except OSError:
        pass
    finally:
        os.close(log)
    return telling_kernel_lines(records)


def telling_kernel_lines(records: Iterable[bytes]) -> tuple[str, ...]:
    """The texts of kernel records that tell of the GPU or of memory."""
    # 4,1234,5678901234,-;amdgpu 0000:c5:00.0: ring comp_1.1.0 timeout
    texts = (record.partition(b";")[2].partition(b"\n")[0].decode("utf-8", errors="replace") for record in records)
    return tuple(text for text in texts if re.search(r"amdgpu|\[drm\]|oom|Out of memory", text))
