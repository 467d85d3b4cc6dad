"""Comes back when told: the share that gets in at the first retry; `python -m bench.retry`.

A burst of five times the capacity for 20 s, from clients on the official SDK with its two retries: with
computed Retry-After, with a constant one of 1 s, and under a load that stays at 1.5 of capacity. G18:
what clients were told of their wait and of their return, beside what came.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.compare.report import Row, fact, table, write_json
from bench.compare.server import Server, Setup, lqs_from_here, running
from bench.load.client import Client
from bench.retry.crowd import Crowd, Outcome
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder

PARALLEL, CTX = 8, 4096
BURST, SUSTAINED = 5.0, 1.5
BEFORE = 0.8  # What the server is used to before.
AT_FIRST_MIN = 0.90
# G18: half of what is told is within 25 % of what comes, nine of ten within 50 %.
WITHIN = (("0.25", 0.5), ("0.5", 0.9))
_BUCKET = re.compile(r'^lqs_(wait|retry)_error_ratio_bucket\{le="(.+?)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Length:
    """Seconds of each part, and the length of the queue that goes with them."""

    measure: float
    before: float
    burst: float
    sustained: float
    num_places: int


FULL = Length(measure=10, before=15, burst=20, sustained=90, num_places=40)
QUICK = Length(measure=2, before=2, burst=3, sustained=8, num_places=10)


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario: what became of the crowd, errors of what was told by their bounds, the capacity."""

    outcome: Outcome
    errors: Counter[tuple[str, str]]
    capacity: float


async def play(server: Server, setup: Setup, length: Length, times: float, seconds: float) -> Result:
    """Find the capacity, get used to 0.8 of it, then let `times` of it come for so long."""
    async with running(server, setup) as live:
        crowd = Crowd(live.client.port, seed=18)
        try:
            capacity = await crowd.capacity(PARALLEL + 2, length.measure)
            before = await errors_of(live.client)
            outcome = await crowd.rush([(BEFORE * capacity, length.before), (times * capacity, seconds)])
            after = await errors_of(live.client)
        finally:
            await crowd.close()
    after.subtract(before)
    return Result(outcome, after, capacity)


async def errors_of(client: Client) -> Counter[tuple[str, str]]:
    """How many errors were not above each bound, of waits and of returns."""
    text = (await client.get("/metrics")).text
    return Counter({(kind, bound): int(float(count)) for kind, bound, count in _BUCKET.findall(text)})


def crowd_rows(name: str, result: Result, goal: float | None = None) -> list[Row]:
    """The shares of one scenario."""
    outcome = result.outcome
    note = f"{outcome.num_clients} clients, {outcome.num_refused} refused at first, capacity {result.capacity:.1f}/s"
    if outcome.errors:
        note += f", gave up: {outcome.errors}"
    first = outcome.share_at_first_retry
    passed = None if goal is None else first >= goal
    return [
        Row(None, f"{name}: get in at the first retry", "share", (first,), passed=passed, note=note),
        Row(None, f"{name}: fail for good", "share", (outcome.share_failed,)),
    ]


def told_rows(name: str, result: Result) -> list[Row]:
    """How much of what was told was near enough to what came."""
    found = []
    for kind, what in (("wait", "expected wait"), ("retry", "Retry-After")):
        total = result.errors[kind, "+Inf"]
        for bound, least in WITHIN if total else ():
            share = result.errors[kind, bound] / total
            text = f"{name}: {what} within {float(bound):.0%} of what came"
            found.append(Row("G18", text, "share", (share,), passed=share >= least, note=f"{total} times told"))
    return found


async def measure(server: Server, setup: Setup, length: Length) -> list[Row]:
    """All scenarios, each on a server of its own; their rows are printed as they come."""
    blunt = replace(server, program=("env", "LQS_REFUSALS_RETRY_AFTER_S=1", *server.program))
    rows: list[Row] = []
    for name, times, seconds, goal in (
        ("burst", BURST, length.burst, AT_FIRST_MIN),
        ("1.5 of capacity", SUSTAINED, length.sustained, None),
    ):
        promised = await play(server, setup, length, times, seconds)
        constant = await play(blunt, setup, length, times, seconds)
        found = crowd_rows(name, promised, goal) + crowd_rows(f"{name}, always told 1 s", constant)
        found += told_rows(name, promised)
        print(table(found), flush=True)
        rows += found
    return rows


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.retry", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="shorter loads: for a look, not for a claim")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    model = args.model or Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)
    setup = Setup(model, args.threads, PARALLEL, CTX)
    length = QUICK if args.quick else FULL
    server = replace(lqs_from_here(), num_waiting_max=length.num_places)
    flags = server.flags(setup)
    print(flags)
    rows = asyncio.run(measure(server, setup, length))
    if args.json:
        write_json(args.json, [fact("flags", flags)], rows)
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
