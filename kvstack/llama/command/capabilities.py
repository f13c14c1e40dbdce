"""
What one llama-server binary can do, read from its `--version`, `--help` and `--list-devices` texts.

Build numbers are no proof of anything: packaged builds call themselves `version: 1 (571d0d5)` or
`version: 0.6.0-dev (build 0, commit unknown)`.  The help text is the build's own list of what it takes, and unknown
flags are fatal, so every decision is made by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

BUILD_NUMBERS_FROM = 1000
"""Smaller numbers come from checkouts without history and say nothing."""

TRACE_LEVEL = 4
INFO_LEVEL = 3
DEBUG_LEVEL_OF_2025 = 1


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the help text."""

    names: tuple[str, ...]
    """All its spellings, in the order of the help text; negations stand among them."""
    takes_value: bool
    env: str | None = None
    """Its twin in the environment."""
    text: str = ""
    """The description, as one line."""
    removed: bool = False
    """The build knows the name only to say that it is gone."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that llama-server lists."""

    name: str
    """What `--device` takes, for example `Vulkan0`."""
    description: str
    total_mib: int
    free_mib: int

    @property
    def is_software(self) -> bool:
        """Whether this is a processor that plays GPU."""
        return bool(re.search(r"llvmpipe|lavapipe|softpipe|SwiftShader", self.description, re.IGNORECASE))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """
    What one binary can do.

    Attributes:
        build: As `/props` names it, for example `b10068-571d0d5`; `unknown` where the version text says nothing.
        build_number: None where the binary does not really know it.
        compiler: What the build was made with and for.
        options: All options of the help text.
        devices: What `--list-devices` named; None if it was not asked or failed.
        has_tls: False where the build surely cannot fetch by https; None where nothing is known.
        flags: All spellings that may be used.
    """

    build: str
    build_number: int | None = None
    compiler: str = ""
    options: tuple[Option, ...] = ()
    devices: tuple[Device, ...] | None = None
    has_tls: bool | None = None
    flags: frozenset[str] = field(init=False)
    _by_name: Mapping[str, Option] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {name: option for option in self.options for name in option.names}
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "flags", frozenset(name for name, option in by_name.items() if not option.removed))

    def has(self, *names: str) -> bool:
        """Whether the build takes all of *names*."""
        return self.flags.issuperset(names)

    def first(self, *names: str) -> str | None:
        """The first of *names* that the build takes."""
        return next((name for name in names if name in self.flags), None)

    def option(self, name: str) -> Option | None:
        """The option that *name* belongs to, in any spelling that llama-server accepts."""
        return self._by_name.get(spelling(name))

    @property
    def log_verbosity(self) -> int | None:
        """
        The level at which checkpoints and the host prompt cache are logged, but no prompt text; None without `-lv`.

        Three scales are in use: `4: trace` since b9246 or so; before that `3: info` with debug above it; and in 2025 no
        named levels, where 1 is everything.
        """
        option = self.option("-lv") or self.option("--verbosity")
        if option is None or option.removed:
            return None
        levels = dict(re.findall(r"- (\d): (\w+)", option.text))
        if levels.get(str(TRACE_LEVEL), "").startswith("trace"):
            return TRACE_LEVEL
        return INFO_LEVEL if levels else DEBUG_LEVEL_OF_2025

    @property
    def named_devices(self) -> str:
        """The devices in one line, for a person."""
        if not self.devices:
            return "none"
        return ", ".join(f"{device.name} ({device.description})" for device in self.devices)


def spelling(name: str) -> str:
    """
    The spelling of a flag that the help text uses.

    llama-server takes `_` for `-` in long names.
    """
    return name.replace("_", "-") if name.startswith("--") else name


def parse_capabilities(
    version_text: str, help_text: str, devices_text: str | None, *, has_tls: bool | None = None
) -> Capabilities:
    """
    Read the three texts of a binary.

    Args:
        version_text: What `--version` prints, on both outputs.
        help_text: What `--help` prints.
        devices_text: What `--list-devices` prints, on both outputs, or None if there is none.
        has_tls: What is known of the build's https.
    """
    build, number = _build(version_text)
    compiler = re.search(r"^built with (.+)$", version_text, re.MULTILINE)
    return Capabilities(
        build=build,
        build_number=number,
        compiler=compiler[1].strip() if compiler else "",
        options=tuple(_options(help_text.splitlines())),
        devices=None if devices_text is None else parse_devices(devices_text),
        has_tls=has_tls,
    )


def _build(text: str) -> tuple[str, int | None]:
    # version: 10068 (571d0d5)
    # version: 0.6.0-dev (build 0, commit unknown)
    found = re.search(r"^version: (\d+) \(([^)\s]+)\)", text, re.MULTILINE)
    if found is None:
        found = re.search(r"^version: \S+ \(build (\d+), commit ([^)\s]+)\)", text, re.MULTILINE)
    if found is None:
        return "unknown", None
    number = int(found[1])
    return f"b{number}-{found[2]}", number if number >= BUILD_NUMBERS_FROM else None


_NAME = re.compile(r"-{1,2}[A-Za-z0-9][A-Za-z0-9._-]*")
_SEPARATOR = re.compile(r",\s*")
_ENV = re.compile(r"\(env: (\w+)\)")


def _options(lines: Iterable[str]) -> Iterable[Option]:
    head: tuple[tuple[str, ...], bool] | None = None
    text: list[str] = []
    for line in (*lines, "-"):
        if not line.startswith("-"):
            text.append(line.strip())
            continue
        if head is not None:
            yield _option(*head, " ".join(text))
        head, text = None, []
        names, rest = _names(line)
        if names:
            # `-t,    --threads N          number of ...`: a value stands one space behind the names, a text more.
            value, _, described = rest.partition("  ")
            head, text = (names, value.strip() != ""), [described.strip()]


def _option(names: tuple[str, ...], takes_value: bool, text: str) -> Option:
    env = _ENV.search(text)
    text = " ".join(text.split())
    return Option(names, takes_value, env[1] if env else None, text, text.startswith("the argument has been removed"))


def _names(line: str) -> tuple[tuple[str, ...], str]:
    names: list[str] = []
    position = 0
    while found := _NAME.match(line, position):
        names.append(found[0])
        position = found.end()
        separator = _SEPARATOR.match(line, position)
        if separator is None:
            break
        position = separator.end()
    return tuple(names), line[position:]


_DEVICE = re.compile(r"^\s+(\S+): (.*) \((\d+) MiB, (\d+) MiB free\)\s*$")


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices that a `--list-devices` text names."""
    # Vulkan0: AMD Radeon Graphics (RADV STRIX_HALO) (131584 MiB, 129920 MiB free)
    found = (_DEVICE.match(line) for line in text.splitlines())
    return tuple(Device(each[1], each[2], int(each[3]), int(each[4])) for each in found if each)
