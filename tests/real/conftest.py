"""Fixtures of tests with real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.openclaw import OpenClaw


@pytest.fixture
def recording(tmp_path: Path) -> dict[str, Any]:
    """The warm-up's section: another session's request."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(OpenClaw(session=7).ask("Some other question.")), encoding="utf-8")
    return {"request_file": str(path)}
