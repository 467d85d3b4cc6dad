"""Reads what a server costs from outside: its CPU time, and how much of it llama_decode took."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("decode_clock.c")
_TOTALS = struct.Struct("<3Q")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of a server so far, and of the thread that decodes; differences are what counts.

    Without a C compiler no decode is counted and `num_decodes` stays 0.
    """

    process_s: float
    decoder_s: float
    decode_s: float
    num_decodes: int

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(
            self.process_s - earlier.process_s,
            self.decoder_s - earlier.decoder_s,
            self.decode_s - earlier.decode_s,
            self.num_decodes - earlier.num_decodes,
        )


@dataclass(frozen=True, slots=True)
class DecodeClock:
    """The preloaded library that counts time inside llama_decode, and the file it counts in."""

    library: Path | None
    totals: Path

    @classmethod
    def create(cls, folder: Path) -> DecodeClock:
        """Prepare a clock for one server."""
        totals = folder / "decode_clock"
        totals.write_bytes(bytes(_TOTALS.size))
        return cls(_library(), totals)

    def environment(self) -> dict[str, str]:
        """Return the variables that put the clock into a server."""
        if self.library is None:
            return {}
        return {"LD_PRELOAD": str(self.library), "DECODE_CLOCK_FILE": str(self.totals)}

    def read(self, pid: int) -> Cost:
        """Return what the server has cost until now."""
        decode_ns, num_calls, thread = _TOTALS.unpack(self.totals.read_bytes())
        decoder_s = thread_cpu_s(pid, thread) if num_calls else 0.0
        return Cost(process_cpu_s(pid), decoder_s, decode_ns / 1e9, num_calls)


@functools.cache
def _library() -> Path | None:
    """Compile the clock once for this run; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(_build_folder(), "decode_clock.so")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


@functools.cache
def _build_folder() -> str:
    return tempfile.mkdtemp(prefix="lqs-bench-")


def process_cpu_s(pid: int) -> float:
    """Return user and system time of a process and of its threads that have ended."""
    return ticks_of(Path(f"/proc/{pid}/stat").read_text()) / _TICKS_PER_S


def thread_cpu_s(pid: int, thread: int) -> float:
    """Return the CPU time of one thread, in nanoseconds' resolution where the kernel keeps it."""
    folder = Path(f"/proc/{pid}/task/{thread}")
    schedstat = folder / "schedstat"
    if schedstat.exists():
        return int(schedstat.read_text().split()[0]) / 1e9
    return ticks_of((folder / "stat").read_text()) / _TICKS_PER_S


def ticks_of(stat: str) -> int:
    """Return user + system ticks from a stat line; the name in it may hold blanks and brackets."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
