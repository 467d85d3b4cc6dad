"""Short and long requests over a real socket, in real time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import Start
from tests.server.process import Server

# One sequence, so that what comes while it is taken waits in its lane.
BASE = "engine.parallel = 1\nengine.ctx = 60000\nengine.urgent_sequences = 0\n"


@pytest.fixture(scope="module")
def server(share: Start, tiny: Path) -> Iterator[Server]:
    """A server whose only sequence is taken."""
    server = share(tiny, config=BASE)
    holder = server.complete(50_000)
    server.wait_running()
    yield server
    holder.close()


def lane_of(server: Server, num_tokens: int, **fields: str) -> str:
    """In which lane a request of that many tokens in all waits; it leaves again."""
    num_prompt = num_tokens // 2
    call = server.complete(num_tokens - num_prompt, prompt=[5] * num_prompt, **fields)
    server.wait_waiting(1)
    depths = {lane: depth_of(server, lane) for lane in ("short", "long")}
    call.close()
    server.wait_waiting(0)
    assert sorted(depths.values()) == [0, 1]
    return max(depths, key=depths.__getitem__)


def depth_of(server: Server, lane: str) -> float:
    """How many wait in a lane, of all classes."""
    return sum(
        value
        for name, value in server.metrics().items()
        if name.startswith("lqs_lane_queue_depth{") and f'lane="{lane}"' in name
    )


@pytest.mark.parametrize(
    ("num_tokens", "lane"),
    [(64, "short"), (128, "short"), (256, "short"), (2048, "long"), (3000, "long"), (10_000, "long")],
)
def test_requests_wait_in_the_lane_of_their_length(server: Server, num_tokens: int, lane: str) -> None:
    """S14: a threshold of 512 tokens in all."""
    assert lane_of(server, num_tokens) == lane


@pytest.mark.parametrize(
    ("num_tokens", "wish", "lane"), [(2048, "short", "short"), (64, "long", "long"), (2049, "short", "long")]
)
def test_a_client_may_say_so_itself_up_to_the_upper_bound(
    server: Server, num_tokens: int, wish: str, lane: str
) -> None:
    assert lane_of(server, num_tokens, task_type=wish) == lane
