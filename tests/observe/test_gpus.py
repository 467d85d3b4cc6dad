"""What operators see of the GPUs: a figure that the driver does not give is absent, not 0."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lqs.observe.gpus import gpu_families
from lqs.placement.gpus import Gpu, GpuState, Snapshot
from lqs.request import NS_PER_S

FULL = Gpu(
    uuid="GPU-a",
    bus_id="00000000:01:00.0",
    name="RTX",
    memory_total_bytes=24,
    memory_used_bytes=4,
    memory_free_bytes=20,
    memory_ours_bytes=3,
    use=0.5,
    temperature_c=61,
    power_w=90.5,
    num_xids=2,
)
BARE = Gpu(uuid="GPU-b", is_unified=True, state=GpuState.FAILED, reason="it fell off the bus")


class Shown:
    """A page with the families alone; its samples by name and label values, the labels in the order of their names."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        page = generate_latest(registry).decode()
        self.samples = {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    def collect(self) -> Iterator[Metric]:
        return gpu_families(self._snapshot, {"GPU-a": 0}, now_ns=7 * NS_PER_S)


def test_every_figure_has_its_series() -> None:
    assert Shown(Snapshot(5 * NS_PER_S, "", "570", (FULL,))).samples == {
        ("lqs_nvml_up",): 1,
        ("lqs_nvml_age_seconds",): 2,
        ("lqs_gpu_info", "00000000:01:00.0", "cuda:0", "GPU-a", "own", "RTX"): 1,
        ("lqs_gpu_state", "GPU-a", "ok"): 1,
        ("lqs_gpu_state", "GPU-a", "unreadable"): 0,
        ("lqs_gpu_state", "GPU-a", "failed"): 0,
        ("lqs_gpu_xids_total", "GPU-a"): 2,
        ("lqs_gpu_memory_total_bytes", "GPU-a"): 24,
        ("lqs_gpu_memory_used_bytes", "GPU-a"): 4,
        ("lqs_gpu_memory_free_bytes", "GPU-a"): 20,
        ("lqs_gpu_memory_ours_bytes", "GPU-a"): 3,
        ("lqs_gpu_use_ratio", "GPU-a"): 0.5,
        ("lqs_gpu_temperature_celsius", "GPU-a"): 61,
        ("lqs_gpu_power_watts", "GPU-a"): 90.5,
    }


def test_a_figure_that_is_not_known_has_none() -> None:
    samples = Shown(Snapshot(0, "", "", (BARE,))).samples
    assert samples[("lqs_gpu_info", "", "", "GPU-b", "unified", "")] == 1
    assert samples[("lqs_gpu_state", "GPU-b", "failed")] == 1
    assert not any(name.endswith(("_bytes", "_ratio", "_celsius", "_watts")) for name, *_ in samples)


def test_without_a_driver_that_is_all_there_is() -> None:
    assert Shown(Snapshot(7 * NS_PER_S, "not loaded")).samples == {("lqs_nvml_up",): 0, ("lqs_nvml_age_seconds",): 0}
