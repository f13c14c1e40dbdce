"""The tiny models in tests/models: made by their generator, and shaped as their README says."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[3] / "models"


def listed_sums() -> dict[str, str]:
    """Digests by file name."""
    lines = (MODELS / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


@pytest.mark.parametrize("name", ["tiny-dense.gguf", "tiny-swa.gguf", "tiny-hybrid.gguf"])
def test_file_is_the_listed_one(name: str) -> None:
    """Each model file has the digest that SHA256SUMS gives it, and is small enough to live in a repository."""
    data = (MODELS / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == listed_sums()[name]
    assert len(data) < 400_000


def test_generator_is_deterministic(tmp_path: Path) -> None:
    """Running the generator again gives the very same bytes."""
    pytest.importorskip("gguf", reason="needs the gguf package, as the generator does")
    spec = importlib.util.spec_from_file_location("make_models", MODELS / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    sys.modules["make_models"] = generator  # dataclasses look their module up
    try:
        spec.loader.exec_module(generator)
        paths = generator.make_models(tmp_path)
    finally:
        del sys.modules["make_models"]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths} == listed_sums()
