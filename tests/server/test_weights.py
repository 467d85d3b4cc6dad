"""A config that is read again gives device slots other shares, and names what of it waits for a restart."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
engine.devices = ["cpu:0", "cpu:1"]
engine.ctx = 8192
engine.prefix_cache = false
"""


def shown(server: Server, what: str) -> list[Any]:
    """A figure of each device slot."""
    return [slot[what] for slot in server.ask("GET", "/admin/devices").json["data"]]


def shares(server: Server, num: int) -> list[int]:
    """Let so many begin one after another, each while those before it run: how many run on each device slot."""
    calls = []
    for number in range(num):
        calls.append(server.complete(8000, stream=True, seed=number))
        server.wait_running(number + 1)
    running: list[int] = shown(server, "running")
    for call in calls:
        call.close()
    server.wait_running(0)
    return running


def test_changed_weights_are_taken_over_and_what_waits_for_a_restart_is_named(start: Start, tiny: Path) -> None:
    server = start(tiny, config=CONFIG + "placement.weights = [1, 1]\nplacement.lanes = ['both']\n")
    assert shown(server, "weight") == [1, 1]
    assert shares(server, 4) == [2, 2]
    changed = "placement.weights = [3, 1]\nplacement.lanes = ['short', 'long']\nhealth.reload_attempts = 1\n"
    server.log_path.with_name("lqs.toml").write_text(CONFIG + changed)
    server.signal(signal.SIGHUP)
    until(lambda: "reloaded" in server.log)
    until(lambda: "wait for a restart" in server.log)
    (line,) = [line for line in server.log.splitlines() if "wait for a restart" in line]
    assert Counter(line.partition("settings=")[2].strip('"').split(",")) == Counter(["health", "placement.lanes"])
    # Who asks for it by a call is told the same.
    told = server.ask("POST", "/admin/reload").json
    assert (told["status"], sorted(told["wait_for_restart"])) == ("reloaded", ["health", "placement.lanes"])
    assert "an admin asks call=/admin/reload by=" in server.log
    assert shown(server, "weight") == [3, 1]
    assert shares(server, 4) == [3, 1]
