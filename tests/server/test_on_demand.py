"""Models that come, leave and come again under requests and an admin's hands, also while the server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lqs.engine.plan import make_plan
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.settings import load
from tests.server.client import Call, collect
from tests.server.conftest import Start
from tests.server.process import Server, until
from tests.server.test_fleet import COMMON, ask, standing


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    shape = parse_shape("tiny,ctx=100000")
    return [write(folder / f"m{seed}.gguf", Recipe(shape=shape, seed=seed)) for seed in range(3)]


def num_opened(server: Server, device: str) -> int:
    """How often a device slot was opened."""
    return server.log.count(f"device slot opened device={device} ")


def test_all_first_requests_for_a_model_wait_for_its_load(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n')
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "late", "stream": True}
    calls = [server.call("POST", "/v1/chat/completions", body) for _ in range(6)]
    assert all(collect(call).is_done for call in calls)
    assert num_opened(server, "cpu:0@late") == 1


@pytest.mark.parametrize("moment", ["listening", "loading weights"])
def test_a_load_that_is_ordered_while_the_server_starts_changes_nothing(
    start: Start, files: list[Path], moment: str
) -> None:
    server = start(files[0], config=COMMON + f'[models.other]\npath = "{files[1]}"\n', is_ready=False)
    until(lambda: moment in server.log)
    for name in ("m0", "other"):
        assert server.ask("POST", f"/admin/models/{name}/load").status == 202
    server.wait_ready()
    assert standing(server) == {"m0": "ready", "other": "ready"}
    assert [num_opened(server, f"cpu:{n}{of}") for n in range(2) for of in ("", "@other")] == [1, 1, 1, 1]
    assert ask(server, "other").status == 200


def test_an_unload_while_the_server_starts_holds_when_it_has_started(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.other]\npath = "{files[1]}"\n', is_ready=False)
    _ = server.port
    assert server.ask("POST", "/admin/models/other/unload").status == 202
    until(lambda: standing(server) == {"m0": "ready", "other": "absent"})
    server.wait_ready()
    refused = ask(server, "other")
    assert (refused.status, refused.code) == (503, "no_device")
    assert server.ask("POST", "/admin/models/other/load").status == 202
    until(lambda: standing(server)["other"] == "ready")
    assert ask(server, "other").status == 200


def test_one_on_demand_that_is_asked_for_during_the_start_comes_after_it_and_leaves_whole(
    start: Start, files: list[Path]
) -> None:
    config = COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n'
    server = start(files[0], config=config, is_ready=False)
    _ = server.port
    asked = server.complete(3, model="late")
    assert asked.answer().status == 200
    assert server.ask("POST", "/admin/models/late/unload").status == 202
    until(lambda: standing(server) == {"m0": "ready", "late": "absent"})
    server.wait_ready()
    assert ask(server, "late").status == 200
    assert [num_opened(server, f"cpu:{n}@late") for n in range(2)] == [2, 2]


def test_a_budget_that_a_model_can_never_fit_into_is_refused_at_the_start(start: Start, files: list[Path]) -> None:
    config = COMMON + f'loaded_mb = 5\n[models.late]\npath = "{files[1]}"\non_demand = true\n'
    server = start(files[0], config=config, is_ready=False)
    assert server.wait() == 2
    assert "engine.loaded_mb: late can never be loaded. It takes" in server.log


def test_what_is_not_in_memory_takes_nothing_and_every_coming_and_going_is_counted(
    start: Start, files: list[Path]
) -> None:
    server = start(files[0], config=COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n')

    def shown() -> dict[str, Any]:
        return server.ask("GET", "/admin/models").json["data"][1]  # type: ignore[no-any-return]

    def told(what: str) -> float:
        return server.metrics()[f'lqs_model_{what}{{model="late"}}']

    needs = shown()["needs"]
    assert needs["system"] > 0
    for num in (0, 1):
        seen = shown()
        assert (seen["standing"], seen["state"], seen["progress"]) == ("absent", "absent", 0.0)
        assert (seen["takes"], seen["needs"]) == ({"system": 0}, needs)
        assert (told("loads_total"), told("unloads_total"), told("failed_loads_total")) == (num, num, 0)
        assert server.metrics()['lqs_model_standing{model="late",standing="absent"}'] == 1
        coming = server.ask("POST", "/admin/models/late/load").json
        assert (coming["standing"], coming["state"], coming["progress"]) == ("loading", "loading", 0.0)
        until(lambda: standing(server)["late"] == "ready")
        assert (shown()["takes"], shown()["progress"]) == (needs, 1.0)
        assert server.metrics()['lqs_model_standing{model="late",standing="ready"}'] == 1
        assert server.ask("POST", "/admin/models/late/unload").status == 202
        until(lambda: standing(server)["late"] == "absent")


def test_a_name_without_its_version_brings_and_sends_away_all_versions(start: Start, files: list[Path]) -> None:
    versions = "".join(
        f'[models."qwen@v{n}"]\npath = "{path}"\non_demand = true\ndevices = ["cpu:0"]\n'
        for n, path in enumerate(files[1:], 1)
    )
    server = start(files[0], config=COMMON + versions)
    both = ["qwen@v1", "qwen@v2"]
    for change, becomes in (("load", "ready"), ("unload", "absent")):
        answer = server.ask("POST", f"/admin/models/qwen/{change}")
        assert (answer.status, [each["id"] for each in answer.json["data"]]) == (202, both)
        until(lambda becomes=becomes: standing(server) == {"m0": "ready"} | dict.fromkeys(both, becomes))
    assert server.ask("POST", "/admin/models/qwen@v2/load").json["id"] == "qwen@v2"
    until(lambda: standing(server) == {"m0": "ready", "qwen@v1": "absent", "qwen@v2": "ready"})


def test_a_server_that_is_stopped_while_a_model_loads_leaves_nothing_behind(start: Start, files: list[Path]) -> None:
    server = start(files[0], config=COMMON + f'[models.late]\npath = "{files[1]}"\non_demand = true\n')
    assert server.ask("POST", "/admin/models/late/load").status == 202
    server.signal()
    assert server.wait() == 0
    assert "loading model=late" in server.log
    assert "left behind" not in server.log
    server.check_log()


def line(call: Call) -> str:
    """The next line of a stream."""
    return next(call.lines())


def used_up(start: Start, files: list[Path], **queue: float) -> Server:
    """A server with memory for one of a and b, which a has, and in which something runs for long."""
    tables = "".join(
        f'[models.{name}]\npath = "{path}"\non_demand = true\n' for name, path in zip("ab", files[1:], strict=True)
    )
    engine = {"ctx": 8192, "parallel": 4, "prefix_cache": False, "devices": ["cpu:0", "cpu:1"]}
    takes = make_plan(load(None, None, {f"engine.{name}": value for name, value in engine.items()}), files[0]).takes
    room_mb = 2 * takes["system"] // 1_000_000 + 1
    rules = "".join(f"{name} = {value}\n" for name, value in queue.items())
    config = f"{COMMON}loaded_mb = {room_mb}\nload_patience_s = 1000\n[queue]\n{rules}{tables}"
    server = start(files[0], config=config)
    server.complete(20_000, model="a", stream=True)
    server.wait_running()
    return server


def test_a_stream_that_waits_for_its_model_opens_and_tells_its_place(start: Start, files: list[Path]) -> None:
    server = used_up(start, files, hold_s=0.1)
    first = server.complete(3, model="b", stream=True)
    until(lambda: "position=1" in line(first))
    second = server.complete(3, model="b", stream=True)
    assert "position=2" in line(second)
    # One that leaves gives up its place.
    first.close()
    until(lambda: "position=1" in line(second))
    third = server.call(
        "POST", "/v1/completions", {"prompt": "a", "model": "b", "stream": True}, headers={"x-request-id": "third"}
    )
    assert "position=2" in line(third)
    assert server.ask("GET", "/v1/requests/third").json["position"] == 2
    assert server.ask("DELETE", "/v1/requests/third").status == 200
    cancelled = collect(third)
    assert cancelled.error is not None
    assert (cancelled.error["code"], cancelled.is_done) == ("cancelled", False)
    # It comes, and the stream goes on as any other.
    assert server.metrics()['lqs_model_waiting{model="b"}'] == 1
    assert server.ask("POST", "/admin/models/a/unload").status == 202
    for call in server._calls[:]:
        if call is not second:
            call.close()
    told = collect(second)
    assert (told.finish, told.is_done) == ("length", True)
    # It waited for memory, not for a device slot: no alert may take that for a load that is too high.
    waited = server.metric("vllm:request_queue_time_seconds_sum"), server.metric("lqs_lane_queue_wait_seconds_total")
    assert waited[0] - waited[1] > 0.1


def test_a_stream_that_waits_for_its_model_in_vain_ends_with_the_error(start: Start, files: list[Path]) -> None:
    server = used_up(start, files, hold_s=0.1)
    told = collect(server.complete(3, model="b", stream=True, queue_timeout=0.6))
    assert told.error is not None
    assert (told.error["code"], told.is_done) == ("queue_timeout", False)
    assert server.metrics()['lqs_refusals_total{reason="queue_timeout"}'] == 1
    assert "outcome=queue_timeout" in server.log
