"""A server with little memory: what is planned, told, counted and run are the same few sequences."""

from __future__ import annotations

from pathlib import Path

from lqs.engine.plan import make_plan
from lqs.settings import load
from tests.server.conftest import Start

CONFIG = "engine.memory_mb = [1]\nengine.prefix_cache = false\n"


def test_as_many_run_at_once_as_there_is_memory_for_and_the_others_wait(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "lqs.toml"
    file.write_text(CONFIG)
    (planned,) = make_plan(load(str(file)), tiny).slots
    assert 1 < planned.num_sequences == planned.kv_tokens // 256 < 8
    server = start(tiny, config=CONFIG)
    num = planned.num_sequences
    assert f"device slot runs fewer sequences device=cpu:0 sequences={num} wanted=32" in server.log.replace('"', "")
    (shown,) = server.ask("GET", "/admin/devices").json["data"]
    assert (shown["sequences"], shown["kv_tokens"]["total"]) == (num, planned.kv_tokens)
    assert server.metrics()['lqs_device_sequences{device="cpu:0"}'] == num
    calls = [server.complete(150, stream=False, seed=number) for number in range(3 * num)]
    assert [call.answer().status for call in calls] == [200] * (3 * num)
    server.wait_at_rest()
