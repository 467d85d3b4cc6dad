"""A device slot dies of an assert inside llama.cpp: everything else lives, and says so."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.fake_nvml import card, compile_library, environ_of, replace_script
from tests.server.client import Call, collect
from tests.server.conftest import Start
from tests.server.process import Server, until

CONFIG = """
engine.parallel = 2
engine.ctx = 100000
queue.hold_s = {hold_s}
server.drain_s = 1
server.close_s = 1
health.reload_attempts = 0
"""
LONG = 40_000
STEP = 2000


def assert_says_so(server: Server) -> None:
    """Whoever asks is told at once that nothing works, and that the process lives."""
    began_s = time.monotonic()
    assert server.ask("GET", "/readyz").status == 503
    health = server.ask("GET", "/health")
    assert (health.status, health.json["error"]["message"]) == (503, "No healthy device")
    assert server.ask("GET", "/livez").status == 200
    assert server.ask("GET", "/metrics").status == 200
    assert server.ask("GET", "/v1/models").json["data"][0]["meta"]["state"] == "failed"
    for stream in (False, True):
        refused = server.complete(1, stream=stream).answer()
        assert (refused.status, refused.code) == (503, "no_device")
        assert int(refused.headers["retry-after"]) >= 1
    assert server.metric("lqs_device_healthy") == 0
    assert server.metric("lqs_ready") == 0
    assert time.monotonic() - began_s < 5


def assert_told(stream: Call, *others: Call) -> None:
    """The stream had begun, the others had not."""
    told = collect(stream)
    assert told.error is not None
    assert (told.error["code"], told.is_done) == ("no_device", False)
    for call in others:
        answer = call.answer()
        assert (answer.status, answer.code) == (503, "no_device")


def dying(start: Start, tiny: Path, hold_s: float = 10) -> Server:
    return start(tiny, "--chaos", f"device_slot=0 abort@step={STEP}", config=CONFIG.format(hold_s=hold_s))


def test_an_assert_in_a_worker_ends_its_requests_and_nothing_else(start: Start, tiny: Path) -> None:
    """B57, B50: readiness fails, liveness stays, who comes then fails fast, the log says what happened."""
    server = dying(start, tiny)
    stream, whole = server.complete(LONG, stream=True), server.complete(LONG)
    server.wait_running(2)
    waiting = [server.complete(5), server.complete(5, stream=True)]
    told = collect(stream)
    assert told.text
    assert told.error is not None
    assert (told.error["code"], told.error["type"]) == ("no_device", "overloaded_error")
    assert (told.finish, told.is_done) == (None, False)
    for call in (whole, *waiting):
        answer = call.answer()
        assert (answer.status, answer.code, answer.headers["x-lqs-reason"]) == (503, "no_device", "no_device")
        assert int(answer.headers["retry-after"]) >= 1
    assert_says_so(server)
    assert server.metrics()['vllm:request_success_total{finished_reason="error"}'] == 2
    until(lambda: re.search(r"^error .*device slot does not work.*device=cpu:0.*GGML_ASSERT", server.log, re.MULTILINE))
    server.wait_at_rest()


def test_a_worker_that_freezes_is_found_and_told_of(start: Start, tiny: Path) -> None:
    """B57: its step never returns. Until the watchdog has found it probes answer all the same; then nothing says ok."""
    config = CONFIG.format(hold_s=10) + "engine.stall_s = 2\n"
    server = start(tiny, "--chaos", f"device_slot=0 hang@step={STEP}", config=config)
    stream, whole = server.complete(LONG, stream=True), server.complete(LONG)
    server.wait_running(2)
    waiting = [server.complete(5), server.complete(5, stream=True)]
    until(lambda: server.metric("lqs_device_steps_total") >= STEP - 1)
    assert server.ask("GET", "/livez").status == 200
    assert_told(stream, whole, *waiting)
    assert_says_so(server)
    assert server.metric("lqs_steps_stalled_total") == 1
    until(lambda: re.search(r"^error .*device slot does not work.*its step did not end", server.log, re.MULTILINE))
    server.wait_at_rest()


def test_a_card_that_is_lost_takes_the_only_device_slot_with_it(start: Start, tiny: Path, tmp_path: Path) -> None:
    """B57: a device slot on cores that counts as being on a card of the fake NVML, which falls off the bus."""
    script = tmp_path / "gpus"
    environ = environ_of(compile_library(tmp_path / "nvml"), script, [card("GPU-a")])
    config = CONFIG.format(hold_s=10) + "placement.nvml_s = 0.05\n"
    server = start(tiny, "--chaos", "device_slot=0 card=GPU-a", config=config, environ=environ)
    stream, whole = server.complete(LONG, stream=True), server.complete(LONG)
    server.wait_running(2)
    waiting = [server.complete(5), server.complete(5, stream=True)]
    replace_script(script, card("GPU-a"), "event card=GPU-a xid=79")
    assert_told(stream, whole, *waiting)
    assert_says_so(server)
    until(lambda: "its GPU is lost: the driver reported XID 79" in server.log)
    server.wait_at_rest()


def test_what_was_open_while_it_waited_is_told_in_the_stream(start: Start, tiny: Path) -> None:
    server = dying(start, tiny, hold_s=0)
    running = [server.complete(LONG) for _ in range(2)]
    server.wait_running(2)
    waiting = server.complete(5, stream=True)
    told = collect(waiting)
    assert told.error is not None
    assert told.error["code"] == "no_device"
    assert [call.answer().status for call in running] == [503, 503]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_with_a_dead_device_slot_still_ends_when_it_is_told(start: Start, tiny: Path, number: int) -> None:
    """B52: the parked thread is reported and left behind."""
    server = dying(start, tiny)
    assert server.complete(LONG).answer().status == 503
    server.signal(number)
    assert server.wait() == 0
    assert "workers" in server.log
    server.check_log()
