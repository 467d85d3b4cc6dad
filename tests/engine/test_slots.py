"""A model's life on its device slots, with workers that compute nothing."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lqs.config import Config
from lqs.engine.catalog import Entry, plan_all
from lqs.engine.drill import FAIL_LOAD, Break, lost_cards, parse_drill
from lqs.engine.loading import Loader
from lqs.engine.plan import Machine, make_plan
from lqs.engine.slot import Slot
from lqs.engine.slots import Models
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import ConfigError, RequestRefused, StartError
from lqs.observe.log import Log
from lqs.request import NS_PER_S
from lqs.scheduling.core import make_scheduler
from lqs.settings import load

S = NS_PER_S
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class Native:
    n_ctx_train, n_params, size_bytes, eos = 1024, 7, 99, 2
    can_reuse_prefix = True


class NoEnd(Native):
    eos = -1


class FakeModel:
    """A model without weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = 0.0
        self.n_vocab, self.bos = 10, 1
        self.control_texts = ["<|im_start|>", "<|im_end|>"]
        self.chat_template: str | None = CHATML
        self.native = Native()
        self.calls: list[str] = []

    def load(self) -> None:
        self.calls.append("load")
        self.progress = 1.0

    def token_text(self, token: int) -> str:
        return f"<{token}>"

    def close(self) -> bool:
        self.calls.append("close")
        return True


