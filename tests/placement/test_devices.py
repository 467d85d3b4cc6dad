"""The names of devices: what they mean here, and what is said of those that mean nothing."""

from __future__ import annotations

import pytest

from lqs.errors import ConfigError, DeviceError
from lqs.placement.cuda import as_listed, number_gpus
from lqs.placement.devices import Kind, parse_device, resolve, why_not
from lqs.placement.gpus import Gpu, GpuState, Snapshot
from tests.placement.test_cuda import BY_BUS, FOUR, MIXED, SPLIT, gpu


@pytest.mark.parametrize(
    ("text", "kind", "number", "uuid", "bus_id"),
    [
        ("auto", Kind.AUTO, None, "", ""),
        ("cpu", Kind.CPU, 0, "", ""),
        ("cpu:3", Kind.CPU, 3, "", ""),
        ("cuda", Kind.CUDA, 0, "", ""),
        ("cuda:12", Kind.CUDA, 12, "", ""),
        ("cuda:GPU-8932f937-d72c", Kind.CUDA, None, "GPU-8932f937-d72c", ""),
        ("cuda:MIG-8c4c5a27", Kind.CUDA, None, "MIG-8c4c5a27", ""),
        ("cuda:MIG-GPU-8932f937/7/0", Kind.CUDA, None, "MIG-GPU-8932f937/7/0", ""),
        ("cuda:00000000:01:00.0", Kind.CUDA, None, "", "00000000:01:00.0"),
        ("cuda:c1:00.0", Kind.CUDA, None, "", "00000000:C1:00.0"),
    ],
)
def test_a_name_is_taken_apart(text: str, kind: Kind, number: int | None, uuid: str, bus_id: str) -> None:
    name = parse_device(text)
    assert (name.kind, name.number, name.uuid, name.bus_id) == (kind, number, uuid, bus_id)
    assert parse_device(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["", "gpu:0", "cuda:", "cpu:", "cuda:-1", "cuda:x", "cpu:GPU-a", "cpu:01:00.0", "auto:0", "cuda:0 ", "cuda:٣"],
)
def test_what_is_no_name_is_told_what_a_name_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.devices: .* is not a device; write auto, cpu:N, cuda:N"):
        parse_device(text)


@pytest.mark.parametrize("text", ["cpu:1024", "cuda:99999999999999999999"])
def test_a_number_has_a_bound(text: str) -> None:
    with pytest.raises(ConfigError, match="the number is at most 1023"):
        parse_device(text)


def resolved(*names: str, gpus: tuple[Gpu, ...] = FOUR, **environ: str) -> list[str]:
    """The devices in words, each GPU with its UUID."""
    devices = resolve(names, Snapshot(1, "", "", gpus), number_gpus(gpus, BY_BUS | environ))
    return [f"{device} {device.gpu.uuid}" if device.gpu else str(device) for device in devices]


def test_every_form_of_a_name_finds_the_same_card() -> None:
    for name in ("cuda:3", "cuda:GPU-dd", "cuda:gpu-d", "cuda:1a:00.0", "cuda:0000:1a:00.0"):
        assert resolved(name) == ["cuda:3 GPU-dd"]


def test_numbers_are_those_that_cuda_gives_behind_its_variable() -> None:
    """The order changed by CUDA_VISIBLE_DEVICES."""
    assert resolved("cuda:0", "cuda:1", CUDA_VISIBLE_DEVICES="3,0") == ["cuda:0 GPU-dd", "cuda:1 GPU-ab12"]
    # A card that is named otherwise is opened by its number too.
    assert resolved("cuda:GPU-ab12", CUDA_VISIBLE_DEVICES="3,0") == ["cuda:1 GPU-ab12"]


def test_auto_is_every_gpu_that_works_or_the_cpu() -> None:
    assert resolved("auto") == ["cuda:0 GPU-ab12", "cuda:1 GPU-ab34", "cuda:2 GPU-cc", "cuda:3 GPU-dd"]
    assert resolved("auto", CUDA_VISIBLE_DEVICES="") == ["cpu:0"]
    assert resolved("auto", gpus=()) == ["cpu:0"]
    assert resolved("auto", gpus=SPLIT) == ["cuda:0 MIG-11"]
    unreadable = gpu("GPU-a", 1, state=GpuState.UNREADABLE, reason="no permission")
    assert resolved("auto", gpus=(unreadable, gpu("GPU-b", 2))) == ["cuda:1 GPU-b"]


