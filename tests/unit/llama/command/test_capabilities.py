"""What a binary can do, read from its texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstack.llama.command.capabilities import Capabilities, Device, parse_capabilities, parse_devices, spelling

HELP = Path(__file__).parents[3] / "golden" / "help"

HELP_OF_2025 = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 4096)
                                        (env: LLAMA_ARG_CTX_SIZE)
-fa,   --flash-attn                     enable Flash Attention (default: disabled)
                                        (env: LLAMA_ARG_FLASH_ATTN)
-v,    --verbose, --log-verbose         Set verbosity level to infinity
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Messages with a higher verbosity will be
                                        ignored.
                                        (env: LLAMA_LOG_VERBOSITY)
"""

HELP_OF_SPRING_2026 = """\
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 0: generic output
                                         - 1: error
                                         - 2: warning
                                         - 3: info
                                         - 4: debug
                                        (default: 3)
"""


def of_build(name: str) -> Capabilities:
    """Capabilities from the help text of a build, descriptions removed."""
    return parse_capabilities("", (HELP / f"{name}.txt").read_text(), None)


@pytest.mark.parametrize(
    ("text", "build", "number"),
    [
        ("version: 10261 (abc1234)\nbuilt with GNU 13.2.0 for Linux x86_64\n", "b10261-abc1234", 10261),
        ("version: 1 (571d0d5)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "b1-571d0d5", None),
        ("version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU 12.2.0 for Linux x86_64\n", "b0-unknown", None),
        ("version: 0.6.1 (build 11434, commit 0a1b2c3)\n", "b11434-0a1b2c3", 11434),
        ("ggml_cuda_init: found 1 device\nversion: 999 (0badbad)\n", "b999-0badbad", None),
        ("something else\n", "unknown", None),
    ],
)
def test_both_forms_of_version_are_read(text: str, build: str, number: int | None) -> None:
    """Both version forms give the build as /props names it, and numbers below 1000 count as unknown."""
    capabilities = parse_capabilities(text, "", None)
    assert (capabilities.build, capabilities.build_number) == (build, number)


def test_compiler_is_read() -> None:
    """The second line of the version text says what the build was made for."""
    text = "version: 1 (571d0d5)\nbuilt with GNU 11.4.0 for Linux x86_64\n"
    assert parse_capabilities(text, "", None).compiler == "GNU 11.4.0 for Linux x86_64"


@pytest.mark.parametrize(
    ("build", "present", "absent"),
    [
        (
            "b10068",
            ["--no-mmap", "--mlock", "--kv-unified", "-kvu", "--swa-checkpoints"],
            ["--load-mode", "--log-jsonl"],
        ),
        ("b11434", ["--load-mode", "-lm", "--log-jsonl", "--kv-unified-per-slot"], ["--no-mmap", "--mlock", "-dio"]),
    ],
)
def test_flags_that_came_and_went(build: str, present: list[str], absent: list[str]) -> None:
    """The flag set of each build has what it has, and nothing that it lost."""
    flags = of_build(build).flags
    assert [name for name in present if name not in flags] == []
    assert [name for name in absent if name in flags] == []


@pytest.mark.parametrize("build", ["b10068", "b11434"])
def test_options_know_value_env_and_aliases(build: str) -> None:
    """An option carries all its spellings, whether it takes a value, and its environment twin."""
    capabilities = of_build(build)
    context = capabilities.option("--ctx_size")
    assert context is not None
    assert context.names == ("-c", "--ctx-size")
    assert context.takes_value
    assert context.env == "LLAMA_ARG_CTX_SIZE"
    unified = capabilities.option("-no-kvu")
    assert unified is not None
    assert unified.names == ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified")
    assert not unified.takes_value


@pytest.mark.parametrize("build", ["b10068", "b11434"])
def test_names_kept_for_an_error_message_are_no_flags(build: str) -> None:
    """A name that the help text lists as removed is an option, but no flag to use."""
    capabilities = of_build(build)
    option = capabilities.option("--draft-max")
    assert option is not None
    assert option.removed
    assert "--draft-max" not in capabilities.flags


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ((HELP / "b10068.txt").read_text(), 4),
        ((HELP / "b11434.txt").read_text(), 4),
        (HELP_OF_SPRING_2026, 3),
        (HELP_OF_2025, 1),
        ("-c,    --ctx-size N\n", None),
    ],
    ids=["b10068", "b11434", "spring 2026", "2025", "none"],
)
def test_log_level_follows_the_scale(text: str, level: int | None) -> None:
    """The level is the trace level where there is one, info where four is debug, and one on the scale of 2025."""
    assert parse_capabilities("", text, None).log_verbosity == level


def test_descriptions_beside_the_names() -> None:
    """A description on the line of the names is told from a value by its two spaces."""
    capabilities = parse_capabilities("", HELP_OF_2025, None)
    flash = capabilities.option("-fa")
    assert flash is not None
    assert not flash.takes_value
    assert flash.text.startswith("enable Flash Attention")
    context = capabilities.option("-c")
    assert context is not None
    assert context.takes_value
    assert context.text.startswith("size of the prompt context")


def test_devices_are_read() -> None:
    """A device's name, description and memory are read, parentheses in the description included."""
    text = (
        "ggml_vulkan: Found 2 Vulkan devices:\n"
        "Available devices:\n"
        "  Vulkan0: AMD Radeon Graphics (RADV STRIX_HALO) (131584 MiB, 129920 MiB free)\n"
        "  Vulkan1: llvmpipe (LLVM 15.0.6, 256 bits) (15990 MiB, 15990 MiB free)\n"
    )
    devices = parse_devices(text)
    assert devices == (
        Device("Vulkan0", "AMD Radeon Graphics (RADV STRIX_HALO)", 131584, 129920),
        Device("Vulkan1", "llvmpipe (LLVM 15.0.6, 256 bits)", 15990, 15990),
    )
    assert [device.is_software for device in devices] == [False, True]


@pytest.mark.parametrize("text", ["Available devices:\n", "Available devices:\n  (none)\n"], ids=["b10068", "b11434"])
def test_no_device_is_not_unknown(text: str) -> None:
    """An empty list means that there is no device; no text at all means that nothing is known."""
    assert parse_capabilities("", "", text).devices == ()
    assert parse_capabilities("", "", None).devices is None


def test_underscores_are_dashes_in_long_names_only() -> None:
    """llama-server takes --ctx_size, but no -n_gpu_layers."""
    assert spelling("--ctx_size") == "--ctx-size"
    assert spelling("-n_gpu_layers") == "-n_gpu_layers"
