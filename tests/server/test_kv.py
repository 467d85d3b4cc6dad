"""More streams than the KV cache holds: they all complete, and their texts are those they have alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.server.client import Streamed, collect
from tests.server.conftest import Start
from tests.server.process import Server

NUM_TOKENS = 34
THINGS = ("sea", "wind", "desert", "city", "garden", "clock", "bridge", "river")


def stream(server: Server, thing: str, priority: int) -> Streamed:
    body: dict[str, Any] = {
        "prompt": f"{thing.title()}: a poem about the old {thing}\n",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "priority": priority,
    }
    return collect(server.call("POST", "/v1/completions", body))


def test_streams_that_outgrow_the_kv_pause_and_none_is_killed_or_changed(start: Start, default_model: Path) -> None:
    config = "[engine]\nkv_block_tokens = 16\ninter_token_target_ms = 20\n"
    server = start(default_model, "--parallel", str(len(THINGS)), "--ctx", "260", config=config)
    alone = [stream(server, thing, 2) for thing in THINGS]
    # Answers seem to be short now, so all are started at once; 8 x 44 cells are wanted of 260.
    for _ in range(20):
        server.complete(1).answer()
    assert server.metric("vllm:num_preemptions_total") == 0
    with ThreadPoolExecutor(len(THINGS)) as pool:
        together = list(pool.map(lambda thing: stream(server, thing, 2 + THINGS.index(thing) % 3), THINGS))
    assert [told.text for told in together] == [told.text for told in alone]
    assert all(told.is_done and told.finish == "length" for told in together)
    seen = {name: server.metric(f"lqs_{name}_total") for name in ("kv_put_out", "kv_resumed", "swaps_out", "swaps_in")}
    assert seen["kv_put_out"] == seen["kv_resumed"] > 0
    assert seen["swaps_out"] == seen["swaps_in"] > 0
    assert server.metric("vllm:num_preemptions_total") >= seen["swaps_out"]
    assert server.metric("lqs_device_kv_failures_total") == 0
    assert server.metric("lqs_kv_out") == server.metric("lqs_kv_paused") == server.metric("lqs_swap_bytes") == 0


def test_a_split_cache_is_promised_for_the_longest_answer_and_the_log_says_so(start: Start, tiny: Path) -> None:
    server = start(tiny, "--ctx", "1024", "--parallel", "2", config="[engine]\nkv_unified = false\n")
    assert "KV: it is promised for the longest answer, because engine.kv_unified is false" in server.log
    assert server.complete(50).answer().finish == "length"
    assert server.metric("lqs_kv_growths_total") == 0
