"""What a name in `engine.devices` means: `auto`, `cpu:0`, `cuda:0`, a GPU's UUID or its place on the bus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lqs.errors import ConfigError, DeviceError
from lqs.placement.cuda import ORDER, Numbering, by_uuid, normal_bus_id
from lqs.placement.gpus import Gpu, GpuState, Snapshot

_UUID = re.compile(r"(GPU|MIG)-[0-9a-z-]+(/\d+/\d+)?", re.IGNORECASE)
_FORMS = "auto, cpu:N, cuda:N, cuda:GPU-UUID, cuda:MIG-UUID or cuda:DOMAIN:BUS:DEVICE.FUNCTION"
_NUMBER_MAX = 1023


class Kind(StrEnum):
    """What a name begins with."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A name, taken apart: a number, or the UUID or place on the bus of a GPU, or nothing."""

    kind: Kind
    number: int | None = None
    uuid: str = ""
    bus_id: str = ""

    def __str__(self) -> str:
        number = "" if self.number is None else str(self.number)
        return ":".join(part for part in (self.kind, number, self.uuid, self.bus_id) if part)


@dataclass(frozen=True, slots=True)
class Device:
    """What a name means on this machine. `number` is CUDA's, or that of a group of cores."""

    kind: Kind
    number: int
    gpu: Gpu | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


def parse_device(text: str) -> DeviceName:
    """A name as the config has it; without a number it is the first. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if text == Kind.AUTO:
        return DeviceName(Kind.AUTO)
    if text in (Kind.CPU, Kind.CUDA):
        return DeviceName(Kind(kind), number=0)
    if kind in (Kind.CPU, Kind.CUDA) and re.fullmatch("[0-9]+", rest):
        if len(rest) > len(str(_NUMBER_MAX)) or int(rest) > _NUMBER_MAX:
            raise ConfigError(f"engine.devices: {text!r}: the number is at most {_NUMBER_MAX}.")
        return DeviceName(Kind(kind), number=int(rest))
    if kind == Kind.CUDA and _UUID.fullmatch(rest):
        return DeviceName(Kind.CUDA, uuid=rest)
    if kind == Kind.CUDA and (bus_id := normal_bus_id(rest)):
        return DeviceName(Kind.CUDA, bus_id=bus_id)
    raise ConfigError(f"engine.devices: {text!r} is not a device; write {_FORMS}.")


def resolve(names: Sequence[str], snapshot: Snapshot, numbering: Numbering) -> tuple[Device, ...]:
    """What the config's names mean here; `auto` is every GPU that may take work, or else `cpu:0`.

    Raises ConfigError for what is no name, fits several GPUs or is there twice, DeviceError for a GPU that
    cannot be had, or whose number only CUDA knows.
    """
    devices: list[Device] = []
    for name in map(parse_device, names):
        if name.kind is Kind.AUTO:
            devices += _automatic(numbering)
        elif name.kind is Kind.CPU:
            devices.append(Device(Kind.CPU, name.number or 0))
        else:
            devices.append(_cuda(name, snapshot, numbering))
    if not numbering.is_sure and any(device.gpu for device in devices):
        raise DeviceError(
            "engine.devices: the GPUs are of several models, and in which order CUDA counts them only CUDA knows. "
            f"Set {ORDER}=PCI_BUS_ID."
        )
    for device in devices:
        if devices.count(device) > 1:
            raise ConfigError(f"engine.devices: {device} is there twice.")
    return tuple(devices)


def why_not(gpu: Gpu, numbering: Numbering) -> str:
    """Why a GPU takes no work; empty if it may."""
    return gpu.reason if gpu.state is not GpuState.OK else numbering.hidden.get(gpu.uuid, "")


def _automatic(numbering: Numbering) -> list[Device]:
    """Every GPU that may take work, in CUDA's order, or the CPU."""
    counted = enumerate(numbering.gpus)
    usable = [Device(Kind.CUDA, number, gpu) for number, gpu in counted if not why_not(gpu, numbering)]
    return usable or [Device(Kind.CPU, 0)]


def _cuda(name: DeviceName, snapshot: Snapshot, numbering: Numbering) -> Device:
    """The GPU of a name. Raises DeviceError, ConfigError."""
    where = f"engine.devices: {name}"
    if snapshot.problem:
        raise DeviceError(f"{where}: no GPU can be used: {snapshot.problem}.")
    found = _named(name, snapshot) if name.number is None else list(numbering.gpus[name.number :][:1])
    if not found:
        raise DeviceError(f"{where}: there is no such GPU; there are: {_those_there(snapshot, numbering)}.")
    if len(found) > 1:
        raise ConfigError(f"{where}: fits {len(found)} GPUs: {', '.join(gpu.uuid for gpu in found)}.")
    gpu = found[0]
    number = numbering.number_of(gpu.uuid)
    if number is None or why_not(gpu, numbering):
        raise DeviceError(f"{where}: {gpu.uuid} cannot be used: {why_not(gpu, numbering)}.")
    return Device(Kind.CUDA, number, gpu)


def _named(name: DeviceName, snapshot: Snapshot) -> list[Gpu]:
    """The GPUs that a UUID or its beginning fits, or the card at a place on the bus."""
    if name.uuid:
        return by_uuid(name.uuid, snapshot.gpus)
    return [gpu for gpu in snapshot.gpus if not gpu.is_instance and normal_bus_id(gpu.bus_id) == name.bus_id]


def _those_there(snapshot: Snapshot, numbering: Numbering) -> str:
    """The GPUs in words, with CUDA's number or why it has none."""
    numbers = {gpu.uuid: f"cuda:{number}" for number, gpu in enumerate(numbering.gpus)}
    words = (f"{gpu.uuid} ({numbers.get(gpu.uuid) or why_not(gpu, numbering)})" for gpu in snapshot.gpus)
    return ", ".join(words) or "none"
