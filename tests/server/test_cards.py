"""A whole server beside a driver that says what the test wants: what it logs, shows and refuses.

Where llama.cpp is built without CUDA, a device slot on a GPU is opened with its weights in the machine's memory, which
is where a part with unified memory has them. All else is what would run there: naming, planning, placement, metrics.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_nvml import card, compile_library, environ_of, replace_script
from tests.server.conftest import Start
from tests.server.process import REPOSITORY, until
from tests.server.test_start import serve


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


def test_cards_are_watched_shown_and_told_of(start: Start, tiny: Path, library: Path, tmp_path: Path) -> None:
    """B49: others take the memory of a card, it is lost; the server serves on its cores all the while."""
    script = tmp_path / "gpus"
    environ = environ_of(library, script, [card("GPU-a"), card("GPU-b", bus=2, free_gb=11, use=60), "driver 570"])
    # Whatever CUDA is told in this shell.
    environ |= {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    server = start(tiny, "--ctx", "512", config="placement.nvml_s = 0.05\n", environ=environ)
    assert re.search(r"^info +GPU has CUDA's number device=cuda:0 gpu=GPU-b bus=00000000:02:00.0$", server.log, re.M)
    assert 'GPU is not used gpu=GPU-a bus=00000000:01:00.0 reason="CUDA_VISIBLE_DEVICES leaves it out"' in server.log
    assert server.log.count("llama-cpp-python is built without CUDA, so no GPU is used") == 1
    until(lambda: server.metrics().get('lqs_gpu_memory_free_bytes{gpu="GPU-b"}') == 11e9)
    shown = server.metrics()
    assert (shown["lqs_nvml_up"], shown['lqs_gpu_use_ratio{gpu="GPU-b"}']) == (1, 0.6)
    assert re.search(r"^info +NVML answers driver=570 gpus=2", server.log, re.MULTILINE)
    replace_script(
        script, card("GPU-a", free_gb=0.2), card("GPU-b", bus=2), f"process gpu=GPU-a pid=77 used={20 * 10**9}"
    )
    until(lambda: re.search(r"GPU memory is short gpu=GPU-a .*largest_pid=77", server.log))
    replace_script(script, card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetMemoryInfo 15 GPU-a")
    until(lambda: server.metrics()['lqs_gpu_state{gpu="GPU-a",state="failed"}'] == 1)
    assert "GPU failed gpu=GPU-a" in server.log
    assert server.complete(3).answer().status == 200


def test_a_device_slot_on_a_card_that_is_short_lets_others_go_first(
    start: Start, tiny: Path, library: Path, tmp_path: Path
) -> None:
    """A device slot on cores counts as being on a card: B49, and done with it when the card is lost."""
    script = tmp_path / "gpus"
    environ = environ_of(library, script, [card("GPU-a", free_gb=0), card("GPU-b", bus=2)])
    config = 'placement.nvml_s = 0.05\nengine.devices = ["cpu:0", "cpu:1"]\nengine.ctx = 512\nengine.parallel = 2\n'
    drill = "device_slot=0 card=GPU-a device_slot=1 card=GPU-b"
    server = start(tiny, "--chaos", drill, config=config, environ=environ)
    until(lambda: re.search(r"device slot takes less device=cpu:0 kv_tokens=0", server.log))
    started = '{device="cpu:0"}'
    before = server.metrics()[f"lqs_device_steps_total{started}"]
    assert [server.complete(3).answer().status for _ in range(4)] == [200] * 4
    assert server.metrics()[f"lqs_device_steps_total{started}"] == before
    replace_script(script, card("GPU-a"), card("GPU-b", bus=2), "event card=GPU-b xid=79")
    until(lambda: re.search(r"device slot does not work device=cpu:1 .*XID 79", server.log))
    until(lambda: "device slot takes all again" in server.log)
    assert [server.complete(3).answer().status for _ in range(2)] == [200] * 2
    assert server.metrics()[f"lqs_device_steps_total{started}"] > before


UNIFIED = """
import sys
import lqs.cards
import lqs.serve
from lqs.engine import library

