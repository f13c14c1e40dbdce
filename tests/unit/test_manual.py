"""
The manual of the config file, configs/README.md.

After a change of a key or its docstring, write it anew: `python tests/unit/test_manual.py`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvstack.config.parse import manual

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "configs" / "README.md"


def page() -> str:
    """The whole page, title included."""
    return (
        "# Configuration\n\nEvery key of a config file. Relative paths are relative to the file, `~` is your home "
        "directory, and\n`kvstack up CONFIG --set server.port=12346` overrides any key. The files beside this page are "
        f"complete examples.\n\n{manual()}"
    )


def test_manual_is_current() -> None:
    """configs/README.md is what the docstrings of the config say."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/unit/test_manual.py"


def test_manual_names_every_key_of_the_profiles() -> None:
    """No profile uses a key that the manual does not explain."""
    text = page()
    for path in (ROOT / "configs").glob("*.toml"):
        for keys in tomllib.loads(path.read_text(encoding="utf-8")).values():
            for key in keys if isinstance(keys, dict) else ():
                assert f"| `{key}` |" in text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
