"""What `up` says of the warm-up's prompt before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstack.config.parse import parse_config
from kvstack.stack.plan import make_plan

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(("messages", "doubted"), [([USER], True), ([{"role": "system", "content": "S"}, USER], False)])
def test_a_recording_that_shares_nothing_is_doubted(messages: list[Any], doubted: bool, tmp_path: Path) -> None:
    """The stack starts, and says that next to nothing will be warm."""
    recording = tmp_path / "r.json"
    recording.write_text(json.dumps({"messages": messages}))
    text = '[server]\nurl = "http://127.0.0.1:9"\n[warmup]\nrequest_file = "r.json"\n'
    source = tmp_path / "box.toml"
    plan = make_plan(parse_config(text, source, tmp_path), source, {})
    assert [str(recording) in notice and "neither system text nor tools" in notice for notice in plan.notices] == (
        [True] if doubted else []
    )