load = library.Model.load
lqs.cards.has_cuda = lambda: True
library.Model.load = lambda self, devices=(), parts=(): load(self)
from lqs.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("memory", [{"total": None}, {"total": 0, "free": 0, "used": 0}], ids=["no figure", "zeros"])
def test_with_unified_memory_a_server_starts_and_counts_the_machines_memory_once(
    start: Start, tiny: Path, library: Path, tmp_path: Path, memory: dict[str, object]
) -> None:
    """B45: without figures of memory, use, temperature and power; one device slot on the GPU, one on cores."""
    line = card("GPU-a", name="GB10", use=None, temp=None, power=None, **memory)
    environ = environ_of(library, tmp_path / "gpus", [line])
    config = 'placement.nvml_s = 0.05\nengine.devices = ["cuda:0", "cpu:0"]\nengine.ctx = 512\nengine.parallel = 2\n'
    server = start(tiny, config=config, environ=environ, program=("-c", UNIFIED))
    assert [server.complete(3).answer().status for _ in range(4)] == [200] * 4
    shown = server.metrics()
    assert shown['lqs_gpu_info{bus="00000000:01:00.0",device="cuda:0",gpu="GPU-a",memory="unified",name="GB10"}'] == 1
    assert shown['lqs_gpu_state{gpu="GPU-a",state="ok"}'] == 1
    # What is free of it is what the machine has, and nothing is made up of what nobody says.
    assert shown['lqs_gpu_memory_free_bytes{gpu="GPU-a"}'] > 1e8
    for name in (
        "lqs_gpu_use_ratio",
        "lqs_gpu_temperature_celsius",
        "lqs_gpu_power_watts",
        "lqs_gpu_memory_total_bytes",
    ):
        assert not any(key.startswith(name) for key in shown)
    (model,) = server.ask("GET", "/admin/models").json["data"]
    assert model["devices"] == ["cuda:0", "cpu:0"]
    # Both device slots and both copies of the weights are one account.
    assert list(model["takes"]) == ["system"]
    assert model["takes"]["system"] >= 2 * tiny.stat().st_size
    for device in model["devices"]:
        assert shown[f'lqs_device_healthy{{device="{device}"}}'] == 1


def test_another_error_than_not_supported_keeps_a_gpu_out_of_the_start(
    tiny: Path, library: Path, tmp_path: Path
) -> None:
    """B45: only `not supported` means unified memory; this GPU takes no work, and the reason is told."""
    environ = environ_of(library, tmp_path / "gpus", [card("GPU-a", name="GB10"), "error nvmlDeviceGetMemoryInfo 999"])
    command = [sys.executable, "-c", UNIFIED, "serve", str(tiny), "--port", "0", "--device", "cuda:0"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "its memory cannot be read" in done.stderr
    assert "listening" not in done.stderr


@pytest.mark.parametrize("has_card", [True, False])
def test_a_gpu_that_is_asked_for_and_cannot_be_had_is_refused_at_the_start(
    tiny: Path, library: Path, tmp_path: Path, has_card: bool
) -> None:
    """B47: with the reason, before the port is taken."""
    lines = [card("GPU-a")] if has_card else ["error nvmlInitWithFlags 9"]
    environ = environ_of(library, tmp_path / "gpus", lines)
    done = serve(str(tiny), "--device", "cuda:0", **{name: environ[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")})
    assert done.returncode == 1
    assert "engine.devices: cuda:0" in done.stderr
    why = "llama-cpp-python is built without CUDA" if has_card else "the NVIDIA driver is not loaded"
    assert why in done.stderr
    assert "listening" not in done.stderr


# As it is, but for how long the first reading is waited for.
IMPATIENT = """
import sys
from functools import partial
import lqs.cards

lqs.cards.read_once = partial(lqs.cards.read_once, 0.5)
from lqs.cli import main
sys.exit(main())
"""


def test_a_driver_that_hangs_keeps_nobody_waiting(start: Start, tiny: Path, library: Path, tmp_path: Path) -> None:
    environ = environ_of(library, tmp_path / "gpus", ["hang nvmlInitWithFlags"])
    server = start(tiny, "--ctx", "512", config="server.close_s = 1\n", environ=environ, program=("-c", IMPATIENT))
    assert server.complete(3).answer().status == 200
    server.signal()
    assert server.wait() == 0
    assert "left behind threads=lqs-nvml" in server.log
