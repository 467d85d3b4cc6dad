"""What the names in a config mean on this machine, each a device or several that one model is split over.

snapshot     what NVML says, at one time
numbering    which number CUDA gives to which GPU; made once, it holds for the life of the process
groups()     the device slots that names mean: `auto`, `cpu:1`, `cuda:GPU-8932...`, `cuda:0+cuda:1`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lqs.errors import ConfigError, DeviceError
from lqs.placement.cuda import Numbering, as_listed, number_gpus
from lqs.placement.devices import Device, Kind, resolve
from lqs.placement.gpus import SYSTEM_POOL, Gpu, Snapshot

_NO_CUDA = "llama-cpp-python is built without CUDA"
_JOINT = "+"


@dataclass(frozen=True, slots=True)
class Group:
    """What a device slot runs on: one device, or GPUs that share the layers of a model."""

    devices: tuple[Device, ...]

    def __str__(self) -> str:
        return _JOINT.join(map(str, self.devices))

    @property
    def is_cpu(self) -> bool:
        """Whether it computes on the machine's own cores."""
        return self.devices[0].kind is Kind.CPU

    @property
    def number(self) -> int:
        """The number of its first device: CUDA's, or that of a group of cores."""
        return self.devices[0].number

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs as they were when the numbering was made."""
        return tuple(device.gpu for device in self.devices if device.gpu is not None)

    @property
    def pools(self) -> tuple[str, ...]:
        """The memories that it takes from."""
        return tuple(gpu.pool for gpu in self.gpus) or (SYSTEM_POOL,)


@dataclass(frozen=True, slots=True)
class Survey:
    """The GPUs at one time, and how CUDA counts them."""

    snapshot: Snapshot
    numbering: Numbering

    def groups(self, names: Sequence[str]) -> tuple[Group, ...]:
        """The device slots that names mean. See `resolve`.

        Raises ConfigError, and DeviceError with all that cannot be had.
        """
        groups: list[Group] = []
        absent: list[str] = []
        for name in names:
            parts = name.split(_JOINT)
            if len(parts) > 1 and not all(part.startswith(Kind.CUDA) for part in parts if part):
                raise ConfigError(f"engine.devices: {name!r}: a model can be split over GPUs only, each named.")
            try:
                devices = resolve(parts, self.snapshot, self.numbering)
            except DeviceError as error:
                absent.append(str(error))
                continue
            groups += [Group(devices)] if len(parts) > 1 else [Group((device,)) for device in devices]
        if absent:
            raise DeviceError(" ".join(dict.fromkeys(absent)))
        used = [device for group in groups for device in group.devices]
        for device in used:
            if used.count(device) > 1:
                raise ConfigError(f"engine.devices: {device} is there twice.")
        return tuple(groups)

    def seen_anew(self, snapshot: Snapshot) -> Survey:
        """The same GPUs under the same numbers, as a later snapshot has them."""
        numbering = self.numbering
        gpus = tuple(snapshot.find(gpu.uuid) or gpu for gpu in numbering.gpus)
        return Survey(snapshot, replace(numbering, gpus=gpus))


def no_gpus(reason: str = "not asked") -> Survey:
    """A machine whose GPUs nobody asks for."""
    return Survey(Snapshot(problem=reason), Numbering((), {}, is_sure=True))


def survey_of(
    snapshot: Snapshot, environ: Mapping[str, str], *, has_cuda: bool, listed: Sequence[str] | None = None
) -> Survey:
    """The GPUs as CUDA will count them in this process; none where libllama cannot use any.

    `listed` are the places on the bus that CUDA itself tells, in its order, where it was asked. Raises
    DeviceError if those are other GPUs.
    """
    if not has_cuda:
        hidden = {gpu.uuid: _NO_CUDA for gpu in snapshot.gpus}
        return Survey(snapshot, Numbering((), hidden, is_sure=True))
    numbering = number_gpus(snapshot.gpus, environ)
    # Without NVML nothing is known of what CUDA lists.
    if numbering.gpus and listed and all(listed):
        numbering = as_listed(numbering, listed)
    return Survey(snapshot, numbering)


def now_of(group: Group, snapshot: Snapshot) -> tuple[Gpu, ...]:
    """The group's GPUs as a later snapshot has them. Raises DeviceError for one that may take no work."""
    found = []
    for gpu in group.gpus:
        now = snapshot.find(gpu.uuid) or replace(gpu, reason="it is gone")
        if now.reason:
            raise DeviceError(f"{group}: {gpu.uuid} cannot be used: {now.reason}.")
        found.append(now)
    return tuple(found)
