"""`lqs check` shows the GPUs, and why one is not used, in a process that finds the driver by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.fake_nvml import card, compile_library, environ_of, instance


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "tiny.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)


@pytest.fixture
def check(library: Path, model: Path, tmp_path: Path):
    """The lines about the GPUs, with the first word cut off."""

    def run(*lines: str, **environ: str) -> list[str]:
        fake = environ_of(library, tmp_path / "gpus", lines) | {"LQS_MODELS_DIR": str(tmp_path)}
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            fake.pop(name, None)
        command = [sys.executable, "-m", "lqs", "check", str(model), "--ctx", "512"]
        done = subprocess.run(command, env=fake | environ, capture_output=True, text=True, timeout=60, check=True)
        text = done.stdout
        lines = [line[11:] for line in text[text.index("GPUs ") : text.index("model ")].splitlines()]
        # What libllama was built for is another matter.
        return [line for line in lines if line != "llama-cpp-python is built without CUDA, so no GPU is used"]

    return run


def test_gpus_are_shown_by_cudas_numbers(check) -> None:
    """The order changed by CUDA_VISIBLE_DEVICES."""
    cards = card("GPU-b", bus=2, free_gb=11), card("GPU-a", bus=1, use=None)
    assert check(*cards) == [
        "cuda:0 RTX-4090, GPU-a, 00000000:01:00.0, 20000 of 24000 MB free",
        "cuda:1 RTX-4090, GPU-b, 00000000:02:00.0, 11000 of 24000 MB free, 30% in use",
    ]
    assert check(*cards, CUDA_VISIBLE_DEVICES="1") == [
        "cuda:0 RTX-4090, GPU-b, 00000000:02:00.0, 11000 of 24000 MB free, 30% in use",
        "RTX-4090, GPU-a, 00000000:01:00.0, 20000 of 24000 MB free; not used: CUDA_VISIBLE_DEVICES leaves it out",
    ]


def test_a_gpu_that_is_not_used_says_why(check) -> None:
    lines = check(
        card("GPU-a", split=1),
        instance("MIG-1", "GPU-a", gi=1),
        card("GPU-b", bus=2, use=None),
        "error nvmlDeviceGetMemoryInfo 4 MIG-1",
    )
    assert lines == [
        "cuda:0 MIG-1g, MIG-1, 00000000:01:00.0; not used: its memory cannot be read: Insufficient Permissions",
        "RTX-4090, GPU-a, 00000000:01:00.0, 20000 of 24000 MB free, 30% in use; "
        "not used: it is split into MIG instances: MIG-1",
        "RTX-4090, GPU-b, 00000000:02:00.0, 20000 of 24000 MB free; not used: "
        "a process has one MIG instance and no whole card beside it, here MIG-1; choose by CUDA_VISIBLE_DEVICES",
    ]


def test_unified_memory_is_named_so(check) -> None:
    """B45."""
    assert check(card("GPU-a", name="GB10", total=None)) == [
        "cuda:0 GB10, GPU-a, 00000000:01:00.0, shares the machine's memory, 30% in use"
    ]


def test_an_order_that_only_cuda_knows_is_named_so(check) -> None:
    *_, last = check(card("GPU-a"), card("GPU-b", bus=2, name="T4"), CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert last.startswith("these numbers are a guess")


def test_a_driver_that_is_not_loaded_or_has_no_gpu_is_one_line(check) -> None:
    """B47."""
    assert check("error nvmlInitWithFlags 9") == ["none: the NVIDIA driver is not loaded"]
    assert check("driver 570") == ["none: the driver lists none"]


def test_a_library_that_cannot_be_loaded_is_one_line(model: Path, tmp_path: Path) -> None:
    """B47: the file is there and is none."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "LQS_MODELS_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "lqs", "check", str(model), "--ctx", "512"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "GPUs       none: libnvidia-ml.so.1 cannot be loaded: no NVIDIA driver" in done.stdout
