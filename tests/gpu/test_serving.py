"""A model on a real GPU, served and replaced; skipped where there is none or llama.cpp was built without CUDA."""

from __future__ import annotations

import signal
from pathlib import Path

import llama_cpp
import pytest

from lqs.engine.synth import Recipe, parse_shape, write
from lqs.placement.reader import Reader
from tests.server.conftest import Start, share  # noqa: F401 A fixture.
from tests.server.process import Server, until

pytestmark = pytest.mark.gpu

NUM_REQUESTS, NUM_TOKENS = 32, 64
# Weights of 113 million numbers, so that they show in the memory of a card.
SHAPE = "layer=8,embd=1024,head=16,head_kv=8,ff=2816,ctx=8192,vocab=8192"


def used_bytes() -> int:
    """What the first GPU has given away."""
    reader = Reader(lambda: 0)
    try:
        snapshot = reader.read(1)
        if snapshot.problem or not snapshot.gpus:
            pytest.skip(f"no GPU here: {snapshot.problem or 'none is listed'}")
        return snapshot.gpus[0].memory_used_bytes or 0
    finally:
        reader.close()


@pytest.fixture(scope="module")
def before_bytes() -> int:
    """What was given away before lqs came."""
    if not llama_cpp.llama_supports_gpu_offload():
        pytest.skip("llama.cpp is built without CUDA")
    return used_bytes()


@pytest.fixture(scope="module")
def server(before_bytes: int, share: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:  # noqa: F811
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write(path, Recipe(shape=parse_shape(SHAPE), dtype="f16"))
    return share(path, "--supervise", "--device", "cuda:0", "--parallel", "16", "--ctx", "32768")


def test_the_weights_are_on_the_card(server: Server, before_bytes: int) -> None:
    (slot,) = server.ask("GET", "/admin/devices").json["data"]
    assert (slot["device"], slot["state"]) == ("cuda:0", "ready")
    size = server.ask("GET", "/v1/models").json["data"][0]["meta"]["size"]
    assert used_bytes() - before_bytes > size


def test_one_request_alone_has_the_same_text_each_time(server: Server) -> None:
    texts = {server.complete(NUM_TOKENS, temperature=0).answer().text for _ in range(3)}
    assert len(texts) == 1


def test_many_at_once_are_all_answered_and_everything_is_given_back(server: Server) -> None:
    calls = [server.complete(NUM_TOKENS, prompt=f"number {number}") for number in range(NUM_REQUESTS)]
    assert [call.answer().usage[1] for call in calls] == [NUM_TOKENS] * NUM_REQUESTS
    server.wait_at_rest()


def test_a_restart_makes_room_on_the_card_first(server: Server, before_bytes: int) -> None:
    """Nobody knows what a card will have free, so the old one ends before the new one loads."""
    old = server.ask("GET", "/admin/devices").json["pid"]
    running = server.complete(NUM_TOKENS * 4)
    server.wait_running()
    server.signal(signal.SIGUSR2)
    assert running.answer().usage[1] == NUM_TOKENS * 4
    until(lambda: server.ask("GET", "/admin/devices").json["pid"] != old)
    assert "mode=hold" in server.log
    assert not Path(f"/proc/{old}").exists()
    assert server.complete(NUM_TOKENS).answer().usage[1] == NUM_TOKENS
