"""`python -m bench.compare`: starts lqs and its peers, drives them alike, prints what came out."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.compare.burst import g3
from bench.compare.flood import g2
from bench.compare.interference import g2c
from bench.compare.probes import g13
from bench.compare.report import Row, fact, table, write_json
from bench.compare.rounds import Bench, LoadFailed, say
from bench.compare.server import Server, ServerFailed, lqs_from_here
from bench.compare.throughput import g1, g4, g5

GOALS: dict[str, Callable[[Bench], Awaitable[list[Row]]]] = {
    "G1": g1,
    "G2": g2,
    "G2c": g2c,
    "G3": g3,
    "G4": g4,
    "G5": g5,
    "G13": g13,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 done, 1 a server failed, 2 wrong use."""
    options = _parser().parse_args(arguments)
    bench = Bench(
        subject=options.subject,
        peers=tuple(options.peer),
        model=options.model.resolve(),
        threads=options.threads,
        quick=options.quick,
        num_rounds=options.rounds or (1 if options.quick else 3),
    )
    rows, failures = asyncio.run(_run(bench, options.goals))
    facts = _facts(bench, failures)
    for found in facts:
        print(f"{found['what']}: {found['value']}")
    print(table(rows))
    if options.json:
        write_json(options.json, facts, rows)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument(
        "--peer",
        type=Server.parse,
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="a server to compare with, such as llama-server=/path/to/llama-server; repeatable",
    )
    parser.add_argument(
        "--subject",
        type=Server.parse,
        default=lqs_from_here(),
        metavar="NAME=PATH",
        help="what stands in the first column; lqs from this Python by default",
    )
    parser.add_argument("--model", type=_file, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=1, help="for decode and prefill (1)")
    parser.add_argument("--goals", type=_goals, default=list(GOALS), help=f"of {','.join(GOALS)}")
    parser.add_argument("--rounds", type=int, help="how often each server is measured (3, quick 1)")
    parser.add_argument("--quick", action="store_true", help="under a minute for most goals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def _goals(text: str) -> list[str]:
    goals = text.split(",")
    unknown = [goal for goal in goals if goal not in GOALS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; one of {', '.join(GOALS)}")
    return goals


async def _run(bench: Bench, goals: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Measure goal after goal; one that fails is told and does not lose the others."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for goal in goals:
        try:
            rows += await GOALS[goal](bench)
        except (ServerFailed, LoadFailed, TimeoutError) as error:
            failures[goal] = str(error) or "timeout"
            say(f"{goal} failed: {failures[goal]}")
    return rows, failures


def _facts(bench: Bench, failures: dict[str, str]) -> list[dict[str, object]]:
    """Return what a stranger needs to repeat the run, and what went wrong."""
    rounds = f"{bench.num_rounds} rounds, alternating, {'quick' if bench.quick else 'full'}"
    return [
        fact("machine", f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}"),
        fact("method", f"{bench.model.name}, {bench.threads} threads, {rounds}"),
        *(fact(f"flags of {name}", flags) for name, flags in bench.flags.items()),
        *(fact(f"FAILED {goal}", text) for goal, text in failures.items()),
    ]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
