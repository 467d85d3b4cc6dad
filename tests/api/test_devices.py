"""Device slots and models are drained, opened and weighted by an admin; the process is asked to end or reload."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.api.harness import HI, House, driven, until

SHOWN = {
    "object": "device_slot", "slot": 0, "device": "cpu:0", "model": "M", "state": "ready", "held_by": [],
    "running": 0, "waiting": 0, "sequences": 1, "kv_tokens": {"used": 0, "reserved": 0, "total": 100_000},
    "weight": 1.0, "use_percent": 0, "steps": 7, "health": {
        "stage": "sound", "reason": None, "attempts": None, "attempts_left": None, "next_attempt_s": None,
    },
}  # fmt: skip
POSTS = (
    "/admin/devices/0/drain", "/admin/devices/0/undrain", "/admin/devices/0/weight", "/admin/models/M/drain",
    "/admin/models/M/undrain", "/admin/drain", "/admin/reload", "/admin/restart",
)  # fmt: skip


async def posted(house: House, path: str, body: Any = None) -> Any:
    """What a call that the scheduler has to hear of answers."""
    call = house.call("POST", path, body)
    await until(lambda: house.turn() or call.task.done())  # type: ignore[func-returns-value]
    return (await call.done()).json


@driven
async def test_the_device_slots_are_shown_as_they_are():
    house = House()
    call = await house.ask("GET", "/admin/devices")
    assert call.json["data"] == [SHOWN]
    runs = house.call("POST", "/v1/chat/completions", HI)
    (handle,) = await house.starts()
    waits = house.call("POST", "/v1/chat/completions", HI)
    await until(lambda: house.turn() or house.desk.scheduler.slots()[0]["num_waiting"])  # type: ignore[func-returns-value]
    (shown,) = (await house.ask("GET", "/admin/devices")).json["data"]
    assert (shown["running"], shown["waiting"]) == (1, 1)
    assert shown["kv_tokens"]["reserved"] > 0
    house.finish(handle)
    await runs.done()
    await house.serve(waits, "ok")


@pytest.mark.parametrize("name", ["devices/0", "devices/cpu:0", "models/M"])
def test_a_drain_lets_nobody_in_and_an_undrain_does_again(name: str):
    @driven
    async def scene():
        house = House()
        running = house.call("POST", "/v1/chat/completions", HI)
        (handle,) = await house.starts()
        answer = await posted(house, f"/admin/{name}/drain")
        (shown,) = answer.get("data", [answer])
        assert (shown["state"], shown["held_by"], shown["running"]) == ("draining", ["operator"], 1)
        refused = await house.ask("POST", "/v1/chat/completions", HI)
        assert (refused.status, refused.headers["x-lqs-reason"]) == (503, "draining")
        assert "An operator has drained the model" in refused.error["message"]
        assert 30 <= int(refused.headers["retry-after"]) <= 38
        assert "All models are drained" in (await house.ask("GET", "/health")).json["error"]["message"]
        assert (await house.ask("GET", "/readyz")).json == {"status": "draining"}
        house.finish(handle)
        assert (await running.done()).status == 200
        (shown,) = (await house.ask("GET", "/admin/devices")).json["data"]
        assert shown["state"] == "drained"
        answer = await posted(house, f"/admin/{name}/undrain")
        (shown,) = answer.get("data", [answer])
        assert (shown["state"], shown["held_by"]) == ("ready", [])
        assert (await house.ask("GET", "/readyz")).status == 200
        assert await house.is_well()

    scene()


@driven
async def test_a_drain_may_wait_until_the_device_slot_is_empty():
    house = House()
    running = house.call("POST", "/v1/chat/completions", HI)
    (handle,) = await house.starts()
    draining = house.call("POST", "/admin/devices/0/drain", query=b"wait=60")
    await until(lambda: house.turn() or house.desk.scheduler.slots()[0]["is_drained"])  # type: ignore[func-returns-value]
    assert not draining.task.done()
    house.finish(handle)
    assert (await draining.done()).json["state"] == "drained"
    assert (await running.done()).status == 200


@pytest.mark.parametrize("name", ["devices/0", "models/M"])
def test_nobody_waits_on_for_a_caller_that_has_left(name: str):
    @driven
    async def scene():
        house = House()
        running = house.call("POST", "/v1/chat/completions", HI)
        (handle,) = await house.starts()
        draining = house.call("POST", f"/admin/{name}/drain", query=b"wait=3600")
        await until(lambda: house.turn() or house.desk.scheduler.slots()[0]["is_drained"])  # type: ignore[func-returns-value]
        draining.leave()
        assert (await draining.done()).status is None
        # What it asked for is done all the same.
        assert house.gate.drains.holders(0) == ["operator"]
        house.finish(handle)
        assert (await running.done()).status == 200

    scene()


@driven
async def test_who_waits_is_told_when_the_drain_has_lasted_for_drain_s():
    house = House(server={"drain_s": 20})
    running = house.call("POST", "/v1/chat/completions", HI)
    (handle,) = await house.starts()
    waiting = house.call("POST", "/v1/chat/completions", HI)
    await until(lambda: house.turn() or house.desk.scheduler.slots()[0]["num_waiting"])  # type: ignore[func-returns-value]
    await posted(house, "/admin/devices/0/drain")
    house.gate.drains.look(time.monotonic_ns() + 21 * 10**9)
    house.turn()
    told = await waiting.done()
    assert (told.status, told.error["code"]) == (503, "draining")
    house.finish(handle)
    assert (await running.done()).status == 200


@driven
async def test_a_dead_device_slot_and_one_that_loads_are_shown_as_such():
    house = House()
    house.served.is_loading = True
    assert (await house.ask("GET", "/admin/devices")).json["data"][0]["state"] == "loading"
    house.desk.scheduler.report_dead(0)
    assert (await house.ask("GET", "/admin/devices")).json["data"][0]["state"] == "dead"


@driven
async def test_one_that_died_says_why_and_when_it_is_opened_anew():
    house = House(health={"reload_attempts": 3, "reload_backoff_s": 60})
    house.keeper.look(time.monotonic_ns())
    house.worker.state, house.worker.death = "dead", "GGML_ASSERT"
    house.desk.scheduler.report_dead(0)
    house.keeper.look(time.monotonic_ns())
    (shown,) = (await house.ask("GET", "/admin/devices")).json["data"]
    health = shown.pop("health")
    assert shown["state"] == "backoff"
    assert 50 < health.pop("next_attempt_s") <= 60
    assert health == {"stage": "backoff", "reason": "GGML_ASSERT", "attempts": 0, "attempts_left": 3}


@driven
async def test_one_that_nobody_opens_anew_is_quarantined():
    house = House(health={"reload_attempts": 0})
    house.worker.state, house.worker.death = "dead", "GGML_ASSERT"
    house.keeper.look(time.monotonic_ns())
    (shown,) = (await house.ask("GET", "/admin/devices")).json["data"]
    assert (shown["state"], shown["health"]["reason"]) == ("quarantined", "GGML_ASSERT")
    assert (shown["health"]["attempts_left"], shown["health"]["next_attempt_s"]) == (0, None)


@driven
async def test_a_device_slot_gets_another_weight():
    house = House()
    shown = await posted(house, "/admin/devices/0/weight", {"weight": 2.5})
    assert shown["weight"] == 2.5
    for body, param in (
        ({"weight": 0}, "weight"),
        ({"weight": 1e7}, "weight"),
        ({"weight": "x"}, "weight"),
        ({}, None),
    ):
        call = await house.ask("POST", "/admin/devices/0/weight", body)
        assert (call.status, call.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "code"),
    [("/admin/devices/9/drain", "device_not_found"), ("/admin/models/x/undrain", "model_not_found")],
)
def test_what_is_not_there_is_told(path: str, code: str):
    @driven
    async def scene():
        call = await House().ask("POST", path)
        assert (call.status, call.error["code"]) == (404, code)

    scene()


@pytest.mark.parametrize("wait", [b"wait=-1", b"wait=x", b"wait=nan", b"wait=3601"])
def test_a_wait_is_a_number_of_seconds(wait: bytes):
    @driven
    async def scene():
        house = House()
        call = await house.ask("POST", "/admin/devices/0/drain", query=wait)
        assert (call.status, call.error["param"]) == (400, "wait")
        assert house.gate.drains.holders(0) == []

    scene()


@driven
async def test_the_process_is_asked_to_drain_and_to_reload():
    house = House()
    call = await house.ask("POST", "/admin/drain")
    assert (call.status, call.json) == (202, {"status": "draining", "requests": 0})
    call = await house.ask("POST", "/admin/reload")
    assert (call.status, call.json) == (200, {"status": "reloaded", "keys": 0, "wait_for_restart": []})
    house.reload_waiting = ["placement.policy", "engine"]
    assert (await house.ask("POST", "/admin/reload")).json["wait_for_restart"] == house.reload_waiting
    house.reload_problem = "queue.levels: it changes only with a restart."
    call = await house.ask("POST", "/admin/reload")
    assert (call.status, call.error["code"], call.error["message"]) == (400, "reload_failed", house.reload_problem)
    assert house.asked == ["drain", "reload", "reload", "reload"]


@driven
async def test_a_restart_wants_somebody_who_keeps_the_socket():
    house = House()
    house.restart_problem = "a server is starting already"
    refused = await house.ask("POST", "/admin/restart")
    assert (refused.status, refused.error["message"]) == (409, "No restart: a server is starting already.")
    house.restart_problem = ""
    call = await house.ask("POST", "/admin/restart")
    assert (call.status, call.json["status"]) == (202, "restarting")
    for successor, shown in (("starting", ("starting", None)), ("failed: exit code 2", ("failed", "exit code 2"))):
        house.successor = successor
        said = (await house.ask("GET", "/admin/restart")).json
        assert (said["pid"], (said["successor"], said["how"])) == (os.getpid(), shown)


@pytest.mark.parametrize("path", POSTS)
def test_all_of_it_is_for_admins(path: str, tmp_path: Any):
    @driven
    async def scene():
        house = House(keys=["plain"], tmp_path=tmp_path)
        assert (await house.ask("POST", path, {"weight": 1})).status == 401
        assert (await house.ask("POST", path, {"weight": 1}, key="plain")).status == 403
        assert house.asked == []
        assert house.gate.drains.holders(0) == []
        assert (await house.ask("GET", "/admin/devices", key="plain")).status == 403

    scene()
