"""Device slots and models open one after another, and each takes requests as soon as it is open. Real process."""

from __future__ import annotations

from pathlib import Path

from tests.server.conftest import Start
from tests.server.process import Server, until

# Opening the second one takes longer than any answer here.
DRILL = "device_slot=1 slow-load for=3s"
OPENED = "device slot opened device={}"


def is_open(server: Server, device: str) -> bool:
    return OPENED.format(device) + " " in server.log


def test_a_device_slot_answers_while_the_next_still_opens(start: Start, tiny: Path) -> None:
    config = 'engine.devices = ["cpu:0", "cpu:1"]\nengine.ctx = 4096\nengine.parallel = 1\n'
    server = start(tiny, "--chaos", DRILL, config=config, is_ready=False)
    until(lambda: is_open(server, "cpu:0"))
    until(lambda: server.metrics().get('lqs_device_healthy{device="cpu:0"}') == 1)
    answer = server.complete(5).answer()
    assert (answer.status, answer.usage[1]) == (200, 5)
    # The probe waits for all of them.
    ready = server.ask("GET", "/readyz")
    assert (ready.status, ready.json) == (503, {"status": "model_loading"})
    assert not is_open(server, "cpu:1")
    server.wait_ready()
    assert is_open(server, "cpu:1")
    # Only one runs at a time on each, so these are on both.
    calls = [server.complete(200) for _ in range(2)]
    assert [call.answer().status for call in calls] == [200] * 2
    assert server.metrics()['lqs_device_prefill_tokens_total{device="cpu:1"}'] > 0


def test_a_model_answers_while_the_next_still_opens(start: Start, tiny: Path) -> None:
    config = f'engine.ctx = 4096\n[models.second]\npath = "{tiny}"\n'
    server = start(tiny, "--chaos", DRILL, config=config, is_ready=False)
    until(lambda: is_open(server, "cpu:0"))
    until(lambda: server.metrics().get('lqs_device_healthy{device="cpu:0"}') == 1)
    assert server.complete(5).answer().status == 200
    refused = server.complete(5, model="second").answer()
    assert (refused.status, refused.code) == (503, "model_loading")
    assert not is_open(server, "cpu:0@second")
    server.wait_ready()
    answer = server.complete(5, model="second").answer()
    assert (answer.status, answer.json["model"]) == (200, "second")
