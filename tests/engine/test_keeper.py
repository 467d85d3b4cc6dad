"""Who looks after the device slots: by the clock that is passed in, with workers that compute nothing."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lqs._core import EV_STARTED, Scheduler, Work
from lqs.config import LogConfig
from lqs.engine.care import Stage, Standing
from lqs.engine.keeper import Keeper
from lqs.engine.slot import NoWorker, Slot
from lqs.errors import DeviceError
from lqs.observe.log import Log
from lqs.request import NS_PER_S
from lqs.settings import load

S = NS_PER_S


class FakeWorker:
    """A worker whose state and steps the test sets."""

    def __init__(self) -> None:
        self.state, self.death, self.is_parked, self.step_began_ns = "ready", "", False, 0
        self.calibration: dict[int, float] = {}
        self.num_steps = self.step_ns = 0

    def steps(self, num: int, each_ns: int) -> None:
        self.num_steps += num
        self.step_ns += num * each_ns

    def snapshot(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "step_ns": self.step_ns}


class House:
    """Two device slots; opening anew fails as often as it is told, or hangs until it is let go."""

    def __init__(self, devices: tuple[str, ...] = ("cpu:0", "cpu:1"), **health: Any) -> None:
        self.text = io.StringIO()
        self.core = Scheduler(table_capacity=64, level_caps=[64], total_cap=64)
        self._slots = [self._slot(device, self._add()) for device in devices]
        self.num_failures = self.num_opened = 0
        self.is_loading = False
        self.gate: threading.Event | None = None
        config = load(None, None, {f"health.{name}": value for name, value in health.items()})
        self.keeper = Keeper(config, self, self.core, Log(LogConfig(), self.text))
        self.now_s = 0.0

    def _add(self) -> int:
        return self.core.add_device_slot(kv_tokens=1000, num_sequences=8)

    def _slot(self, device: str, number: int) -> Slot:
        return Slot(device, FakeWorker(), 1000, number)  # type: ignore[arg-type]

    def __getitem__(self, place: int) -> Any:
        return self._slots[place].worker

    # What the keeper asks for.

    @property
    def slots(self) -> Iterator[Slot]:
        return iter(self._slots)

    def add_again(self, slot: Slot) -> int:
        return self.core.add_device_slot(kv_tokens=1000, num_sequences=8, is_resting=True)

    def open_again(self, slot: Slot, number: int) -> Slot:
        if self.gate is not None:
            self.gate.wait(10)
        if self.num_failures:
            self.num_failures -= 1
            raise DeviceError("no memory")
        self.num_opened += 1
        return self._slot(slot.device, number)

    def replace(self, slot: Slot, new: Slot) -> None:
        self._slots[self._slots.index(slot)] = new
        self.core.rest_slot(new.number, False)

    # What the test does.

    def fail_at_first(self, place: int, cards: tuple[str, ...] = ()) -> None:
        """Its load failed before it ever lived."""
        slot = self._slots[place]
        slot.worker, slot.cards = NoWorker("no memory", {"num_steps": 0, "step_ns": 0}), cards

    def look(self, at_s: float) -> None:
        self.now_s = at_s
        self.keeper.look(int(at_s * S))

    def opened(self, place: int) -> None:
        """Wait for the thread that opens it, and look again at once."""
        opening = self.keeper._care[self._slots[place].device].opening
        assert opening is not None
        opening.thread.join(10)
        self.look(self.now_s)

    def stage(self, place: int) -> Stage:
        return self.keeper.standing_of(self._slots[place]).stage

    def pace(self, at_s: float, *paces_ms: int) -> None:
        """Steps of so long in each, then a look."""
        for place, pace_ms in enumerate(paces_ms):
            self[place].steps(10 if pace_ms else 0, pace_ms * 1_000_000)
        self.look(at_s)


def test_one_that_stops_working_is_told_once_and_so_is_its_return() -> None:
    house = House(reload_attempts=0)
    for state, death in (("ready", ""), ("dead", "GGML_ASSERT"), ("dead", "GGML_ASSERT"), ("ready", ""), ("dead", "")):
        house[0].state, house[0].death = state, death
        house.look(1)
    lines = [line for line in house.text.getvalue().splitlines() if "until lqs is restarted" not in line]
    assert len(lines) == 3
    assert "GGML_ASSERT" in lines[0]
    assert "works again" in lines[1]
    assert "does not end" in lines[2]


def test_what_an_operator_is_told_follows_what_becomes_of_it() -> None:
    house = House(reload_attempts=2, reload_backoff_s=4.0, steady_s=100.0)

    def told() -> Standing:
        return house.keeper.standing_of(house._slots[0])

    assert told() == Standing(Stage.SOUND)
    house.look(0)
    house[0].state, house[0].death = "dead", "GGML_ASSERT"
    house.core.report_dead(0)
    # Nobody has seen it yet.
    assert (told().stage, told().state(house._slots[0])) == (Stage.SOUND, "dead")
    house.look(1)
    assert told() == Standing(Stage.BACKOFF, "GGML_ASSERT", 0, 2, 5 * S)
    house.num_failures = 1
    house.look(5)
    assert told() == Standing(Stage.OPENING, "GGML_ASSERT", 1, 1)
    house.opened(0)
    assert told() == Standing(Stage.BACKOFF, "no memory", 1, 1, 13 * S)
    house.look(13)
    house.opened(0)
    assert told() == Standing(Stage.PROBATION, "it was opened anew", 2)
    assert told().state(house._slots[0]) == "probation"
    house[0].state, house[0].death = "dead", "again"
    house.look(14)
    assert told() == Standing(Stage.QUARANTINE, "again", 2, 0)


def test_one_that_rests_says_how_slow_it_is() -> None:
    house = House(probation_steps=10)
    for at_s, pace_ms in enumerate([20] * 5 + [300] * 3):
        house.pace(at_s, pace_ms, 30)
    resting = house.keeper.standing_of(house._slots[0])
    assert resting[:2] == (Stage.RESTING, "a step takes 300 ms, 20 ms as a rule")
    assert resting.state(house._slots[0]) == "resting"


def test_one_that_died_is_opened_anew_and_tried_out_with_few_requests() -> None:
    house = House(("cpu:0",), probation_requests=1, probation_steps=100)
    house.look(0)
    house[0].state = "dead"
    house.core.report_dead(0)
    house.look(10)
    assert house.stage(0) is Stage.BACKOFF
    house.look(10.9)
    assert house.stage(0) is Stage.BACKOFF
    house.look(11)
    house.opened(0)
    assert house.stage(0) is Stage.PROBATION
    assert house._slots[0].number == 1
    for _ in range(3):
        house.core.try_enter(0)
        house.core.submit(Work(), "x", footprint_tokens=10)
    house.core.round(0)
    assert [event[0] for event in house.core.poll()] == [EV_STARTED]
    house[0].num_steps = 99
    house.look(12)
    assert house.stage(0) is Stage.PROBATION
    house[0].num_steps = 100
    house.look(13)
    house.core.round(1)
    assert house.stage(0) is Stage.SOUND
    assert [event[0] for event in house.core.poll()] == [EV_STARTED] * 2


def test_a_load_that_fails_is_tried_less_and_less_often_and_not_for_ever() -> None:
    """B55: 1, 2, 4, 5, 5 seconds after the failure before, then never again."""
    house = House(reload_attempts=5, reload_backoff_max_s=5.0)
    house.look(0)
    house.fail_at_first(0)
    house.num_failures = 100
    tried = []
    for tenth in range(600):
        house.look(tenth / 10)
        if house.stage(0) is Stage.OPENING:
            tried.append(tenth / 10)
            house.opened(0)
    assert [round(b - a, 1) for a, b in zip([0.0, *tried], tried, strict=False)] == [1, 2, 4, 5, 5]
    assert house.stage(0) is Stage.QUARANTINE
    assert house.text.getvalue().count("until lqs is restarted") == 1
    # It had a place in the core and kept it until then; now nobody waits for it.
    assert [slot["is_dead"] for slot in house.core.slots()] == [True, False]


def test_one_whose_load_failed_at_first_serves_when_it_can() -> None:
    house = House()
    house.fail_at_first(1)
    house.num_failures = 1
    for at_s in (0, 1):
        house.look(at_s)
    house.opened(1)
    assert house.stage(1) is Stage.BACKOFF
    house.look(3)
    house.opened(1)
    assert house.stage(1) is Stage.PROBATION
    assert (house[1].state, house._slots[1].number) == ("ready", 1)


def test_who_dies_again_and_again_is_left_alone_and_who_lived_long_begins_anew() -> None:
    house = House(reload_attempts=2, steady_s=100.0)
    house.look(0)
    at_s = 0.0
    for _ in range(2):
        house[0].state = "dead"
        house.look(at_s)
        house.look(at_s + 10)
        house.opened(0)
        at_s += 20
    house[0].state = "dead"
    house.look(at_s + 200)
    assert house.stage(0) is Stage.BACKOFF
    for _ in range(2):
        house.look(at_s + 210)
        house.opened(0)
        house[0].state = "dead"
        house.look(at_s + 220)
        at_s += 20
    assert house.stage(0) is Stage.QUARANTINE
    # Counted over all of its lives.
    assert (house.keeper.num_deaths["cpu:0"], house.keeper.num_reopened["cpu:0"]) == (5, 4)
    assert (house.keeper.num_deaths["cpu:1"], house.keeper.num_out) == (0, 1)


def test_a_card_is_not_opened_anew() -> None:
    """CUDA's error stays with the process."""
    house = House(("cuda:0", "cpu:0"))
    house[0].state = "dead"
    for at_s in (0, 100):
        house.look(at_s)
    assert house.stage(0) is Stage.QUARANTINE
    assert house.num_opened == 0


