"""G2: what short requests of a high class wait while long ones of a low class flood the server."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bench.compare.report import Row
from bench.compare.rounds import Bench, Runs, Values, answers, compare
from bench.compare.scale import Scale
from bench.compare.server import Live
from bench.compare.workload import LONG_PRIORITY, SHORT_PRIORITY, completions
from bench.load.drive import Backdrop, closed_loop, open_loop
from bench.load.reply import Reply, read_reply
from bench.load.stats import median, percentile

PARALLEL, CTX = 4, 4096
NUM_LONG_CLIENTS = 16
INTERVAL_S = 0.5
SHORT_WORDS, SHORT_TOKENS = 10, 8
DRAIN_S = 60.0
# More tokens than any request has: no border then, and so one lane.
ONE_LANE = {"LQS_QUEUE_SHORT_TOKENS_MAX": "1000000000", "LQS_QUEUE_LONG_TOKENS_MIN": "1000000000"}
# The flood's long requests are just short by default; one sequence of the four is kept for the
# short ones.
TWO_LANES = {"LQS_QUEUE_SHORT_TOKENS_MAX": "256", "LQS_QUEUE_LANE_SEQUENCES": "[0, 3]"}
# S16: how far the short requests' P99 has to fall once long ones have a lane of their own.
SPLIT_MAX = 0.2
TTFT_MAX_MS, IDLE_MAX, BELOW_PEER_MIN = 350.0, 4.0, 100.0


@dataclass(frozen=True, slots=True)
class Flood:
    """How long the flood is and how long its requests are."""

    long_words: int
    long_tokens: int
    num_short: int


FULL = Flood(long_words=200, long_tokens=256, num_short=60)
QUICK = Flood(long_words=32, long_tokens=32, num_short=8)


async def g2(bench: Bench) -> list[Row]:
    """Compare the short requests' TTFT, and the total beside our own order of arrival."""
    flood = QUICK if bench.quick else FULL
    by_class = functools.partial(_measure, flood=flood, short_priority=SHORT_PRIORITY)
    in_order = functools.partial(_measure, flood=flood, short_priority=LONG_PRIORITY)
    small = [peer.with_flags("-b 64 -ub 64", "-b", "64", "-ub", "64") for peer in bench.peers]
    contestants = [
        (bench.subject, by_class),
        *((server, by_class) for server in (*bench.peers, *small)),
        (bench.subject.with_environment("with lanes and no classes", **TWO_LANES), in_order),
        (bench.subject.with_environment("in order of arrival", **ONE_LANE), in_order),
    ]
    mine, *peers, split, fifo = await bench.alternate("G2", bench.setup(PARALLEL, CTX), contestants)
    scale = Scale.measure()
    rows = [row for peer in peers for row in _ttft_rows(bench, scale, mine, peer)]
    rows.append(compare(None, "flood, short TTFT P99", "ms", "p99", mine, fifo))
    rows.append(
        compare(
            "S16",
            "flood, short TTFT P99, lanes and no classes",
            "ms",
            "p99",
            split,
            fifo,
            lambda row: row.ratio <= SPLIT_MAX,
        )
    )
    rows.append(
        compare(
            "G2b",
            "flood, all generated tokens",
            "tokens/s",
            "tokens_per_s",
            mine,
            fifo,
            lambda row: row.ratio >= 0.97,
        )
    )
    return [*rows, scale.row()]


def _ttft_rows(bench: Bench, scale: Scale, mine: Runs, peer: Runs) -> list[Row]:
    def within(row: Row) -> bool:
        limits = [IDLE_MAX * median(mine.of("idle")), row.peer_value / BELOW_PEER_MIN]
        if bench.threads == 1:
            limits.append(scale.here(TTFT_MAX_MS))
        return row.value <= min(limits)

    note = f"{TTFT_MAX_MS:.0f} ms are {scale.here(TTFT_MAX_MS):.0f} ms on this machine"
    return [
        compare("G2", "flood, short TTFT P99", "ms", "p99", mine, peer, within, note),
        compare(None, "flood, short TTFT P50", "ms", "p50", mine, peer),
        compare(None, "flood, short TTFT P50 when idle", "ms", "idle", mine, peer),
        compare(None, "flood, all generated tokens", "tokens/s", "tokens_per_s", mine, peer),
    ]


async def _measure(live: Live, flood: Flood, short_priority: int) -> Values:
    client = live.client
    short = completions(client, SHORT_WORDS, SHORT_TOKENS, draw=2, priority=short_priority)
    long = completions(client, flood.long_words, flood.long_tokens, draw=3, priority=LONG_PRIORITY)
    idle = answers(await closed_loop(client, 1, 5, short))
    backdrop = Backdrop(client, NUM_LONG_CLIENTS, long)
    backdrop.start()
    # The first arrival comes after the flood has filled all sequences.
    arrivals_s = [4.0 + INTERVAL_S * number for number in range(flood.num_short)]
    shorts = answers(await open_loop(client, arrivals_s, short))
    longs = [read_reply(exchange) for exchange in await backdrop.finish(DRAIN_S)]
    ttfts_ms = [reply.ttft_s * 1e3 for reply in shorts]
    window = (shorts[0].start_s, max(reply.end_s for reply in shorts))
    return {
        "idle": percentile([reply.ttft_s * 1e3 for reply in idle], 0.5),
        "p50": percentile(ttfts_ms, 0.50),
        "p99": percentile(ttfts_ms, 0.99),
        "tokens_per_s": tokens_between([*shorts, *longs], *window) / (window[1] - window[0]),
    }


def tokens_between(replies: list[Reply], start_s: float, end_s: float) -> float:
    """Return how many tokens were generated within a span of time.

    Each reply's tokens, as its usage counts them, are spread evenly over its events: a server may
    send several tokens at once, but it sends a long answer in many events.
    """
    total = 0.0
    for reply in replies:
        if reply.ok and reply.token_times_s:
            inside = sum(start_s <= when_s <= end_s for when_s in reply.token_times_s)
            total += reply.num_completion_tokens * inside / len(reply.token_times_s)
    return total
