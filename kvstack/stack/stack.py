"""
The composition root: a Config becomes running parts, started and stopped in order.

`kvstack.stack.plan` does everything that can fail before a process is started; `Stack` runs the plan.

Start: lock, sweep what a killed run left, bind the proxy's port, serve, spawn, wait for health, warm up, ready.
Stop: accept no more, let streams end, close the upstream's connections, end the child, release the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import kvstack
from kvstack.bus import Bus, Subscription
from kvstack.errors import KvstackError, NotReady, root_error, unexpected
from kvstack.llama.log.reader import LogReader
from kvstack.process.contract import Hooks, Launch
from kvstack.process.descriptors import limit, raise_limit
from kvstack.process.identity import ProcessIdentity, identify, sweep
from kvstack.process.supervisor import Supervisor
from kvstack.process.watchdog import IDLE, slots_mark
from kvstack.prompt.diff.previous import FormerRequests
from kvstack.prompt.engine import RewriteResult, apply_rules
from kvstack.prompt.memory.store import ConversationMemory
from kvstack.prompt.report.listing import RuleLine, list_rules
from kvstack.proxy.app import make_app
from kvstack.proxy.forward import Forward
from kvstack.proxy.keys import Keys
from kvstack.proxy.request_log import RequestLog
from kvstack.proxy.serve import ProxyServer
from kvstack.rundir import EndFile, RawLog, RunDir, RunFile, new_token
from kvstack.stack.plan import Plan
from kvstack.stack.ports import take_ports
from kvstack.stack.server_identity import IdentityCheck
from kvstack.state.events import (
    LogFactSeen,
    LogLineSeen,
    Notice,
    ServerDescribed,
    WarmupEnded,
    WarmupStarted,
)
from kvstack.state.lifecycle import State
from kvstack.state.records import ProxyView, ServerView
from kvstack.state.stack_state import StackState
from kvstack.upstream import PROBE_TIMEOUT_S, Health, Upstream, UpstreamError
from kvstack.warmup.pause import Pause
from kvstack.warmup.snapshots import PrefixSnapshots
from kvstack.warmup.validation import SnapshotValidator
from kvstack.warmup.warmup import Warmer

CLOSE_S = 5.0
OUT_OF_DESCRIPTORS_AGAIN_S = 600.0

_Result = TypeVar("_Result")


class Stack:
    """
    One running server and proxy.

    Attributes:
        bus: Where events go and the Snapshot is.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self._plan = plan
        self._run_dir = RunDir(config.name)
        self._raw_log = RawLog(self._run_dir.log_path)
        self._token = new_token()
        server = ServerView(url=config.upstream_url, is_attached=config.attached)
        self.bus = Bus(StackState(config.name, ProxyView(config.proxy_url), server=server))
        self._upstream = Upstream(config.upstream_url, config.server.api_key)
        self._log = RequestLog(config.proxy.keep_bodies)
        self._pause = Pause(self.bus, self._log if plan.snapshot_dir is not None else None)
        self._snapshots = PrefixSnapshots(
            plan.warmup_context, self._upstream, lambda: self._identity.props, self._pause, self._warn
        )
        self._validator = SnapshotValidator(self._upstream, self._snapshots, self.bus, self._log)
        self._forward = Forward(
            self._upstream,
            self._rewrite,
            self._wait_ready,
            self.bus.publish,
            max_body_bytes=config.proxy.max_body_mib * 1024 * 1024,
            ready_timeout_s=config.proxy.ready_timeout_s,
            cors_origins=config.proxy.cors_origins,
            log=self._log,
            is_stopping=lambda: self._supervisor.state in {State.STOPPING, State.STOPPED, State.FAILED},
            slot_actions=plan.snapshot_dir is None or config.server.slot_save_path is not None,
            keys=Keys(config.proxy.api_key, config.server.api_key),
            on_out_of_descriptors=self._no_descriptor_left,
        )
        self._readers: dict[int, LogReader] = {}
        self._identity = IdentityCheck(plan, self._upstream, self.bus.publish)
        self._memory = ConversationMemory()
        self._formers = FormerRequests()
        self._warming = asyncio.Lock()
        self._warmer = Warmer(
            self._upstream,
            self._rewrite_alone,
            plan.warmup,
            long_user_text=plan.needs_checkpoints,
            ubatch_tokens=config.server.ubatch_size,
            snapshots=self._snapshots if config.warmup.snapshot else None,
        )
        self._server: ProxyServer | None = None
        self._listener: socket.socket | None = None
        self._begun_s = 0.0
        self._descriptors_told_s: float | None = None
        self._supervisor = Supervisor(self._launch(), self._hooks(), self._raw_log)

    # What the control routes need

    def stack_state(self) -> StackState:
        """The stack as it is now."""
        return self.bus.stack_state

    def rules(self) -> list[RuleLine]:
        """All rules as this stack applies them: its file may have changed since, and `--set` is not in the file."""
        return list_rules(self._plan.rules)

    def request_stop(self, reason: str) -> None:
        """Begin the orderly stop; a second call changes nothing."""
        self._supervisor.stop(reason)

    def kill(self) -> None:
        """Stop now: the child is killed, open streams are cut off."""
        self._supervisor.kill()

    def subscribe(self) -> Subscription:
        """Begin to listen to events."""
        return self.bus.subscribe()

    async def warm_up(self) -> WarmupEnded:
        """
        Evaluate the known prefix, so that the next request finds it in the cache.

        Raises:
            NotReady: There is no healthy server to warm.
        """
        if self._supervisor.state not in {State.READY, State.WARMING}:
            raise NotReady("The stack is not ready", f"state: {self._supervisor.state}", "Wait until it is.")
        async with self._warming:
            self.bus.publish(WarmupStarted(time.time()))
            self._validator.begin(None)
            ended = await self._warmer.warm_up()
            self._validator.begin(self._snapshots.prefix)
        self.bus.publish(ended)
        if ended.outcome == "failed":
            self._warn(f"The warm-up failed: {ended.detail}")
        return ended

    # Life

    async def run(self, on_started: Callable[[], None] | None = None) -> None:
        """
        Run until stopped.

        Args:
            on_started: Called when the proxy listens and the run file is written, long before the model is loaded.

        Raises:
            KvstackError: The stack could not start, or its llama-server is lost.
        """
        raise_limit()
        with self._run_dir.unchanged_if_refused() as start:
            self._run_dir.lock()
            try:
                await self._reap_orphans()
                listener = self._listener = take_ports(self._plan.config)
                # From here on it is this stack of which others are told; before, a refusal left all as it was.
                start.may_be_refused = False
                await self._serve(listener, on_started)
            finally:
                await self._upstream.close()
                if self._listener is not None:
                    self._listener.close()
                self._raw_log.close()
                self._run_dir.unlock()

    async def _serve(self, listener: socket.socket, on_started: Callable[[], None] | None) -> None:
        """Run with the lock and the proxy's port in hand."""
        config = self._plan.config
        self._begun_s = time.time()
        try:
            self._run_dir.forget_end()
            self._run_dir.clear()
            app = make_app(self._forward, self, self._token, kvstack.__version__)
            server = self._server = ProxyServer(app, listener, config.server.stop_timeout_s, self._no_descriptor_left)
            for text in self._plan.notices:
                self._warn(text)
            self._identity.report(self._plan.findings)
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.run())
                validating = group.create_task(self._validator.run())
                try:
                    await _first_of(server.started(), serving)
                    self._write_run_file()
                    if on_started is not None:
                        on_started()
                    await self._supervisor.run()
                except Exception as error:
                    # Before the proxy is silent: whoever finds it so is told why.
                    self._write_end_file(error)
                    raise
                finally:
                    validating.cancel()
                    server.stop()
                    await self._forward.close_exchanges(0)
                    # Here and not by the group: after an error that would cancel it in the middle of its own end.
                    await asyncio.wait({serving}, timeout=CLOSE_S)
        except BaseException as caught:
            chosen = root_error(caught)
            self._write_end_file(chosen)
            raise chosen from chosen.__cause__
        finally:
            self._run_dir.clear()

    async def _reap_orphans(self) -> None:
        left = self._run_dir.read()
        if left is None:
            return
        # We hold the lock, so whoever wrote this file is gone; its llama-server may not be.
        server = None
        if left.server_pid is not None and left.server_started_s is not None:
            server = ProcessIdentity(left.server_pid, left.server_started_s)
        owner = ProcessIdentity(left.pid, left.started_s)
        if await asyncio.to_thread(sweep, server, left.server_argv0, owner):
            text = f"Stopped what a killed run of this stack had left behind (llama-server, pid {left.server_pid})"
            self._warn(text)

    def _write_run_file(self) -> None:
        me = identify(os.getpid())
        assert me is not None
        config = self._plan.config
        run = RunFile(
            config.name,
            me.pid,
            me.started_s,
            config.proxy_url,
            self._token,
            str(self._plan.config_path),
            str(self._run_dir.log_path),
            kvstack.__version__,
            attached=config.attached,
            begun_s=self._begun_s,
        )
        try:
            self._run_dir.write(run)
        except OSError as error:
            raise KvstackError(
                "The run file cannot be written: no other terminal would find this stack",
                f"{self._run_dir.path}: {error.strerror or error}",
                "Free some space there, or set KVSTACK_STATE_DIR to another directory.",
            ) from None

    def _write_end_file(self, error: BaseException) -> None:
        """For who asks later: in the background nobody sees what is said, and a terminal may be closed."""
        if not isinstance(error, Exception):  # cancelled: a stop, and no error
            return
        told = error if isinstance(error, KvstackError) else unexpected(error)
        name, path = self._plan.config.name, str(self._plan.config_path)
        end = EndFile(name, os.getpid(), self._begun_s, time.time(), path, told.what, told.fact, told.next_step)
        self._run_dir.write_end(end)

    # Parts

    def _launch(self) -> Launch | None:
        plan, server = self._plan, self._plan.config.server
        if plan.command is None:
            return None
        return Launch(
            plan.command.argv,
            plan.command.display,
            plan.env or {},
            server.host,
            server.port,
            server.max_restarts,
            server.stall_timeout_s,
            server.stop_timeout_s,
            server.watchdog,
            # Not the current directory, which may hold anything; relative paths start at the config file anyway.
            directory=plan.config_path.parent,
        )

    def _hooks(self) -> Hooks:
        return Hooks(
            publish=self.bus.publish,
            output=self._output,
            health=self._upstream.health,
            verify=self._identity.verify,
            warm=self._warm,
            release_upstream=self._release_upstream,
            spawned=self._spawned,
            busy=self._busy,
            on_death=self._snapshots.on_death,
        )

    def _spawned(self, identity: ProcessIdentity) -> None:
        assert self._plan.command is not None
        self._snapshots.server_started()
        # Before the file: a disk that is full must not hide from the screen what is being loaded.
        model = self._plan.model_path
        self.bus.publish(
            ServerDescribed(
                time.time(),
                url=self._plan.config.upstream_url,
                model=model.name if model is not None else None,
                similarity_threshold_ratio=self._plan.facts.settings.similarity_ratio,
            )
        )
        self._run_dir.set_server(identity.pid, identity.started_s, self._plan.command.argv[0])

    async def _busy(self) -> Hashable | None:
        if not self._forward.open_requests:
            # A look at the slots wakes the server and is a line in its log: without a request it is not worth that.
            return IDLE if await self._upstream.health() in {Health.OK, Health.UNASKED} else None
        try:
            answer = await self._upstream.request("GET", "/slots", timeout_s=PROBE_TIMEOUT_S)
        except UpstreamError as error:
            return IDLE if error.out_of_descriptors else None
        return slots_mark(answer.status, answer.body)

    def _output(self, data: bytes, run: int) -> None:
        reader = self._readers.get(run)
        if reader is None:
            self._readers = {run: LogReader()}
            self._identity.start_facts.clear()
            reader = self._readers[run]
        batch = reader.feed(data)
        now = time.time()
        for line in batch.lines:
            self.bus.publish(LogLineSeen(now, line))
        for fact in batch.facts:
            self.bus.publish(LogFactSeen(now, run, fact))
            if self._supervisor.state is not State.READY:
                self._identity.start_facts.append(fact)

    async def _warm(self) -> None:
        if not self._plan.config.warmup.enabled:  # not by itself; whoever asks for it gets it
            self.bus.publish(WarmupEnded(time.time(), "off"))
            return
        try:
            await self.warm_up()
        except KvstackError as error:
            self._warn(f"The warm-up failed: {error.what}")

    def _warn(self, text: str) -> None:
        self.bus.publish(Notice(time.time(), "warning", text))

    def _no_descriptor_left(self) -> None:
        """There is no file descriptor left: said once in a while, for it happens thousands of times at once."""
        now_s = time.monotonic()
        if self._descriptors_told_s is None or now_s - self._descriptors_told_s >= OUT_OF_DESCRIPTORS_AGAIN_S:
            self._descriptors_told_s = now_s
            self._warn(
                f"kvstack is out of file descriptors (limit {limit():,}): connections wait, requests are refused; "
                "allow more with `ulimit -n`, or LimitNOFILE= in a systemd unit"
                if limit() is not None
                else "The system is out of file descriptors: connections wait, requests are refused"
            )

    async def _release_upstream(self) -> bool:
        if self._supervisor.state is not State.STOPPING:
            # A hung server is ended to be started again: the proxy stays, and its clients get an error when the
            # connections break.
            return False
        if self._server is not None:
            self._server.stop()
        return await self._forward.close_exchanges(self._plan.config.server.stop_timeout_s) > 0

    async def _wait_ready(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while await self._supervisor.wait_ready(max(0.0, deadline - time.monotonic())):
            if self._pause.is_open:
                return True
            if not await self._pause.wait_open(max(0.0, deadline - time.monotonic())):
                return False
        return False

    def _rewrite(self, body: bytes, path: str, headers: list[tuple[str, str]], number: int | None) -> RewriteResult:
        rules, template = self._plan.rules, self._identity.props.chat_template
        memory, formers = self._memory, self._formers
        return apply_rules(body, path, rules, memory, headers, template, number=number, formers=formers)

    def _rewrite_alone(self, body: bytes, path: str, headers: list[tuple[str, str]]) -> RewriteResult:
        """The same rules without the memory: a warm-up is no conversation."""
        return apply_rules(body, path, self._plan.rules, None, headers, self._identity.props.chat_template)


async def _first_of(wanted: Awaitable[_Result], other: asyncio.Task[None]) -> None:
    """Wait for *wanted*, but not longer than *other* lives."""
    waiting = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({waiting, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
