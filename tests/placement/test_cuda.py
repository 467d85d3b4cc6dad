"""CUDA's numbers of the GPUs, from what NVML lists and the two variables that CUDA reads."""

from __future__ import annotations

import pytest

from lqs.errors import DeviceError
from lqs.placement.cuda import as_listed, normal_bus_id, number_gpus, pin_order
from lqs.placement.gpus import Gpu, GpuState

BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu(uuid: str, bus: int = 0, **more: object) -> Gpu:
    return Gpu(uuid=uuid, bus_id=f"00000000:{bus:02X}:00.0", **{"name": "A100"} | more)


# NVML may list them in any order.
FOUR = (gpu("GPU-cc", 3), gpu("GPU-ab12", 1), gpu("GPU-ab34", 2), gpu("GPU-dd", 0x1A))
SPLIT = (
    gpu("GPU-aa", 1),
    gpu("GPU-bb", 2, is_split=True),
    gpu("MIG-11", 2, card_uuid="GPU-bb", instance_ids=(7, 0)),
    gpu("MIG-22", 2, card_uuid="GPU-bb", instance_ids=(8, 0)),
)


def numbers(gpus: tuple[Gpu, ...], visible: str | None = None, **environ: str) -> list[str]:
    """The UUIDs in CUDA's order, each told from any other by its number alone."""
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    numbering = number_gpus(gpus, BY_BUS | environ)
    uuids = [one.uuid for one in numbering.gpus]
    assert [numbering.number_of(uuid) for uuid in uuids] == list(range(len(uuids)))
    assert {*uuids, *numbering.hidden} == {one.uuid for one in gpus}
    assert all(numbering.hidden.values())
    return uuids


def test_all_are_counted_by_their_place_on_the_bus() -> None:
    assert numbers(FOUR) == ["GPU-ab12", "GPU-ab34", "GPU-cc", "GPU-dd"]


def test_the_domain_counts_before_the_bus() -> None:
    far = Gpu(uuid="GPU-far", bus_id="00000001:00:00.0")
    assert numbers((far, gpu("GPU-near", 9))) == ["GPU-near", "GPU-far"]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("2,0", ["GPU-cc", "GPU-ab12"]),
        (" 3 , 1", ["GPU-dd", "GPU-ab34"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        # An entry that fits nothing ends the list.
        ("0,2,-1,1", ["GPU-ab12", "GPU-cc"]),
        ("1,4,0", ["GPU-ab34"]),
        ("1,,0", ["GPU-ab34"]),
        # One that comes twice empties it.
        ("1,1", []),
        ("GPU-cc,GPU-c", []),
        # Numbers are read up to the first that is no digit.
        ("1gpu2,2ampere", ["GPU-ab34", "GPU-cc"]),
        # Beginnings of UUIDs, as long as they fit one.
        ("GPU-dd,GPU-ab1", ["GPU-dd", "GPU-ab12"]),
        ("gpu-DD", ["GPU-dd"]),
        ("GPU-dd,GPU-ab,GPU-cc", ["GPU-dd"]),
        ("GPU-dd,GPU-xx,GPU-cc", ["GPU-dd"]),
        # What the first entry is, all are.
        ("GPU-dd,0", ["GPU-dd"]),
        ("0,GPU-dd", ["GPU-ab12"]),
    ],
)
def test_the_visible_are_counted_in_the_order_in_which_they_are_named(visible: str, seen: list[str]) -> None:
    assert numbers(FOUR, visible) == seen


def test_a_uuid_that_is_the_beginning_of_another_means_itself() -> None:
    assert numbers((gpu("GPU-a", 1), gpu("GPU-ab", 2)), "GPU-a") == ["GPU-a"]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        # One instance, and no whole card beside it.
        (None, ["MIG-11"]),
        ("0", ["GPU-aa"]),
        ("1", ["MIG-11"]),
        ("1,0", ["MIG-11"]),
        ("0,1", ["MIG-11"]),
        ("GPU-bb", ["MIG-11"]),
        ("MIG-22", ["MIG-22"]),
        ("MIG-22,MIG-11", ["MIG-22"]),
        ("MIG-GPU-bb/8/0", ["MIG-22"]),
        ("MIG-GPU-bb/9/0", []),
        ("MIG-2,GPU-aa", ["MIG-22"]),
    ],
)
def test_with_mig_cuda_sees_one_instance(visible: str | None, seen: list[str]) -> None:
    assert numbers(SPLIT, visible) == seen


