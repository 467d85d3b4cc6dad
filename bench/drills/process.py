"""`lqs serve` as a drill needs it: its process, what it counts, and waiting."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.load.client import Client
from tests.fake_nvml import card, environ_of, replace_script

WAIT_S, STOP_S = 120.0, 60.0
CONFIG = """
engine.devices = ["cpu:0", "cpu:1"]
engine.ctx = 8192
engine.stall_s = 2.0
health.reload_backoff_s = 0.5
server.drain_s = 5
server.close_s = 2
log.access = false
queue.entry_per_s = 0
"""
_SAMPLE = re.compile(r"^([a-z_:]+)(\{.*\})? (\S+)$", re.MULTILINE)


class DrillFailed(Exception):
    """A run was not as it must be; the message says in what."""


async def until(holds: Callable[[], Awaitable[bool]], failure: str) -> None:
    """Ask again and again. Raises DrillFailed with `failure` after WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while True:
        if await holds():
            return
        if time.monotonic() > end_s:
            raise DrillFailed(failure)
        await asyncio.sleep(0.05)


class Process:
    """`lqs serve` with two device slots, on a free port. `nvml` is the driver that it finds."""

    def __init__(self, folder: Path, threads: int, drill: str, nvml: Path) -> None:
        self._script = folder / "gpus"
        (folder / "lqs.toml").write_text(CONFIG)
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "lqs", "serve", "--config", str(folder / "lqs.toml"), "--port", "0"]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", str(threads), "--chaos", drill],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ_of(nvml, self._script, [card("GPU-a")]),
            )

    async def ready(self) -> Client:
        """Wait until requests are let in. Raises DrillFailed."""

        async def is_ready() -> bool:
            if self._process.poll() is not None:
                raise DrillFailed("it did not start: " + self.log[-2000:])
            return re.search(r"^info +ready ", self.log, re.MULTILINE) is not None

        await until(is_ready, "it did not start")
        found = re.search(r"listening .*port=(\d+)", self.log)
        assert found is not None
        return Client("127.0.0.1", int(found[1]))

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lose_card(self) -> None:
        """Let the driver say that the card is gone."""
        replace_script(self._script, card("GPU-a"), "event card=GPU-a xid=79")

    async def end(self) -> int:
        """End it as an operator does; its exit code."""
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, STOP_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def figures(client: Client) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    text = (await client.get("/metrics", timeout_s=10.0)).text
    return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)
