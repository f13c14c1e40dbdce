"""What to read on the dashboard before the first request."""

from __future__ import annotations

from rich.text import Text

from kvstack.state.lifecycle import State
from kvstack.state.stack_state import StackState
from kvstack.terminal import format
from kvstack.terminal.dashboard.glyphs import Glyphs, piece
from kvstack.terminal.dashboard.headline import state_sentence
from kvstack.terminal.format import one_line

_STEPS = {
    State.STARTING: "start llama-server",
    State.LOADING: "load the model",
    State.WARMING: "warm up the prefix",
    State.READY: "serve",
}
_ATTACHED_STEPS = {
    State.LOADING: "find the running llama-server",
    State.WARMING: "warm up the prefix",
    State.READY: "serve",
}


def guidance(stack_state: StackState, now_s: float, glyphs: Glyphs) -> list[Text]:
    """
    What is happening, or how to begin.

    Args:
        stack_state: The stack; there was no request yet.
        now_s: The present, in seconds since the epoch.
        glyphs: Shapes that the output can show.
    """
    url = one_line(stack_state.proxy.url)
    lines = [Text()]
    if stack_state.state in _STEPS and stack_state.state is not State.READY:
        attached = stack_state.server.is_attached
        steps = _ATTACHED_STEPS if attached else _STEPS
        # Looking for a server that runs already is one step.
        now = State.LOADING if attached and stack_state.state is State.STARTING else stack_state.state
        at = list(steps).index(now)
        for index, text in enumerate(steps.values()):
            if index < at:
                lines.append(piece(f"   {glyphs.good} {text}", "green"))
            elif index == at:
                step = piece(f"   {glyphs.arrow} {text}", "bold yellow")
                if stack_state.state_since_s is not None:
                    step.append(f"  for {format.duration(now_s - stack_state.state_since_s)}")
                if stack_state.server.rss_bytes is not None:
                    step.append(f", {format.memory(stack_state.server.rss_bytes)} in memory")
                lines.append(step)
            else:
                lines.append(piece(f"   {glyphs.idle} {text}", "dim"))
        lines.append(Text())
        if attached and now is State.LOADING:
            lines.append(piece("   kvstack waits for it.  If it is not there: start it, or correct server.url.", "dim"))
        elif stack_state.state is State.LOADING:
            lines.append(piece("   A new build or driver compiles shaders first: that takes minutes.", "dim"))
        lines.append(piece(f"   Clients may connect to {url} now: their requests wait.", "dim"))
    elif stack_state.state is State.READY:
        lines.append(piece("   No request yet.  Point a client at ") + piece(f"{url}/v1", "bold cyan"))
        lines.append(piece("   (OpenAI chat and responses, Anthropic messages), or try:", "dim"))
        lines.append(Text())
        lines.append(piece(f"   curl {url}/v1/chat/completions \\"))
        lines.append(piece("""     -d '{"messages":[{"role":"user","content":"Hello"}],"max_tokens":32}'"""))
    else:
        lines.append(piece(f"   {state_sentence(stack_state, now_s)}"))
    lines.append(Text())
    return lines
