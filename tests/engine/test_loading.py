"""Device slots that open: with less context where there is less memory, and not at all with a reason."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest

from lqs.engine.catalog import Entry, plan_all
from lqs.engine.loading import Loader
from lqs.engine.plan import Machine
from lqs.engine.slots import Models
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import DeviceError, NoRoom
from lqs.observe.log import Log
from lqs.placement.gpus import Gpu, Snapshot
from lqs.placement.survey import survey_of
from lqs.scheduling.core import make_scheduler
from lqs.settings import load
from tests.engine.test_slots import FakeModel, FakeWorker

GB = 1_000_000_000


class Weights(FakeModel):
    """A model that notes where it was loaded to."""

    def load(self, devices: Any = (), parts: Any = ()) -> None:
        self.calls.append(f"load {list(devices)} {[round(part / max(sum(parts), 1), 2) for part in parts]}")
        self.progress = 1.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)


class House:
    """Loads on a machine whose cards and memory the test makes up; the core is the real one."""

    def __init__(self, path: Path, *free_gb: float, fits: int = 1 << 30, **flags: Any) -> None:
        self.config = load(None, None, {"engine.ctx": 8192, "engine.parallel": 4} | flags)
        self.core = make_scheduler(self.config, [1.0])
        self.free_gb = list(free_gb)
        self.fits = fits
        self.tried: list[tuple[int, int]] = []
        self.weights: list[Weights] = []
        self.log = io.StringIO()
        self.loader = Loader(
            self.core,
            make_model=self._make_model,  # type: ignore[arg-type]
            make_worker=self._make_worker,
            log=Log(self.config.log, self.log),
            refresh=self.snapshot,
            gpu_margin_bytes=GB,
        )
        survey = survey_of(self.snapshot(), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, has_cuda=True)
        entries = [Entry("tiny", path, self.config)]
        plans = plan_all(entries, Machine(8, 16 * GB, survey))
        self.models = Models(self.config, entries, plans, self.core, self.loader)

    def snapshot(self) -> Snapshot:
        gpus = [
            Gpu(uuid=f"GPU-{n}", bus_id=f"00000000:0{n}:00.0", name="T4", memory_free_bytes=int(free * GB))
            for n, free in enumerate(self.free_gb)
        ]
        return Snapshot(1, "", "570", tuple(gpus))

    def _make_model(self, path: Path) -> Weights:
        self.weights.append(Weights(path))
        return self.weights[-1]

    def _make_worker(self, scheduler: object, number: int, model: object, **settings: Any) -> FakeWorker:
        self.tried.append((number, settings["n_ctx"]))
        if settings["n_ctx"] > self.fits:
            raise NoRoom("the device slot cannot be opened: no memory")
        return FakeWorker(**settings)

    def load(self) -> list[int]:
        """Load; the KV tokens of each device slot in the core after a round."""
        self.models.load_residents()
        self.core.round(1)
        return [slot["capacity"] for slot in self.core.slots()]


def test_out_of_memory_at_load_takes_half_of_the_context_and_says_so(path: Path) -> None:
    """B50: what fails while a device slot is opened is a failure of the load, before anybody is let in."""
    house = House(path, fits=3000)
    assert house.load() == [2048]
    assert [size for _, size in house.tried] == [8192, 4096, 2048]
    said = house.log.getvalue()
    assert said.count("device slot gets less context") == 2
    assert "kv_tokens=2048 tried=4096" in said
    served = house.models.find("tiny")
    assert served is not None
    assert served.n_ctx == min(2048, house.models.plan_of(served).n_ctx_train)
    assert house.models.close(5)


def test_a_small_context_is_opened_with_fewer_sequences_and_the_core_knows(path: Path) -> None:
    """What the core lets run there at once is what the worker has, also when a larger one comes later."""
    house = House(path, fits=3000, **{"engine.parallel": 32})
    assert house.load() == [2048]
    (slot,) = house.models.slots
    assert (slot.num_sequences, slot.worker.settings["n_seq"]) == (8, 8)  # type: ignore[attr-defined]
    assert house.core.slots()[0]["num_sequences"] == 8
    said = house.log.getvalue()
    assert "kv_tokens=2048 tried=4096 sequences=8" in said
    assert "device=cpu:0 sequences=8 wanted=32 kv_tokens=2048" in said
    served = house.models.find("tiny")
    assert served is not None
    house.models.close_to_newcomers(served)
    house.core.round(2)
    assert house.models.leave(served, 5)
    house.fits = 1 << 30
    house.models.load_one(served)
    house.core.round(3)
    account = house.core.slots()[0]
    assert (account["capacity"], account["num_sequences"]) == (8192, 32)
    assert house.models.close(5)


def test_in_the_end_fewer_sequences_are_tried_with_the_smallest_context(path: Path) -> None:
    house = House(path, **{"engine.ctx": 256, "engine.parallel": 16})
    real = house._make_worker

    def only_one(scheduler: object, number: int, model: object, **settings: Any) -> FakeWorker:
        if settings["n_seq"] > 1:
            raise NoRoom("no memory for the outputs")
        return real(scheduler, number, model, **settings)

    house.loader._make_worker = only_one  # type: ignore[assignment]
    assert house.load() == [256]
    assert house.core.slots()[0]["num_sequences"] == 1
    assert house.models.close(5)


def test_the_tries_are_few_and_then_the_load_fails_with_the_reason(path: Path) -> None:
    house = House(path, fits=0)
    with pytest.raises(DeviceError, match=r"cpu:0: no context fits, not even .* no memory"):
        house.load()
    assert [size for _, size in house.tried] == [8192, 4096, 2048, 1024]
    assert house.log.getvalue().count("device slot gets less context") == 3
    assert all(slot["is_drained"] or slot["num_running"] == 0 for slot in house.core.slots())


def test_one_device_slot_that_does_not_open_keeps_no_other_from_serving(path: Path) -> None:
    house = House(path, **{"engine.devices": ["cpu:0", "cpu:1"]})
    real = house._make_worker

    def broken_first(scheduler: object, number: int, model: object, **settings: Any) -> FakeWorker:
        if number == 0:
            raise DeviceError("cpu:0: the device slot cannot be opened: broken")
        return real(scheduler, number, model, **settings)

    house.loader._make_worker = broken_first  # type: ignore[assignment]
    house.load()
    served = house.models.find("tiny")
    assert served is not None
    assert [slot.state for slot in house.models.slots] == ["failed", "ready"]
    assert served.state == "ready"
    assert [slot["is_drained"] for slot in house.core.slots()] == [True, False]
    assert "device slot does not open" in house.log.getvalue()
    assert house.models.close(5)


def test_what_nobody_foresaw_while_a_device_slot_opens_is_its_failure(path: Path) -> None:
    house = House(path)

    def broken(*_: object, **__: object) -> FakeWorker:
        raise KeyError("secret")

    house.loader._make_worker = broken
    with pytest.raises(DeviceError, match=r"KeyError in broken, test_loading\.py") as told:
        house.load()
    assert "secret" not in str(told.value)
    assert [slot.state for slot in house.models.slots] == ["failed"]


def test_weights_are_shared_by_cores_and_laid_once_on_each_group_of_gpus(path: Path) -> None:
    devices = ["cpu:0", "cpu:1", "cuda:0", "cuda:1+cuda:2"]
    house = House(path, 20, 30, 10, **{"engine.devices": devices})
    house.load()
    assert [weights.calls[0] for weights in house.weights] == [
        "load [] []",
        "load [0] [1.0]",
        "load [1, 2] [0.75, 0.25]",
    ]
    # The model's own weights, which know its vocabulary, are the first.
    served = house.models.find("tiny")
    assert served is not None
    assert served.own is house.weights[0]
    on_cards = {slot.device: slot.cards for slot in house.models.slots}
    assert on_cards["cuda:1+cuda:2"] == ("GPU-1", "GPU-2")
    assert on_cards["cpu:1"] == ()
    settings = {slot.device: slot.worker.settings for slot in house.models.slots}  # type: ignore[attr-defined]
    assert (settings["cpu:0"]["n_ubatch"], settings["cuda:0"]["n_ubatch"]) == (63, 512)
    assert (settings["cpu:0"]["is_cpu"], settings["cuda:0"]["threads"]) == (True, 1)
    assert house.models.close(5)
    assert all(weights.calls[-1] == "close" for weights in house.weights)


def three_replicas(path: Path) -> House:
    return House(path, 20, 20, 20, **{"engine.devices": ["cuda:0", "cuda:1", "cuda:2"]})


def test_the_first_weights_come_from_the_disk_and_the_others_at_the_same_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, both = three_replicas(path), threading.Barrier(2)

    def load(self: Weights, devices: list[int], parts: list[float]) -> None:
        if devices == [0]:
            assert [weights.progress for weights in house.weights] == [0, 0, 0]
        else:
            assert house.weights[0].progress == 1
            # Neither is passed before the other has come.
            both.wait(10)
        self.progress = 1.0

    monkeypatch.setattr(Weights, "load", load)
    house.load()
    assert [weights.progress for weights in house.weights] == [1, 1, 1]
    assert [slot.state for slot in house.models.slots] == ["ready"] * 3
    assert house.models.close(5)


def test_weights_that_one_gpu_does_not_take_end_the_load_with_the_reason(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = three_replicas(path)

    def load(self: Weights, devices: list[int], parts: list[float]) -> None:
        if devices == [2]:
            raise DeviceError("cuda:2: no memory for the weights")
        self.progress = 1.0

    monkeypatch.setattr(Weights, "load", load)
    with pytest.raises(DeviceError, match="no memory for the weights"):
        house.load()
    assert house.tried == []


def test_memory_that_others_took_since_the_plan_makes_the_context_smaller_or_the_load_fail(path: Path) -> None:
    """B49: decided at 20 GB; when the load begins others have left less."""
    house = House(path, 20, **{"engine.devices": ["cuda:0"], "engine.ctx": 1 << 20})
    served = house.models.find("tiny")
    assert served is not None
    plan = house.models.plan_of(served)
    (slot,) = plan.slots
    half = plan.needs.compute_bytes(slot.group) + (1 << 19) * plan.needs.token_bytes(slot.group)
    house.free_gb[0] = 1 + half / GB
    assert house.load() == [1 << 19]
    assert "GPU-0 has" in house.log.getvalue()
    assert house.models.close(5)
    house = House(path, 20, **{"engine.devices": ["cuda:0"]})
    house.free_gb[0] = 0.5
    with pytest.raises(DeviceError, match="GPU-0 has 0 MB to give beside its margin"):
        house.load()
    assert house.tried == []


def test_a_seat_is_used_again_by_the_next_worker(path: Path) -> None:
    house = House(path)
    house.load()
    served = house.models.find("tiny")
    assert served is not None
    house.models.close_to_newcomers(served)
    assert not house.models.is_empty(served)
    house.core.round(2)
    assert house.models.is_empty(served)
    assert house.models.leave(served, 5)
    assert (served.state, served.slots) == ("absent", [])
    assert house.weights[0].calls[-1] == "close"
    house.models.load_one(served)
    house.core.round(3)
    assert [slot.number for slot in house.models.slots] == [0]
    assert not house.core.slots()[0]["is_drained"]
    assert house.models.close(5)
