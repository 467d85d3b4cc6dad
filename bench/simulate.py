"""How long a million simulated requests take: python -m bench.simulate [--quick] [--json FILE]."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from bench.core.measure import Row
from lqs.config import Config
from lqs.simulate.cost import EXAMPLE
from lqs.simulate.generate import generate, spread
from lqs.simulate.play import Devices, capacity_of, play
from lqs.simulate.policy import Policy
from lqs.simulate.summary import Slo, groups_of

LIMIT_S = 20.0
LOAD = 1.2
RECIPE = "gamma cv=3 prompt=lognormal:400:0.9 answer=lognormal:160:0.7"


def measure(*, is_quick: bool) -> list[Row]:
    """Play them under lqs's own policy, and sum them up; each part with its time."""
    num = 50_000 if is_quick else 1_000_000
    config = Config()
    devices = Devices.of(EXAMPLE, config, 8)
    began_s = time.perf_counter()
    trace = generate(f"{RECIPE} requests={num}", seed=1)
    spread(trace, {0: 0.1, 2: 0.6, 4: 0.3}, 16, seed=1)
    made_s = time.perf_counter()
    trace = trace.at_rate(LOAD * capacity_of(trace, devices))
    scaled_s = time.perf_counter()
    cpu_began_s = time.process_time()
    played = play(trace, Policy.named("lqs", config), devices)
    cpu_s, played_s = time.process_time() - cpu_began_s, time.perf_counter()
    groups_of(played, config.queue, Slo(2.0, 0.5))
    summed_s = time.perf_counter()
    what = f"{num:,} requests on 8 device slots at {LOAD:g} of the capacity"
    return [
        Row(None, f"{what}, simulated", played_s - scaled_s, "s", passed=None if is_quick else cpu_s <= LIMIT_S),
        Row(None, "the same, CPU time", cpu_s, "s", passed=None if is_quick else cpu_s <= LIMIT_S),
        Row(None, "drawing the trace", made_s - began_s, "s"),
        Row(None, "finding the capacity", scaled_s - made_s, "s"),
        Row(None, "summing up", summed_s - played_s, "s"),
        Row(None, "simulated time", played.span_s, "s"),
    ]


def main() -> None:
    """Print the table, and write the rows where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50,000 requests, for a look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    rows = measure(is_quick=options.quick)
    for row in rows:
        print(f"{row.what:72} {row.value:>14,.2f} {row.unit:4} { ({True: 'pass', False: 'FAIL'}.get(row.passed, '')) }")
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
