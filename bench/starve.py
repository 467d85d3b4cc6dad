"""G15: nobody starves. Ten minutes at 1.2 of the capacity, and the lowest class beside the proven bound.

    python -m bench.starve [--model FILE] [--load X] [--minutes N] [--seed N] [--quick] [--json FILE]

The minutes are simulated; with `--model` they are real as well: a server on this machine, with one thread less than
there are cores, and the same arrivals. Its start order is told by `x-lqs-queue-ms`, to a millisecond.

The bound, for a request of level L that arrives at time t: from t + L x step on nobody who comes
later is served before it, but for better classes that take at most `aged_every` - 1 of `aged_every`
starts. So until it starts there are at most `aged_every` x (1 + those still waiting then that are
due before it) starts. The starts are counted in the run; the time they take is what the run took.

It holds with sequences kept for urgent requests too, which a second run has: who is due may use them as well, so no
urgent one that starts there comes on top of the aged share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.compare.quiet import Watch
from bench.compare.server import Server, Setup, lqs_from_here, running
from bench.core.measure import Row
from bench.replay import calibrate, replay
from lqs.config import Config, QueueConfig
from lqs.request import NS_PER_S
from lqs.simulate.cost import EXAMPLE
from lqs.simulate.generate import generate, spread
from lqs.simulate.play import Devices, Played, capacity_of, play
from lqs.simulate.policy import Policy
from lqs.simulate.trace import Trace

_VERDICT = {True: "pass", False: "FAIL", None: "not judged"}
SHARES = {0: 0.35, 2: 0.35, 4: 0.3}
RECIPE = "poisson prompt=lognormal:60:0.6 answer=lognormal:24:0.5"
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Wait:
    """One request of the lowest class: how long it waited, and for how long and how many starts it might."""

    waited_s: float
    bound_s: float
    num_starts: int
    num_starts_max: int


def waits_of(
    trace: Trace, start_no: Sequence[int], started_ns: Sequence[int], queue: QueueConfig, level: int
) -> list[Wait]:
    """Every request of the class that started, beside its bound. All stand in one lane, for one key.

    `start_no` is the order of the starts, from 1 on, 0 for who did not start; `started_ns` is by the trace's clock.
    """
    starts = [0] * max(start_no)
    for number, at_ns in zip(start_no, started_ns, strict=True):
        if number:
            starts[number - 1] = at_ns
    step_ns = int(queue.aging_step_s * NS_PER_S)
    virtual = [at + own * step_ns for at, own in zip(trace.arrival_ns, trace.level, strict=True)]
    found = []
    for number, own in enumerate(trace.level):
        if own != level or not start_no[number]:
            continue
        due_ns = virtual[number]
        before = sum(
            trace.arrival_ns[other] <= due_ns < started_ns[other] and (virtual[other], other) < (due_ns, number)
            for other in range(len(trace))
        )
        num_max = queue.aged_every * (before + 1)
        first = bisect_right(starts, due_ns)
        num_starts = max(start_no[number] - first, 0)
        ends_ns = starts[min(first + num_max, len(starts)) - 1] if first < len(starts) else due_ns
        found.append(
            Wait(
                waited_s=(started_ns[number] - trace.arrival_ns[number]) / NS_PER_S,
                bound_s=(max(ends_ns, due_ns) - trace.arrival_ns[number]) / NS_PER_S,
                num_starts=num_starts,
                num_starts_max=num_max,
            )
        )
    return found


def measure(load: float, minutes: float, seed: int) -> list[Row]:
    """Play and judge, without and with sequences for urgent requests."""
    config = Config()
    level = len(config.queue.levels) - 1
    plain = Devices(1, EXAMPLE.cost, msgspec.structs.replace(EXAMPLE.shape, num_extra=0))
    rate = load * capacity_of(generate(f"{RECIPE} requests=2000", seed=seed), plain)
    num = int(rate * minutes * 60)
    trace = generate(f"{RECIPE} requests={num} rate={rate}", seed=seed)
    spread(trace, SHARES, 0, seed=seed)
    queue = msgspec.structs.replace(config.queue, **_patient(num))
    policy = Policy("lqs", msgspec.structs.replace(config, queue=queue), has_keys=False, has_lanes=False)
    waits = _played(play(trace, policy, plain), queue, level)
    beside = _played(play(trace, policy, Devices(1, EXAMPLE.cost, EXAMPLE.shape)), queue, level)
    num_never = list(trace.level).count(level) - len(waits)
    what = f"{len(waits)} requests of the lowest class, {minutes:g} min at {load:g} of the capacity"
    return [
        *_judged(what, waits),
        Row("G15", "of them never served", num_never, "requests", passed=num_never == 0),
        *_judged(f"with {EXAMPLE.shape.num_extra} sequences kept for urgent requests", beside),
    ]


def _patient(num: int) -> dict[str, Any]:
    """A queue for so many, unbounded and patient, so that only the order decides."""
    bounds = {"caps": (num,), "total": num, "table_capacity": max(num, 16)}
    return bounds | {"timeout_s": 0.0, "request_timeout_s": 0.0, "high_load_at": 1.0}


def _played(played: Played, queue: QueueConfig, level: int) -> list[Wait]:
    return waits_of(played.trace, played.start_no, played.started_ns, queue, level)


async def measure_real(model: Path, load: float, minutes: float, seed: int) -> list[Row]:
    """The same of a server that runs, beside the bound from the starts that it made."""
    setup = Setup(model, max((os.cpu_count() or 2) - 1, 1), parallel=4, ctx=4096)
    config = Config()
    level = len(config.queue.levels) - 1
    devices = Devices.of(calibrate(setup), config)
    rate = load * capacity_of(generate(f"{RECIPE} requests=2000", seed=seed), devices)
    num = int(rate * minutes * 60)
    trace = generate(f"{RECIPE} requests={num} rate={rate}", seed=seed)
    spread(trace, SHARES, 0, seed=seed)
    async with running(_patient_server(num), setup) as live, Watch(live.pid) as watch:
        replies = await replay(live, trace, seed)
    started_ns = [
        at_ns + int(float(reply.headers["x-lqs-queue-ms"]) * NS_PER_MS)
        for at_ns, reply in zip(trace.arrival_ns, replies, strict=True)
    ]
    start_no = [0] * num
    for place, number in enumerate(sorted(range(num), key=lambda number: (started_ns[number], number))):
        start_no[number] = place + 1
    waits = waits_of(trace, start_no, started_ns, config.queue, level)
    what = f"on a server, {len(waits)} of {num} requests are of the lowest class, {minutes:g} min at {load:g}"
    if watch.disturbers():
        what += f" (disturbed by {', '.join(watch.disturbers())})"
    # Starts of one step have one time; as many may stand in another order than they were chosen in.
    return _judged(what, waits, num_alike=setup.parallel, close_s=1.0)


def _patient_server(num: int) -> Server:
    """With one lane and no bound; no stream is opened before it starts, so that each tells how long it waited."""
    never, total = "100000", str(num)
    # The table also holds who runs.
    environment = {"LQS_QUEUE_CAPS": f"[{total}]", "LQS_QUEUE_TOTAL": total, "LQS_QUEUE_TABLE_CAPACITY": str(num + 64)}
    environment |= {"LQS_QUEUE_TIMEOUT_S": "86400", "LQS_QUEUE_REQUEST_TIMEOUT_S": "86400", "LQS_QUEUE_HOLD_S": "3600"}
    environment |= {"LQS_QUEUE_HIGH_LOAD_AT": "1", "LQS_QUEUE_SHORT_TOKENS_MAX": never}
    environment |= {"LQS_QUEUE_LONG_TOKENS_MIN": never, "LQS_QUEUE_BREAK_AT": "0", "LQS_ALERTS_ENABLED": "false"}
    return lqs_from_here().with_environment("patient", **environment)


def _judged(what: str, waits: Sequence[Wait], *, num_alike: int = 0, close_s: float = 0.0) -> list[Row]:
    """The longest wait beside its bound, and the wait that came nearest to its own.

    Of starts that are known to `num_alike` and times that are known to `close_s` only so much is judged.
    """
    worst = max(waits, key=lambda wait: wait.waited_s)
    nearest = max(waits, key=lambda wait: wait.num_starts / wait.num_starts_max)
    holds = all(
        wait.num_starts <= wait.num_starts_max + num_alike and wait.waited_s <= wait.bound_s + close_s for wait in waits
    )
    ratio = worst.waited_s / worst.bound_s
    starts = nearest.num_starts, nearest.num_starts_max
    return [
        Row("G15", f"{what}: longest wait", worst.waited_s, "s", "its bound", worst.bound_s, ratio, holds),
        Row("G15", "starts after its time, nearest to the bound", starts[0], "starts", "the most", starts[1],
            starts[0] / starts[1], holds),
    ]  # fmt: skip


def main() -> None:
    """Print the rows, and write them where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.starve", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file: also a real server, in real time")
    parser.add_argument("--load", type=float, default=1.2, help="share of the capacity (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a real run takes half a minute only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    print(f"bench.starve --load {options.load:g} --minutes {options.minutes:g} --seed {options.seed}")
    rows = measure(options.load, options.minutes, options.seed)
    if options.model is not None:
        minutes = 0.5 if options.quick else options.minutes
        rows += asyncio.run(measure_real(options.model, options.load, minutes, options.seed))
    for row in rows:
        peer = f"{row.peer} {row.peer_value:,.1f} {row.unit}, {row.ratio:.2f} x" if row.peer else ""
        print(f"{row.goal} {row.what:76} {row.value:>10,.1f} {row.unit:8} {peer:32} {_VERDICT[row.passed]}")
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
