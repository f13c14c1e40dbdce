"""The model file and its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.llama.model.memory import GIB


def incomplete(facts: Facts) -> Iterator[Finding]:
    """The file is cut off, or parts of it are missing."""
    model = facts.model
    if model is None:
        return
    if model.missing_parts:
        yield Finding(
            "model-parts",
            Severity.ERROR,
            f"The model is split, and {len(model.missing_parts)} of its parts are missing",
            ", ".join(model.missing_parts),
            "Download them into the directory of part 1.",
        )
    elif model.shape is not None and model.shape.parts > 1 and "-00001-of-" not in model.path:
        yield Finding(
            "model-parts",
            Severity.ERROR,
            "The file is one part of a split model, but its name does not say which",
            f"{model.path}: the header names {model.shape.parts} parts",
            "Give the parts the names that they were downloaded with, and name part 1.",
        )
    if model.problem is not None:
        yield Finding(
            "model-file",
            Severity.ERROR,
            "The model file is damaged or incomplete",
            f"{model.path} {model.problem}",
            "Compare its size with the original's, and download it again.",
        )


def drops_reasoning(facts: Facts) -> Iterator[Finding]:
    """The template takes the reasoning of earlier turns out, so each new turn rewrites the one before."""
    template = _template(facts)
    if template is None or facts.settings.reasoning_preserved:
        return
    # Qwen3 and Qwen3.5 keep it behind the last query only; DeepSeek's family cuts at the end mark.
    dropped = re.search(r"last_query_index|split\(['\"]</think>['\"]\)\s*(?:\[-1\]|\|\s*last)", template)
    if dropped is None:
        return
    can_keep = facts.props is not None and facts.props.preserves_reasoning is True
    if "preserve_thinking" in template:
        remedy = 'Add to server.extra_args: "--chat-template-kwargs", \'{"preserve_thinking": true}\'.'
    elif can_keep and facts.capabilities is not None and facts.capabilities.has("--reasoning-preserve"):
        remedy = 'Add to server.extra_args: "--reasoning-preserve".'
    else:
        remedy = "Use a template that keeps it (--chat-template-file), or switch thinking off for agents."
    yield Finding(
        "template-reasoning",
        Severity.WARNING,
        "The chat template drops the reasoning of earlier turns, so each turn re-evaluates the one before",
        f"chat template: ...{template[max(0, dropped.start() - 20) : dropped.end() + 20].strip()}...",
        remedy,
    )


def dates_prompt(facts: Facts) -> Iterator[Finding]:
    """The template writes today's date into the front of the prompt."""
    template = _template(facts)
    found = re.search(r"strftime_now\([^)]*\)", template or "")
    if found is None:
        return
    yield Finding(
        "template-date",
        Severity.NOTE,
        "The chat template writes the date at the front of the prompt: once a day the whole prompt is evaluated again",
        f"chat template: {found[0]}",
        "Nothing to do, unless a server runs over midnight: the first request of the day is slow.",
    )


def _template(facts: Facts) -> str | None:
    if facts.props is not None and facts.props.chat_template:
        return facts.props.chat_template
    return facts.shape.chat_template if facts.shape is not None else None


def foreign_model(facts: Facts) -> Iterator[Finding]:
    """The running server serves another model than the config names."""
    served = facts.props.model_path if facts.props is not None else None
    if served is None or facts.model is None or facts.config.attached:
        return
    name = re.split(r"[/\\]", facts.model.path)[-1]
    if re.split(r"[/\\]", served)[-1] == name:
        return
    yield Finding(
        "model-other",
        Severity.ERROR,
        "The server on this port serves another model",
        f"/props: model_path = {served}; the config names {name}",
        "Stop that server, or set server.port to a free port.",
    )


def size(facts: Facts) -> Iterator[Finding]:
    """The sum, for a person who plans."""
    needed, shape = facts.memory, facts.shape
    if needed is None or shape is None or facts.config.attached or needed.weights_bytes < GIB:
        return
    yield Finding(
        "memory-sum",
        Severity.NOTE,
        f"{shape.name or shape.architecture} needs {needed.gpu_bytes / GIB:.1f} GiB for the model and its cache, and "
        f"{needed.host_bytes / GIB:.1f} GiB of RAM beside it",
        "; ".join(needed.lines()),
        "",
    )


CHECKS = (incomplete, foreign_model, drops_reasoning, dates_prompt, size)
"""The checks of this module."""
