"""The log says why a GPU is not used, once when it begins and once when it ends."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from lqs.config import LogConfig
from lqs.observe.log import Log
from lqs.placement.notices import Notices
from lqs.placement.reader import Reader
from tests.fake_nvml import GB, Driver, card, instance


class Told:
    """Notices of a real reader's snapshots, and the lines since last asked."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._notices = Notices(Log(LogConfig(), self._stream), GB)
        self._reader = Reader(lambda: 64 * GB)

    def lines(self) -> list[str]:
        self._stream.seek(0)
        self._stream.truncate()
        self._notices.look(self._reader.read(1))
        return self._stream.getvalue().splitlines()

    def close(self) -> None:
        self._reader.close()


@pytest.fixture
def told(driver: Driver) -> Iterator[Told]:
    told = Told()
    yield told
    told.close()


def test_gpus_are_introduced_once(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a", free_gb=20), card("GPU-b", bus=2, total=None, use=None, name="GB10"))
    assert told.lines() == [
        "info    NVML answers driver=570.86 gpus=2",
        "info    GPU gpu=GPU-a bus=00000000:01:00.0 name=RTX-4090 free_mb=20000",
        "info    GPU gpu=GPU-b bus=00000000:02:00.0 name=GB10 free_mb=64000 "
        'memory="shared with the machine" unknown=use',
    ]
    assert told.lines() == []


@pytest.mark.usefixtures("no_library")
def test_a_machine_without_gpus_gets_one_line() -> None:
    """B47: one clear line."""
    told = Told()
    (line,) = told.lines()
    assert line.startswith('info    no GPUs reason="libnvidia-ml.so.1 cannot be loaded')
    assert told.lines() == []


def test_instances_are_introduced_and_say_what_they_do_not_have(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a", split=1), instance("MIG-1", "GPU-a", gi=1))
    _, split, one = told.lines()
    assert 'use="by its MIG instances only"' in split
    assert one.endswith("gpu=MIG-1 bus=00000000:01:00.0 name=MIG-1g free_mb=9000 unknown=use,temperature,power")


def test_a_lost_card_is_told_once(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a"))
    told.lines()
    driver.says(card("GPU-a"), "error nvmlDeviceGetHandleByIndex_v2 15")
    assert told.lines() == [
        'error   GPU failed gpu=GPU-a bus=00000000:01:00.0 reason="it fell off the bus (GPU is lost)" '
        'advice="it is used again after a restart"'
    ]
    assert told.lines() == []
    driver.says(card("GPU-a"))
    assert told.lines() == []


def test_a_gpu_that_cannot_be_read_is_told_and_told_again_when_it_can(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a"), "error nvmlDeviceGetMemoryInfo 4")
    assert 'GPU cannot be read gpu=GPU-a bus=00000000:01:00.0 reason="its memory cannot be read' in told.lines()[1]
    driver.says(card("GPU-a"))
    assert told.lines() == ["info    GPU answers again gpu=GPU-a free_mb=20000"]


def test_errors_are_told_when_they_come(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a"), "event card=GPU-a xid=31")
    told.lines()
    assert told.lines() == ["warning GPU reported an error gpu=GPU-a xid=31 total=1"]
    assert told.lines() == []


def test_memory_that_others_take_is_told_with_who_took_it(driver: Driver, told: Told) -> None:
    """B49: the log says why nothing more is placed there."""
    driver.says(card("GPU-a", free_gb=3))
    told.lines()
    others = f"process gpu=GPU-a pid=4711 used={21 * GB}"
    driver.says(card("GPU-a", free_gb=0.9), others)
    assert told.lines() == ["warning GPU memory is short gpu=GPU-a free_mb=900 largest_pid=4711 largest_mb=21000"]
    # On the edge it is neither short again nor free again.
    for free_gb in (1.1, 0.95, 1.2):
        driver.says(card("GPU-a", free_gb=free_gb), others)
        assert told.lines() == []
    driver.says(card("GPU-a", free_gb=2), others)
    assert told.lines() == ["info    GPU memory is free again gpu=GPU-a free_mb=2000"]


def test_what_others_took_is_told_apart_from_what_we_took(driver: Driver, told: Told) -> None:
    ours = f"process gpu=GPU-a pid={Path('/proc/self').resolve().name} used={22 * GB}"
    driver.says(card("GPU-a", free_gb=0.5), ours, f"process gpu=GPU-a pid=7 used={GB}")
    assert "others_mb=1500 largest_pid=7 largest_mb=1000" in told.lines()[-1]


def test_a_driver_that_goes_is_one_line_and_not_one_for_each_gpu(driver: Driver, told: Told) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    told.lines()
    driver.vanishes()
    assert told.lines() == ['warning NVML does not answer reason="the NVIDIA driver is not loaded"']
    assert told.lines() == []
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    assert told.lines() == ["info    NVML answers driver=570.86 gpus=2"]
