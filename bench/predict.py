"""Predicted beside measured: the time to the first token of a real server, and what `lqs simulate` said of it.

    python -m bench.predict --model FILE [--load X] [--requests N] [--rounds N] [--quick] [--json FILE]

Each round calibrates (`lqs check --calibrate`), draws a trace, plays it through the simulation, and
then sends it to a server on this machine at the trace's own times. Client and server share the
cores, so the server gets one thread less than there are. The nearer the load is to 1, the more
each percent of error in what a step takes is multiplied: at 0.6 by two and a half, at 0.9 by ten.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from pathlib import Path

from bench.compare.quiet import Watch
from bench.compare.report import Row, fact, table, write_json
from bench.compare.server import Setup, lqs_from_here, running
from bench.load.stats import percentile
from bench.replay import calibrate, replay
from lqs.config import Config
from lqs.request import NS_PER_S
from lqs.settings import load
from lqs.simulate.generate import generate, spread
from lqs.simulate.play import Devices, capacity_of, play
from lqs.simulate.policy import Policy

SHARES = {2: 0.4, 3: 0.3, 4: 0.3}
RECIPE = "gamma cv=2 prompt=lognormal:32:0.7 answer=lognormal:12:0.5"
PARALLEL, CTX = 8, 4096
TOLERANCE = 0.25
SHARES_SHOWN = (0.50, 0.99)
TO_JUDGE_P99 = 1000


def main() -> int:
    """Measure, print the table, write the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--load", type=float, default=0.6, help="share of the capacity (%(default)s)")
    parser.add_argument("--requests", type=int, help=f"in each round ({TO_JUDGE_P99}, quick 80)")
    parser.add_argument("--rounds", type=int, help="(3, quick 1)")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look, not a claim: P99 needs many requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    num_requests = options.requests or (80 if options.quick else TO_JUDGE_P99)
    num_rounds = options.rounds or (1 if options.quick else 3)
    found: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES_SHOWN}
    disturbed: list[str] = []
    for number in range(num_rounds):
        predicted, measured, by_whom = asyncio.run(_round(options, num_requests, seed=number))
        disturbed += [f"round {number + 1}: {name}" for name in by_whom]
        for share, pairs in found.items():
            pairs.append((percentile(predicted, share), percentile(measured, share)))
        said = ", ".join(
            f"P{share * 100:g} {pairs[-1][0]:.2f} / {pairs[-1][1]:.2f} s" for share, pairs in found.items()
        )
        print(f"round {number + 1}: predicted / measured {said}", flush=True)
    rows = [_row(share, pairs, num_requests, tuple(disturbed)) for share, pairs in found.items()]
    print(table(rows))
    if options.json:
        method = (
            f"{options.model.name}, {options.threads} threads, {num_requests} requests at {options.load:g}, {RECIPE}"
        )
        write_json(options.json, [fact("machine", platform.machine()), fact("method", method)], rows)
    return 0 if all(row.passed is not False for row in rows) else 1


def _row(share: float, pairs: list[tuple[float, float]], num_requests: int, disturbed: tuple[str, ...]) -> Row:
    predicted, measured = zip(*pairs, strict=True)
    row = Row(None, f"TTFT P{share * 100:g}", "s", predicted, "measured", measured, disturbed=disturbed)
    is_judged = num_requests >= TO_JUDGE_P99 and not disturbed
    passed = abs(row.ratio - 1) <= TOLERANCE if is_judged else None
    return Row(None, row.what, "s", predicted, "measured", measured, passed, disturbed)


async def _round(
    options: argparse.Namespace, num_requests: int, *, seed: int
) -> tuple[list[float], list[float], list[str]]:
    """Times to the first token in seconds, predicted and measured, and who else was busy meanwhile."""
    setup = Setup(options.model, options.threads, PARALLEL, CTX)
    calibration = calibrate(setup)
    config = _config()
    devices = Devices.of(calibration, config)
    trace = generate(f"{RECIPE} requests={num_requests}", seed=seed)
    spread(trace, SHARES, 0, seed=seed)
    trace = trace.at_rate(options.load * capacity_of(trace, devices))
    played = play(trace, Policy.named("lqs", config), devices)
    predicted = [
        (first_ns - at_ns) / NS_PER_S for first_ns, at_ns in zip(played.first_token_ns, trace.arrival_ns, strict=True)
    ]
    async with running(lqs_from_here(), setup) as live, Watch(live.pid) as watch:
        replies = await replay(live, trace, seed)
    # Where a token ends inside a character the text comes with the next one; an answer may have none.
    measured = [reply.ttft_s for reply in replies if reply.token_times_s]
    return predicted, measured, watch.disturbers()


def _config() -> Config:
    """What bench.compare starts its server with, as far as the queue goes."""
    limits = {"queue.timeout_s": 600.0, "queue.request_timeout_s": 1200.0}
    return load(flags={"queue.caps": [512], "queue.total": 512, **limits})


if __name__ == "__main__":
    sys.exit(main())
