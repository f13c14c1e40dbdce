"""`kvstack warmup`: make the known prefix warm again, now."""

from __future__ import annotations

from kvstack.errors import KvstackError, NotReady
from kvstack.terminal import format, output
from kvstack.terminal.app import JsonOption, StackArgument, app

TIMEOUT_S = 3600.0
"""A cold prefix of 100,000 tokens takes a small machine many minutes."""


@app.command()
def warmup(stack: StackArgument = None, as_json: JsonOption = False) -> None:
    """
    Warm the running stack's prefix up.

    Waits until it is done: milliseconds if a snapshot can be restored, else it may take minutes, and says why. A
    conversation in the slot goes to the host prompt cache. Also where warmup.enabled is false.
    """

    def action() -> output.Result:
        from kvstack.terminal import control_client  # noqa: PLC0415 - only when the verb runs

        run = control_client.find(stack)
        answer = control_client.act(run, "warmup", TIMEOUT_S)
        data = answer.data or {}
        if not answer.ok:
            status = control_client.fetch_status(run)
            if status.get("state") != "ready":
                raise NotReady(
                    f"The stack {run.name!r} is not ready", f"state: {status.get('state')}", "Wait until it is."
                )
            unknown = data.get("outcome") == "no prefix known"
            raise KvstackError(
                "There is nothing to warm up" if unknown else "The warm-up failed",
                "no prefix known" if unknown else answer.message,
                f"Set warmup.request_file or warmup.system_prompt in {run.config_path}, and start the stack again."
                if unknown
                else "Check the log of the llama-server that it is attached to."
                if run.attached
                else f"See `kvstack logs {run.name}`.",
            )
        # The prompt may hold a long user text behind the prefix, which nobody will ask for.
        prefix = data.get("boundary_tokens") or data.get("prompt_tokens")
        prompt, new = format.tokens(prefix), format.tokens(data.get("evaluated_tokens"))
        took = format.seconds(data.get("duration_ms"))
        how = {
            "restored": f"{run.name}: {prompt} tokens restored from a snapshot in {took}; the next answer proves it",
            "saved": f"{run.name} is warm: {new} tokens evaluated in {took}, and saved for the next start",
        }
        why = f" ({data['detail']})" if data.get("detail") else ""
        evaluated = f"{run.name} is warm: {prompt} tokens, {new} evaluated in {took}{why}"
        return output.Result(data, how.get(str(data.get("snapshot")), evaluated))

    output.deliver("warmup", as_json, action)
