"""A whole server in this process: it listens, loads, serves, drains and closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lqs import serve
from lqs.engine.synth import Recipe, parse_shape, write
from lqs.errors import ConfigError, DeviceError, ModelFileError
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
            await asyncio.sleep(0)


def live(server: Server, scene: Callable[[int], Awaitable[None]]) -> int:
    """Run the server with a scene beside it; the exit code."""

    async def both() -> int:
        running = asyncio.create_task(server.run())
        while not server.port:
            await asyncio.sleep(0)
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


def test_a_drain_serves_what_is_in_refuses_what_comes_and_cuts_the_rest(model: str) -> None:
    async def scene(port: int) -> None:
        await until(port, "/readyz", 200)
        long = [asyncio.create_task(ask(port, "POST", "/v1/completions", prompt(400))) for _ in range(3)]
        while server._desk.num_inside < 3:
            await asyncio.sleep(0)
        server.stop()
        await until(port, "/readyz", 503)
        assert (await ask(port, "GET", "/livez"))[0] == 200
        status, headers, _ = await ask(port, "POST", "/v1/completions", prompt(1))
        assert (status, headers["x-lqs-reason"], headers["connection"]) == (503, "draining", "close")
        assert int(headers["retry-after"]) >= 1
        for status, headers, _ in await asyncio.gather(*long):
            assert status == 200 or headers["x-lqs-reason"] == "draining"

    server = build(config_for(model, **{"server.drain_s": 0.2}))
    assert live(server, scene) == 0
    assert server._desk.num_inside == 0


def test_a_server_that_is_stopped_while_it_loads_leaves_without_its_thread(model: str) -> None:
    async def scene(port: int) -> None:
        server.stop()

    server = build(config_for(model))
    release = asyncio.Event()

    async def never(function: Any, name: str) -> Any:
        await release.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "in_thread", never)
        assert live(server, scene) == 0
    assert server.hung == ["lqs-load"]


def test_a_device_slot_that_cannot_be_opened_ends_the_server_with_1(model: str) -> None:
    def fail() -> None:
        raise DeviceError("no room")

    async def scene(port: int) -> None:
        await asyncio.sleep(0)

    server = build(config_for(model))
    server._models.load = fail  # type: ignore[assignment,method-assign]
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


def test_health_changes_of_a_device_slot_are_logged(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = build(config_for(model, **{"log.level": "info"}))
    server._log_health("cpu:0", False, "GGML_ASSERT")
    server._log_health("cpu:0", False, "")
    server._log_health("cpu:0", True, "")
    text = capsys.readouterr().err
    assert "GGML_ASSERT" in text
    assert "does not end" in text
    assert "works again" in text
