"""CUDA counts in another order than NVML: which card a device slot is bound to, what befalls it there, what is said.

All from the driver's answers to the choice of the core is the real thing; what would compute on the cards is not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lqs import cards as cards_module
from lqs._core import Finish, Work
from lqs.cards import Cards
from lqs.engine.catalog import Entry, plan_all
from lqs.engine.loading import Loader
from lqs.engine.slots import Models
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.observe.log import Log
from lqs.scheduling.core import make_scheduler
from lqs.settings import load
from tests.engine.test_loading import Weights
from tests.engine.test_slots import FakeWorker
from tests.fake_nvml import GB, Driver, card
from tests.server.process import until


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)


def three(**free_gb: float) -> list[str]:
    """NVML's order is b, a, c; by their places on the bus it is a, b, c."""
    return [card(f"GPU-{name}", bus=bus, free_gb=free_gb.get(name, 20)) for name, bus in (("b", 2), ("a", 1), ("c", 3))]


class House:
    """A server's cards, plan, loader and core, in a process whose libllama would have CUDA."""

    def __init__(self, path: Path, listed: list[str], environ: dict[str, str], *devices: str) -> None:
        flags: dict[str, Any] = {"engine.devices": list(devices), "engine.ctx": 4096, "engine.gpu_margin_mb": 1000}
        config = load(None, None, flags | {"placement.nvml_s": 0.02})
        self.text = io.StringIO()
        log = Log(config.log, self.text)
        self.core = make_scheduler(config, [1.0])
        self.cards = Cards(config, environ, log)
        entries = [Entry("tiny", path, config)]
        plans = plan_all(entries, self.cards.machine(lambda: listed))
        loader = Loader(
            self.core,
            make_model=Weights,  # type: ignore[arg-type]
            make_worker=FakeWorker,
            log=log,
            refresh=self.cards.refresh,
            gpu_margin_bytes=GB,
        )
        self.models = Models(config, entries, plans, self.core, loader)
        self.models.load_residents()
        self.cards.watch(self.core, lambda: self.models.slots)
        self.cards.start()
        self.now_ns = 0

    @property
    def log(self) -> str:
        return self.text.getvalue()

    def place(self) -> str:
        """The device that a request starts on, alone."""
        self.now_ns += 1
        assert self.core.try_enter(0)
        self.core.submit(Work(), object(), num_prompt_tokens=100, max_tokens=28, footprint_tokens=128)
        self.core.round(self.now_ns)
        slots = self.models.slots
        ((device, handle),) = [(slot.device, each) for slot in slots for each in self.core.take(slot.number)]
        self.core.finish(handle, Finish.FINISH_STOP)
        self.core.round(self.now_ns)
        self.core.poll()
        return device

    def close(self) -> None:
        assert self.cards.stop(5)
        assert self.models.close(5)


@pytest.fixture
def make(driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(cards_module, "has_cuda", lambda: True)
    houses: list[House] = []

    def make(listed: list[str], *devices: str, **environ: str) -> House:
        driver.says(*three())
        houses.append(House(path, listed, environ, *devices))
        return houses[-1]

    yield make
    for house in houses:
        house.close()


def test_where_cuda_visible_devices_changes_the_order_requests_avoid_the_card_that_is_short(
    make: Any, driver: Driver
) -> None:
    """The numbers are changed, the right card's memory decides, and the log says which is which and why."""
    house = make(["0000:03:00.0", "0000:01:00.0"], "cuda:0", "cuda:1", CUDA_VISIBLE_DEVICES="2,0")
    assert house.log.splitlines()[:3] == [
        "info    GPU has CUDA's number device=cuda:0 gpu=GPU-c bus=00000000:03:00.0",
        "info    GPU has CUDA's number device=cuda:1 gpu=GPU-a bus=00000000:01:00.0",
        'info    GPU is not used gpu=GPU-b bus=00000000:02:00.0 reason="CUDA_VISIBLE_DEVICES leaves it out"',
    ]
    assert [(slot.device, slot.cards) for slot in house.models.slots] == [
        ("cuda:0", ("GPU-c",)),
        ("cuda:1", ("GPU-a",)),
    ]
    until(lambda: "NVML answers" in house.log)
    assert house.place() == "cuda:0"
    # The card that CUDA does not see changes nothing, nor does the one that NVML calls 0.
    driver.says(*three(b=0.1))
    until(lambda: "GPU memory is short gpu=GPU-b" in house.log)
    assert house.place() == "cuda:0"
    driver.says(*three(c=0.1))
    short = 'device slot takes less device=cuda:0 kv_tokens=0 reason="less than the margin is free on its GPU" gpus='
    until(lambda: short + "GPU-c" in house.log)
    assert [house.place(), house.place()] == ["cuda:1", "cuda:1"]
    driver.says(*three(a=0.1))
    until(lambda: short.replace("cuda:0", "cuda:1") + "GPU-a" in house.log)
    until(lambda: "device slot takes all again device=cuda:0" in house.log)
    assert [house.place(), house.place()] == ["cuda:0", "cuda:0"]


def test_with_auto_a_card_that_is_left_out_is_told_and_not_dropped_in_silence(make: Any) -> None:
    house = make(["0000:02:00.0"], "auto", CUDA_VISIBLE_DEVICES="GPU-b")
    assert [(slot.device, slot.cards) for slot in house.models.slots] == [("cuda:0", ("GPU-b",))]
    told = [line for line in house.log.splitlines() if "leaves it out" in line]
    assert [line.split()[5] for line in told] == ["gpu=GPU-a", "gpu=GPU-c"]
    assert house.log.count("GPU has CUDA's number") == 1


def test_the_numbers_are_told_once(make: Any) -> None:
    house = make(["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"], "cuda:0")
    house.cards.machine(lambda: [])
    assert house.log.count("GPU has CUDA's number") == 3
