"""What `lqs check` says of the GPUs: which there are, and why one is not used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping

from lqs.engine.backends import has_cuda
from lqs.placement.cuda import Numbering, number_gpus, pin_order
from lqs.placement.gpus import Gpu, Snapshot
from lqs.placement.reader import Reader
from lqs.placement.standing import remarks, standings

_MB = 1_000_000


def gpu_lines(system_free_bytes: Callable[[], int], environ: MutableMapping[str, str]) -> Iterator[str]:
    """Read the GPUs once and tell of each, by CUDA's numbers."""
    reader = Reader(system_free_bytes)
    snapshot = reader.read(time.monotonic_ns())
    reader.close()
    pin_order(environ)
    numbering = number_gpus(snapshot.gpus, environ)
    for number, line in enumerate(_lines(snapshot, numbering)):
        yield f"{'' if number else 'GPUs':11}{line}"


def _lines(snapshot: Snapshot, numbering: Numbering) -> Iterator[str]:
    if not snapshot.gpus:
        yield f"none: {snapshot.problem or 'the driver lists none'}"
    for gpu, device, reason in standings(snapshot, numbering):
        words = f"{device} {_in_words(gpu)}".lstrip()
        yield f"{words}; not used: {reason}" if reason else words
    yield from remarks(snapshot, numbering, has_cuda=has_cuda())


def _in_words(gpu: Gpu) -> str:
    words = [part for part in (gpu.name, gpu.uuid, gpu.bus_id) if part]
    if gpu.is_unified:
        words.append("shares the machine's memory")
    elif gpu.memory_total_bytes is not None and gpu.memory_free_bytes is not None:
        words.append(f"{gpu.memory_free_bytes // _MB} of {gpu.memory_total_bytes // _MB} MB free")
    if gpu.use is not None:
        words.append(f"{gpu.use:.0%} in use")
    return ", ".join(words)
