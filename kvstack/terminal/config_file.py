"""Reads a config file for the verbs that need all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstack.errors import ConfigError, Problem

if TYPE_CHECKING:
    from kvstack.config.model import Config


def load_config(path: str, overrides: Sequence[str] | None) -> tuple[Config, Path]:
    """
    Parse a config file.

    Args:
        path: As the person gave it.
        overrides: `key.path=value` items.

    Returns:
        The config, and the file's absolute path.

    Raises:
        ConfigError: The file cannot be read or has problems; all of them are named.
    """
    from kvstack.config.parse import parse_config  # noqa: PLC0415 - verbs that act on a running stack need no pydantic

    source, text = _read(path)
    return parse_config(text, source, Path.home(), overrides or ()), source


def load_checked(path: str, overrides: Sequence[str] | None) -> tuple[Config, Path]:
    """
    Parse a config file, and what is part of it: its rules, the prompt that it names for the warm-up, its arguments.

    Args:
        path: As the person gave it.
        overrides: `key.path=value` items.

    Returns:
        The config, and the file's absolute path.

    Raises:
        ConfigError: Something of that cannot be used; all problems are named, wherever they are.
    """
    from kvstack.stack.preflight import check_config  # noqa: PLC0415 - see above

    source, text = _read(path)
    return check_config(text, source, Path.home(), overrides or (), os.environ), source


def _read(path: str) -> tuple[Path, str]:
    source = Path(path).expanduser().absolute()
    try:
        return source, source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(path, [Problem("", "is not UTF-8 text")], "A config is a TOML file.") from None
    except OSError as error:
        near = _near(path) if isinstance(error, FileNotFoundError) else []
        raise ConfigError(
            path,
            [Problem("", f"cannot be read: {error.strerror or error}")],
            f"Give the path of a config file: {' or '.join(f'`{one}`' for one in near)}?"
            if near
            else "Give the path of a config file; `configs/` has examples.",
        ) from None


def _near(path: str) -> list[str]:
    """Files that may be meant where a stack's name is given, or a name without its directory."""
    from kvstack.terminal.control_client import config_of  # noqa: PLC0415 - only where it went wrong

    name = Path(path).name
    tried = [config_of(path), f"{path}.toml", f"configs/{name}", f"configs/{name}.toml"]
    return [one for one in dict.fromkeys(tried) if one and Path(one).expanduser().is_file()]
