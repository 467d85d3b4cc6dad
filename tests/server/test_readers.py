"""Clients that do not read: one is dropped in time, the others notice nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.server.client import collect
from tests.server.conftest import Start
from tests.server.process import Server, until

STALL_S = 1.0
CONFIG = f"""
engine.parallel = 2
engine.ctx = 100000
engine.prefix_cache = false
server.write_stall_s = {STALL_S}
"""


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Server:
    return share(tiny, config=CONFIG)


def test_who_never_reads_is_dropped_and_its_sequence_is_free(server: Server) -> None:
    """Its answer fills every buffer on the way; a stall later it is gone, and the neighbour streamed on."""
    before = server.memory_bytes
    # Logprobs make the answer a hundred times as large, so that the kernel's own buffers fill too.
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40_000, "ignore_eos": True, "stream": True}
    server.call("POST", "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 20}, receive_bytes=4096)
    server.wait_running(1)
    neighbour = server.complete(1500, stream=True)
    assert collect(neighbour).is_done
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    until(lambda: server.metrics()[aborted] == 1, 40)
    server.wait_running(0)
    assert server.metric("lqs_device_kv_cells") == 0
    assert server.memory_bytes - before < 100_000_000
    assert "status=200" in server.log


def test_who_reads_slowly_gets_everything(server: Server) -> None:
    """Slower than the model, but never silent for so long."""
    call = server.complete(1000, stream=True, logprobs=5, receive_bytes=4096)
    num_events, began_s = 0, time.monotonic()
    for event in call.events():
        num_events += 1
        last = event
    assert last == "[DONE]"
    assert num_events > 100
    assert time.monotonic() - began_s < 60
