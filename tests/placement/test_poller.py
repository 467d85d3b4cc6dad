"""The thread that reads the GPUs: it answers at once, hangs alone, ends, and leaves no session behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lqs.placement.gpus import GpuState, Snapshot
from lqs.placement.poller import Poller
from lqs.placement.reader import Reader
from tests.fake_nvml import GB, Driver, card
from tests.server.process import until

LIMIT_S = 20.0
# Longer than any test: nothing is read but when asked.
NEVER_S = 1000.0


class Seen:
    """The snapshots that were handed on, and how to wait for some."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self.snapshots: list[Snapshot] = []
        self.threads: set[str] = set()

    def __call__(self, snapshot: Snapshot) -> None:
        with self._arrived:
            self.snapshots.append(snapshot)
            self.threads.add(threading.current_thread().name)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self.snapshots) >= count, LIMIT_S)


def poller_of(seen: Seen, interval_s: float) -> Poller:
    return Poller(lambda: Reader(lambda: GB), interval_s=interval_s, on_snapshot=seen)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def poller(driver: Driver, seen: Seen) -> Iterator[Poller]:
    """It reads when it is asked, and once at its start."""
    driver.says(card("GPU-a", free_gb=20))
    poller = poller_of(seen, NEVER_S)
    poller.start()
    yield poller
    assert poller.stop(LIMIT_S)


def test_it_reads_again_and_again_in_its_own_thread(driver: Driver, seen: Seen) -> None:
    driver.says(card("GPU-a"))
    poller = poller_of(seen, 0.001)
    assert poller.latest.problem == "not read yet"
    poller.start()
    assert seen.wait_for(3)
    assert poller.stop(LIMIT_S)
    assert seen.threads == {"lqs-nvml"}
    assert poller.latest is seen.snapshots[-1]
    taken = [snapshot.taken_ns for snapshot in seen.snapshots]
    assert taken == sorted(set(taken))


def test_it_ends_at_once_and_shuts_down_what_it_began(driver: Driver, seen: Seen) -> None:
    driver.says(card("GPU-a"))
    poller = poller_of(seen, NEVER_S)
    poller.start()
    assert seen.wait_for(1)
    assert driver.num_sessions == 1
    assert poller.stop(LIMIT_S)
    assert "lqs-nvml" not in {thread.name for thread in threading.enumerate()}
    assert (driver.num_sessions, driver.calls("nvmlShutdown")) == (0, 1)


def test_a_refresh_sees_what_changed_before_it(driver: Driver, poller: Poller) -> None:
    """B49: memory is read again just before a load."""
    for free_gb in (12, 3, 22):
        driver.says(card("GPU-a", free_gb=free_gb))
        gpu = poller.refresh(LIMIT_S).find("GPU-a")
        assert gpu is not None
        assert gpu.memory_free_bytes == free_gb * GB


def test_a_driver_that_hangs_keeps_only_its_own_thread(driver: Driver, poller: Poller, seen: Seen) -> None:
    before = poller.refresh(LIMIT_S)
    driver.says(card("GPU-a", free_gb=1), "hang nvmlDeviceGetMemoryInfo")
    assert poller.refresh(0.05) is before
    until(lambda: driver.num_hanging == 1, LIMIT_S)
    assert poller.latest is before
    assert not poller.stop(0.05)
    # Nobody waits for a read that will not come.
    assert poller.refresh(NEVER_S) is before
    driver.says(card("GPU-a", free_gb=1))
    assert poller.stop(LIMIT_S)


def test_who_waits_for_a_read_is_let_go_when_it_is_stopped(driver: Driver, poller: Poller, seen: Seen) -> None:
    assert seen.wait_for(1)
    driver.says(card("GPU-a"), "hang nvmlDeviceGetMemoryInfo")
    waiting = threading.Thread(target=poller.refresh, args=(NEVER_S,))
    waiting.start()
    until(lambda: driver.num_hanging == 1, LIMIT_S)
    assert not poller.stop(0.05)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    driver.says(card("GPU-a"))


def test_it_reads_once_for_each_refresh_and_sleeps_in_between(poller: Poller, seen: Seen) -> None:
    for _ in range(50):
        poller.refresh(LIMIT_S)
    assert poller.stop(LIMIT_S)
    assert 50 <= len(seen.snapshots) <= 51


def test_a_lost_card_and_a_lost_driver_do_not_end_it(driver: Driver, poller: Poller) -> None:
    poller.refresh(LIMIT_S)
    driver.says(card("GPU-a"), "error nvmlDeviceGetHandleByIndex_v2 15")
    assert [gpu.state for gpu in poller.refresh(LIMIT_S).gpus] == [GpuState.FAILED]
    driver.vanishes()
    assert poller.refresh(LIMIT_S).problem == "the NVIDIA driver is not loaded"
    driver.says(card("GPU-b"))
    assert poller.refresh(LIMIT_S).problem == ""


@pytest.mark.usefixtures("no_library")
def test_without_a_driver_it_goes_on_and_ends_like_any_other(seen: Seen) -> None:
    """B47: a machine without a GPU; the exit is clean."""
    poller = poller_of(seen, 0.001)
    poller.start()
    assert seen.wait_for(2)
    assert poller.stop(LIMIT_S)
    assert "cannot be loaded" in poller.latest.problem


def test_several_may_ask_at_once(driver: Driver, poller: Poller) -> None:
    driver.says(card("GPU-a", free_gb=6))
    found: list[Snapshot] = []
    threads = [threading.Thread(target=lambda: found.append(poller.refresh(LIMIT_S))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [snapshot.gpus[0].memory_free_bytes for snapshot in found] == [6 * GB] * 8
    assert driver.num_sessions == 1


def test_sessions_that_begin_and_end_at_once_stay_paired(driver: Driver) -> None:
    """B47: init and shutdown are paired whatever threads do; the fixture counts them."""
    driver.says(card("GPU-a"))
    found: list[str] = []

    def again_and_again() -> None:
        for _ in range(20):
            reader = Reader(lambda: GB)
            found.extend(gpu.uuid for gpu in reader.read(1).gpus)
            reader.close()
            reader.close()

    threads = [threading.Thread(target=again_and_again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == ["GPU-a"] * 80
    assert driver.calls("nvmlInitWithFlags") == 80
