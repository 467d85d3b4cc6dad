"""What is under /admin is for admin keys."""

from __future__ import annotations

import hashlib
import json

from lqs.observe.alerts import Reading
from lqs.request import NS_PER_S
from tests.api.harness import House, driven


@driven
async def test_alerts_are_shown_to_everybody_where_there_is_no_key():
    house = House()
    house.alerts.look(Reading(5, 0.85, 0.0, 0, 0, 0), NS_PER_S)
    call = await house.ask("GET", "/admin/alerts")
    assert call.status == 200
    raised = [(each["rule"], each["level"]) for each in call.json["data"] if each["state"] == "raised"]
    assert raised == [("fill", "warn")]


@driven
async def test_with_keys_alerts_are_shown_to_admins_alone(tmp_path):
    house = House(keys=["plain", "admin"], tmp_path=tmp_path)
    path = tmp_path / "keys"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["admin"] = True
    assert records[1]["sha256"] == hashlib.sha256(b"admin").hexdigest()
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    house.ring.reload(house.config)
    assert (await house.ask("GET", "/admin/alerts")).status == 401
    refused = await house.ask("GET", "/admin/alerts", key="plain")
    assert refused.status == 403
    assert refused.error["type"] == "permission_error"
    assert (await house.ask("GET", "/admin/alerts", key="admin")).status == 200


@driven
async def test_the_log_tells_what_an_admin_did_and_who_it_was(tmp_path):
    house = House(keys=["plain", "admin"], tmp_path=tmp_path, log={"access": False})
    path = tmp_path / "keys"
    first, second = path.read_text().splitlines()
    record = json.loads(second) | {"admin": True}
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    house.ring.reload(house.config)
    name = record["name"]
    acts = (
        "/admin/devices/0/drain", "/admin/models/M/undrain", "/admin/devices/0/weight", "/admin/drain", "/admin/reload",
        "/admin/restart",
    )  # fmt: skip
    for act in acts:
        assert (await house.ask("POST", act, {"weight": 2}, key="admin")).status < 300
    lines = house.log_text.getvalue().splitlines()
    assert len(lines) == len(acts)
    for act, line in zip(acts, lines, strict=True):
        assert f"an admin asks call={act} by={name} request_id=" in line
    await house.ask("POST", "/admin/devices/9/drain", key="admin")
    await house.ask("GET", "/admin/devices", key="admin")
    await house.ask("POST", "/admin/drain", key="plain")
    *_, asked, refused = house.log_text.getvalue().splitlines()
    assert len(lines) + 2 == len(house.log_text.getvalue().splitlines())
    assert f"an admin asks call=/admin/devices/9/drain by={name}" in asked
    assert "an admin is refused call=/admin/devices/9/drain" in refused
    assert refused.endswith("code=device_not_found")


@driven
async def test_a_web_page_wants_a_key_where_nobody_else_does(tmp_path):
    """Any page that a browser shows may send a call to this machine; only the answer is kept from it."""
    origin = [(b"origin", b"https://example.org")]
    house = House()
    for method, path in (("POST", "/admin/drain"), ("POST", "/admin/devices/0/drain"), ("GET", "/admin/alerts")):
        assert (await house.ask(method, path, headers=origin)).status == 403
    assert (house.asked, house.gate.drains.holders(0)) == ([], [])
    house = House(keys=["admin"], tmp_path=tmp_path)
    path = tmp_path / "keys"
    path.write_text(path.read_text().replace("}", ', "admin": true}'))
    house.ring.reload(house.config)
    assert (await house.ask("POST", "/admin/drain", key="admin", headers=origin)).status == 202
