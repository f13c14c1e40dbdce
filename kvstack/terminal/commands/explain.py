"""`kvstack explain [N|last]`: one request in plain words."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from kvstack.errors import KvstackError
from kvstack.terminal import output
from kvstack.terminal.app import JsonOption, app

WIDTH = 100


@app.command()
def explain(
    request: Annotated[
        str, typer.Argument(metavar="[N|last]", help="Number of the request, as `status` shows it.")
    ] = "last",
    stack: Annotated[
        str | None,
        typer.Option(
            "--stack", metavar="NAME|CONFIG", help="A stack's name, or its config file. Default: the only running one."
        ),
    ] = None,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Show sixty characters of the prompt around the difference.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """
    Explain what the cache did to one request, and why.

    Says what the client changed, what the server did, what it cost, and what to do about it.
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

        run = control_client.find(stack)
        answer = control_client.fetch(run, f"requests/{request}" + ("?text=1" if show_text else ""))
        if not answer.ok or answer.data is None:
            raise KvstackError(
                f"The stack {run.name!r} cannot explain that request",
                answer.message,
                f"`kvstack status {run.name}` lists the requests that it remembers.",
            )
        return output.Result(answer.data, _text(answer.data, show_text=show_text))

    output.deliver("explain", as_json, action)


def _text(data: dict[str, Any], *, show_text: bool = False) -> str:
    explanation = data.get("explanation") or {}
    verdict = explanation.get("verdict") or "still running"
    lines = [f"Request {explanation.get('request')}: {verdict}.  {_one_line(explanation.get('headline'))}"]
    for part in explanation.get("parts") or ():
        lines += ["", str(part.get("title"))]
        for sentence in part.get("sentences") or ():
            lines += textwrap.wrap(_one_line(sentence), WIDTH, initial_indent="  ", subsequent_indent="  ")
    divergence = data.get("divergence")
    if isinstance(divergence, dict):
        lines += [
            "",
            f"The text around {divergence.get('path')} @{divergence.get('offset'):,}",
            f"  before: {_one_line(divergence.get('before'))}",
            f"  now:    {_one_line(divergence.get('after'))}",
        ]
    elif show_text:
        differs = (data.get("request") or {}).get("difference") is not None
        lines += [
            "",
            "The text around the difference is no longer remembered."
            if differs
            else "There is no text to show: no difference from a former request was found.",
        ]
    return "\n".join(lines)


def _one_line(text: object) -> str:
    """A piece of a prompt, or words of a server, without what would move the cursor or hide."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
