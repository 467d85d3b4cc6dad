"""Cores and memory of this machine, as far as this process may use them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from lqs.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def cores_of(groups: Sequence[str], number: int) -> frozenset[int]:
    """The cores of `cpu:number`, `0-3,6` each; empty: any. Raises ConfigError for what is not there."""
    if number >= len(groups):
        return frozenset()
    cores = set[int]()
    for part in groups[number].split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        lacking = in_ranges(missing) or "any"
        raise ConfigError(
            f"engine.cores: cpu:{number} has {groups[number]!r}, but this process has not core {lacking}."
        )
    return frozenset(cores)


def in_ranges(cores: Collection[int]) -> str:
    """Numbers as `engine.cores` has them: `0-3,6`."""
    words, first = [], -1
    for number in sorted(cores):
        if number - 1 not in cores:
            first = number
        if number + 1 not in cores:
            words.append(str(number) if number == first else f"{first}-{number}")
    return ",".join(words)


def memory_free_bytes() -> int:
    """Memory that is available, cgroup limits included."""
    free = [_meminfo_available(Path("/proc/meminfo").read_text())]
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - int(used.read_text()))
    return max(min(free), 0)


def _meminfo_available(text: str) -> int:
    """Bytes of the line `MemAvailable:  1234 kB`."""
    lines = (line.split() for line in text.splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
