"""A driver that says what a test wants: a library in C which the real pynvml loads, and its script."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
GB = 1_000_000_000


def compile_library(folder: Path, *flags: str) -> Path:
    """The library in a folder of its own, to be found there by LD_LIBRARY_PATH. Needs a C compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-pthread"]
    subprocess.run([*command, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


def card(uuid: str, bus: int = 1, *, free_gb: float = 20, total_gb: float = 24, **more: object) -> str:
    """A line for a card with all figures; None leaves one out."""
    values = {
        "uuid": uuid,
        "bus": f"00000000:{bus:02X}:00.0",
        "name": "RTX-4090",
        **memory(free_gb, total_gb),
        "use": 30,
        "temp": 50,
        "power": 90_000,
        **more,
    }
    return "card " + _written(values)


def instance(uuid: str, of: str, gi: int, *, free_gb: float = 9, total_gb: float = 10, **more: object) -> str:
    """A line for a MIG instance: its memory and nothing else, as it is."""
    values = {"uuid": uuid, "card": of, "gi": gi, "ci": 0, "name": "MIG-1g", **memory(free_gb, total_gb), **more}
    return "instance " + _written(values)


def memory(free_gb: float, total_gb: float) -> dict[str, int]:
    """What is free, and the rest as used."""
    return {"total": int(total_gb * GB), "free": int(free_gb * GB), "used": int((total_gb - free_gb) * GB)}


def _written(values: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items() if value is not None)


def replace_script(script: Path, *lines: str) -> None:
    """Write it anew, at once: nobody reads half of it."""
    fresh = script.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    fresh.replace(script)


class Driver:
    """The fake library in this process, and the script that it reads again at each call."""

    def __init__(self, library: Path, script: Path) -> None:
        self._script = script
        self.library = ctypes.CDLL(str(library))
        self.library.fake_reset()

    def says(self, *lines: str) -> None:
        """Replace the whole script at once."""
        replace_script(self._script, *lines)

    def vanishes(self) -> None:
        """No script: the driver is not loaded."""
        self._script.unlink(missing_ok=True)

    def calls(self, function: str) -> int:
        """How often a function was called and did what it should."""
        return int(self.library.fake_calls(function.encode()))

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return int(self.library.fake_sessions())

    @property
    def num_hanging(self) -> int:
        """Calls that do not return just now."""
        return int(self.library.fake_hanging())


def environ_of(library: Path, script: Path, lines: Sequence[str]) -> dict[str, str]:
    """What a new process needs to find the library and its script."""
    script.write_text("\n".join(lines) + "\n")
    return os.environ | {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(script)}
