"""G3: 32 requests at once, and when each got its first text."""

from __future__ import annotations

from bench.compare.report import Row
from bench.compare.rounds import Bench, Values, answers, compare
from bench.compare.server import Live
from bench.compare.workload import completions
from bench.load.drive import closed_loop
from bench.load.stats import percentile

NUM_REQUESTS, NUM_WORDS, NUM_TOKENS = 32, 28, 16
CTX = 8192


async def g3(bench: Bench) -> list[Row]:
    """Compare the time to the first text in a burst."""
    num_bursts = 1 if bench.quick else 3

    async def measure(live: Live) -> Values:
        ttfts_ms = []
        supply = completions(live.client, NUM_WORDS, NUM_TOKENS, draw=3)
        for _ in range(num_bursts):
            replies = answers(await closed_loop(live.client, NUM_REQUESTS, 1, supply))
            ttfts_ms += [reply.ttft_s * 1e3 for reply in replies]
        return {"p50": percentile(ttfts_ms, 0.50), "p99": percentile(ttfts_ms, 0.99)}

    setup = bench.setup(NUM_REQUESTS, CTX)
    mine, *peers = await bench.alternate("G3", setup, bench.everyone(measure))
    rows = []
    for key, limit in (("p50", 0.6), ("p99", 1.05)):

        def within(row: Row, limit: float = limit) -> bool:
            return row.ratio <= limit

        what = f"burst of {NUM_REQUESTS}, TTFT {key.upper()}"
        rows += [compare("G3", what, "ms", key, mine, peer, within) for peer in peers]
    return rows
