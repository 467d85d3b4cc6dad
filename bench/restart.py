"""Rolling restarts under a steady load at half of the capacity: no request may fail; the longest wait is reported.

    python -m bench.restart [--restarts N] [--seconds S] [--quick] [--model FILE] [--json FILE]

For each way to restart, `lqs serve --supervise` runs the model, its capacity is measured with as many clients as
it has sequences, and then requests come at random times at half of that rate, each on a connection of its own. The
supervisor is asked for a restart again and again, each time when the one before is over. A wait is the time from
the moment a client begins to connect to the first token. `overlap`: both servers are there for a while. `hold`:
the new one is loaded when the old one has ended, and connections wait in the kernel meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.compare.report import Row, fact, table, write_json
from bench.compare.server import Live, Setup, lqs_from_here, running
from bench.compare.workload import completions
from bench.load.drive import NextPayload, closed_loop, open_loop
from bench.load.reply import Reply, read_reply
from bench.load.stats import percentile
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder

PARALLEL, CTX = 8, 8192
NUM_WORDS, NUM_TOKENS = 12, 16
SHARE = 0.5
MODES = ("overlap", "hold")
_LOOK_S = 0.1
_RESTART_S = 120.0


@dataclass(slots=True)
class Restarts:
    """When each restart was asked for and when the next server was there, in `time.perf_counter` seconds."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def touches(self, reply: Reply) -> bool:
        """Whether a restart went on while the request waited for its first token."""
        begun_s = reply.token_times_s[0] if reply.token_times_s else reply.end_s
        return any(start_s <= begun_s and reply.start_s <= end_s for start_s, end_s in self.spans)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one way to restart; capacity in requests a second."""

    capacity: float
    replies: list[Reply]
    restarts: Restarts
    mode: str

    @property
    def failed(self) -> list[Reply]:
        """Requests that were not answered in full."""
        return [reply for reply in self.replies if not reply.ok]

    def waits_s(self, *, touched: bool) -> list[float]:
        """Waits of those that a restart touched, or of the others."""
        return [reply.ttft_s for reply in self.replies if reply.ok and self.restarts.touches(reply) is touched]


async def play(mode: str, setup: Setup, num_restarts: int, between_s: float) -> Result:
    """Find the capacity, let half of it come, and restart so often, with as much time between."""
    subject = lqs_from_here()
    server = replace(subject, name=f"lqs, {mode}", extra=("--supervise",)).with_environment(
        mode, LQS_SERVER_RESTART=mode
    )
    async with running(server, setup) as live:
        rate = await _capacity(live)
        restarts = Restarts()
        supply = completions(live.client, NUM_WORDS, NUM_TOKENS, draw=2)
        asking = asyncio.create_task(_restart(live, restarts, num_restarts, between_s))
        sending: list[asyncio.Task[list[Reply]]] = []
        number = 0
        while not asking.done():
            # In short stretches, because nobody knows how long the restarts will take.
            sending.append(asyncio.create_task(_send(live, _arrivals(rate * SHARE, 1.0, seed=number), supply)))
            number += 1
            await asyncio.sleep(1.0)
        await asking
        replies = [reply for stretch in await asyncio.gather(*sending) for reply in stretch]
    return Result(rate, replies, restarts, mode)


async def _capacity(live: Live) -> float:
    supply = completions(live.client, NUM_WORDS, NUM_TOKENS, draw=1)
    began_s = time.perf_counter()
    exchanges = await closed_loop(live.client, PARALLEL, 4, supply)
    return len(exchanges) / (time.perf_counter() - began_s)


def _arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    times, now_s = [], 0.0
    while (now_s := now_s + draw.expovariate(rate)) < seconds:
        times.append(now_s)
    return times


async def _send(live: Live, arrivals_s: Sequence[float], supply: NextPayload) -> list[Reply]:
    return [read_reply(exchange) for exchange in await open_loop(live.client, arrivals_s, supply)]


async def _restart(live: Live, restarts: Restarts, num: int, between_s: float) -> None:
    for _ in range(num):
        await asyncio.sleep(between_s)
        old = await _server_pid(live)
        start_s = time.perf_counter()
        os.kill(live.pid, signal.SIGUSR2)
        await asyncio.wait_for(_replaced(live, old), _RESTART_S)
        restarts.spans.append((start_s, time.perf_counter()))
    await asyncio.sleep(between_s)


async def _replaced(live: Live, old: int) -> None:
    """Wait until another process answers and the old one has ended."""
    while await _server_pid(live) == old or is_alive(old):  # noqa: ASYNC110 Nothing tells of another's end.
        await asyncio.sleep(_LOOK_S)


def is_alive(pid: int) -> bool:
    """Whether there is a process of that number."""
    return Path(f"/proc/{pid}").exists()


async def _server_pid(live: Live) -> int:
    """The process that answers."""
    reply = await live.client.get("/admin/devices", timeout_s=_RESTART_S)
    return int(json.loads(reply.text)["pid"])


def rows_of(result: Result) -> list[Row]:
    """Failures, which must be none, and the longest wait beside that of requests which no restart touched."""
    name, num = result.mode, len(result.restarts.spans)
    failed = result.failed
    note = f"{len(result.replies)} requests, {num} restarts, capacity {result.capacity:.1f}/s"
    if failed:
        note += f"; the first: {failed[0].status} {failed[0].error or failed[0].text[:200]}"
    touched, others = result.waits_s(touched=True), result.waits_s(touched=False)
    spans = [end_s - start_s for start_s, end_s in result.restarts.spans]
    return [
        Row("restart", f"{name}: failed", "requests", (len(failed),), passed=not failed, note=note),
        Row(
            None, f"{name}: longest wait of {len(touched)} that a restart touched", "s",
            (max(touched, default=math.nan),), "the others", (max(others, default=math.nan),),
        ),
        Row(
            None, f"{name}: P50 of them", "s", (percentile(touched, 0.5),), "the others", (percentile(others, 0.5),)
        ),
        Row(None, f"{name}: from the signal until the old server has ended", "s", tuple(spans)),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=10, help="of each kind (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="between two of them (%(default)s)")
    parser.add_argument("--mode", choices=MODES, action="append", help="one alone (both)")
    parser.add_argument("--model", type=Path, help="a GGUF file (the default model)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one restart of each kind: for a look, not for a claim")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(argv)
    model = options.model or Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)
    setup = Setup(model, options.threads, PARALLEL, CTX)
    num, between_s = (1, 1.0) if options.quick else (options.restarts, options.seconds)
    rows: list[Row] = []
    for mode in options.mode or MODES:
        rows += rows_of(asyncio.run(play(mode, setup, num, between_s)))
        print(table(rows[-4:]), flush=True)
    if options.json:
        facts = [fact("method", f"{model.name}, {options.threads} threads, {num} restarts, {between_s:g} s apart")]
        write_json(options.json, facts, rows)
    return 1 if any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
