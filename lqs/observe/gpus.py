"""Families of metrics about the GPUs: what the driver says of each, as far as it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lqs.request import NS_PER_S

_STATES = ("ok", "unreadable", "failed")
# (name, doc, the snapshot's name).
_GAUGES = (
    ("lqs_gpu_memory_total_bytes", "Memory of the GPU.", "memory_total_bytes"),
    ("lqs_gpu_memory_used_bytes", "What all processes and the driver took of it.", "memory_used_bytes"),
    ("lqs_gpu_memory_free_bytes", "What is free of it; where it is the machine's: of that.", "memory_free_bytes"),
    ("lqs_gpu_memory_ours_bytes", "What this process took of it.", "memory_ours_bytes"),
    ("lqs_gpu_use_ratio", "Share of the last moments in which it computed; 1 is all.", "use"),
    ("lqs_gpu_temperature_celsius", "How warm it is.", "temperature_c"),
    ("lqs_gpu_power_watts", "What it draws.", "power_w"),
)


class GpuFigures(Protocol):
    """What is shown of one GPU; a figure that is None is left out."""

    @property
    def uuid(self) -> str: ...
    @property
    def bus_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def is_unified(self) -> bool: ...
    @property
    def num_xids(self) -> int: ...


class GpuSnapshot(Protocol):
    """What was read of all GPUs."""

    @property
    def taken_ns(self) -> int: ...
    @property
    def problem(self) -> str: ...
    @property
    def gpus(self) -> Iterable[GpuFigures]: ...


def gpu_families(snapshot: GpuSnapshot, numbers: Mapping[str, int], now_ns: int) -> Iterator[Metric]:
    """The GPUs by UUID. `numbers` are CUDA's, by UUID; a label of those that CUDA sees."""
    gpus = tuple(snapshot.gpus)
    yield GaugeMetricFamily("lqs_nvml_up", "1 while the driver can be asked.", value=not snapshot.problem)
    age_s = max(now_ns - snapshot.taken_ns, 0) / NS_PER_S
    yield GaugeMetricFamily("lqs_nvml_age_seconds", "Time since it was asked.", value=age_s)
    info = GaugeMetricFamily("lqs_gpu_info", "What it is.", labels=["gpu", "device", "bus", "name", "memory"])
    states = GaugeMetricFamily("lqs_gpu_state", "1 for the state that it is in.", labels=["gpu", "state"])
    xids = CounterMetricFamily("lqs_gpu_xids", "Errors that the driver reported of it.", labels=["gpu"])
    for gpu in gpus:
        number = numbers.get(gpu.uuid)
        device, memory = "" if number is None else f"cuda:{number}", "unified" if gpu.is_unified else "own"
        info.add_metric([gpu.uuid, device, gpu.bus_id, gpu.name, memory], 1)
        for state in _STATES:
            states.add_metric([gpu.uuid, state], state == gpu.state)
        xids.add_metric([gpu.uuid], gpu.num_xids)
    yield from (info, states, xids)
    for name, doc, key in _GAUGES:
        family = GaugeMetricFamily(name, doc, labels=["gpu"])
        for gpu in gpus:
            if (value := getattr(gpu, key)) is not None:
                family.add_metric([gpu.uuid], value)
        yield family
