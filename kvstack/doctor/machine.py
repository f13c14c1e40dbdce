"""Kernel, ports, log level, proxy."""

from __future__ import annotations

from collections.abc import Iterator

from kvstack.config.model import is_loopback
from kvstack.doctor.facts import Facts, Finding, Severity
from kvstack.doctor.gpu import uses_gpu


def log_level(facts: Facts) -> Iterator[Finding]:
    """At this level the server does not log what the figures are made of."""
    capabilities = facts.capabilities
    if capabilities is None or facts.config.attached:
        return
    wanted, given = capabilities.log_verbosity, facts.settings.verbosity
    if wanted is None:
        yield Finding(
            "log-level",
            Severity.WARNING,
            "This llama-server has no log level to set: checkpoints and the host prompt cache stay unseen",
            "no -lv in --help",
            "Use a newer build.",
        )
    elif given is not None and given < wanted:
        yield Finding(
            "log-level",
            Severity.WARNING,
            "At this log level the server hides checkpoints, full re-processing and the host prompt cache",
            f"-lv {given}; this build logs them from {wanted} on",
            "Remove server.log_verbosity: kvstack chooses the level by the build.",
        )


def watchdog(facts: Facts) -> Iterator[Finding]:
    """The kernel resets the GPU in the middle of a long prefill."""
    machine = facts.machine
    if machine.kernel is None or not machine.amd_gpu or not uses_gpu(facts) or machine.lockup_timeout:
        return
    major = machine.kernel.partition(".")[0]
    if not major.isdecimal() or int(major) < 7:
        return
    yield Finding(
        "gpu-watchdog",
        Severity.WARNING,
        "Kernels from 7.0 on are reported to reset the GPU after 2 s of one submit, which ends long prefills",
        f"kernel {machine.kernel}, amdgpu.lockup_timeout at its default",
        "Add the kernel parameter amdgpu.lockup_timeout=10000,60000,10000,10000.",
    )


def port_taken(facts: Facts) -> Iterator[Finding]:
    """Something else answers where the server or the proxy is to listen."""
    server, proxy = facts.config.server, facts.config.proxy
    taken = []
    if facts.server_port_answers and not facts.config.attached:
        remedy = "Stop it, attach to it with server.url, or set server.port to a free port."
        taken.append(("llama-server's port", server.host, server.port, remedy))
    if facts.proxy_port_answers:
        taken.append(("the proxy's port", proxy.host, proxy.port, "Stop it, or set proxy.port to a free port."))
    for what, host, port, remedy in taken:
        yield Finding(
            "port-taken",
            Severity.ERROR,
            f"Another program answers on {what} already",
            f"{host}:{port} accepts connections, and it is not the stack {facts.config.name!r} that does",
            remedy,
        )


def bypass(facts: Facts) -> Iterator[Finding]:
    """Clients talk to the server without the proxy."""
    if facts.bypassing_requests:
        count = "One request" if facts.bypassing_requests == 1 else f"{facts.bypassing_requests} requests"
        yield Finding(
            "proxy-bypassed",
            Severity.WARNING,
            f"{count} bypassed the proxy, so nothing was stripped",
            f"the server's log has tasks that the proxy did not send; clients should use {facts.config.proxy_url}",
            f"Point every client at {facts.config.proxy_url}.",
        )
    if not facts.config.attached and not is_loopback(facts.config.server.host):
        yield Finding(
            "server-exposed",
            Severity.WARNING,
            "llama-server listens on the network, so anyone can bypass the proxy",
            f"server.host = {facts.config.server.host}",
            'Set server.host = "127.0.0.1"; clients come through the proxy.',
        )


CHECKS = (log_level, watchdog, port_taken, bypass)
"""The checks of this module."""
