"""
`kvstack check CONFIG`: is the file right?
"""

from __future__ import annotations

from kvstack.terminal import output
from kvstack.terminal.app import ConfigArgument, JsonOption, OverridesOption, app
from kvstack.terminal.loading import load_config

__all__ = ["check"]


@app.command()
def check(config: ConfigArgument, overrides: OverridesOption = None, as_json: JsonOption = False) -> None:
    """
    Check a config file and name every problem.

    All of them at once, each with its key and line. Starts nothing.
    """

    def action() -> output.Result:
        parsed, path = load_config(config, overrides)
        server = parsed.server
        source = server.url or server.hf or server.package or str(server.model)
        data = {
            "name": parsed.name,
            "config_path": str(path),
            "proxy_url": parsed.proxy_url,
            "upstream_url": parsed.upstream_url,
            "attached": parsed.attached,
            "source": source,
        }
        verb = "attaches to" if parsed.attached else "serves"
        text = f"{config} is right: stack {parsed.name!r} {verb} {source} behind {parsed.proxy_url}"
        return output.Result(data, text)

    output.deliver("check", as_json, action)