def test_a_card_without_memory_at_the_start_is_tried_again() -> None:
    """Nothing failed in CUDA: others took the memory, and may give it back."""
    house = House(("cuda:0", "cpu:0"))
    house.fail_at_first(0, ("GPU-a",))
    house.num_failures = 1
    for at_s in (0, 1):
        house.look(at_s)
    house.opened(0)
    assert house.stage(0) is Stage.BACKOFF
    house.look(3)
    house.opened(0)
    assert (house.stage(0), house[0].state, house.num_opened) == (Stage.PROBATION, "ready", 1)
    # Now it failed in CUDA.
    house[0].state = "dead"
    house.core.report_dead(0)
    for at_s in (4, 100):
        house.look(at_s)
    assert (house.stage(0), house.num_opened) == (Stage.QUARANTINE, 1)


def test_a_load_that_failed_on_a_card_that_is_lost_since_is_not_tried_again() -> None:
    house = House(("cuda:0", "cpu:0"))
    house.fail_at_first(0, ("GPU-a",))
    house.look(0)
    assert house.stage(0) is Stage.BACKOFF
    house.keeper._lost_cards = lambda: {"GPU-a": "the driver reported XID 79"}
    for at_s in (1, 100):
        house.look(at_s)
    assert (house.stage(0), house.num_opened) == (Stage.QUARANTINE, 0)
    assert [slot["is_dead"] for slot in house.core.slots()] == [True, False]


