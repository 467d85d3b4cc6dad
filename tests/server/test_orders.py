"""What an operator said of device slots holds for as long as the server lives, whatever becomes of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from tests.server.client import Answer, Call, collect
from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.test_fleet import standing

CONFIG = """
server.close_s = 1
queue.timeout_s = 20
[engine]
devices = ["cpu:0", "cpu:1"]
ctx = 4096
parallel = 4
prefix_cache = false
inter_token_target_ms = 20
[health]
reload_backoff_s = 0.1
"""
LONG = 90_000
# A second or more after it began to work.
DIES = "device_slot=1 abort@step=2000"
VERSIONS = """
[models."qwen@v1"]
path = "{0}"
share = 9
devices = ["cpu:1"]
[models."qwen@v2"]
path = "{1}"
devices = ["cpu:1"]
on_demand = true
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    shape = parse_shape("tiny,ctx=100000")
    return [write(folder / f"m{seed}.gguf", Recipe(shape=shape, seed=seed)) for seed in range(3)]


def slots(server: Server, *what: str) -> list[tuple[Any, ...]]:
    """What is shown of each device slot."""
    shown = server.ask("GET", "/admin/devices").json["data"]
    return [tuple(each[name] for name in what) for each in shown]


def post(server: Server, path: str, body: Any = None) -> Answer:
    return server.ask("POST", f"/admin/{path}", body)


def both_run(server: Server) -> list[Call]:
    """A long stream on each device slot, in their order."""
    first = server.complete(LONG, stream=True)
    until(lambda: slots(server, "running") == [(1,), (0,)])
    second = server.complete(LONG, stream=True, seed=1)
    until(lambda: slots(server, "running") == [(1,), (1,)])
    return [first, second]


def test_a_drained_device_slot_that_dies_comes_back_drained_under_its_number(start: Start, tiny: Path) -> None:
    server = start(tiny, "--chaos", DIES, config=CONFIG.replace("ctx = 4096", "ctx = 200000"))
    running = both_run(server)
    assert post(server, "devices/1/weight", {"weight": 5}).status == 200
    assert post(server, "devices/1/drain").status == 200
    until(lambda: "device slot works again" in server.log)
    life = '{device="cpu:1",model="tiny"}'
    until(lambda: server.metrics()["lqs_device_reopenings_total" + life] == 1)
    assert server.metrics()["lqs_device_deaths_total" + life] == 1
    assert server.metric("lqs_device_deaths_total") == 1
    # It goes by the same number, and so does what was said of it.
    shown = post(server, "devices/1/drain?wait=5").json
    assert (shown["device"], shown["state"]) == ("cpu:1", "drained")
    assert slots(server, "slot", "weight", "held_by") == [(0, 1, []), (1, 5, ["operator"])]
    # What ran there goes on at the other one, and who is new starts there too.
    running += [server.complete(LONG, stream=True, seed=seed) for seed in range(2)]
    until(lambda: slots(server, "running") == [(4,), (0,)])
    assert post(server, "devices/1/undrain").json["state"] == "probation"
    for call in running:
        call.close()
    # The core keeps what the dead one slept on.
    server.start_figures["files"] += 1


def test_lost_streams_of_a_drained_model_are_told_when_drain_s_is_over(start: Start, tiny: Path) -> None:
    config = CONFIG.replace("reload_backoff_s = 0.1", "reload_attempts = 0").replace("ctx = 4096", "ctx = 200000")
    server = start(tiny, "--chaos", DIES, config="server.drain_s = 1\n" + config)
    running = both_run(server)
    assert post(server, "devices/0/drain").json["running"] == 1
    until(lambda: server.metric("lqs_requests_lost_waiting") == 1)
    # It is told, and who runs on the other is not disturbed.
    until(lambda: server.metric("lqs_requests_lost_waiting") == 0)
    assert server.metric("vllm:num_requests_running") == 1
    assert slots(server, "state") == [("draining",), ("quarantined",)]
    # What the dead one left in its ring is nobody's any more.
    assert not [name for name in server.metrics() if "ring_events_1" in name]
    assert post(server, "devices/0/undrain").status == 200
    told = collect(running[1])
    assert told.error is not None
    assert told.error["code"] == "draining"
    running[0].close()


