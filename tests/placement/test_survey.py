"""What the names in a config mean as device slots, a device or several each, in whatever order CUDA counts."""

from __future__ import annotations

import pytest

from lqs.errors import ConfigError, DeviceError
from lqs.placement.gpus import Gpu, GpuState, Snapshot
from lqs.placement.survey import Survey, no_gpus, now_of, survey_of

GB = 1_000_000_000
CARDS = tuple(
    Gpu(uuid=f"GPU-{name}", bus_id=f"00000000:0{bus}:00.0", name="T4", index=index, memory_free_bytes=10 * GB)
    for index, (name, bus) in enumerate((("b", 2), ("a", 1), ("c", 3)))
)
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def survey(has_cuda: bool = True, listed: list[str] | None = None, **environ: str) -> Survey:
    return survey_of(Snapshot(1, "", "570", CARDS), BY_BUS | environ, has_cuda=has_cuda, listed=listed)


def meant(found: Survey, *names: str) -> list[tuple[str, list[str]]]:
    return [(str(group), [gpu.uuid for gpu in group.gpus]) for group in found.groups(names)]


def test_the_order_that_cuda_visible_devices_makes_decides_whose_memory_counts() -> None:
    """The index order changed: cuda:0 is another card, and its figures are that card's."""
    assert meant(survey(), "cuda:0", "cuda:1") == [("cuda:0", ["GPU-a"]), ("cuda:1", ["GPU-b"])]
    changed = survey(CUDA_VISIBLE_DEVICES="2,0")
    assert meant(changed, "cuda:0", "cuda:1") == [("cuda:0", ["GPU-c"]), ("cuda:1", ["GPU-a"])]
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES leaves it out"):
        changed.groups(["cuda:GPU-b"])


def test_cudas_own_list_has_the_last_word() -> None:
    listed = survey(listed=["0000:03:00.0", "0000:01:00.0", "0000:02:00.0"])
    assert meant(listed, "cuda:0") == [("cuda:0", ["GPU-c"])]
    with pytest.raises(DeviceError, match="CUDA lists the GPUs"):
        survey(listed=["0000:09:00.0"])


def test_a_model_is_split_over_the_gpus_that_are_joined() -> None:
    found = survey()
    assert meant(found, "cuda:0+cuda:2", "cuda:GPU-b") == [("cuda:0+cuda:2", ["GPU-a", "GPU-c"]), ("cuda:1", ["GPU-b"])]
    (both, _) = found.groups(["cuda:0+cuda:2", "cuda:1"])
    assert (both.is_cpu, both.pools) == (False, ("GPU-a", "GPU-c"))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["cpu:0+cpu:1"], "can be split over GPUs only"),
        (["auto+cuda:0"], "can be split over GPUs only"),
        (["cuda:0+cpu:0"], "can be split over GPUs only"),
        (["cuda:0+cuda:0"], "cuda:0 is there twice"),
        (["cuda:0", "cuda:0+cuda:1"], "cuda:0 is there twice"),
        (["auto", "cuda:1"], "cuda:1 is there twice"),
        (["cuda:0+"], "is not a device"),
    ],
)
def test_what_cannot_be_is_named(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        survey().groups(names)


def test_without_cuda_in_the_build_auto_is_the_cpu_and_a_gpu_that_is_asked_for_says_why() -> None:
    """B47: a GPU demanded by the config is refused at the start with a reason."""
    found = survey(has_cuda=False)
    assert meant(found, "auto") == [("cpu:0", [])]
    with pytest.raises(DeviceError, match="llama-cpp-python is built without CUDA"):
        found.groups(["cuda:0"])
    with pytest.raises(DeviceError, match="no GPU can be used: no driver"):
        no_gpus("no driver").groups(["cuda:0"])


def test_later_figures_are_of_the_same_cards_under_the_same_numbers() -> None:
    found = survey(CUDA_VISIBLE_DEVICES="2,0")
    later = Snapshot(2, "", "570", tuple(Gpu(uuid=each.uuid, memory_free_bytes=GB) for each in CARDS))
    (group,) = found.seen_anew(later).groups(["cuda:0"])
    assert [(gpu.uuid, gpu.memory_free_bytes) for gpu in group.gpus] == [("GPU-c", GB)]
    assert [gpu.memory_free_bytes for gpu in now_of(group, later)] == [GB]
    lost = Snapshot(3, "", "570", (Gpu(uuid="GPU-c", state=GpuState.FAILED, reason="it fell off the bus"),))
    with pytest.raises(DeviceError, match="GPU-c cannot be used: it fell off the bus"):
        now_of(group, lost)


def test_every_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=r"cuda:7: there is no such GPU.*cuda:GPU-x: there is no such GPU"):
        survey().groups(["cuda:7", "cuda:0", "cuda:GPU-x", "cpu:0"])
    with pytest.raises(DeviceError, match=r"cuda:0: no GPU can be used.*cuda:1: no GPU can be used"):
        no_gpus().groups(["cuda:0", "cuda:1"])
