"""What is read of the GPUs through the real pynvml, and that nothing that befalls them is an exception."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from lqs.placement.gpus import SYSTEM_POOL, Gpu, GpuState, Process, Snapshot, headroom_bytes
from lqs.placement.reader import Reader
from tests.fake_nvml import GB, Driver, card, compile_library, instance

SYSTEM_FREE = 100 * GB
MARGIN = GB


class Rig:
    """A reader at a time that moves by one each read."""

    def __init__(self) -> None:
        self._reader = Reader(lambda: SYSTEM_FREE)
        self._now_ns = 0

    def read(self) -> Snapshot:
        self._now_ns += 1
        snapshot = self._reader.read(self._now_ns)
        assert snapshot.taken_ns == self._now_ns
        return snapshot

    def gpu(self, uuid: str = "GPU-a") -> Gpu:
        """One GPU, read now."""
        gpu = self.read().find(uuid)
        assert gpu is not None
        return gpu

    def close(self) -> None:
        self._reader.close()


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_every_figure_is_read(driver: Driver, rig: Rig) -> None:
    ours = os.getpid()
    driver.says(
        card("GPU-a", bus=1, free_gb=20, total_gb=24, use=37, temp=61, power=123_456),
        f"process gpu=GPU-a pid={ours} used={GB}",
        f"process gpu=GPU-a pid=7 used={3 * GB}",
        "driver 575.1",
    )
    snapshot = rig.read()
    assert (snapshot.problem, snapshot.driver) == ("", "575.1")
    assert snapshot.gpus == (
        Gpu(
            uuid="GPU-a",
            bus_id="00000000:01:00.0",
            name="RTX-4090",
            memory_total_bytes=24 * GB,
            memory_used_bytes=4 * GB,
            memory_free_bytes=20 * GB,
            memory_ours_bytes=GB,
            processes=(Process(7, 3 * GB), Process(ours, GB, is_ours=True)),
            use=0.37,
            temperature_c=61,
            power_w=123.456,
        ),
    )
    assert snapshot.gpus[0].missing == ()


def test_headroom_follows_what_others_take_and_give_back(driver: Driver, rig: Rig) -> None:
    """B49: free memory moves both ways, and nothing expects that it does not."""
    seen = []
    for free_gb in (20, 12, 18, 3, 0.5, 22):
        driver.says(card("GPU-a", free_gb=free_gb))
        seen.append(headroom_bytes(rig.gpu(), MARGIN))
    assert seen == [19 * GB, 11 * GB, 17 * GB, 2 * GB, 0, 21 * GB]


def test_a_figure_that_a_gpu_does_not_have_is_none_and_not_0(driver: Driver, rig: Rig) -> None:
    """B45: utilisation, temperature and power may be missing."""
    driver.says(card("GPU-a", use=None, temp=None, power=None), "error nvmlDeviceGetComputeRunningProcesses_v3 4")
    gpu = rig.gpu()
    assert gpu.missing == ("processes", "use", "temperature", "power")
    assert (gpu.state, gpu.memory_free_bytes, gpu.memory_ours_bytes) == (GpuState.OK, 20 * GB, None)


def test_a_process_whose_memory_is_not_told_is_still_there(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), "process gpu=GPU-a pid=7")
    assert rig.gpu().processes == (Process(7, None),)


@pytest.mark.parametrize("memory", [{"total": None}, {"total": 0, "free": 0, "used": 0}])
def test_unified_memory_is_what_the_machine_has_free(memory: dict[str, object], driver: Driver, rig: Rig) -> None:
    """B45: placed by system memory, marked as unified, and in one pool with the CPU so that nothing counts twice."""
    driver.says(card("GPU-a", name="GB10", **memory), card("GPU-b", bus=2))
    unified, own = rig.read().gpus
    assert (unified.state, unified.is_unified, unified.memory_total_bytes) == (GpuState.OK, True, None)
    assert headroom_bytes(unified, MARGIN) == SYSTEM_FREE - MARGIN
    assert (unified.pool, own.pool) == (SYSTEM_POOL, "GPU-b")


@pytest.mark.parametrize("code", [4, 999])
def test_memory_that_cannot_be_read_for_another_reason_keeps_the_gpu_out(code: int, driver: Driver, rig: Rig) -> None:
    """B45: only `not supported` means that the memory is unified."""
    driver.says(card("GPU-a"), f"error nvmlDeviceGetMemoryInfo {code}")
    gpu = rig.gpu()
    assert (gpu.state, gpu.is_unified, headroom_bytes(gpu, MARGIN)) == (GpuState.UNREADABLE, False, None)
    assert gpu.reason.startswith("its memory cannot be read: ")


def test_a_lost_card_stays_out_and_leaves_the_others_alone(driver: Driver, rig: Rig) -> None:
    cards = card("GPU-a"), card("GPU-b", bus=2)
    driver.says(*cards)
    rig.read()
    driver.says(*cards, "error nvmlDeviceGetHandleByIndex_v2 15 GPU-b")
    well, lost = rig.read().gpus
    assert (well.state, well.memory_free_bytes) == (GpuState.OK, 20 * GB)
    assert (lost.uuid, lost.state, lost.bus_id) == ("GPU-b", GpuState.FAILED, "00000000:02:00.0")
    assert "fell off the bus" in lost.reason
    assert (lost.memory_free_bytes, headroom_bytes(lost, MARGIN)) == (None, 0)
    # CUDA's error stays until a restart, whatever NVML says.
    driver.says(*cards)
    back = rig.gpu("GPU-b")
    assert (back.state, back.memory_free_bytes, headroom_bytes(back, MARGIN)) == (GpuState.FAILED, 20 * GB, 0)


def test_a_card_that_is_lost_while_it_is_read_is_lost(driver: Driver, rig: Rig) -> None:
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetMigMode"):
        rig.close()
        driver.says(card(f"GPU-{function}"))
        rig.read()
        driver.says(card(f"GPU-{function}"), f"error {function} 15")
        assert rig.gpu(f"GPU-{function}").state is GpuState.FAILED


def test_a_card_that_is_no_longer_listed_failed(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    rig.read()
    driver.says(card("GPU-b", bus=2))
    assert [(gpu.uuid, gpu.state, gpu.reason) for gpu in rig.read().gpus] == [
        ("GPU-b", GpuState.OK, ""),
        ("GPU-a", GpuState.FAILED, "the driver no longer lists it"),
    ]


def test_a_card_that_never_says_who_it_is_is_shown_and_forgotten_when_it_does(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetHandleByIndex_v2 4 GPU-b")
    _, nameless = rig.read().gpus
    assert (nameless.uuid, nameless.is_nameless, nameless.state) == ("unknown-1", True, GpuState.UNREADABLE)
    assert nameless.reason == "Insufficient Permissions"
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    assert [gpu.uuid for gpu in rig.read().gpus] == ["GPU-a", "GPU-b"]


def test_a_card_is_known_by_its_uuid_whatever_its_number(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a", free_gb=5), card("GPU-b", bus=2, free_gb=9))
    rig.read()
    driver.says(card("GPU-b", bus=2, free_gb=8), card("GPU-a", free_gb=4))
    assert {gpu.uuid: (gpu.index, gpu.memory_free_bytes) for gpu in rig.read().gpus} == {
        "GPU-b": (0, 8 * GB),
        "GPU-a": (1, 4 * GB),
    }


SPLIT = (
    card("GPU-a", split=1, use=None),
    instance("MIG-1", "GPU-a", gi=1, free_gb=9),
    instance("MIG-2", "GPU-a", gi=2, free_gb=4),
)


def test_a_card_in_mig_mode_is_read_with_its_instances(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT, card("GPU-b", bus=2, split=0))
    split, first, second, whole = rig.read().gpus
    assert (split.is_split, headroom_bytes(split, MARGIN)) == (True, 0)
    assert (first.uuid, first.card_uuid, first.instance_ids, first.name) == ("MIG-1", "GPU-a", (1, 0), "MIG-1g")
    assert (first.bus_id, first.index) == (split.bus_id, split.index)
    assert [headroom_bytes(one, MARGIN) for one in (first, second)] == [8 * GB, 3 * GB]
    assert (first.state, first.missing) == (GpuState.OK, ("use", "temperature", "power"))
    assert (whole.uuid, whole.is_split, whole.is_instance) == ("GPU-b", False, False)


def test_the_sum_of_a_split_card_is_for_root_and_not_needed(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT, "error nvmlDeviceGetMemoryInfo 4 GPU-a")
    split, first, _ = rig.read().gpus
    assert (split.state, split.memory_total_bytes) == (GpuState.OK, None)
    assert first.memory_free_bytes == 9 * GB


def test_an_instance_without_figures_is_not_unified(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT, "error nvmlDeviceGetMemoryInfo 3 MIG-1")
    gpu = rig.gpu("MIG-1")
    assert (gpu.is_unified, gpu.state) == (False, GpuState.UNREADABLE)


def test_an_instance_that_is_removed_failed_and_its_neighbour_goes_on(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT)
    rig.read()
    driver.says(*SPLIT[:2])
    snapshot = rig.read()
    assert [(gpu.uuid, gpu.state, gpu.reason) for gpu in snapshot.gpus] == [
        ("GPU-a", GpuState.OK, ""),
        ("MIG-1", GpuState.OK, ""),
        ("MIG-2", GpuState.FAILED, "the MIG instance was removed"),
    ]


def test_with_a_lost_card_its_instances_are_lost(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT)
    rig.read()
    driver.says(*SPLIT, "error nvmlDeviceGetHandleByIndex_v2 15 GPU-a")
    assert {gpu.uuid: gpu.state for gpu in rig.read().gpus} == dict.fromkeys(
        ("GPU-a", "MIG-1", "MIG-2"), GpuState.FAILED
    )


def test_reported_errors_are_counted_and_only_grave_ones_take_a_gpu_out(driver: Driver, rig: Rig) -> None:
    cards = card("GPU-a"), card("GPU-b", bus=2)
    harmless = "event card=GPU-a xid=13", "event card=GPU-a xid=31"
    driver.says(*cards, *harmless)
    # A card is watched from the first read on.
    assert rig.gpu().num_xids == 0
    gpu = rig.gpu()
    assert (gpu.state, gpu.num_xids, gpu.last_xid) == (GpuState.OK, 2, 31)
    driver.says(*cards, *harmless, "event card=GPU-a xid=79")
    gpu, other = rig.read().gpus
    assert (gpu.state, gpu.num_xids, gpu.reason) == (GpuState.FAILED, 3, "the driver reported XID 79")
    assert (other.state, other.num_xids) == (GpuState.OK, 0)


def test_a_card_is_watched_once_in_a_session_and_again_in_the_next(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"))
    for _ in range(3):
        rig.read()
    assert driver.calls("nvmlDeviceRegisterEvents") == 1
    driver.vanishes()
    rig.read()
    driver.says(card("GPU-a"), "event card=GPU-a xid=79")
    rig.read()
    assert rig.gpu().num_xids == 1
    assert driver.calls("nvmlDeviceRegisterEvents") == 2


def test_a_new_session_takes_no_card_for_the_one_that_had_its_number(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    rig.read()
    driver.vanishes()
    rig.read()
    driver.says(card("GPU-b", bus=2), card("GPU-a"), "error nvmlDeviceGetHandleByIndex_v2 15 GPU-b")
    states = {gpu.uuid: gpu.state for gpu in rig.read().gpus}
    assert (states["GPU-a"], states["GPU-b"]) == (GpuState.OK, GpuState.FAILED)


def test_an_instance_that_is_made_on_a_failed_card_failed_too(driver: Driver, rig: Rig) -> None:
    event = "event card=GPU-a xid=79"
    driver.says(*SPLIT[:2], event)
    rig.read()
    rig.read()
    driver.says(*SPLIT, event)
    assert rig.gpu("MIG-2").state is GpuState.FAILED


def test_memory_that_lost_data_takes_a_gpu_out(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), "event card=GPU-a xid=0")
    rig.read()
    gpu = rig.gpu()
    assert (gpu.state, gpu.num_xids, gpu.last_xid) == (GpuState.FAILED, 1, 0)
    assert "double-bit ECC" in gpu.reason


def test_an_error_of_an_instance_leaves_its_neighbour_alone(driver: Driver, rig: Rig) -> None:
    driver.says(*SPLIT, "event card=GPU-a xid=95 gi=2")
    rig.read()
    assert [gpu.state for gpu in rig.read().gpus] == [GpuState.OK, GpuState.OK, GpuState.FAILED]
    driver.says(*SPLIT, "event card=GPU-a xid=95 gi=2", "event card=GPU-a xid=79")
    assert {gpu.state for gpu in rig.read().gpus} == {GpuState.FAILED}


def test_a_number_of_an_instance_means_nothing_on_a_card_that_is_whole(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), "event card=GPU-a xid=79 gi=0")
    rig.read()
    assert rig.gpu().state is GpuState.FAILED


def test_a_gpu_that_reports_no_errors_is_as_good(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), "error nvmlDeviceGetSupportedEventTypes 3", "event card=GPU-a xid=79")
    rig.read()
    assert rig.gpu().state is GpuState.OK
    rig.close()
    driver.says(card("GPU-a"), "error nvmlEventSetCreate 3")
    assert rig.gpu().state is GpuState.OK


@pytest.mark.usefixtures("no_library")
def test_without_the_library_there_is_a_reason_and_nothing_to_shut_down() -> None:
    """B47: the init that failed is not followed by a shutdown that fails too."""
    rig = Rig()
    snapshot = rig.read()
    assert (snapshot.gpus, "libnvidia-ml.so.1 cannot be loaded" in snapshot.problem) == ((), True)
    assert rig.read() == replace(snapshot, taken_ns=2)
    rig.close()


def test_without_pynvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """B47."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Rig().read().problem == "the Python package nvidia-ml-py is missing"