class FakeWorker:
    """A worker whose thread waits until it is stopped, unless it hangs."""

    kept = 0.0  # Bytes of KV for a token; 0: not measured.

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.settings = settings
        self.state, self.death, self.is_parked, self.step_began_ns = "ready", "", False, 0
        self.hangs = False
        self.swapping = {"bytes_per_token": self.kept}
        self.calibration: dict[int, float] = {}
        self.calls: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        self.ended.wait(10)

    def stop(self) -> None:
        self.calls.append("stop")
        if not self.hangs:
            self.ended.set()

    def close(self) -> None:
        self.calls.append("close")

    def break_at(self, kind: str, *, step: int, rc: int, times: int, for_s: float) -> None:
        self.calls.append(f"{kind} {step}")

    def snapshot(self) -> dict[str, Any]:
        return {"num_steps": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(found, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return found


class House:
    def __init__(self, path: Path, drill: str = "", **flags: Any) -> None:
        self.config: Config = load(None, None, {"engine.devices": ["cpu:0", "cpu:1"], "engine.ctx": 512} | flags)
        self.core = make_scheduler(self.config, [1.0])
        self.fakes: list[FakeModel] = []
        self.log = io.StringIO()
        loader = Loader(
            self.core,
            make_model=self._make_model,  # type: ignore[arg-type]
            make_worker=FakeWorker,
            log=Log(self.config.log, self.log),
            drill=parse_drill(drill),
        )
        name = self.config.model.name or path.stem
        entries = [Entry(name, path, self.config)]
        plans = plan_all(entries, Machine(8, 16_000_000_000))
        self.models = Models(self.config, entries, plans, self.core, loader)
        (self.name,) = self.models.names()
        served = self.models.find(self.name)
        assert served is not None
        self.served = served
        # What a test changes of the model before it is loaded.
        self.changes: dict[str, Any] = {}

    def _make_model(self, path: Path) -> FakeModel:
        fake = FakeModel(path)
        for name, value in self.changes.items():
            setattr(fake, name, value)
        self.fakes.append(fake)
        return fake

    @property
    def fake(self) -> FakeModel:
        return self.fakes[-1]

    @property
    def workers(self) -> list[Any]:
        return [slot.worker for slot in self.models.slots]


def test_a_drill_breaks_its_device_slot_and_no_other(path: Path) -> None:
    house = House(path, "device_slot=1 abort@step=40 abort@step=50")
    house.models.load_residents()
    assert [worker.calls for worker in house.workers] == [[], ["assert 40", "assert 50"]]


@pytest.mark.parametrize("card", ["", "GPU-a"])
def test_a_card_is_lost_with_its_step_and_with_it_all_that_is_on_it(path: Path, card: str) -> None:
    on_card = f"device_slot=0 card={card} device_slot=1 card={card}" if card else ""
    drill = f"{on_card} device_slot=1 lose-card@step=3"
    house = House(path, drill)
    house.models.load_residents()
    assert [worker.calls for worker in house.workers] == [[], ["lost 3"]]
    first, second = house.models.slots
    assert (first.cards, second.cards) == ((card,), (card,)) if card else ((), ("of-device-slot-1",))
    breaks = parse_drill(drill)
    first.worker.state = "dead"  # type: ignore[misc]
    assert lost_cards(breaks, [first, second]) == {}
    second.worker.state = "dead"  # type: ignore[misc]
    assert lost_cards(breaks, [first, second]) == dict.fromkeys(second.cards, "a drill says so")


@pytest.mark.parametrize(
    "text",
    [
        "abort",
        "device_slot=x",
        "device_slot=0",
        "abort@step=40",
        "device_slot=0 explode@step=1",
        "device_slot=0 abort@step=-1",
        "device_slot=0 lose-card",
        "device_slot=0 fail-load for=2s",
        "device_slot=0 hang@step=1 for=8",
        "device_slot=0 abort@step=1 for=8s",
        "device_slot=0 times=2",
    ],
)
def test_what_is_no_drill_is_wrong_use(text: str) -> None:
    with pytest.raises(ConfigError, match="--chaos"):
        parse_drill(text)


def test_each_part_of_a_drill_is_read() -> None:
    assert parse_drill("device_slot=1 abort-helper@step=3 hang@step=4 for=1500ms fail-load times=3 oom@step=5") == (
        Break(1, "helper", 3),
        Break(1, "hang", 4, for_s=1.5),
        Break(1, FAIL_LOAD, times=3),
        Break(1, "rc", 5, rc=-100, times=-1),
    )
    assert parse_drill("device_slot=0 slow-load device_slot=1 slow-load for=3s") == (
        Break(0, "slow-load", for_s=1.0),
        Break(1, "slow-load", for_s=3.0),
    )
    assert parse_drill("device_slot=0 lose-card@step=4") == (Break(0, "lost", 4),)
    assert parse_drill("device_slot=0 hang@step=1")[0].for_s > 10_000
    assert parse_drill("") == ()


def test_a_drill_for_a_device_slot_that_there_is_not_is_told(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no device slot 2"):
        House(path, "device_slot=2 abort@step=1").models.load_residents()


def test_one_that_cannot_be_opened_leaves_the_others_and_none_of_them_ends_it(path: Path) -> None:
    """B55."""
    house = House(path, "device_slot=0 fail-load")
    house.models.load_residents()
    assert [slot.state for slot in house.models.slots] == ["failed", "ready"]
    assert house.models.has_healthy_device
    assert house.models.snapshots()["cpu:0"]["num_steps"] == 0
    house.core.round(0)
    assert [slot["is_drained"] for slot in house.core.slots()] == [True, False]
    first = next(iter(house.models.slots))
    house.models.replace(first, house.models.open_again(first, first.number))
    house.core.round(1)
    assert [slot["is_drained"] for slot in house.core.slots()] == [False, False]
    assert house.models.close(5)
    with pytest.raises(StartError, match="a drill"):
        House(path, "device_slot=0 fail-load device_slot=1 fail-load").models.load_residents()


def test_a_step_may_take_ten_times_what_was_measured() -> None:
    worker = FakeWorker()
    slot = Slot("cpu:0", worker, 1, 0)
    assert slot.stall_ns(30) == 30 * S
    worker.calibration = {16: 100.0, 512: 4000.0}
    assert slot.stall_ns(30) == 40 * S


@pytest.mark.parametrize(
    ("template", "said"), [(CHATML, None), (None, "chat template is missing"), ("{% for", "template cannot be used: ")]
)
def test_a_model_that_cannot_chat_says_why(path: Path, template: str | None, said: str | None) -> None:
    house = House(path)
    house.changes = {"chat_template": template}
    house.models.load_residents()
    assert ("no chat" in house.log.getvalue()) == (said is not None)
    assert said is None or said in house.log.getvalue()


def test_a_context_is_told_its_padded_size_and_a_step_fits_it(path: Path) -> None:
    """B15: 300 tokens promised; llama.cpp makes 512 cells, and takes no larger step than that."""
    house = House(path, **{"engine.ctx": 300, "engine.n_batch": 600})
    house.models.load_residents()
    assert {(w.settings["n_ctx"], w.settings["n_batch"]) for w in house.workers} == {(512, 512)}
    assert house.served.n_ctx == 300


@pytest.mark.parametrize(
    ("flags", "can_cut", "said"),
    [
        ({}, True, None),
        ({"engine.kv_mode": "guaranteed"}, False, None),
        ({}, False, "it is promised for the longest answer, because the model's memory cannot be cut"),
        (
            {"engine.kv_unified": False},
            True,
            "it is promised for the longest answer, because engine.kv_unified is false",
        ),
    ],
)
def test_kv_is_promised_for_the_longest_answer_where_it_cannot_grow(
    path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], can_cut: bool, said: str | None
) -> None:
    monkeypatch.setattr(Native, "can_reuse_prefix", can_cut)
    house = House(path, **flags)
    house.models.load_residents()
    assert house.served.kv_problem == said
    assert said is None or f"KV: {said}" in house.log.getvalue()
    assert {worker.settings["swap_bytes"] for worker in house.workers} == {256_000_000}


@pytest.mark.parametrize(("share", "is_told"), [(1.0, False), (1.04, False), (1.06, True), (0.9, True)])
def test_kv_that_takes_other_than_planned_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, share: float, is_told: bool
) -> None:
    planned = make_plan(load(), path).kv_bytes_per_token
    monkeypatch.setattr(FakeWorker, "kept", planned * share)
    house = House(path)
    house.models.load_residents()
    assert (f"and {planned} were planned" in (house.served.kv_problem or "")) == is_told


def test_until_it_is_loaded_a_model_says_so(path: Path) -> None:
    house = House(path)
    served = house.served
    assert house.models.is_loading
    assert (served.state, served.model, served.has_healthy_device) == ("loading", None, False)
    assert served.meta() == {"state": "loading", "devices": []}
    with pytest.raises(RequestRefused):
        _ = served.loaded
    assert house.models.find("other") is None


def test_the_time_left_follows_what_is_loaded(path: Path) -> None:
    house = House(path)
    now_ns = time.monotonic_ns() + 10 * S
    assert house.served.load_time_left_s(now_ns) == 5
    fake = FakeModel(path)
    house.served.renew(fake)  # type: ignore[arg-type]
    fake.progress = 0.25
    assert house.served.load_time_left_s(now_ns) == pytest.approx(30, rel=0.1)


def test_a_loaded_model_has_a_worker_on_each_device_slot(path: Path) -> None:
    house = House(path)
    plan = house.models.load_residents()
    assert not house.models.is_loading
    assert house.models.has_healthy_device
    assert house.served.devices == ["cpu:0", "cpu:1"]
    assert house.served.n_ctx == plan.request_tokens_max == 512
    assert house.served.loaded is house.served.model
    meta = house.served.meta()
    assert (meta["state"], meta["n_ctx"], meta["n_params"], meta["chat_template"]) == ("ready", 512, 7, "ok")
    assert [slot["capacity"] for slot in house.core.snapshot()["slots"]] == [512, 512]
    settings = house.workers[0].settings
    assert (settings["n_seq"], settings["n_batch"]) == (32, 512)
    assert house.models.snapshots()["cpu:1"] == {"num_steps": 3, "is_healthy": True, "state": "ready", "slot": 1}
    workers = house.workers
    assert house.models.close(5)
    assert [worker.calls for worker in workers] == [["stop", "close"]] * 2
    assert house.fake.calls == ["load", "close"]


def test_a_dead_or_stalled_worker_is_not_healthy(path: Path) -> None:
    house = House(path)
    house.models.load_residents()
    now_ns = time.monotonic_ns()
    dead, stalled = house.workers
    dead.state = "dead"
    assert house.models.has_healthy_device
    stalled.step_began_ns = now_ns - 31 * S
    assert not house.models.has_healthy_device
    assert house.served.state == "failed"
    stalled.step_began_ns = now_ns - 5 * S
    assert house.models.has_healthy_device
    assert house.models.close(5)


@pytest.mark.parametrize("kind", ["parked", "hung"])
def test_nothing_under_a_thread_that_does_not_end_is_freed(path: Path, kind: str) -> None:
    house = House(path)
    house.models.load_residents()
    bad, good = house.workers
    bad.is_parked, bad.hangs = kind == "parked", kind == "hung"
    assert not house.models.close(0.05)
    assert "close" not in bad.calls
    assert "close" in good.calls
    assert "close" not in house.fake.calls
    bad.ended.set()


@pytest.mark.parametrize("kind", ["parked", "hung"])
def test_who_died_in_one_life_of_a_model_keeps_the_weights_of_that_life_only(path: Path, kind: str) -> None:
    house = House(path)
    house.models.load_residents()
    bad = house.workers[0]
    bad.is_parked, bad.hangs = kind == "parked", kind == "hung"
    assert not house.models.leave(house.served, 0.05)
    for life in range(1, 4):
        house.models.load_one(house.served)
        assert house.models.leave(house.served, 5)
        assert house.fakes[life].calls == ["load", "close"]
    assert house.fakes[0].calls == ["load"]
    assert not house.models.close(0.05)
    if kind == "hung":
        # It wakes up after all: whoever leaves next frees what it stood in.
        bad.ended.set()
        until = time.monotonic() + 10
        while not house.models.close(0.05):
            assert time.monotonic() < until
        assert house.fakes[0].calls == ["load", "close"]


def test_a_file_that_has_changed_brings_its_own_template(path: Path) -> None:
    house = House(path)
    house.changes = {"chat_template": "{% for"}
    house.models.load_residents()
    assert house.served.template_error
    assert house.models.leave(house.served, 5)
    house.changes = {}
    house.models.load_one(house.served)
    assert house.served.template is not None
    assert house.served.meta()["chat_template"] == "ok"
    assert house.models.leave(house.served, 5)
    house.changes = {"chat_template": "{% for"}
    house.models.load_one(house.served)
    assert house.served.template is None
    assert house.models.close(5)


def test_a_slot_that_was_never_started_is_closed_too() -> None:
    worker = FakeWorker()
    assert Slot("cpu:0", worker, 1, 0).close(0)
    assert worker.calls == ["stop", "close"]


def test_a_broken_template_leaves_plain_completions(path: Path) -> None:
    house = House(path)
    house.changes = {"chat_template": "{% for"}
    house.models.load_residents()
    assert house.served.template is None
    assert house.served.template_error
    assert house.served.meta()["chat_template"] == house.served.template_error
    assert house.models.close(5)


def test_a_model_without_a_template_says_so(path: Path) -> None:
    house = House(path, **{"model.name": "my-model"})
    house.changes = {"chat_template": None, "bos": None}
    house.models.load_residents()
    assert house.name == "my-model"
    assert house.served.meta()["chat_template"] == "none"
    assert house.models.close(5)


def test_the_config_can_bring_its_own_template(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    house = House(path, **{"model.chat_template": str(own)})
    house.changes = {"bos": None, "native": NoEnd()}
    house.models.load_residents()
    assert house.served.template is not None
    segments = house.served.template.render([{"role": "user", "content": "hi"}])
    assert "".join(segment.text for segment in segments) == "hi"


def test_a_template_file_that_is_not_there_is_named(path: Path) -> None:
    house = House(path, **{"model.chat_template": "nowhere.jinja"})
    with pytest.raises(StartError, match=r"nowhere\.jinja"):
        house.models.load_residents()
