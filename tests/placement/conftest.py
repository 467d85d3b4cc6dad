"""The fake driver in this process: pynvml finds it as if it had loaded it itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.fake_nvml import Driver, compile_library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """What the GPUs are is the test's choice; whatever it does, no session may be left open."""
    script = tmp_path / "gpus"
    monkeypatch.setenv("FAKE_NVML", str(script))
    driver = Driver(library, script)
    # It loads its library once in a process and never lets go of it, so a test brings one and takes it away again.
    monkeypatch.setattr(pynvml, "nvmlLib", driver.library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield driver
    assert driver.num_sessions == 0
    assert driver.calls("nvmlInitWithFlags") == driver.calls("nvmlShutdown")
    assert driver.calls("nvmlEventSetCreate") == driver.calls("nvmlEventSetFree")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where nothing of the driver is installed, whatever this one has."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", missing)
