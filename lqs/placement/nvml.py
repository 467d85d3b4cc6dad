"""A session with NVML, the library that comes with NVIDIA's driver; the only door to pynvml.

What the driver does not know of a GPU is None. What keeps a GPU, or NVML as a whole, from answering is
`Refused`, with a reason for an operator. Each nvmlInit that worked is paired with one nvmlShutdown, and
nothing is shut down that was never opened.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from lqs.placement.gpus import Gpu, GpuState, Process

# Events taken at once and processes kept, at most.
_EVENTS_MAX = 64
_PROCESSES_MAX = 64
# Of an event that concerns the whole card.
_NO_INSTANCE = 0xFFFF_FFFF


class Code(IntEnum):
    """NVML's return codes that mean something here; part of its binary interface."""

    UNINITIALIZED = 1
    NOT_SUPPORTED = 3
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    UNKNOWN = 999


# The GPU is broken until it is reset.
LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED})
# If no GPU says anything else, the session is of no more use.
SESSION_OVER = frozenset({Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH, Code.UNKNOWN})
# What an operator can make of a code, where NVML's own word says too little.
_ADVICE: dict[int, str] = {
    Code.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    Code.LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 cannot be loaded: no NVIDIA driver, or not passed into this container",
    Code.FUNCTION_NOT_FOUND: "the NVIDIA driver is too old for this",
    Code.GPU_IS_LOST: "it fell off the bus (GPU is lost)",
    Code.RESET_REQUIRED: "it must be reset (GPU requires restart)",
    Code.LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library differ, as after an update: restart the machine",
    Code.UNKNOWN: "Unknown Error; in a container often: its right to the devices was taken away, restart it",
}


