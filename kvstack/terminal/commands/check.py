"""`kvstack check CONFIG`: is the file right?"""

from __future__ import annotations

import os

from kvstack.terminal import output
from kvstack.terminal.app import ConfigArgument, JsonOption, OverridesOption, app
from kvstack.terminal.config_file import load_checked


@app.command()
def check(config: ConfigArgument, overrides: OverridesOption = None, as_json: JsonOption = False) -> None:
    """
    Check a config file and name every problem.

    Keys, rules, llama-server's arguments and the warm-up's prompt, all at once, each problem with its key and line;
    then whether this machine has the binary and the model. Starts no server.
    """

    def action() -> output.Result:
        from kvstack.stack.preflight import preflight  # noqa: PLC0415 - other verbs must not pay for it

        parsed, path = load_checked(config, overrides)
        missing = preflight(parsed, path, os.environ)
        server = parsed.server
        source = server.url or server.hf or server.package or str(server.model)
        data = {
            "name": parsed.name,
            "config_path": str(path),
            "proxy_url": parsed.proxy_url,
            "upstream_url": parsed.upstream_url,
            "attached": parsed.attached,
            "source": source,
            "missing": [{"what": error.what, "fact": error.fact, "next_step": error.next_step} for error in missing],
        }
        verb = "attaches to" if parsed.attached else "serves"
        text = f"{config}: keys and rules are valid; stack {parsed.name!r} {verb} {source} behind {parsed.proxy_url}"
        if missing:
            shown = [output.error_text(error).replace("error: ", "not here: ", 1) for error in missing]
            text = "\n".join([text, "But on this machine it would not start:", *shown])
        return output.Result(data, f"{text}\n`kvstack doctor {config}` examines machine, model and memory.")

    output.deliver("check", as_json, action)
