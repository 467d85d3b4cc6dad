"""Which number CUDA gives to each GPU, or why one is not used: the same words for `lqs check` and the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lqs.placement.cuda import ORDER, Numbering
from lqs.placement.devices import why_not
from lqs.placement.gpus import Gpu, Snapshot


class Standing(NamedTuple):
    """A GPU as this process sees it. `device` is empty where CUDA does not count it, `reason` where it may be used."""

    gpu: Gpu
    device: str
    reason: str


def standings(snapshot: Snapshot, numbering: Numbering) -> Iterator[Standing]:
    """Every GPU: those that CUDA counts in its order, then the others in the driver's."""
    for number, gpu in enumerate(numbering.gpus):
        yield Standing(gpu, f"cuda:{number}", why_not(gpu, numbering))
    seen = {gpu.uuid for gpu in numbering.gpus}
    for gpu in snapshot.gpus:
        if gpu.uuid not in seen:
            yield Standing(gpu, "", why_not(gpu, numbering))


def remarks(snapshot: Snapshot, numbering: Numbering, *, has_cuda: bool) -> Iterator[str]:
    """What holds for all of them."""
    if not numbering.is_sure:
        yield f"these numbers are a guess, for CUDA begins with the card it takes for the fastest; {ORDER}=PCI_BUS_ID"
    if snapshot.gpus and not has_cuda:
        yield "llama-cpp-python is built without CUDA, so no GPU is used"
