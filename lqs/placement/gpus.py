"""What is known of the GPUs at one time: plain values that any thread may read.

A figure that the driver does not give is None; 0 means 0. Three cases that look alike are told apart: a
driver that answers nothing (`Snapshot.problem`), a GPU that cannot be read just now (UNREADABLE; it may
come back) and one that is broken for this process (FAILED; CUDA's error stays until a restart).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# The pool of all that takes the machine's own memory.
SYSTEM_POOL = "system"
# Stands before the number of a card that does not say who it is.
NAMELESS = "unknown-"


class GpuState(StrEnum):
    """Whether a GPU may take work, and if not, whether waiting helps."""

    OK = "ok"
    UNREADABLE = "unreadable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that computes on a GPU; `used_bytes` is None where the driver does not say."""

    pid: int
    used_bytes: int | None
    is_ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card, or a MIG instance of one. `index` is NVML's number of the card, not CUDA's."""

    uuid: str
    bus_id: str = ""  # As NVML writes it: 00000000:01:00.0; of an instance: its card's.
    name: str = ""
    index: int = 0
    card_uuid: str = ""  # Of an instance: its card.
    instance_ids: tuple[int | None, int | None] | None = None  # Of an instance: GPU and compute instance.
    is_split: bool = False  # A card in MIG mode: nothing runs on it but on its instances.
    state: GpuState = GpuState.OK
    reason: str = ""  # Why it is not OK.
    is_unified: bool = False  # Its memory is the machine's, and what is free of that is free here.
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[Process, ...] | None = None  # The largest, if there are very many.
    memory_ours_bytes: int | None = None  # None also where this process is not in the list, as in a container.
    use: float | None = None  # Share of the last moments in which it computed; 1 is all.
    temperature_c: int | None = None
    power_w: float | None = None
    num_xids: int = 0  # Errors that the driver reported since this process looks.
    last_xid: int = 0

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance."""
        return bool(self.card_uuid)

    @property
    def is_nameless(self) -> bool:
        """Whether it never said who it is: nothing can be done with it but to show it."""
        return self.uuid.startswith(NAMELESS)

    @property
    def pool(self) -> str:
        """The memory it takes from. Devices with the same pool share what is free; never count it twice."""
        return SYSTEM_POOL if self.is_unified else self.uuid

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the figures that the driver does not give."""
        figures = {
            "processes": self.processes,
            "use": self.use,
            "temperature": self.temperature_c,
            "power": self.power_w,
        }
        return tuple(name for name, value in figures.items() if value is None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All GPUs at one time, each card before its instances. `taken_ns` is monotonic."""

    taken_ns: int = 0
    problem: str = "not read yet"  # Why NVML cannot be asked; empty if it answers.
    driver: str = ""
    gpus: tuple[Gpu, ...] = field(default=())

    def find(self, uuid: str) -> Gpu | None:
        """The GPU of that UUID."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def headroom_bytes(gpu: Gpu, margin_bytes: int) -> int | None:
    """What may be placed on a GPU: what is free, whoever took the rest, less the margin.

    None where nobody can tell; 0 for one that may take no work.
    """
    if gpu.state is GpuState.FAILED or gpu.is_split:
        return 0
    if gpu.memory_free_bytes is None:
        return None
    return max(gpu.memory_free_bytes - margin_bytes, 0)
