"""Reads all GPUs into a snapshot, again and again, whatever happens to them meanwhile.

No driver, no GPU, a figure that a GPU does not have, a card that falls off its bus, a driver that goes away
and comes back: each is a value in what `read` returns, never an exception. What stays between two reads:

    session    opened by the first read that can, until NVML as a whole refuses; the next read tries again.
    known      the GPUs of the last read by UUID, so that one which no longer answers still has a name.
    failed     why a GPU is broken for this process. It stays: CUDA's error does, whatever NVML says later.
    xids       how many errors the driver reported of a GPU, and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lqs.placement.gpus import NAMELESS, Gpu, GpuState, Snapshot
from lqs.placement.nvml import LOST, SESSION_OVER, Event, Nvml, Refused

# GPUs remembered that are no longer listed, at most.
_GONE_MAX = 64
# Errors that a program brings on itself, and notes: the card goes on. The list is that of NVIDIA's device
# plugin for Kubernetes, with a repaired memory row (63) and a contained memory error (94).
_HARMLESS_XIDS = frozenset({13, 31, 43, 45, 63, 68, 94, 109})


class Reader:
    """What is known of the GPUs, kept up to date by `read`.

    `system_free_bytes` tells what the machine has free, for GPUs that share its memory.

    Owner: the thread that reads; the same one closes.
    """

    def __init__(self, system_free_bytes: Callable[[], int]) -> None:
        self._system_free_bytes = system_free_bytes
        self._nvml = Nvml()
        self._uuid_of_index: dict[int, str] = {}
        self._known: dict[str, Gpu] = {}
        self._failed: dict[str, str] = {}
        self._xids: dict[str, tuple[int, int]] = {}

    def read(self, now_ns: int) -> Snapshot:
        """Look at every GPU once. Takes milliseconds, or as long as the driver hangs."""
        try:
            if not self._nvml.is_open:
                self._uuid_of_index.clear()
                self._nvml.open()
            for event in self._nvml.events():
                self._note(event)
            self._remember(self._listed())
        except Exception as error:
            # A library that answers what it never should is as good as one that refuses.
            reason = error.reason if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            self._nvml.close()
            gpus = (self._judged(_blank(gpu, reason)) for gpu in self._known.values())
            return Snapshot(now_ns, reason, "", tuple(gpus))
        return Snapshot(now_ns, "", self._nvml.driver, tuple(self._judged(gpu) for gpu in self._known.values()))

    def close(self) -> None:
        """End the session with NVML, if there is one."""
        self._nvml.close()

    def _note(self, event: Event) -> None:
        """Count an error, and take out what it broke."""
        for uuid in [gpu.uuid for gpu in self._known.values() if _concerns(event, gpu)]:
            count, _ = self._xids.get(uuid, (0, 0))
            self._xids[uuid] = (count + 1, event.xid)
            if not event.xid:
                self._failed.setdefault(uuid, "its memory lost data (double-bit ECC error)")
            elif event.xid not in _HARMLESS_XIDS:
                self._failed.setdefault(uuid, f"the driver reported XID {event.xid}")

    def _listed(self) -> dict[str, Gpu]:
        """Every card and instance that NVML lists, by UUID. Raises Refused where NVML as a whole refuses."""
        found: dict[str, Gpu] = {}
        num_cards, refusals = self._nvml.num_cards(), []
        for index in range(num_cards):
            try:
                gpus = list(self._nvml.card(index))
                self._uuid_of_index[index] = gpus[0].uuid
            except Refused as refused:
                refusals.append(refused)
                gpus = list(self._refusing(index, refused))
            found |= {gpu.uuid: gpu for gpu in gpus}
        if refusals and len(refusals) == num_cards and all(one.code in SESSION_OVER for one in refusals):
            raise refusals[0]
        return found

    def _refusing(self, index: int, refused: Refused) -> Iterator[Gpu]:
        """A card that does not answer, by the name that it had, and its instances."""
        uuid = self._uuid_of_index.get(index, "")
        if not uuid:
            yield Gpu(uuid=f"{NAMELESS}{index}", index=index, state=GpuState.UNREADABLE, reason=refused.reason)
        for gpu in self._known.values():
            if uuid and uuid in (gpu.uuid, gpu.card_uuid):
                if refused.code in LOST:
                    self._failed.setdefault(gpu.uuid, refused.reason)
                yield _blank(gpu, refused.reason)

    def _remember(self, found: dict[str, Gpu]) -> None:
        """Keep what was found. What is no longer listed is gone for this process."""
        gone = [gpu for uuid, gpu in self._known.items() if uuid not in found and not gpu.is_nameless]
        for gpu in gone:
            reason = "the MIG instance was removed" if gpu.is_instance else "the driver no longer lists it"
            self._failed.setdefault(gpu.uuid, reason)
        self._known = found | {gpu.uuid: _blank(gpu, "gone") for gpu in gone[-_GONE_MAX:]}
        self._failed = {uuid: reason for uuid, reason in self._failed.items() if uuid in self._known}
        self._xids = {uuid: xids for uuid, xids in self._xids.items() if uuid in self._known}

    def _judged(self, gpu: Gpu) -> Gpu:
        """The GPU with what was reported of it; failed, once it or its card did."""
        num_xids, last_xid = self._xids.get(gpu.uuid, (0, 0))
        gpu = replace(gpu, num_xids=num_xids, last_xid=last_xid)
        if reason := self._failed.get(gpu.uuid) or self._failed.get(gpu.card_uuid):
            return replace(gpu, state=GpuState.FAILED, reason=reason)
        if gpu.is_unified and gpu.state is GpuState.OK:
            return replace(gpu, memory_free_bytes=self._system_free_bytes())
        return gpu


def _concerns(event: Event, gpu: Gpu) -> bool:
    """Whether an event means this GPU: of a split card the instance that it names, or else all of it."""
    if not event.card_uuid or event.card_uuid not in (gpu.uuid, gpu.card_uuid):
        return False
    if event.gpu_instance is None or gpu.instance_ids is None:
        # A card that is not split may still get a number, which means nothing then.
        return event.gpu_instance is None or not gpu.is_split
    return gpu.instance_ids[0] == event.gpu_instance


def _blank(gpu: Gpu, reason: str) -> Gpu:
    """Who it is, without its figures."""
    return Gpu(
        uuid=gpu.uuid,
        bus_id=gpu.bus_id,
        name=gpu.name,
        index=gpu.index,
        card_uuid=gpu.card_uuid,
        instance_ids=gpu.instance_ids,
        is_split=gpu.is_split,
        is_unified=gpu.is_unified,
        state=GpuState.UNREADABLE,
        reason=reason,
    )
