"""Models that cannot be loaded beside one that serves: told quickly, tried again later each time, costing nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.test_fleet import ask, standing

CONFIG = """
engine.ctx = 50000
engine.parallel = 2
engine.stall_s = 2
health.reload_attempts = 0
server.close_s = 1
[models.late]
path = "{late}"
on_demand = true
"""
# The device slot of `late`; that of the first model is 0.
LATE = 1
FAILURES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model that serves, and the late one: with weights large enough to be missed."""
    folder = tmp_path_factory.mktemp("models")
    shapes = ["tiny,ctx=100000", "tiny,ctx=4096,vocab=32000"]
    return [write(folder / f"m{n}.gguf", Recipe(shape=parse_shape(shape), seed=n)) for n, shape in enumerate(shapes)]


def num_failed(server: Server) -> int:
    return server.log.count("model not loaded")


def test_polls_of_a_model_that_cannot_be_loaded_are_answered_at_once_and_start_no_load(
    start: Start, files: list[Path]
) -> None:
    """B55: its weights come, its device slot does not open; beside it a stream goes on undisturbed."""
    drill = f"device_slot={LATE} fail-load times=99"
    server = start(files[0], "--chaos", drill, config=CONFIG.format(late=files[1]))
    stream = server.complete(4000, stream=True)
    server.wait_running()
    assert ask(server, "late").code == "no_device"
    began_s = time.monotonic()
    for _ in range(20):
        polled_s = time.monotonic()
        refused = ask(server, "late")
        assert time.monotonic() - polled_s < 1
        assert (refused.status, refused.code) == (503, "no_device")
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        listed = {each["id"]: each["meta"]["state"] for each in server.ask("GET", "/v1/models").json["data"]}
        assert listed == {"m0": "ready", "late": "absent"}
    if time.monotonic() - began_s < 4:
        assert num_failed(server) == 1
    told = collect(stream)
    assert (told.finish, told.is_done) == ("length", True)


def test_failed_loads_leave_nothing_behind(start: Start, files: list[Path]) -> None:
    """B55, B53: an admin tries again and again; memory, files and threads are as after the first time."""
    drill = f"device_slot={LATE} fail-load times={FAILURES}"
    server = start(files[0], "--chaos", drill, config=CONFIG.format(late=files[1]))
    before: tuple[int, int, int] | None = None
    for n in range(1, FAILURES + 1):
        assert server.ask("POST", "/admin/models/late/load").status == 202
        until(lambda n=n: num_failed(server) == n and standing(server)["late"] == "absent")  # type: ignore[misc]
        before = before or (server.num_files, server.num_threads, server.memory_bytes)
    num_files, num_threads, memory_bytes = before
    # Half of its weights, over all the loads that came after the first.
    assert server.memory_bytes < memory_bytes + files[1].stat().st_size // 2
    # The threads that loaded have ended, or are about to.
    until(lambda: server.num_files <= num_files and server.num_threads <= num_threads)
    # The drill is over: the next try finds everything in order.
    assert server.ask("POST", "/admin/models/late/load").status == 202
    until(lambda: standing(server)["late"] == "ready")
    assert ask(server, "late").status == 200


def test_a_broken_file_that_is_put_right_is_loaded_once_that_was_seen(
    start: Start, files: list[Path], tmp_path: Path
) -> None:
    """B55, B53: nobody has to wait for the end of the back-off, nor to call an admin; the other model serves on."""
    late = tmp_path / "late.gguf"
    good = files[1].read_bytes()
    late.write_bytes(good)
    server = start(files[0], config=CONFIG.format(late=late))
    late.write_bytes(good[:1000])
    for _ in range(3):
        assert ask(server, "late").code == "no_device"
        assert ask(server, "m0").status == 200
    assert num_failed(server) == 1
    late.write_bytes(good)
    until(lambda: "model file has changed" in server.log)
    assert ask(server, "late").status == 200


def test_a_model_is_loaded_while_another_ones_step_never_returns_and_after_it_was_found(
    start: Start, files: list[Path]
) -> None:
    """B55: the watchdog waits for nobody, and holds nothing that a load needs."""
    server = start(files[0], "--chaos", "device_slot=0 hang@step=100", config=CONFIG.format(late=files[1]))
    stream = server.complete(40_000, stream=True)
    until(lambda: server.metric("lqs_device_steps_total") >= 99)
    assert ask(server, "late").status == 200
    told = collect(stream)
    assert told.error is not None
    assert told.error["code"] == "no_device"
    assert server.metric("lqs_steps_stalled_total") == 1
    assert ask(server, "m0").code == "no_device"
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server)["late"] == "absent")
    assert ask(server, "late").status == 200
    assert server.ask("GET", "/readyz").status == 200
