"""Where a device slot stands after it broke, as a real server shows it to who asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
engine.devices = ["cpu:0", "cpu:1"]
engine.ctx = 4096
server.close_s = 1
health.reload_attempts = {attempts}
health.reload_backoff_s = {backoff_s}
health.probation_steps = 1000000
"""


def slot(server: Server) -> Any:
    """The second device slot."""
    return server.ask("GET", "/admin/devices").json["data"][1]


def states(server: Server) -> dict[str, list[str]]:
    """The states of each device slot, as the metrics have them."""
    shown = [key for key, value in server.metrics().items() if key.startswith("lqs_device_state{") and value]
    return {
        device: [key.split('state="')[1].rstrip('"}') for key in shown if f'device="{device}"' in key]
        for device in ("cpu:0", "cpu:1")
    }


@pytest.mark.parametrize(
    ("attempts", "backoff_s", "state"), [(3, 60, "backoff"), (0, 1, "quarantined"), (3, 0.1, "probation")]
)
def test_what_becomes_of_a_device_slot_that_broke_can_be_seen(
    start: Start, tiny: Path, attempts: int, backoff_s: float, state: str
) -> None:
    config = CONFIG.format(attempts=attempts, backoff_s=backoff_s)
    server = start(tiny, "--chaos", "device_slot=1 abort@step=5", config=config)
    assert [each["state"] for each in server.ask("GET", "/admin/devices").json["data"]] == ["ready"] * 2
    first = server.complete(3000)
    server.wait_running(1)
    # So this one begins at the other device slot.
    assert server.complete(50).answer().status == first.answer().status == 200
    until(lambda: slot(server)["state"] == state)
    health = slot(server)["health"]
    assert health["stage"] == state
    assert states(server) == {"cpu:0": ["ready"], "cpu:1": [state]}
    if state == "backoff":
        assert "GGML_ASSERT" in health["reason"]
        assert (health["attempts"], health["attempts_left"]) == (0, 3)
        assert 10 < health["next_attempt_s"] <= 60
    elif state == "quarantined":
        assert (health["attempts"], health["attempts_left"], health["next_attempt_s"]) == (0, 0, None)
    else:
        assert (health["reason"], health["next_attempt_s"]) == ("it was opened anew", None)
    # The core keeps what the dead one slept on.
    server.start_figures["files"] = server.num_files
