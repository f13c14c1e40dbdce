"""The house stays one that a newcomer finds their way in: short functions, and maps that name every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KVSTACK = Path(__file__).parents[2] / "kvstack"
MODULES = sorted(KVSTACK.rglob("*.py"))
PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py" and path.parent != KVSTACK)
LINES = 60


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(KVSTACK)))
def test_no_function_is_longer_than_a_page(path: Path) -> None:
    """Ruff limits the complexity of a function, not its length."""
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LINES
    ]
    assert not long


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(KVSTACK)))
def test_each_package_is_a_map_of_its_modules(package: Path) -> None:
    """One line a module, and none for a module that is gone."""
    if package.name == "packs":
        pytest.skip("data only")
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = {line.split()[0] for line in text.splitlines() if line.startswith("    ") and line[4:5].strip()}
    modules = {path.stem for path in package.glob("*.py") if path.stem != "__init__"}
    modules |= {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert named == modules
