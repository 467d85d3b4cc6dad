"""Starts that fail: the exit code, and what the message says to do."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.client import HOST
from tests.server.conftest import Start
from tests.server.process import REPOSITORY, until

LIMIT_S = 30.0


def serve(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `lqs serve` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lqs", "serve", "--port", "0", "--threads", "1", *args],
        cwd=REPOSITORY,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def empty(path: Path, good: bytes) -> None:
    path.write_bytes(b"")


def only_a_header(path: Path, good: bytes) -> None:
    path.write_bytes(good[:24])


def cut_in_its_tensors(path: Path, good: bytes) -> None:
    path.write_bytes(good[: -len(good) // 4])


def wrong_magic(path: Path, good: bytes) -> None:
    path.write_bytes(b"GGML" + good[4:])


def huge_string(path: Path, good: bytes) -> None:
    path.write_bytes(good[:24] + struct.pack("<Q", 2**63) + good[32:])


def empty_key(path: Path, good: bytes) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 0) + b"\x00" * 5)


def a_folder(path: Path, good: bytes) -> None:
    path.mkdir()


def a_loop(path: Path, good: bytes) -> None:
    path.symlink_to(path)


def a_pipe(path: Path, good: bytes) -> None:
    os.mkfifo(path)


def missing(path: Path, good: bytes) -> None:
    pass


@pytest.mark.parametrize(
    "damage",
    [empty, only_a_header, cut_in_its_tensors, wrong_magic, huge_string, empty_key, a_folder, a_loop, a_pipe, missing],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_model_file_is_named_with_the_reason(damage: object, tiny: Path, tmp_path: Path) -> None:
    """B53: 0 bytes, 24 bytes, cut, magic, string length 2**63, empty key, directory, loop, FIFO."""
    path = tmp_path / "damaged.gguf"
    damage(path, tiny.read_bytes())  # type: ignore[operator]
    ended = serve(str(path))
    assert ended.returncode == 1
    assert "damaged.gguf" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("lqs: ")


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tiny: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        ended = serve(str(tiny), "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("queue.totl = 5", "queue.total"),
        ("queue.total = 0", "queue.total"),
        ('server.drain_s = "x"', "server.drain_s"),
        ("not toml", "TOML"),
        ("engine.n_batch = 2\nengine.parallel = 4", "engine.n_batch"),
        ('engine.devices = ["tpu:0"]', "engine.devices"),
    ],
)
def test_a_wrong_config_is_wrong_use_and_names_the_key(config: str, named: str, tiny: Path, tmp_path: Path) -> None:
    """B36 too: a batch smaller than the slots is refused at start."""
    path = tmp_path / "lqs.toml"
    path.write_text(config)
    ended = serve(str(tiny), "--config", str(path))
    assert ended.returncode == 2
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_keys_only_this_machine_may_reach_it(tiny: Path) -> None:
    ended = serve(str(tiny), "--host", "0.0.0.0")
    assert ended.returncode == 2
    assert "lqs keys add" in ended.stderr
    assert "--insecure" in ended.stderr


def test_wrong_flags_and_drills_are_wrong_use(tiny: Path) -> None:
    assert serve(str(tiny), "--nope").returncode == 2
    ended = serve(str(tiny), "--chaos", "device_slot=0 explode@step=1")
    assert ended.returncode == 2
    assert "explode" in ended.stderr


def test_variables_and_flags_override_the_file(start: Start, tiny: Path) -> None:
    server = start(
        tiny, "--ctx", "2048", config="engine.ctx = 512\nengine.parallel = 1\n", environ={"LQS_ENGINE_PARALLEL": "3"}
    )
    assert server.ask("GET", "/v1/models").json["data"][0]["meta"]["n_ctx"] == 2048
    for _ in range(3):
        server.complete(600)
    server.wait_running(3)


def test_a_log_in_json_is_json_in_every_line(start: Start, tiny: Path) -> None:
    import json

    server = start(tiny, "--log-format", "json", is_ready=False)
    until(lambda: '"listening"' in server.log)
    server.signal()
    assert server.wait() == 0
    assert all(json.loads(line) for line in server.log.splitlines())