def test_a_card_where_libllama_gives_up_while_it_is_opened_is_not_tried_again() -> None:
    house = House(("cuda:0",))
    house.fail_at_first(0)
    house.gate = threading.Event()
    for at_s in (0, 1):
        house.look(at_s)
    house.core.report_dead(0)
    for at_s in (2, 100):
        house.look(at_s)
    assert house.stage(0) is Stage.QUARANTINE
    house.gate.set()


def test_a_card_that_is_lost_while_something_opens_on_it_takes_it_when_it_is_open() -> None:
    """Until then its thread stands in the seat, and on the weights."""
    house = House(("cuda:0", "cpu:1"))
    lost: dict[str, str] = {}
    house.keeper._lost_cards = lambda: lost
    house.fail_at_first(0, ("GPU-a",))
    house.gate = threading.Event()
    house.look(0)
    house.look(10)
    assert house.stage(0) is Stage.OPENING
    lost["GPU-a"] = "the driver reported XID 79"
    house.look(11)
    assert house.stage(0) is Stage.OPENING
    assert not house.core.slots()[0]["is_dead"]
    house.gate.set()
    house.opened(0)
    house._slots[0].cards = ("GPU-a",)
    house.look(12)
    assert house.core.slots()[0]["is_dead"]
    assert "its GPU is lost: the driver reported XID 79" in house._slots[0].lost


def test_a_thread_that_opens_and_never_ends_is_left_behind() -> None:
    house = House(reload_attempts=1)
    house.gate = threading.Event()
    house[0].state = "dead"
    house.look(0)
    house.look(1)
    assert not house.keeper.close()
    assert house.stage(0) is Stage.OPENING
    # An assert of llama.cpp parks it.
    house.core.report_dead(2)
    house.look(2)
    assert house.stage(0) is Stage.QUARANTINE
    house.gate.set()
    house.keeper._care["cpu:0"].opening.thread.join(10)  # type: ignore[union-attr]
    assert house.keeper.close()


