"""Which GPUs cannot be used any more, of those that matter to somebody."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lqs.placement.gpus import GpuState, Snapshot
from lqs.placement.poller import Poller
from lqs.placement.reader import Reader

_POLL_S = 0.5


def lost_gpus(snapshot: Snapshot, of: Collection[str]) -> dict[str, str]:
    """Why, by UUID, for each of those that has failed."""
    return {gpu.uuid: gpu.reason for gpu in snapshot.gpus if gpu.uuid in of and gpu.state is GpuState.FAILED}


def watch_gpus(of: Collection[str], system_free_bytes: Callable[[], int]) -> Callable[[], Mapping[str, str]]:
    """What tells at once which of them are lost. Where there are none, nothing is ever asked.

    The thread that reads begins with the first question; it is a daemon, which may hang in the driver.
    """
    if not of:
        return dict
    poller = Poller(lambda: Reader(system_free_bytes), interval_s=_POLL_S)
    is_started = False

    def lost() -> Mapping[str, str]:
        nonlocal is_started
        if not is_started:
            is_started = True
            poller.start()
        return lost_gpus(poller.latest, of)

    return lost
