"""The typer app that the verbs register themselves with."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstack import __version__
from kvstack.terminal import output

app = typer.Typer(
    name="kvstack",
    help="Start llama-server with the right flags, keep its KV cache hot, and prove it live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StackArgument = Annotated[
    str | None,
    typer.Argument(metavar="NAME|CONFIG", help="A stack's name, or its config file. Default: the only running one."),
]
ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The stack's config file (TOML).")]
KnownConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|NAME",
        help="The stack's config file (TOML), or the name of a stack: then the file that it was started with.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON envelope instead of text.")]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the config, as in server.port=8081. Repeatable."
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        output.write(f"kvstack {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Start llama-server with the right flags, keep its KV cache hot, and prove it live."""
    del version
    output.set_debug(debug)