def test_a_split_card_without_instances_is_not_there() -> None:
    assert numbers(SPLIT[:2]) == ["GPU-aa"]


@pytest.mark.parametrize(
    ("visible", "uuid", "why"),
    [
        ("0", "MIG-11", "CUDA_VISIBLE_DEVICES leaves it out"),
        ("0", "GPU-bb", "it is split into MIG instances: MIG-11, MIG-22"),
        ("MIG-11", "MIG-22", "CUDA_VISIBLE_DEVICES leaves it out"),
        ("1", "MIG-22", "a process has one MIG instance and no whole card beside it, here MIG-11"),
        (None, "GPU-aa", "a process has one MIG instance and no whole card beside it, here MIG-11"),
    ],
)
def test_what_cuda_does_not_see_has_its_reason(visible: str | None, uuid: str, why: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert number_gpus(SPLIT, environ).hidden[uuid].startswith(why)


def test_a_gpu_that_failed_before_the_start_is_not_counted() -> None:
    failed = gpu("GPU-aa", 1, state=GpuState.FAILED, reason="it fell off the bus")
    nameless = Gpu(uuid="unknown-1", index=1, state=GpuState.UNREADABLE, reason="Insufficient Permissions")
    gpus = (failed, nameless, gpu("GPU-bb", 2, state=GpuState.UNREADABLE))
    assert numbers(gpus) == ["GPU-bb"]
    assert number_gpus(gpus, BY_BUS).hidden == {
        "GPU-aa": "it fell off the bus",
        "unknown-1": "Insufficient Permissions",
    }


MIXED = (gpu("GPU-slow", 1, name="T4"), gpu("GPU-fast", 2, name="H100"))


@pytest.mark.parametrize(
    ("gpus", "environ", "is_sure"),
    [
        (MIXED, {}, False),
        (MIXED, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, False),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, False),
        (MIXED, BY_BUS, True),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-fast,GPU-slow"}, True),
        (FOUR, {}, True),
        (MIXED[:1], {}, True),
        ((), {}, True),
    ],
)
def test_numbers_are_sure_unless_only_cuda_knows_its_fastest(
    gpus: tuple[Gpu, ...], environ: dict[str, str], is_sure: bool
) -> None:
    assert number_gpus(gpus, environ).is_sure is is_sure


def test_the_order_is_pinned_unless_the_operator_chose_one() -> None:
    environ: dict[str, str] = {}
    pin_order(environ)
    assert environ == BY_BUS
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    pin_order(environ)
    assert environ == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:01:00.0", "00000000:01:00.0"),
        ("0000:c1:00.0", "00000000:C1:00.0"),
        ("1A:00.0", "00000000:1A:00.0"),
        ("0001:0a:1F.7", "00000001:0A:1F.7"),
        ("1:00.0", ""),
        ("0000:01:00", ""),
        ("GPU-a", ""),
    ],
)
def test_a_place_on_the_bus_has_one_form(text: str, normal: str) -> None:
    assert normal_bus_id(text) == normal


def test_what_cuda_lists_is_its_order() -> None:
    listed = as_listed(number_gpus(MIXED, {}), ["0000:02:00.0", "0000:01:00.0"])
    assert ([one.uuid for one in listed.gpus], listed.is_sure) == (["GPU-fast", "GPU-slow"], True)
    one_instance = as_listed(number_gpus(SPLIT, {}), ["0000:02:00.0"])
    assert [one.uuid for one in one_instance.gpus] == ["MIG-11"]


@pytest.mark.parametrize("bus_ids", [[], ["0000:01:00.0"], ["0000:01:00.0", "0000:03:00.0"], ["0000:01:00.0"] * 2])
def test_other_gpus_than_nvml_lists_are_refused(bus_ids: list[str]) -> None:
    with pytest.raises(DeviceError, match=r"CUDA lists the GPUs .*, but NVML 00000000:01:00.0, 00000000:02:00.0"):
        as_listed(number_gpus(MIXED, {}), bus_ids)
