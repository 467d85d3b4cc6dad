"""Says in the log what happens to the GPUs: once when it begins, once when it ends, with the reason."""

from __future__ import annotations

from lqs.observe.log import Log
from lqs.placement.gpus import Gpu, GpuState, Snapshot

_MB = 1_000_000
# Free memory counts as back only this much above the margin, so that a figure on the edge writes no line a second.
_BACK_AT = 1.25


class Notices:
    """Compares each snapshot with the one before. `margin_bytes` is what should stay free on a GPU.

    Owner: the poller's thread.
    """

    def __init__(self, log: Log, margin_bytes: int) -> None:
        self._log = log
        self._margin_bytes = margin_bytes
        self._problem: str | None = None  # None before the first snapshot.
        self._seen: dict[str, Gpu] = {}
        self._short: frozenset[str] = frozenset()

    def look(self, snapshot: Snapshot) -> None:
        """Write what is new."""
        if snapshot.problem != self._problem:
            self._tell_problem(snapshot)
        for gpu in snapshot.gpus:
            before = self._seen.get(gpu.uuid)
            if before is None:
                self._introduce(gpu)
            # While nothing can be asked, one line for all of them is enough.
            elif not snapshot.problem or gpu.state is GpuState.FAILED:
                self._tell_state(before, gpu)
            self._tell_errors(before, gpu)
        self._short = frozenset(gpu.uuid for gpu in snapshot.gpus if self._is_short(gpu))
        # What was seen before all went silent is what it is compared with when it answers again.
        silent = {gpu.uuid for gpu in snapshot.gpus if snapshot.problem and gpu.state is not GpuState.FAILED}
        self._seen = {gpu.uuid: self._seen[gpu.uuid] if gpu.uuid in silent else gpu for gpu in snapshot.gpus}

    def _tell_problem(self, snapshot: Snapshot) -> None:
        is_first, self._problem = self._problem is None, snapshot.problem
        if not snapshot.problem:
            self._log.info("NVML answers", driver=snapshot.driver, gpus=len(snapshot.gpus))
        elif is_first:
            # The usual case of a machine without a GPU.
            self._log.info("no GPUs", reason=snapshot.problem)
        else:
            self._log.warning("NVML does not answer", reason=snapshot.problem)

    def _introduce(self, gpu: Gpu) -> None:
        if gpu.state is not GpuState.OK:
            self._tell_out(gpu)
            return
        fields = {"gpu": gpu.uuid, "bus": gpu.bus_id, "name": gpu.name, "free_mb": _mb(gpu.memory_free_bytes)}
        if gpu.is_unified:
            fields["memory"] = "shared with the machine"
        if gpu.is_split:
            fields["use"] = "by its MIG instances only"
        if gpu.missing:
            fields["unknown"] = ",".join(gpu.missing)
        self._log.info("GPU", **fields)

    def _tell_state(self, before: Gpu, gpu: Gpu) -> None:
        if (before.state, before.reason) == (gpu.state, gpu.reason):
            return
        if gpu.state is GpuState.OK:
            self._log.info("GPU answers again", gpu=gpu.uuid, free_mb=_mb(gpu.memory_free_bytes))
        else:
            self._tell_out(gpu)

    def _tell_out(self, gpu: Gpu) -> None:
        if gpu.state is GpuState.FAILED:
            advice = "it is used again after a restart"
            self._log.error("GPU failed", gpu=gpu.uuid, bus=gpu.bus_id, reason=gpu.reason, advice=advice)
        else:
            self._log.warning("GPU cannot be read", gpu=gpu.uuid, bus=gpu.bus_id, reason=gpu.reason)

    def _tell_errors(self, before: Gpu | None, gpu: Gpu) -> None:
        if gpu.num_xids > (before.num_xids if before else 0):
            self._log.warning("GPU reported an error", gpu=gpu.uuid, xid=gpu.last_xid, total=gpu.num_xids)

    def _is_short(self, gpu: Gpu) -> bool:
        """Whether too little is free, and the line about it."""
        was_short = gpu.uuid in self._short
        if gpu.memory_free_bytes is None or gpu.is_split:
            return was_short
        margin = self._margin_bytes * _BACK_AT if was_short else self._margin_bytes
        is_short = gpu.memory_free_bytes < margin
        if is_short and not was_short:
            self._log.warning("GPU memory is short", gpu=gpu.uuid, free_mb=_mb(gpu.memory_free_bytes), **_takers(gpu))
        elif was_short and not is_short:
            self._log.info("GPU memory is free again", gpu=gpu.uuid, free_mb=_mb(gpu.memory_free_bytes))
        return is_short


def _takers(gpu: Gpu) -> dict[str, int]:
    """Who took the memory, as far as the driver says: others all together, and the largest of them."""
    fields: dict[str, int] = {}
    if gpu.memory_used_bytes is not None and gpu.memory_ours_bytes is not None:
        fields["others_mb"] = _mb(gpu.memory_used_bytes - gpu.memory_ours_bytes)
    if others := [one for one in gpu.processes or () if not one.is_ours]:
        fields |= {"largest_pid": others[0].pid, "largest_mb": _mb(others[0].used_bytes)}
    return fields


def _mb(num_bytes: int | None) -> int:
    return (num_bytes or 0) // _MB
