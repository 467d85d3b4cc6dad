"""Which weight and lanes device slots have in the core: by where their device stands on the list."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from lqs.config import Config
from lqs.engine.catalog import catalog_of, plan_all
from lqs.engine.loading import Loader
from lqs.engine.plan import Machine
from lqs.engine.slots import Models
from lqs.engine.store import Store
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.observe.log import Log
from lqs.placement.gpus import Gpu, Snapshot
from lqs.placement.survey import Survey, no_gpus, survey_of
from lqs.scheduling.core import make_scheduler
from lqs.settings import load
from tests.engine.test_slots import FakeModel, FakeWorker

GB = 1_000_000_000
SHORT, LONG, BOTH = 1, 2, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    for name in ("a", "b"):
        write(folder / f"{name}.gguf", Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return Store(folder)


class House:
    """Several models as a config has them, in a core of their own."""

    def __init__(self, store: Store, tmp_path: Path, text: str, survey: Survey | None = None) -> None:
        file = tmp_path / "lqs.toml"
        file.write_text(text)
        self.config: Config = load(str(file))
        self.core = make_scheduler(self.config, [1.0])
        entries = catalog_of(self.config, store)
        plans = plan_all(entries, Machine(8, 16 * GB, survey or no_gpus()))
        loader = Loader(
            self.core,
            make_model=FakeModel,  # type: ignore[arg-type]
            make_worker=FakeWorker,
            log=Log(self.config.log, io.StringIO()),
        )
        self.models = Models(self.config, entries, plans, self.core, loader)

    def seen(self, what: str) -> list[Any]:
        """A figure of every device slot, in the order of models and their devices."""
        self.core.round(1)
        return [slot[what] for slot in self.core.slots()]


BOTH_MODELS = """
[models.a]
path = "a"
{of_a}
[models.b]
path = "b"
devices = {of_b}
[engine]
devices = {devices}
[placement]
weights = [5, 1]
lanes = ["short", "long"]
"""


def on_cores(of_b: str, of_a: str = "", devices: str = '["cpu:0", "cpu:1"]') -> str:
    return BOTH_MODELS.format(of_b=of_b, of_a=of_a, devices=devices)


@pytest.mark.parametrize(
    ("of_b", "weights"),
    [
        ('["cpu:1"]', [1]),
        ('["cpu:1", "cpu:0"]', [1, 5]),
        ('["cpu:0"]', [5]),
        # Nobody speaks of it: the last one stands for it.
        ('["cpu:7"]', [1]),
        ('["cpu:7", "cpu:0"]', [1, 5]),
    ],
)
def test_a_weight_belongs_to_the_device_whatever_place_a_model_gives_it(
    store: Store, tmp_path: Path, of_b: str, weights: list[int]
) -> None:
    """S11."""
    house = House(store, tmp_path, on_cores(of_b))
    assert house.seen("weight") == [5, 1, *weights]


def test_so_do_its_lanes(store: Store, tmp_path: Path) -> None:
    """S16."""
    house = House(store, tmp_path, on_cores('["cpu:1", "cpu:0"]'))
    assert house.seen("lanes") == [SHORT, LONG, LONG, SHORT]


def test_a_device_has_its_weight_under_all_of_its_names(store: Store, tmp_path: Path) -> None:
    gpus = tuple(
        Gpu(uuid=f"GPU-{n}", bus_id=f"00000000:0{n}:00.0", name="T4", memory_free_bytes=8 * GB) for n in range(3)
    )
    survey = survey_of(Snapshot(1, "", "570", gpus), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, has_cuda=True)
    text = on_cores('["cuda:GPU-1", "cuda:2"]', 'devices = ["cuda:0000:00:00.0"]', '["cuda:0", "cuda:1"]')
    assert House(store, tmp_path, text, survey).seen("weight") == [5, 1, 1]


def test_more_weights_than_auto_finds_devices_leave_the_last_for_the_rest(store: Store, tmp_path: Path) -> None:
    text = on_cores('["cpu:5"]', devices='["auto"]').replace("weights = [5, 1]", "weights = [5, 4, 3]")
    assert House(store, tmp_path, text).seen("weight") == [5, 3]


def test_a_device_that_is_not_here_keeps_its_place_on_the_list(store: Store, tmp_path: Path) -> None:
    text = on_cores('["cpu:1"]', 'devices = ["cpu:1"]', '["cuda:0", "cpu:1", "cpu:2"]')
    assert House(store, tmp_path, text).seen("weight") == [1, 1]


def test_changed_weights_hold_for_those_that_come_too(store: Store, tmp_path: Path) -> None:
    """What is opened anew after a death gets the weight of the config that was read last."""
    house = House(store, tmp_path, on_cores('["cpu:1"]'))
    house.models.load_residents()
    house.models.set_weights(load(None, None, {"placement.weights": [2.0, 7.0], "engine.devices": ["cpu:0", "cpu:1"]}))
    assert house.seen("weight") == [2, 7, 7]
    last = list(house.models.slots)[-1]
    house.models.add_again(last)
    assert house.seen("weight") == [2, 7, 7, 7]
    assert house.models.close(5)


class Said:
    """Orders that a test can read; which models are closed it sets."""

    def __init__(self) -> None:
        self.moves: list[tuple[int, int]] = []
        self.closed: set[int] = set()

    def moved(self, slot: int, seat: int) -> None:
        self.moves.append((slot, seat))

    def is_closed(self, model: int) -> bool:
        return model in self.closed


@pytest.mark.parametrize("has_left", [False, True], ids=["opened anew", "loaded anew"])
def test_a_device_slot_keeps_its_number_and_weight_in_another_seat(
    store: Store, tmp_path: Path, has_left: bool
) -> None:
    house, said = House(store, tmp_path, on_cores('["cpu:1"]')), Said()
    models = house.models
    models.obey(said)
    models.load_residents()
    first = models.all()[0]
    models.set_weight(1, 9)
    assert house.seen("weight") == [5, 9, 1]
    house.core.report_dead(1)
    if has_left:
        models.replan(first, models.plan_of(first))
    else:
        models.add_again(first.slots[1])
    assert said.moves == [(1, 3)]
    assert house.seen("weight") == [5, 9, 1, 9]
    assert [seat.slot for seat in models.seats_of(first)] == [0, 1]
    # Until the config is read again; another weight finds the seat that counts.
    models.set_weight(1, 4)
    assert house.seen("weight")[3] == 4
    models.set_weights(house.config)
    assert house.seen("weight")[3] == 1
    assert models.close(5)


def test_a_closed_version_leaves_its_share_to_the_others(store: Store, tmp_path: Path) -> None:
    text = on_cores('["cpu:1"]').replace("models.a", 'models."q@1"').replace("models.b", 'models."q@2"')
    house, said = House(store, tmp_path, text), Said()
    house.models.obey(said)
    house.models.load_residents()

    def answered() -> set[str]:
        return {served.name for _ in range(4) if (served := house.models.route("q", ""))}

    assert answered() == {"q@1", "q@2"}
    said.closed = {0}
    assert answered() == {"q@2"}
    assert [served.state for served in house.models.all()] == ["drained", "ready"]
    assert [served.name for served in house.models.find_all("q")] == ["q@1", "q@2"]
    assert [served.name for served in house.models.find_all("q@2")] == ["q@2"]
    assert house.models.close(5)
