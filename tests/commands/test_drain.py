"""`lqs drain` against a connection that answers from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lqs.cli import main
from lqs.commands import chat, drain
from tests.commands.test_chat import Answer, Script


def slot(state: str, **more: Any) -> dict[str, Any]:
    return {"slot": 1, "device": "cpu:1", "model": "m", "state": state, "running": 1, "waiting": 2} | more


def said(body: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(body).encode(), status)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_LOOK_S", 0)


def run(monkeypatch: pytest.MonkeyPatch, script: Script, *argv: str) -> int:
    monkeypatch.setattr(chat.http.client, "HTTPConnection", script)
    return main(["drain", *argv])


def paths(script: Script) -> list[str]:
    return [f"{method} {path}" for method, path, *_ in script.sent]


def test_a_device_slot_is_drained_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LQS_API_KEY", "KEY")
    script = Script(said(slot("draining")))
    assert run(monkeypatch, script, "--device-slot", "cpu:1", "--url", "h:9") == 0
    assert paths(script) == ["POST /admin/devices/cpu%3A1/drain?wait=0.000"]
    assert script.sent[0][3]["Authorization"] == "Bearer KEY"
    assert capsys.readouterr().out.split() == ["1", "cpu:1", "m", "draining", "1", "request", "run,", "2", "wait"]


def test_a_wait_asks_again_until_all_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    half = said({"data": [slot("drained"), slot("draining")]})
    script = Script(half, said({"data": [slot("drained"), slot("dead"), slot("quarantined"), slot("backoff")]}))
    assert run(monkeypatch, script, "--model", "a/b", "--wait") == 0
    assert paths(script) == ["POST /admin/models/a/b/drain?wait=20.000"] * 2


def test_what_is_not_done_in_time_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(said(slot("draining")))
    assert run(monkeypatch, script, "--device-slot", "1", "--wait", "0") == 1
    assert "Some still runs there" in capsys.readouterr().err


def test_an_undrain_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(said(slot("ready")))
    assert run(monkeypatch, script, "--device-slot", "1", "--undrain", "--wait") == 0
    assert paths(script) == ["POST /admin/devices/1/undrain?wait=0.000"]


def test_the_whole_server_is_drained_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(said({"requests": 2}, 202), said({}), ConnectionRefusedError())
    assert run(monkeypatch, script, "--wait") == 0
    assert paths(script) == ["POST /admin/drain", "GET /livez", "GET /livez"]
    assert capsys.readouterr().out == "draining, 2 requests inside\n"
    assert run(monkeypatch, Script(said({"requests": 0}, 202)), "--wait", "0") == 1
    assert "It still serves" in capsys.readouterr().err


def test_a_restart_is_done_when_another_process_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = {"pid": 7, "successor": "starting", "how": None}, {"pid": 8, "successor": "none", "how": None}
    script = Script(said({"pid": 7}, 202), said(old), ConnectionResetError(), said(new))
    assert run(monkeypatch, script, "--restart", "--wait") == 0
    assert "process 8 serves" in capsys.readouterr().out
    assert run(monkeypatch, Script(said({"pid": 7}, 202)), "--restart") == 0
    assert run(monkeypatch, Script(said({"pid": 7}, 202), said(old)), "--restart", "--wait", "0") == 1


def test_a_new_server_that_does_not_come_up_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"pid": 7, "successor": "failed", "how": "exit code 2"}
    assert run(monkeypatch, Script(said({"pid": 7}, 202), said(failed)), "--restart", "--wait") == 1
    assert "did not come up (exit code 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [("--undrain",), ("--wait", "-1"), ("--device-slot", "1", "--model", "m"), ("--restart", "--model", "m")]
)
def test_what_makes_no_sense_is_wrong_use(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    script = Script()
    assert run(monkeypatch, script, *argv) == 2
    assert script.sent == []


def test_a_server_that_says_no_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"message": "There is no such device slot."}}
    assert run(monkeypatch, Script(said(error, 404)), "--device-slot", "9") == 1
    assert "no such device slot" in capsys.readouterr().err