def test_a_drained_version_leaves_its_share_to_the_others(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=CONFIG + VERSIONS.format(*files[1:]))

    def answered(num: int) -> Counter[tuple[int, str]]:
        body = {"prompt": "hello", "max_tokens": 2, "model": "qwen"}
        answers = [server.ask("POST", "/v1/completions", body) for _ in range(num)]
        return Counter((answer.status, answer.json.get("model") or answer.code) for answer in answers)

    assert post(server, "models/qwen@v1/drain").status == 200
    assert answered(4) == {(200, "qwen@v2"): 4}
    # The bare name means all versions.
    drained = post(server, "models/qwen/drain").json["data"]
    assert [(each["model"], each["state"]) for each in drained] == [("qwen@v1", "drained"), ("qwen@v2", "drained")]
    assert answered(2) == {(503, "draining"): 2}
    assert [each["meta"]["state"] for each in server.ask("GET", "/v1/models").json["data"]][1:] == ["drained"] * 2
    assert post(server, "models/qwen/undrain").status == 200
    assert answered(10)[200, "qwen@v1"] >= 8
    left = post(server, "models/qwen/unload")
    assert (left.status, [each["id"] for each in left.json["data"]]) == (202, ["qwen@v1", "qwen@v2"])
    until(lambda: {standing(server)["qwen@v1"], standing(server)["qwen@v2"]} == {"absent"})
    assert post(server, "models/qwen@v1/load").json["id"] == "qwen@v1"
    until(lambda: answered(1) == {(200, "qwen@v1"): 1})
    server.start_figures["files"] = server.num_files


def test_a_device_means_all_that_is_on_it(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=CONFIG + VERSIONS.format(*files[1:]))
    names = ["cpu:0", "cpu:1", "cpu:1@qwen@v1", "cpu:1@qwen@v2"]
    assert slots(server, "slot", "device") == list(enumerate(names))
    drained = post(server, "devices/cpu:1/drain").json["data"]
    assert [(each["device"], each["state"]) for each in drained] == [(name, "drained") for name in names[1:]]
    assert post(server, "devices/cpu:1@qwen@v1/undrain").json["held_by"] == []
    assert slots(server, "state") == [("ready",), ("drained",), ("ready",), ("drained",)]
    assert post(server, "devices/cpu:1/weight", {"weight": 3}).status == 200
    until(lambda: slots(server, "weight") == [(1,), (3,), (3,), (3,)])


def test_a_model_is_drained_and_opened_whether_it_is_in_memory_or_not(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=CONFIG + VERSIONS.format(*files[1:]))

    def ask() -> Answer:
        return server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 2, "model": "qwen@v2"})

    def shown() -> tuple[Any, ...]:
        return slots(server, "state", "held_by")[3]

    assert shown() == ("absent", [])
    # Absent: a request for it does not bring it.
    assert [each["state"] for each in post(server, "models/qwen@v2/drain").json["data"]] == ["drained"]
    assert (ask().code, standing(server)["qwen@v2"]) == ("draining", "absent")
    # Brought by hand it is still drained, and also when it has left and come back.
    post(server, "models/qwen@v2/load")
    until(lambda: standing(server)["qwen@v2"] == "ready")
    assert (ask().code, shown()) == ("draining", ("drained", ["operator"]))
    post(server, "models/qwen@v2/unload")
    until(lambda: standing(server)["qwen@v2"] == "absent")
    # Opened while it is away, it comes with the next request.
    assert [each["state"] for each in post(server, "models/qwen@v2/undrain").json["data"]] == ["absent"]
    assert ask().status == 200
    assert shown() == ("ready", [])
    server.start_figures["files"] = server.num_files


def test_while_the_server_starts_its_device_slots_load(start: Start, default_model: Path) -> None:
    server = start(default_model, is_ready=False, config=CONFIG)
    seen = until(lambda: slots(server, "device", "state"))
    assert seen[1] == ("cpu:1", "loading")
    server.wait_ready()
    assert slots(server, "state") == [("ready",)] * 2
