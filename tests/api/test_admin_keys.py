"""Keys are made, shown and revoked by an admin, in force at once; a key itself is told once and never again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lqs.admission.key_file import KeyFile
from tests.api.harness import House, driven, until

LIMITS = {
    "all": {"of": "requests", "amount": 100},
    "vips": {"of": "tokens", "amount": 1000, "tiers": ["vip"]},
}


def guarded(tmp_path: Path, **sections: Any) -> House:
    """A house with a plain key and an admin's."""
    house = House(keys=["plain", "admin"], tmp_path=tmp_path, limits=LIMITS, **sections)
    path = tmp_path / "keys"
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + second.replace("}", ', "admin": true}') + "\n")
    house.ring.reload(house.config)
    return house


@driven
async def test_a_key_is_made_shown_without_it_and_revoked(tmp_path: Path):
    house = guarded(tmp_path)
    made = await house.ask("POST", "/admin/keys", {"name": "shop", "tier": "vip"}, key="admin")
    assert (made.status, made.headers["cache-control"]) == (201, "no-store")
    key = made.json["key"]
    assert key.startswith(made.json["prefix"])
    assert made.json["prefix"] != key
    assert {name: made.json[name] for name in ("name", "tier", "admin", "limits")} == {
        "name": "shop", "tier": "vip", "admin": False, "limits": ["all", "vips"],
    }  # fmt: skip
    # It is in force at once, and no admin's.
    assert (await house.ask("GET", "/v1/models", key=key)).status == 200
    assert (await house.ask("GET", "/admin/keys", key=key)).status == 403
    listed = await house.ask("GET", "/admin/keys", key="admin")
    assert [each["name"] for each in listed.json["data"]] == ["tenant0", "tenant1", "shop"]
    assert [each["limits"] for each in listed.json["data"]] == [["all"], ["all"], ["all", "vips"]]
    assert [each["admin"] for each in listed.json["data"]] == [False, True, False]
    for secret in (key, hashlib.sha256(key.encode()).hexdigest(), hashlib.sha256(b"admin").hexdigest()):
        assert secret.encode() not in listed.body
        assert secret not in house.log_text.getvalue()
    gone = await house.ask("DELETE", "/admin/keys/shop", key="admin")
    assert (gone.status, gone.json) == (200, {"object": "key", "name": "shop", "deleted": True})
    assert (await house.ask("GET", "/v1/models", key=key)).status == 401
    assert [record.name for record in KeyFile(str(tmp_path / "keys")).read()] == ["tenant0", "tenant1"]
    again = await house.ask("DELETE", "/admin/keys/shop", key="admin")
    assert (again.status, again.error["code"]) == (404, "key_not_found")
    assert "key revoked name=shop by=tenant1" in house.log_text.getvalue()


@driven
async def test_what_lqs_keys_wrote_meanwhile_is_kept_and_taken_over(tmp_path: Path):
    house = guarded(tmp_path)
    other = KeyFile(str(tmp_path / "keys")).add("by-hand", "free", created="")
    assert (await house.ask("GET", "/v1/models", key=other)).status == 401
    assert (await house.ask("POST", "/admin/keys", {"name": "boss", "admin": True}, key="admin")).status == 201
    assert (await house.ask("GET", "/v1/models", key=other)).status == 200
    assert [record.name for record in house.ring.records] == ["tenant0", "tenant1", "by-hand", "boss"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, None),
        ({"name": 1}, 400, "name"),
        ({"name": ""}, 400, "name"),
        ({"name": " shop"}, 400, "name"),
        ({"name": "a\nb"}, 400, "name"),
        ({"name": "x" * 101}, 400, "name"),
        ({"name": "shop", "tier": "gold"}, 400, "tier"),
        ({"name": "shop", "admin": "yes"}, 400, "admin"),
        ({"name": "shop", "sha256": "0" * 64}, 400, None),
        (b"{", 400, None),
        ({"name": "tenant0"}, 409, None),
    ],
)
def test_what_is_no_new_key_is_told_and_changes_nothing(body: Any, status: int, param: str | None, tmp_path: Path):
    @driven
    async def scene():
        house = guarded(tmp_path)
        before = (tmp_path / "keys").read_bytes()
        call = await house.ask("POST", "/admin/keys", body, key="admin")
        assert call.status == status
        assert param is None or call.error["param"] == param
        assert call.error["message"]
        assert (tmp_path / "keys").read_bytes() == before

    scene()


