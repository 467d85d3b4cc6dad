"""Which GPUs cannot be used any more."""

from __future__ import annotations

from lqs.placement.gpus import GpuState, Snapshot


def lost_gpus(snapshot: Snapshot) -> dict[str, str]:
    """Why, by UUID, for each that has failed."""
    return {gpu.uuid: gpu.reason for gpu in snapshot.gpus if gpu.state is GpuState.FAILED}
