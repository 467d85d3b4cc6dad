"""Drills with the fake driver: what befalls the cards decides where requests start, and the log says why.

The reader, the real pynvml, what is made of a snapshot and the core are the real ones; two device slots stand on
two cards, whoever computes on them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lqs._core import Finish, Placing, Scheduler, Work
from lqs.config import LogConfig
from lqs.observe.log import Log
from lqs.placement.headroom import Headrooms
from lqs.placement.notices import Notices
from lqs.placement.reader import Reader
from tests.fake_nvml import GB, Driver, card, instance

MARGIN = 1 * GB
TOKEN = 100_000  # A KV cell: 10,000 of them are one GB.


@dataclass
class OnCards:
    """A device slot, as far as its cards are concerned."""

    device: str
    number: int
    cards: tuple[str, ...]
    kv_tokens: int = 10_000
    token_bytes: int = TOKEN


class House:
    """Requests of 1,000 tokens each, for device slots A and B."""

    def __init__(self, *cards: tuple[str, ...], policy: Placing = Placing.LEAST_CONNECTIONS) -> None:
        self.core = Scheduler(
            table_capacity=256, level_caps=[256], total_cap=256, num_lanes=1, lane_weights=[1], policy=policy
        )
        self.seats = []
        for names in cards:
            number = self.core.add_device_slot(kv_tokens=10_000, num_sequences=8, token_bytes=TOKEN)
            self.seats.append(OnCards("AB"[number], number, names))
        self.text = io.StringIO()
        log = Log(LogConfig(), self.text)
        self.notices = Notices(log, MARGIN)
        self.headrooms = Headrooms(self.core, lambda: self.seats, margin_bytes=MARGIN, log=log)
        self.reader = Reader(lambda: 100 * GB)
        self.now_ns = 0

    def look(self) -> str:
        """Read the cards, let everybody see it; what the log says of it."""
        begin = self.text.tell()
        self.now_ns += 1
        snapshot = self.reader.read(self.now_ns)
        self.notices.look(snapshot)
        self.headrooms.look(snapshot)
        self.core.round(self.now_ns)
        return self.text.getvalue()[begin:]

    def place(self, num: int = 1) -> str:
        """Where so many requests start, one after another; `-` for one that waits. All are over afterwards."""
        where, running, waiting = "", [], []
        for _ in range(num):
            self.now_ns += 1
            assert self.core.try_enter(0)
            waiting.append(
                self.core.submit(Work(), object(), num_prompt_tokens=900, max_tokens=100, footprint_tokens=1000)
            )
            self.core.round(self.now_ns)
            taken = [(seat.device, handle) for seat in self.seats for handle in self.core.take(seat.number)]
            where += "".join(device for device, _ in taken) or "-"
            running += [handle for _, handle in taken]
        for handle in waiting:
            if handle in running:
                self.core.finish(handle, Finish.FINISH_STOP)
            else:
                self.core.cancel(handle)
        self.core.round(self.now_ns)
        self.core.poll()
        return where

    def headroom(self) -> list[int]:
        return [slot["headroom"] for slot in self.core.slots()]

    def close(self) -> None:
        self.reader.close()


@pytest.fixture
def house(driver: Driver) -> Iterator[House]:
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    house = House(("GPU-a",), ("GPU-b",))
    house.look()
    yield house
    house.close()


def test_while_there_is_room_both_cards_take_requests(house: House) -> None:
    assert house.headroom() == [10_000, 10_000]
    assert house.place(4) == "ABAB"


def test_others_that_take_the_memory_of_a_card_take_its_requests_away(house: House, driver: Driver) -> None:
    """B49: free 20, 12, 0.3, 0.05 and 22 GB; nothing is expected of the direction."""
    driver.says(card("GPU-a", free_gb=12), card("GPU-b", bus=2))
    assert house.look() == ""
    assert house.headroom() == [10_000, 10_000]
    driver.says(card("GPU-a", free_gb=0.3), card("GPU-b", bus=2), f"process gpu=GPU-a pid=4242 used={20 * GB}")
    said = house.look()
    # 0.7 GB of the margin are lacking: 7,000 cells are held back.
    assert house.headroom() == [3_000, 10_000]
    assert "GPU memory is short" in said
    assert "largest_pid=4242" in said
    assert "device slot takes less" in said
    assert "device=A kv_tokens=3000" in said
    assert house.place(9) == "ABABABBBB"
    driver.says(card("GPU-a", free_gb=0.05), card("GPU-b", bus=2))
    assert "device slot takes less" not in house.look()
    assert house.place(3) == "BBB"
    driver.says(card("GPU-a", free_gb=22), card("GPU-b", bus=2))
    said = house.look()
    assert "GPU memory is free again" in said
    assert "device slot takes all again" in said
    assert house.place(4) == "ABAB"


def test_the_policy_that_looks_at_memory_sees_it(driver: Driver) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    house = House(("GPU-a",), ("GPU-b",), policy=Placing.VRAM)
    house.look()
    assert house.place() == "A"
    driver.says(card("GPU-a", free_gb=0.9), card("GPU-b", bus=2))
    house.look()
    assert house.place() == "B"
    house.close()


def test_a_card_that_is_lost_takes_its_device_slot_with_it_once(house: House, driver: Driver) -> None:
    """The driver answers GPU_IS_LOST (15) for one of two cards, then lists it no more, then it is back."""
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetMemoryInfo 15 GPU-a")
    said = house.look()
    assert "GPU failed" in said
    assert 'device=A kv_tokens=0 reason="its GPU failed: it fell off the bus (GPU is lost)"' in said
    assert house.place(2) == "BB"
    driver.says(card("GPU-b", bus=2))
    house.look()
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    house.look()
    # CUDA's error stays as long as the process.
    assert house.text.getvalue().count("device slot takes less") == 1
    assert house.place(2) == "BB"


def test_an_error_that_the_driver_reports_takes_the_card_out(house: House, driver: Driver) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "event card=GPU-a xid=79")
    said = house.look()
    assert "the driver reported XID 79" in said
    assert house.place(2) == "BB"


def test_a_card_that_cannot_be_read_takes_nobody_until_it_can(house: House, driver: Driver) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetMemoryInfo 4 GPU-a")
    assert "its GPU cannot be read" in house.look()
    assert house.place(2) == "BB"
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    assert "device slot takes all again" in house.look()
    assert house.place(2) == "AB"


def test_a_driver_that_goes_away_and_comes_back_changes_nothing(house: House, driver: Driver) -> None:
    """B47: loss and recovery at a later reading; CUDA may not have noticed."""
    driver.vanishes()
    assert "NVML does not answer" in house.look()
    assert house.place(2) == "AB"
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    assert "NVML answers" in house.look()
    assert house.place(2) == "AB"


def test_instances_of_a_split_card_are_cards_of_their_own(driver: Driver) -> None:
    """MIG: one instance is short, then removed; the other goes on."""
    whole = card("GPU-a", split=1), instance("MIG-1", "GPU-a", gi=1), instance("MIG-2", "GPU-a", gi=2)
    driver.says(*whole)
    house = House(("MIG-1",), ("MIG-2",))
    house.look()
    assert house.place(2) == "AB"
    driver.says(card("GPU-a", split=1), instance("MIG-1", "GPU-a", gi=1, free_gb=0), instance("MIG-2", "GPU-a", gi=2))
    house.look()
    assert house.place(2) == "BB"
    driver.says(card("GPU-a", split=1), instance("MIG-2", "GPU-a", gi=2))
    said = house.look()
    assert "the MIG instance was removed" in said
    assert house.place(2) == "BB"
    house.close()


def test_unified_memory_is_short_when_the_machines_is(driver: Driver) -> None:
    """B45: NVML has no memory figures; use, power and temperature may be missing too."""
    free = [100 * GB]
    driver.says(card("GPU-a", name="GB10", total=None, free=None, used=None, use=None, temp=None, power=None))
    house = House(("GPU-a",), ("GPU-a",))
    house.reader.close()
    house.reader = Reader(lambda: free[0])
    said = house.look()
    assert "memory=shared with the machine" in said.replace('"', "")
    assert "unknown=use,temperature,power" in said.replace('"', "")
    assert house.place(2) == "AB"
    # Both device slots take from one memory: each gives half of what is lacking.
    free[0] = MARGIN - 4000 * TOKEN
    house.look()
    assert house.headroom() == [8_000, 8_000]
    house.close()


def test_a_slot_over_two_cards_is_as_good_as_the_worse_of_them(driver: Driver) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2, free_gb=0.9), card("GPU-c", bus=3))
    house = House(("GPU-a", "GPU-b"), ("GPU-c",))
    house.look()
    # 0.1 GB lacks on a card that has half of each cell: 2,000 cells.
    assert house.headroom() == [8_000, 10_000]
    driver.says(card("GPU-a"), card("GPU-b", bus=2), card("GPU-c", bus=3), "event card=GPU-b xid=79")
    assert "its GPU failed: the driver reported XID 79" in house.look()
    assert house.place(2) == "BB"
    house.close()


def test_how_busy_a_card_is_counts_for_load(driver: Driver) -> None:
    driver.says(card("GPU-a", use=90), card("GPU-b", bus=2, use=10))
    house = House(("GPU-a",), ("GPU-b",), policy=Placing.LOAD)
    house.look()
    assert house.place() == "B"
    driver.says(card("GPU-a", use=5), card("GPU-b", bus=2, use=95))
    house.look()
    assert house.place() == "A"
    house.close()
