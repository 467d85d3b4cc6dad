"""A model's file changes under a server that has it mapped: what that model, and all others, do then."""

from __future__ import annotations

import os
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
health.reload_backoff_s = 0.1
health.reload_attempts = 1
server.drain_s = 1
server.close_s = 1
[models.late]
path = "{late}"
on_demand = true
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The model that goes on, and the one whose file is damaged."""
    shape = parse_shape("tiny,ctx=100000")
    return [write(tmp_path / f"m{seed}.gguf", Recipe(shape=shape, seed=seed)) for seed in range(2)]


def out_of_use(server: Server) -> bool:
    return "device slot stays out until lqs is restarted device=cpu:0@late" in server.log


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_is_cut_short_after_the_load_takes_its_model_out_and_no_other(
    start: Start, files: list[Path], threads: int
) -> None:
    """B53: the read of a page that is gone ends that device slot, not the process; put right, it is loaded anew."""
    good = files[1].read_bytes()
    server = start(files[0], "--threads", str(threads), config=CONFIG.format(late=files[1]))
    whole = ask(server, "late").text
    beside = server.complete(3000, stream=True)
    server.wait_running()
    os.truncate(files[1], 4096)
    broken = ask(server, "late")
    assert (broken.status, broken.code) == (503, "no_device")
    until(lambda: out_of_use(server))
    assert "a part of the model file cannot be read any more" in server.log
    # Everybody else hears nothing of it.
    told = collect(beside)
    assert (told.finish, told.is_done) == ("length", True)
    assert ask(server, "m0").status == 200
    assert server.ask("GET", "/readyz").status == 200
    assert ask(server, "late").code == "no_device"
    # Another file in its place; what the dead one stands on is kept, and the new one is beside it.
    fresh = files[1].with_suffix(".new")
    fresh.write_bytes(good)
    fresh.replace(files[1])
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server)["late"] == "absent")
    assert "unloaded, but its memory is not free: a thread may stand in it" in server.log
    assert ask(server, "late").text == whole
    server.signal()
    assert server.wait() == 0
    server.check_log()


def test_a_file_that_is_replaced_or_removed_after_the_load_is_served_as_it_was(start: Start, files: list[Path]) -> None:
    """B53: the old file stays mapped; the new one comes with the next load."""
    server = start(files[0], config=CONFIG.format(late=files[1]))
    texts = {name: ask(server, name).text for name in ("m0", "late")}
    assert texts["m0"] != texts["late"]
    fresh = files[1].with_suffix(".new")
    fresh.write_bytes(files[0].read_bytes())
    fresh.replace(files[1])
    assert ask(server, "late").text == texts["late"]
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server)["late"] == "absent")
    assert ask(server, "late").text == texts["m0"]
    files[1].unlink()
    assert ask(server, "late").text == texts["m0"]
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server)["late"] == "absent")
    refused = ask(server, "late")
    assert (refused.status, refused.code) == (503, "no_device")
    assert f"{files[1]}" in server.log
    assert ask(server, "m0").text == texts["m0"]
