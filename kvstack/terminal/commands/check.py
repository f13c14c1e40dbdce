"""`kvstack check CONFIG`: is the file right?"""

from __future__ import annotations

import os
from pathlib import Path

from kvstack.errors import KvstackError
from kvstack.rundir import RunDir, RunFile
from kvstack.terminal import output
from kvstack.terminal.app import ConfigArgument, JsonOption, OverridesOption, app
from kvstack.terminal.config_file import load_checked
from kvstack.terminal.control_client import alive


@app.command()
def check(config: ConfigArgument, overrides: OverridesOption = None, as_json: JsonOption = False) -> None:
    """
    Check a config file and name every problem.

    Keys, rules, llama-server's arguments and the warm-up's prompt, all at once, each problem with its key and line;
    then whether the stack runs already, or would start on this machine: binary, model, ports. Starts no server.
    """

    def action() -> output.Result:
        from kvstack.stack.ports import refusal  # noqa: PLC0415 - other verbs must not pay for it
        from kvstack.stack.preflight import preflight  # noqa: PLC0415 - see above

        parsed, path = load_checked(config, overrides)
        missing = preflight(parsed, path, os.environ)
        run = _running(parsed.name)
        # (of one that runs already the ports are its own)
        refused = refusal(parsed) if run is None else None
        server = parsed.server
        source = server.url or server.hf or server.package or str(server.model)
        data = {
            "name": parsed.name,
            "config_path": str(path),
            "proxy_url": parsed.proxy_url,
            "upstream_url": parsed.upstream_url,
            "attached": parsed.attached,
            "source": source,
            "missing": [_parts(error) for error in missing],
            "refused": _parts(refused) if refused is not None else None,
            "running": {"pid": run.pid, "proxy_url": run.proxy_url, "config_path": run.config_path} if run else None,
        }
        verb = "attaches to" if parsed.attached else "serves"
        text = f"{config}: keys and rules are valid; stack {parsed.name!r} {verb} {source} behind {parsed.proxy_url}"
        shown = [output.error_text(error).replace("error: ", "not here: ", 1) for error in missing]
        if refused is not None:
            shown.append(output.error_text(refused).replace("error: ", "in the way: ", 1))
        lines = [text, *_prospects(run, path, shown), f"`kvstack doctor {config}` examines machine, model and memory."]
        return output.Result(data, "\n".join(lines))

    output.deliver("check", as_json, action)


def _running(name: str) -> RunFile | None:
    run = RunDir(name).read()
    return run if run is not None and alive(run) else None


def _parts(error: KvstackError) -> dict[str, str]:
    return {"what": error.what, "fact": error.fact, "next_step": error.next_step}


def _prospects(run: RunFile | None, path: Path, obstacles: list[str]) -> list[str]:
    """Whether it runs, and what a start would give."""
    if run is None:
        if obstacles:
            return ["But on this machine it would not start:", *obstacles]
        return ["It does not run. Nothing was found that would keep it from starting."]
    other = "" if Path(run.config_path) == path else f", started from {run.config_path}"
    runs = f"It runs already: pid {run.pid}, {run.proxy_url}{other}. A second start would be refused."
    after = f"After `kvstack down {run.name}`"
    if obstacles:
        return [runs, f"{after} it would not start on this machine:", *obstacles]
    return [runs, f"{after} nothing that was found would keep it from starting with this file."]
