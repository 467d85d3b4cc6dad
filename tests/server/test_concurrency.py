"""Many streams at once: each text is the one it has alone, and the books add up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.client import Streamed, collect
from tests.server.conftest import Start
from tests.server.process import Server

NUM_STREAMS = 32
NUM_TOKENS = 8
# One that is alone on its device slot finds nothing there.
UNCACHED = "[engine]\nctx = 1024\nprefix_cache = false\ninter_token_target_ms = 20\n"
THINGS = (
    "sea", "wind", "desert", "city", "garden", "clock", "bridge", "river", "winter", "horse", "ship", "market",
    "king", "school", "forest", "train", "island", "letter", "kitchen", "mirror", "road", "storm", "farm", "song",
    "tower", "window", "lake", "moon", "doctor", "castle", "painter", "engine",
)  # fmt: skip


def ask(server: Server, thing: str) -> dict[str, Any]:
    """A stream's body; prompts differ in their first words and in their length."""
    return {
        "prompt": f"{thing.title()}: a poem about the {thing}" + f", the old {thing}" * (len(thing) % 4) + "\n",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def stream(server: Server, thing: str) -> Streamed:
    return collect(server.call("POST", "/v1/completions", ask(server, thing)))


def all_at_once(server: Server, num: int) -> list[Streamed]:
    """One for each thing, so many at the same time."""
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda thing: stream(server, thing), THINGS))


@pytest.mark.timing
def test_32_streams_at_once_each_have_the_text_they_have_alone(start: Start, default_model: Path) -> None:
    """And what they are billed adds up to what the metrics count."""
    server = start(default_model, "--parallel", "1", "--device", "cpu:0", "--device", "cpu:1", config=UNCACHED)
    alone = all_at_once(server, 2)
    server.stop()
    server = start(default_model, "--parallel", str(NUM_STREAMS), "--ctx", "8192")
    together = all_at_once(server, NUM_STREAMS)
    assert [told.text for told in together] == [told.text for told in alone]
    assert len({told.text for told in together}) == NUM_STREAMS
    assert all(told.is_done and told.finish == "length" for told in together)
    usages = [told.usage for told in together if told.usage]
    for name, field in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert server.metric(f"vllm:{name}_total") == sum(usage[field] for usage in usages)
    assert sum(usage["completion_tokens"] for usage in usages) == NUM_STREAMS * NUM_TOKENS
    assert sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) < NUM_STREAMS
