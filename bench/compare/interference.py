"""G2c: what a long prompt that comes in does to the streams that are running."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable

from bench.compare.report import Row
from bench.compare.rounds import Bench, Measure, Values, answers, compare
from bench.compare.server import Live
from bench.compare.workload import completions
from bench.load.drive import Backdrop, has_event
from bench.load.reply import read_reply
from bench.load.stats import percentile

CTX = 8192
STREAM_WORDS = 28
# By the number of streams: one alone is quick, and has to last until the prompt has been computed.
STREAM_TOKENS = {8: 600, 1: 2400}
IDLE_MAX = 3.0
START_S = 60.0


async def g2c(bench: Bench) -> list[Row]:
    """Compare the P99 gap between events of 8 streams, and of 1, idle and with a long prompt."""
    rows = []
    for num_streams in STREAM_TOKENS:
        setup = bench.setup(num_streams + 1, CTX)
        measure = _measure(num_streams, quick=bench.quick)
        mine, *peers = await bench.alternate(f"G2c {num_streams} running", setup, bench.everyone(measure))
        goal = "G2c" if num_streams == 8 else None
        title = f"{num_streams} running"
        note = f"{mine.of('prompt_tokens')[0]:.0f} prompt tokens come in"
        for peer in peers:
            rows += [
                compare(None, f"{title}, ITL P99 idle", "ms", "idle", mine, peer),
                compare(None, f"{title}, ITL P99 with prompt", "ms", "during", mine, peer, None, note),
                compare(
                    goal,
                    f"{title}, ITL P99 with prompt / idle",
                    "x",
                    "factor",
                    mine,
                    peer,
                    (lambda row: row.value <= IDLE_MAX) if goal else None,
                ),
                compare(None, f"{title}, TTFT of the prompt", "ms", "ttft", mine, peer),
            ]
    return rows


def _measure(num_streams: int, quick: bool) -> Measure:
    num_words, idle_s = (500, 2.0) if quick else (2000, 5.0)
    num_tokens = STREAM_TOKENS[num_streams]

    async def measure(live: Live) -> Values:
        client = live.client
        streams = completions(client, STREAM_WORDS, num_tokens, draw=5)
        backdrop = Backdrop(client, num_streams, streams)
        backdrop.start()
        await _until_all_stream(backdrop)
        exchanges = list(backdrop.current)
        idle_start_s = time.perf_counter()
        await asyncio.sleep(idle_s)
        prompt = completions(client, num_words, 2, draw=6)
        [long] = answers([await client.send(prompt())])
        await backdrop.finish(drain_s=0.0)
        times_s = [read_reply(exchange).token_times_s for exchange in exchanges]
        first_text_s = long.start_s + long.ttft_s
        idle_ms = percentile(gaps_ms(times_s, idle_start_s, long.start_s), 0.99)
        during_ms = percentile(gaps_ms(times_s, long.start_s, first_text_s), 0.99)
        return {
            "idle": idle_ms,
            "during": during_ms,
            "factor": during_ms / idle_ms,
            "ttft": long.ttft_s * 1e3,
            "prompt_tokens": long.num_prompt_tokens,
        }

    return measure


async def _until_all_stream(backdrop: Backdrop) -> None:
    """Wait until every stream has brought an event. Raises TimeoutError after START_S."""
    give_up_s = time.perf_counter() + START_S
    while not all(map(has_event, backdrop.current)):
        if time.perf_counter() > give_up_s:
            raise TimeoutError(f"not all streams have begun within {START_S:.0f} s")
        await asyncio.sleep(0.05)


def gaps_ms(streams: Iterable[list[float]], start_s: float, end_s: float) -> list[float]:
    """Return the gaps between events, in ms, that end after `start_s` and begin before `end_s`.

    A gap that reaches over the edge counts whole: one long gap is what a client would notice.
    """
    return [
        (later - sooner) * 1e3
        for times_s in streams
        for sooner, later in itertools.pairwise(times_s)
        if later > start_s and sooner < end_s
    ]