@pytest.mark.parametrize("stage", [Stage.BACKOFF, Stage.OPENING, Stage.QUARANTINE, Stage.PROBATION, Stage.RESTING])
def test_one_whose_model_left_and_came_back_begins_anew(stage: Stage) -> None:
    """Nothing of its earlier life is told of it, holds it back, or counts as an attempt."""
    attempts = 0 if stage is Stage.QUARANTINE else 3
    house = House(reload_attempts=attempts, probation_requests=1, slow_factor=8.0 if stage is Stage.RESTING else 0.0)
    house.look(0)
    if stage is Stage.RESTING:
        for at_s, pace_ms in enumerate([20] * 5 + [300] * 3):
            house.pace(at_s, pace_ms, 30)
    else:
        house[0].state = "dead"
        house.core.report_dead(0)
        house.look(10)
    if stage in (Stage.OPENING, Stage.PROBATION):
        house.gate = threading.Event()
        house.look(20)
    if stage is Stage.PROBATION:
        house.gate.set()  # type: ignore[union-attr]
        house.opened(0)
    assert house.stage(0) is stage
    # Its model leaves, and comes back: on the same seat if nobody died there.
    number = house._slots[0].number
    number = house._add() if house.core.slots()[number]["is_dead"] else number
    house._slots[0] = house._slot("cpu:0", number)
    house.core.rest_slot(number, False)
    assert house.keeper.standing_of(house._slots[0]) == Standing(Stage.SOUND)
    for at_s in (30, 31):
        house.look(at_s)
    assert house.keeper.standing_of(house._slots[0])[:3] == (Stage.SOUND, "", 0)
    for _ in range(8):
        house.core.try_enter(0)
        house.core.submit(Work(), "x", footprint_tokens=10)
    house.core.round(1)
    assert [slot["num_running"] for slot in house.core.slots()][number] == 4
    # And when it dies again it has all of its attempts.
    house[0].state, house[0].death = "dead", "GGML_ASSERT"
    house.look(32)
    assert house.keeper.standing_of(house._slots[0])[2:4] == (0, attempts)
    if house.gate is not None:
        house.gate.set()


@pytest.mark.parametrize("factor", [8.0, 0.0])
def test_one_that_becomes_much_slower_than_itself_and_the_others_rests(factor: float) -> None:
    house = House(slow_factor=factor, probation_steps=10)
    for at_s in range(5):
        house.pace(at_s, 20, 30)
    # Slower, but not as much; or as much, but not for long.
    for at_s, pace_ms in enumerate([150, 300, 300, 20, 300, 300, 300], 5):
        house.pace(at_s, pace_ms, 30)
        is_last = at_s == 11
        assert house.stage(0) is (Stage.RESTING if is_last and factor else Stage.SOUND)
    house.core.round(0)
    assert [slot["is_drained"] for slot in house.core.slots()] == [bool(factor), False]
    if not factor:
        return
    # What still runs there is quick again; or nothing does.
    for at_s, pace_ms in enumerate([300, 20, 20, 0], 12):
        house.pace(at_s, pace_ms, 30)
    assert house.stage(0) is Stage.PROBATION
    house.core.round(1)
    assert not house.core.slots()[0]["is_drained"]
    house.pace(16, 20, 30)
    assert house.stage(0) is Stage.SOUND


@pytest.mark.parametrize(("pace_ms", "stage"), [(390, Stage.SOUND), (410, Stage.RESTING)])
def test_steps_of_long_prompts_are_not_slow(pace_ms: int, stage: Stage) -> None:
    """Twice what a full step took when it was opened is no sign of anything."""
    house = House()
    house[0].calibration = {16: 20.0, 512: 200.0}
    for at_s, pace in enumerate([20] * 5 + [pace_ms] * 3):
        house.pace(at_s, pace, 20)
    assert house.stage(0) is stage


def test_when_all_are_slow_nobody_rests() -> None:
    """The box is busy, and no device slot is to blame; the same holds for the only one that works."""
    house = House()
    for at_s, pace_ms in enumerate([20] * 5 + [400] * 10):
        house.pace(at_s, pace_ms, pace_ms)
    assert [house.stage(0), house.stage(1)] == [Stage.SOUND] * 2
    alone = House()
    for at_s, pace_ms in enumerate([20] * 5 + [400] * 10):
        alone.pace(at_s, pace_ms, 0)
    assert alone.stage(0) is Stage.SOUND


def test_what_is_on_a_lost_card_is_dead_and_stays_out() -> None:
    house = House()
    lost: dict[str, str] = {}
    house.keeper._lost_cards = lambda: lost
    house._slots[1].cards = ("GPU-a",)
    house.look(0)
    lost["GPU-b"] = "the driver reported XID 79"
    house.look(1)
    assert not any(slot["is_dead"] for slot in house.core.slots())
    lost["GPU-a"] = "the driver reported XID 79"
    house[1].state = "dead"  # As the native worker says once its device slot is reported dead.
    house.look(2)
    assert [slot["is_dead"] for slot in house.core.slots()] == [False, True]
    assert house.stage(1) is Stage.QUARANTINE
    assert "its GPU is lost: the driver reported XID 79" in house.text.getvalue()