def test_without_a_driver_auto_is_the_cpu_and_a_gpu_that_was_asked_for_is_refused() -> None:
    """B47: with GPU demanded by config: refused at start with a reason."""
    none, numbering = Snapshot(1, "the NVIDIA driver is not loaded"), number_gpus((), {})
    assert [str(device) for device in resolve(["auto"], none, numbering)] == ["cpu:0"]
    assert [str(device) for device in resolve(["cpu:1", "cpu:0"], none, numbering)] == ["cpu:1", "cpu:0"]
    with pytest.raises(DeviceError, match="cuda:0: no GPU can be used: the NVIDIA driver is not loaded"):
        resolve(["cuda:0"], none, numbering)
    with pytest.raises(DeviceError, match="cuda:0: there is no such GPU; there are: none"):
        resolve(["cuda:0"], Snapshot(1, ""), numbering)


@pytest.mark.parametrize(
    ("name", "environ", "said"),
    [
        ("cuda:4", {}, r"there is no such GPU; there are: GPU-cc \(cuda:2\), GPU-ab12 \(cuda:0\)"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0"}, r"GPU-cc \(CUDA_VISIBLE_DEVICES leaves it out\)"),
        ("cuda:GPU-ee", {}, "there is no such GPU"),
        ("cuda:04:00.0", {}, "there is no such GPU"),
        ("cuda:GPU-dd", {"CUDA_VISIBLE_DEVICES": "0"}, "GPU-dd cannot be used: CUDA_VISIBLE_DEVICES leaves it out"),
    ],
)
def test_a_gpu_that_is_not_to_be_had_is_refused_with_the_reason(name: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        resolved(name, **environ)


def test_a_split_card_says_which_instances_it_has() -> None:
    with pytest.raises(DeviceError, match="GPU-bb cannot be used: it is split into MIG instances: MIG-11, MIG-22"):
        resolved("cuda:GPU-bb", gpus=SPLIT)
    assert resolved("cuda:MIG-22", gpus=SPLIT, CUDA_VISIBLE_DEVICES="MIG-22") == ["cuda:0 MIG-22"]
    assert resolved("cuda:02:00.0", gpus=(gpu("GPU-x", 2),)) == ["cuda:0 GPU-x"]


@pytest.mark.parametrize("state", [GpuState.FAILED, GpuState.UNREADABLE])
def test_a_gpu_that_does_not_work_is_refused_with_the_reason(state: GpuState) -> None:
    broken = gpu("GPU-a", 1, state=state, reason="it fell off the bus")
    with pytest.raises(DeviceError, match="GPU-a cannot be used: it fell off the bus"):
        resolved("cuda:GPU-a", gpus=(broken,))
    assert why_not(broken, number_gpus((broken,), {})) == "it fell off the bus"


def test_a_beginning_that_fits_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:GPU-ab: fits 2 GPUs: GPU-ab12, GPU-ab34"):
        resolved("cuda:GPU-ab")


def test_an_order_that_only_cuda_knows_is_refused_until_cuda_has_told_it() -> None:
    snapshot, numbering = Snapshot(1, "", "", MIXED), number_gpus(MIXED, {})
    for name in ("cuda:0", "cuda:GPU-fast", "auto"):
        with pytest.raises(DeviceError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            resolve([name], snapshot, numbering)
    assert [str(device) for device in resolve(["cpu:0"], snapshot, numbering)] == ["cpu:0"]
    (fast,) = resolve(["cuda:0"], snapshot, as_listed(numbering, ["0000:02:00.0", "0000:01:00.0"]))
    assert fast.gpu is MIXED[1]


@pytest.mark.parametrize("names", [("cuda:3", "cuda:GPU-dd"), ("cpu:0", "cpu"), ("auto", "cuda:0")])
def test_a_device_that_is_there_twice_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is there twice"):
        resolved(*names)
