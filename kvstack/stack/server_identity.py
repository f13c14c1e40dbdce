"""Is the server that answers our own, and is it what the config asks for?"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvstack.doctor import Finding, Severity, diagnose
from kvstack.doctor.facts import ServerProps
from kvstack.errors import PortTaken, StartFailed
from kvstack.process.identity import holds_port, port_owners
from kvstack.stack.plan import Plan
from kvstack.state.events import Event, Notice, ServerDescribed
from kvstack.state.log_facts import LogFact
from kvstack.upstream import Props, Upstream, UpstreamError

ASK_AGAIN_S = 1.0
START_FACTS_KEPT = 5000


class IdentityCheck:
    """
    Looks at each server that has become healthy.

    Args:
        plan: What was asked for.
        upstream: The server.
        publish: Takes events.

    Attributes:
        props: What the server said of itself last.
        start_facts: What its log said since it was started, newest last.
    """

    def __init__(self, plan: Plan, upstream: Upstream, publish: Callable[[Event], None]) -> None:
        self.props = Props()
        self.start_facts: deque[LogFact] = deque(maxlen=START_FACTS_KEPT)
        self._plan = plan
        self._upstream = upstream
        self._publish = publish
        self._reported: set[str] = set()

    async def verify(self, pid: int) -> None:
        """
        Check that the server that answers is our own, and learn what it says of itself.

        Args:
            pid: Process id of our child; 0 where attached.

        Raises:
            StartFailed: Somebody else answers, or the server tells nothing of itself.
        """
        config = self._plan.config
        ours = pid != 0  # 0: attached
        if ours and await asyncio.to_thread(holds_port, pid, config.server.port) is False:
            owners = sorted(await asyncio.to_thread(port_owners, config.server.port) or ())
            raise PortTaken(
                f"Another program answers on port {config.server.port}",
                f"held by pid {', '.join(map(str, owners)) or 'unknown'}; our llama-server is pid {pid}",
                "Stop it, or choose another port: `--set server.port=...`.",
            )
        try:
            props = await self._ask()
        except UpstreamError as error:
            if ours:
                raise StartFailed(
                    "llama-server is healthy but does not describe itself",
                    f"{config.upstream_url}/props: {error}",
                    "Set server.api_key if it asks for one.",
                ) from None
            self._publish(Notice(time.time(), "warning", f"{config.upstream_url}/props: {error}"))
            props = Props()
        self.props = props
        if ours and self._plan.model_path is not None and props.model is not None:
            wanted, served = self._plan.model_path, Path(props.model)
            if wanted.name != served.name:
                raise PortTaken(
                    f"Another llama-server answers on port {config.server.port}",
                    f"it serves {served}, not {wanted}",
                    "Stop it, or choose another port: `--set server.port=...`.",
                )
        self._publish(
            ServerDescribed(
                time.time(),
                url=config.upstream_url,
                build=props.build,
                model=Path(props.model).name if props.model else None,
                ctx_per_slot=props.ctx_per_slot,
                slots=props.slots,
                device=config.server.device if not config.attached else None,
            )
        )
        self._examine(props)

    async def _ask(self) -> Props:
        while True:
            try:
                return await self._upstream.props()
            except UpstreamError as error:
                if not error.out_of_descriptors:  # else the server is well, and clients that leave make room
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    def _examine(self, props: Props) -> None:
        """Let the doctor look at the server that runs now."""
        facts = replace(
            self._plan.facts,
            props=ServerProps(props.ctx_per_slot, props.slots, props.chat_template, model_path=props.model),
            log=tuple(self.start_facts),
        )
        self.report(finding for finding in diagnose(facts) if finding.severity is not Severity.NOTE)

    def report(self, findings: Iterable[Finding]) -> None:
        """Tell a person what the doctor found, each finding once."""
        for finding in findings:
            if finding.code not in self._reported:
                self._reported.add(finding.code)
                level: Literal["warning", "error"] = "error" if finding.severity is Severity.ERROR else "warning"
                text = f"{finding.what} ({finding.evidence}). {finding.remedy}"
                self._publish(Notice(time.time(), level, text))