class Refused(Exception):
    """NVML said no. `code` is its number, `reason` is for an operator."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Event(NamedTuple):
    """An error that the driver reported. `xid` is 0 for a memory error that could not be corrected."""

    card_uuid: str
    gpu_instance: int | None  # The MIG instance that it is about, if it names one.
    xid: int


class Nvml:
    """One session at a time. Owner: the thread that opens it."""

    def __init__(self) -> None:
        self.is_open = False
        self.driver = ""
        self._pynvml: Any = None
        self._events: Any = None
        # By the address of a card's handle, which is good as long as the session.
        self._uuid_of_handle: dict[int, str] = {}

    def open(self) -> None:
        """Begin a session. Raises Refused; then there is nothing to close."""
        try:
            # Eight thousand lines that a machine without a GPU need not read at start.
            import pynvml  # noqa: PLC0415
        except ImportError:
            raise Refused(Code.LIBRARY_NOT_FOUND, "the Python package nvidia-ml-py is missing") from None
        self._pynvml = pynvml
        self._ask("nvmlInit")
        # From here on a shutdown is owed.
        self.is_open = True
        self._events = self._perhaps("nvmlEventSetCreate")
        self.driver = self._perhaps("nvmlSystemGetDriverVersion") or ""

    def close(self) -> None:
        """End the session, if there is one."""
        if not self.is_open:
            return
        self.is_open = False
        if self._events is not None:
            self._try("nvmlEventSetFree", self._events)
        self._try("nvmlShutdown")
        self._events = None
        self._uuid_of_handle.clear()

    def num_cards(self) -> int:
        """How many cards this process may ask. Raises Refused."""
        return int(self._ask("nvmlDeviceGetCount"))

    def card(self, index: int) -> Iterator[Gpu]:
        """A card with its figures, then its MIG instances.

        Raises Refused for one that is lost or does not even say who it is.
        """
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        uuid = self._ask("nvmlDeviceGetUUID", handle)
        pci = self._perhaps("nvmlDeviceGetPciInfo", handle)
        card = Gpu(
            uuid=uuid,
            bus_id="" if pci is None else pci.busId,
            name=self._perhaps("nvmlDeviceGetName", handle) or "GPU",
            index=index,
            is_split=self._is_split(handle),
        )
        self._watch(handle, uuid)
        yield self._with_figures(card, handle)
        if card.is_split:
            yield from self._instances(card, handle)

    def events(self) -> Iterator[Event]:
        """What was reported since the last time, of cards seen in this session."""
        for _ in range(_EVENTS_MAX if self._events is not None else 0):
            try:
                event = self._ask("nvmlEventSetWait", self._events, 0)
            except Refused:
                # Nothing more; or a card is lost, which the card will say itself.
                return
            is_xid = event.eventType == self._pynvml.nvmlEventTypeXidCriticalError
            yield Event(
                self._uuid_of_handle.get(_address(event.device), ""),
                None if event.gpuInstanceId == _NO_INSTANCE else event.gpuInstanceId,
                event.eventData if is_xid else 0,
            )

    def _ask(self, name: str, *args: Any) -> Any:
        """What pynvml's function answers. Raises Refused."""
        try:
            return getattr(self._pynvml, name)(*args)
        except self._pynvml.NVMLError as error:
            raise Refused(error.value, _ADVICE.get(error.value) or str(error)) from None

    def _perhaps(self, name: str, *args: Any) -> Any:
        """The same, None for a no. Raises Refused only if the GPU is lost."""
        try:
            return self._ask(name, *args)
        except Refused as refused:
            if refused.code in LOST:
                raise
            return None

    def _try(self, name: str, *args: Any) -> None:
        """The same where no answer matters."""
        try:
            self._ask(name, *args)
        except Refused:
            return

    def _watch(self, handle: Any, uuid: str) -> None:
        """Ask for a card's errors, once in a session. A card that reports none is as good."""
        if self._events is None or _address(handle) in self._uuid_of_handle:
            return
        self._uuid_of_handle[_address(handle)] = uuid
        wanted = self._pynvml.nvmlEventTypeXidCriticalError | self._pynvml.nvmlEventTypeDoubleBitEccError
        if kinds := wanted & (self._perhaps("nvmlDeviceGetSupportedEventTypes", handle) or 0):
            self._perhaps("nvmlDeviceRegisterEvents", handle, kinds, self._events)

    def _is_split(self, handle: Any) -> bool:
        mode = self._perhaps("nvmlDeviceGetMigMode", handle)
        return mode is not None and mode[0] == self._pynvml.NVML_DEVICE_MIG_ENABLE

    def _instances(self, card: Gpu, handle: Any) -> Iterator[Gpu]:
        for number in range(self._perhaps("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = self._perhaps("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            uuid = None if instance is None else self._perhaps("nvmlDeviceGetUUID", instance)
            if uuid is None:
                continue
            gpu = Gpu(
                uuid=uuid,
                bus_id=card.bus_id,
                name=self._perhaps("nvmlDeviceGetName", instance) or card.name,
                index=card.index,
                card_uuid=card.uuid,
                instance_ids=(
                    self._perhaps("nvmlDeviceGetGpuInstanceId", instance),
                    self._perhaps("nvmlDeviceGetComputeInstanceId", instance),
                ),
            )
            yield self._with_figures(gpu, instance)

    def _with_figures(self, gpu: Gpu, handle: Any) -> Gpu:
        use = self._perhaps("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self._perhaps("nvmlDeviceGetPowerUsage", handle)
        processes = self._processes(handle)
        return replace(
            self._with_memory(gpu, handle),
            use=None if use is None else use.gpu / 100,
            temperature_c=self._perhaps("nvmlDeviceGetTemperature", handle, self._pynvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            processes=processes,
            memory_ours_bytes=next((one.used_bytes for one in processes or () if one.is_ours), None),
        )

    def _with_memory(self, gpu: Gpu, handle: Any) -> Gpu:
        """The GPU with its memory. A card that has none of its own is unified; any other no keeps a GPU out."""
        try:
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        except Refused as refused:
            if refused.code in LOST:
                raise
            if gpu.is_split:
                # The sum is for root; its instances have figures of their own.
                return gpu
            if refused.code == Code.NOT_SUPPORTED and not gpu.is_instance:
                return replace(gpu, is_unified=True)
            return replace(gpu, state=GpuState.UNREADABLE, reason=f"its memory cannot be read: {refused.reason}")
        if memory.total == 0 and not gpu.is_instance:
            return replace(gpu, is_unified=True)
        return replace(
            gpu,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.used,
            memory_free_bytes=memory.free,
        )

    def _processes(self, handle: Any) -> tuple[Process, ...] | None:
        listed = self._perhaps("nvmlDeviceGetComputeRunningProcesses", handle)
        if listed is None:
            return None
        largest = sorted(listed, key=lambda seen: seen.usedGpuMemory or 0, reverse=True)[:_PROCESSES_MAX]
        return tuple(Process(seen.pid, seen.usedGpuMemory, seen.pid == os.getpid()) for seen in largest)


def _address(handle: Any) -> int:
    """Where an opaque handle points to: the same for the same card."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
