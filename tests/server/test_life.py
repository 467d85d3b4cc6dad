"""A whole server in this process: it listens, loads, serves, drains and closes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lqs import serve
from lqs.admission.key_file import KeyFile
from lqs.admission.keys import KeyRing
from lqs.engine import plan
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import ConfigError, DeviceError, ModelFileError, StartError
from lqs.request import Request
from lqs.serve import Server, build
from lqs.settings import load

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    return str(path)


def config_for(model: str, **flags: Any) -> Any:
    return load(
        None,
        None,
        {
            "model.path": model,
            "server.port": 0,
            "server.close_s": 5,
            "engine.parallel": 2,
            "engine.ctx": 512,
            "engine.threads": 1,
            "engine.prefix_cache": False,
            "log.level": "error",
        }
        | flags,
    )


async def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection(HOST, port)
    payload = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    answer = await reader.read()
    writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, rest


async def until(port: int, path: str, status: int) -> None:
    async with asyncio.timeout(30):
        while (await ask(port, "GET", path))[0] != status:
            pass


async def eventually(holds: Callable[[], bool]) -> None:
    turn = asyncio.sleep
    async with asyncio.timeout(30):
        while not holds():
            await turn(0)


def live(server: Server, scene: Callable[[int], Awaitable[None]]) -> int:
    """Run the server with a scene beside it; the exit code."""

    async def both() -> int:
        running = asyncio.create_task(server.run())
        await server.is_listening.wait()
        try:
            await scene(server.port)
        finally:
            server.stop()
        return await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(both())


def prompt(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True} | more


def test_a_server_is_ready_when_its_model_is_and_answers(model: str) -> None:
    async def scene(port: int) -> None:
        assert (await ask(port, "GET", "/livez"))[0] == 200
        await until(port, "/readyz", 200)
        status, _, body = await ask(port, "POST", "/v1/completions", prompt(4))
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 4
        status, _, body = await ask(port, "GET", "/metrics")
        assert b"vllm:generation_tokens_total" in body

    server = build(config_for(model))
    assert live(server, scene) == 0
    assert server.hung == []


def test_a_drain_serves_what_is_in_and_refuses_what_comes(model: str) -> None:
    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        # Somebody who stays inside, so that the drain does not end before it was looked at.
        guest = Request(id="g", tenant=server._services.keys.anonymous, model="tiny", arrival_ns=0)
        assert await server._desk.enter(guest, 0) is None
        inside = [asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(50))) for _ in range(3)]
        await eventually(lambda: server._desk.num_inside > 1)
        server.stop()
        await until(port, "/readyz", 503)
        assert (await ask(port, "GET", "/livez"))[0] == 200
        status, headers, _ = await ask(port, "POST", "/v1/completions", prompt(1))
        assert (status, headers["x-lqs-reason"], headers["connection"]) == (503, "draining", "close")
        assert int(headers["retry-after"]) >= 1
        assert {status for status, *_ in await asyncio.gather(*inside)} <= {200, 503}
        server._desk.leave(guest)

    server = build(config_for(model))
    assert live(server, scene) == 0
    assert server._desk.num_inside == 0


def test_what_is_left_at_the_end_of_a_drain_is_cut_with_a_reason(model: str) -> None:
    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        # Two run, the third waits: none can be through before the drain is over.
        sent = [asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(500))) for _ in range(3)]
        await eventually(lambda: server._desk.num_inside == 3)
        server.stop()
        answers = await asyncio.gather(*sent)
        assert [status for status, *_ in answers] == [503] * 3
        assert {headers["x-lqs-reason"] for _, headers, _ in answers} == {"draining"}

    server = build(config_for(model, **{"server.drain_s": 0}))
    assert live(server, scene) == 0
    assert server._desk.num_inside == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_server_that_is_stopped_while_it_loads_waits_for_the_load(
    model: str, ends: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene(port: int) -> None:
        await asyncio.to_thread(has_begun.wait)
        server.stop()
        await eventually(lambda: server._gate.drained_at_ns is not None)
        may_end.set()

    def load_late(tell: Any) -> Any:
        has_begun.set()
        may_end.wait()
        if ends == "badly":
            raise DeviceError("no room")
        return load_now(tell)

    server = build(config_for(model, **{"log.level": "warning"}))
    has_begun, may_end = threading.Event(), threading.Event()
    load_now, server._models.load_residents = server._models.load_residents, load_late  # type: ignore[method-assign]
    assert live(server, scene) == 0
    assert server.hung == []
    assert all(not served.weights and not served.slots for served in server._models.all())
    assert "left behind" not in "".join(capfd.readouterr())


def test_a_server_that_is_stopped_while_it_loads_leaves_without_a_thread_that_does_not_end(model: str) -> None:
    async def scene(port: int) -> None:
        server.stop()

    server = build(config_for(model, **{"server.close_s": 0.2}))
    release = asyncio.Event()

    async def never(function: Any, name: str) -> Any:
        await release.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "in_thread", never)
        assert live(server, scene) == 0
    assert server.hung == ["lqs-load"]


def test_a_device_slot_that_dies_while_it_is_opened_ends_the_server_with_1(model: str) -> None:
    """B50: the thread that opened it never comes back."""

    async def scene(port: int) -> None:
        await eventually(lambda: bool(server.hung))

    def parked(scheduler: Any, number: int, *_: Any, **__: Any) -> None:
        scheduler.report_dead(number)
        threading.Event().wait()

    server = build(config_for(model))
    server._models._loader._make_worker = parked  # type: ignore[assignment]
    assert live(server, scene) == 1
    # Nothing under that thread can be freed.
    assert server.hung == ["workers"]


def test_a_load_that_stands_still_ends_the_server_with_1(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(port: int) -> None:
        await eventually(lambda: bool(server.hung))

    async def parked(function: Any, name: str) -> None:
        await asyncio.Event().wait()

    server = build(config_for(model, **{"engine.stall_s": 0.05, "server.close_s": 0.2}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "in_thread", parked)
        assert live(server, scene) == 1
    assert server.hung == ["lqs-load"]
    assert f"{model}: no progress in loading it for 0.5 s" in capsys.readouterr().err


def test_what_does_not_fit_is_told_before_the_port_is_taken(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "probe_machine", lambda: plan.Machine(1, 1_000_000_000))
    with pytest.raises(StartError, match="does not fit") as caught:
        build(config_for(model, **{"engine.ctx": 16_777_216}))
    assert caught.value.exit_code == 1


def test_a_reload_with_no_plain_key_file_changes_nothing_and_none_is_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    config = config_for(model, **{"keys.file": str(keys), "log.level": "warning"})
    KeyFile(str(keys)).add("ann", "normal", created="")
    server = build(config)
    keys.unlink()
    os.mkfifo(keys)
    server.reload()
    assert "is a FIFO, not a key file" in capsys.readouterr().err
    assert server._services.keys.num_keys == 1
    keys.unlink()
    for _ in range(2):
        server.reload()
        assert "nobody can come in" in capsys.readouterr().err
        keys.touch()


def test_the_core_is_told_the_weight_of_a_key_that_is_made_later(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []
    monkeypatch.setattr(KeyRing, "follow", lambda ring, tell: followed.append(tell))
    server = build(config_for(model, **{"keys.file": str(tmp_path / "keys")}))
    assert followed == [server._desk.scheduler.set_key_weight]


def test_a_device_slot_that_cannot_be_opened_ends_the_server_with_1(model: str) -> None:
    def fail(tell: object) -> None:
        raise DeviceError("no room")

    async def scene(port: int) -> None:
        await asyncio.sleep(0)

    server = build(config_for(model))
    server._models.load_residents = fail  # type: ignore[assignment,method-assign]
    assert live(server, scene) == 1


def test_a_file_that_is_no_model_is_told_before_the_port_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03")
    with pytest.raises(ModelFileError, match=r"broken\.gguf"):
        build(config_for(str(path)))
    with pytest.raises(ConfigError, match="lqs keys add"):
        build(config_for(str(path), **{"server.host": "0.0.0.0"}))


def test_a_reload_takes_new_limits_and_refuses_wrong_ones(model: str) -> None:
    configs = [
        config_for(model, **{"queue.timeout_s": 1}),
        config_for(model, **{"queue.levels": ["a", "b", "c", "d", "e"]}),
    ]
    server = build(config_for(model), reload_config=lambda: configs.pop(0))
    server.reload()
    assert server._gate._config.queue.timeout_s == 1
    server.reload()
    assert server._gate._config.queue.timeout_s == 1
    build(config_for(model)).reload()


def test_a_thread_that_does_not_end_and_a_failed_http_server_are_reported(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        should_exit = False

        async def serve(self, sockets: list[Any]) -> None:
            for listening in sockets:
                listening.close()
            raise RuntimeError

    async def scene(port: int) -> None:
        await eventually(lambda: not server._models.is_loading)

    server = build(config_for(model))
    monkeypatch.setattr(serve, "make_http", lambda *_, **__: Failing())
    close_models, close_desk = server._models.close, server._desk.close
    server._models.close = lambda limit_s: close_models(limit_s) and False  # type: ignore[method-assign]
    server._desk.close = lambda limit_s: close_desk(limit_s) and False  # type: ignore[method-assign]
    assert live(server, scene) == 0
    assert server.hung == ["workers", "lqs-scheduler"]
    assert "RuntimeError" in capsys.readouterr().err


def test_a_hand_over_serves_who_is_connected_and_accepts_nobody(model: str) -> None:
    """Two requests run, a third comes on a connection that was there before; a fourth connection is a successor's."""

    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        reader, writer = await asyncio.open_connection(HOST, port)
        running = [asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(200))) for _ in range(2)]
        await eventually(lambda: server._desk.num_inside == 2)
        server.hand_over()
        await eventually(lambda: not any(each.is_serving() for each in server._http.servers))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        writer.close()
        # The kernel holds it for whoever accepts next.
        waiting = asyncio.create_task(ask(port, "GET", "/livez"))
        assert [status for status, *_ in await asyncio.gather(*running)] == [200, 200]
        successor, _ = await asyncio.get_running_loop().sock_accept(listening)
        with successor:
            await asyncio.get_running_loop().sock_recv(successor, 1000)
            await asyncio.get_running_loop().sock_sendall(successor, b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (await waiting)[0] == 204

    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        server = build(config_for(model), passed=listening.dup())
        assert live(server, scene) == 0
    assert server.hung == []


def test_what_is_left_at_the_end_of_a_hand_over_is_told(model: str) -> None:
    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        sent = [asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(500))) for _ in range(3)]
        await eventually(lambda: server._desk.num_inside == 3)
        server.hand_over()
        answers = await asyncio.gather(*sent)
        assert {headers.get("x-lqs-reason") for _, headers, _ in answers} == {"draining"}

    server = build(config_for(model, **{"server.drain_s": 0}))
    assert live(server, scene) == 0
    assert server._desk.num_inside == 0


def test_a_stop_turns_a_hand_over_into_a_drain(model: str) -> None:
    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        _, writer = await asyncio.open_connection(HOST, port)
        sent = asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(200)))
        await eventually(lambda: server._desk.num_inside == 1)
        server.hand_over()
        await eventually(lambda: not any(each.is_serving() for each in server._http.servers))
        assert server._gate.closed_reason() is None
        server.stop()
        await eventually(lambda: server._gate.closed_reason() == "draining")
        assert (await sent)[0] == 200
        writer.close()

    server = build(config_for(model))
    assert live(server, scene) == 0
