"""
Reads a config file for the verbs that need all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstack.errors import ConfigError, Problem

if TYPE_CHECKING:
    from kvstack.core.config import Config

__all__ = ["load_config"]


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
    from kvstack.core.config import parse_config  # noqa: PLC0415 - verbs that act on a running stack need no pydantic

    source = Path(path).expanduser().absolute()
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(path, [Problem("", "is not UTF-8 text")], "A config is a TOML file.") from None
    except OSError as error:
        raise ConfigError(
            path,
            [Problem("", f"cannot be read: {error.strerror or error}")],
            "Give the path of a config file; `configs/` has some to begin with.",
        ) from None
    return parse_config(text, source, Path.home(), overrides or ()), source