@pytest.mark.parametrize(("method", "path", "body"), [("POST", "", {"name": "shop"}), ("DELETE", "/tenant0", None)])
def test_a_file_with_an_error_in_it_is_not_written_to(method: str, path: str, body: Any, tmp_path: Path):
    @driven
    async def scene():
        house = guarded(tmp_path)
        digest = hashlib.sha256(b"x").hexdigest()
        with (tmp_path / "keys").open("a") as file:
            file.write(json.dumps({"name": "odd", "tier": "gold", "sha256": digest}) + "\n")
        before = (tmp_path / "keys").read_bytes()
        call = await house.ask(method, "/admin/keys" + path, body, key="admin")
        assert (call.status, "tier 'gold'" in call.error["message"]) == (409, True)
        assert (tmp_path / "keys").read_bytes() == before
        # Those that were in force still are.
        assert (await house.ask("GET", "/v1/models", key="plain")).status == 200

    scene()


@driven
async def test_there_is_room_for_so_many_keys_and_no_more(tmp_path: Path):
    house = guarded(tmp_path)
    room = house.config.keys.num_keys_max
    digest = hashlib.sha256(b"x").hexdigest()
    with (tmp_path / "keys").open("a") as file:
        file.writelines(json.dumps({"name": f"n{n}", "tier": "free", "sha256": digest}) + "\n" for n in range(room - 2))
    call = await house.ask("POST", "/admin/keys", {"name": "shop"}, key="admin")
    assert (call.status, "keys.num_keys_max" in call.error["message"]) == (409, True)
    assert (await house.ask("GET", "/admin/keys", key="admin")).status == 200


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", ""), ("DELETE", "/tenant0")])
def test_only_an_admin_key_may_and_nobody_where_there_are_none(method: str, path: str, tmp_path: Path):
    @driven
    async def scene():
        house = guarded(tmp_path)
        before = (tmp_path / "keys").read_bytes()
        body = {"name": "shop"} if method == "POST" else None
        assert (await house.ask(method, "/admin/keys" + path, body)).status == 401
        assert (await house.ask(method, "/admin/keys" + path, body, key="plain")).status == 403
        assert (tmp_path / "keys").read_bytes() == before
        call = await House().ask(method, "/admin/keys" + path, body)
        assert (call.status, call.error["code"]) == (409, "keys_not_configured")

    scene()


@driven
async def test_the_weight_that_is_shown_of_a_new_key_is_the_one_that_it_has(tmp_path: Path):
    tiers = {"normal": {"level": 1}, "heavy": {"level": 1, "weight": 4.0}}
    house = House(keys=["plain", "admin"], tmp_path=tmp_path, tiers=tiers)
    (tmp_path / "keys").write_text((tmp_path / "keys").read_text().replace('"tier"', '"admin": true, "tier"'))
    house.ring.reload(house.config)
    made = (await house.ask("POST", "/admin/keys", {"name": "shop", "tier": "heavy"}, key="admin")).json
    assert made["weight"] == 4.0
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    first = house.call("POST", "/v1/chat/completions", body, key="plain")
    (handle,) = await house.starts()
    # Those of either key wait while it runs.
    calls = {}
    for key in ("plain", made["key"]):
        for _ in range(10):
            calls[house.call("POST", "/v1/chat/completions", body, key=key).task] = key

    def num_waiting() -> int:
        house.turn()
        return sum(level["num_waiting"] for level in house.desk.scheduler.snapshot()["levels"])

    await until(lambda: num_waiting() == 20)
    house.finish(handle, num_completion_tokens=8)
    await first.done()
    order = []
    for _ in range(10):
        (handle,) = await house.starts()
        house.finish(handle, num_completion_tokens=8)
        over, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        order += [calls.pop(task) for task in over]
    assert order.count(made["key"]) >= 7
    for task in calls:
        task.cancel()
