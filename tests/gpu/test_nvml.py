"""What the real driver says of real GPUs; skipped where there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lqs.placement.cuda import normal_bus_id, number_gpus
from lqs.placement.gpus import Gpu, GpuState, headroom_bytes
from lqs.placement.reader import Reader

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpus() -> Iterator[tuple[Gpu, ...]]:
    reader = Reader(lambda: 0)
    snapshot = reader.read(1)
    if snapshot.problem or not snapshot.gpus:
        reader.close()
        pytest.skip(f"no GPU here: {snapshot.problem or 'none is listed'}")
    assert snapshot.driver
    yield reader.read(2).gpus
    reader.close()


def test_every_gpu_says_who_it_is_and_where(gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        assert gpu.uuid.startswith("MIG-" if gpu.is_instance else "GPU-")
        assert normal_bus_id(gpu.bus_id) == gpu.bus_id
        assert gpu.name
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)


def test_memory_adds_up(gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        if gpu.state is not GpuState.OK or gpu.is_unified or gpu.is_split:
            continue
        total, used, free = gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_free_bytes
        assert total is not None
        assert used is not None
        assert free is not None
        assert total > 0
        # What the driver keeps for itself may be in neither.
        assert 0.95 * total <= used + free <= total
        assert headroom_bytes(gpu, 0) == free


def test_figures_are_in_their_units(gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        assert gpu.use is None or 0 <= gpu.use <= 1
        assert gpu.temperature_c is None or 0 < gpu.temperature_c < 120
        assert gpu.power_w is None or 0 < gpu.power_w < 5000


def test_without_variables_cuda_sees_all_of_them_or_one_instance(gpus: tuple[Gpu, ...]) -> None:
    numbering = number_gpus(gpus, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert numbering.is_sure
    if any(gpu.is_instance for gpu in gpus):
        assert len(numbering.gpus) == 1
    else:
        assert len(numbering.gpus) == len(gpus)