def test_a_library_without_what_is_needed_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B47: symbol missing."""
    old = Driver(compile_library(tmp_path, "-DnvmlInitWithFlags=another"), tmp_path / "gpus")
    monkeypatch.setattr(pynvml, "nvmlLib", old.library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    assert Rig().read().problem == "the NVIDIA driver is too old for this"


@pytest.mark.parametrize(
    ("code", "said"),
    [(9, "is not loaded"), (18, "restart the machine"), (999, "Unknown Error; in a container"), (1234, "code 1234")],
)
def test_a_driver_that_does_not_begin_is_asked_again_at_the_next_read(
    code: int, said: str, driver: Driver, rig: Rig
) -> None:
    """B47: driver not loaded, Unknown Error in a container; a driver that comes later is found."""
    driver.says(card("GPU-a"), f"error nvmlInitWithFlags {code}")
    snapshot = rig.read()
    assert (snapshot.gpus, said in snapshot.problem) == ((), True)
    assert driver.calls("nvmlShutdown") == 0
    driver.says(card("GPU-a"))
    assert rig.gpu().state is GpuState.OK


def test_a_driver_without_gpus_is_no_problem(driver: Driver, rig: Rig) -> None:
    """B47: init ok, count 0."""
    driver.says("driver 570.86")
    snapshot = rig.read()
    assert (snapshot.problem, snapshot.gpus) == ("", ())


def test_a_driver_that_goes_away_and_comes_back_is_asked_by_a_new_session(driver: Driver, rig: Rig) -> None:
    """B47: what NVML loses is not what CUDA loses, so nothing failed; sessions stay paired."""
    driver.says(card("GPU-a"))
    rig.read()
    driver.vanishes()
    snapshot = rig.read()
    assert snapshot.problem == "the NVIDIA driver is not loaded"
    (gpu,) = snapshot.gpus
    assert (gpu.state, gpu.memory_free_bytes, headroom_bytes(gpu, MARGIN)) == (GpuState.UNREADABLE, None, None)
    driver.says(card("GPU-a", free_gb=7))
    gpu = rig.gpu()
    assert (gpu.state, gpu.memory_free_bytes) == (GpuState.OK, 7 * GB)
    assert (driver.calls("nvmlInitWithFlags"), driver.num_sessions) == (2, 1)


def test_a_container_that_lost_its_devices_finds_them_again(driver: Driver, rig: Rig) -> None:
    """B47: Unknown Error of every card after its cgroup changed."""
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    rig.read()
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetHandleByIndex_v2 999")
    snapshot = rig.read()
    assert "Unknown Error" in snapshot.problem
    assert [gpu.state for gpu in snapshot.gpus] == [GpuState.UNREADABLE, GpuState.UNREADABLE]
    driver.says(card("GPU-a"), card("GPU-b", bus=2))
    assert [gpu.state for gpu in rig.read().gpus] == [GpuState.OK, GpuState.OK]


def test_one_unknown_error_among_several_cards_is_that_cards_own(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"), card("GPU-b", bus=2), "error nvmlDeviceGetUUID 999 GPU-b")
    snapshot = rig.read()
    assert snapshot.problem == ""
    assert [gpu.state for gpu in snapshot.gpus] == [GpuState.OK, GpuState.UNREADABLE]


def test_a_library_that_answers_nonsense_is_one_that_refuses(driver: Driver, rig: Rig) -> None:
    driver.says(card("GPU-a"))
    rig.read()
    driver.says(card("GPU-a", name="\udcff"))
    snapshot = rig.read()
    assert snapshot.problem.startswith("UnicodeDecodeError")
    assert [gpu.state for gpu in snapshot.gpus] == [GpuState.UNREADABLE]
    driver.says(card("GPU-a"))
    assert rig.gpu().state is GpuState.OK


def test_what_is_gone_is_not_remembered_without_end(driver: Driver, rig: Rig) -> None:
    for number in range(0, 90, 6):
        driver.says(*(card(f"GPU-{one}") for one in range(number, number + 6)))
        rig.read()
    assert len(rig.read().gpus) == 6 + 64
