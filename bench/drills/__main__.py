"""Kill drills: a device slot breaks under 32 running streams, and each of them must end as if nothing had been.

    python -m bench.drills [--runs N] [--only DRILL,...] [--streams N] [--tokens N] [--threads N] [--json FILE]

Each run of a drill has a process of its own with two CPU device slots. Checked in each: every stream ends complete
and exactly equal to its undisturbed text, its tokens are counted once, no request was answered twice, and all that was
taken is given back. Recovery is the longest time in which a stream of such a run stood still, beside that of a run
without a drill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.core.measure import Row
from bench.drills.process import DrillFailed, Process, figures, total, until
from bench.load.client import Client
from bench.load.reply import Reply, read_reply
from tests.fake_nvml import compile_library
from tests.server.process import GAUGES

STREAM_S = 300.0
# What breaks, where {step} is another one in each run.
DRILLS = {
    "abort": "device_slot=1 abort@step={step}",
    "abort-helper": "device_slot=1 abort-helper@step={step}",
    "hang": "device_slot=1 hang@step={step} for=8s",
    "fail-load": "device_slot=1 fail-load times=2",
    # On a card of a driver that says what its script says: that it fell off the bus.
    "lose-card": "device_slot=1 card=GPU-a",
}
# Nothing runs on a device slot that is not there; one on a lost card does not come back.
LOSE_NOTHING, STAY_OUT = {"fail-load"}, {"lose-card"}


@dataclass
class Run:
    """What one run came to."""

    recovery_s: float
    num_lost: float
    back_s: float  # From the start of the streams until both device slots worked, if they ever did again.


@dataclass
class Results:
    """All runs of one drill."""

    name: str
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def body_of(number: int, num_tokens: int) -> dict[str, object]:
    return {
        "prompt": f"{number}. Tell a long story about the number {number} and how it was found.",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def streams(client: Client, num: int, num_tokens: int) -> list[Reply]:
    """All at once; what each saw."""
    payloads = [client.payload("POST", "/v1/completions", body_of(i, num_tokens)) for i in range(num)]
    exchanges = await asyncio.gather(*(client.send(payload, STREAM_S) for payload in payloads))
    return [read_reply(exchange) for exchange in exchanges]


async def lose_card_meanwhile(process: Process, client: Client, num_tokens: int) -> list[Reply]:
    """Once so many tokens are made; nobody replies to that."""

    async def is_time() -> bool:
        return total(await figures(client), "lqs_step_tokens_total") >= num_tokens

    await until(is_time, "no tokens came")
    process.lose_card()
    return []


def longest_gap_s(replies: Sequence[Reply]) -> float:
    """The longest time that any of them stood still once it had begun."""
    gaps = [b - a for reply in replies for a, b in zip(reply.token_times_s, reply.token_times_s[1:], strict=False)]
    return max(gaps, default=0.0)


def check_streams(replies: Sequence[Reply], wanted: Sequence[str], num_tokens: int) -> None:
    """Each is complete, told once and as it was undisturbed. Raises DrillFailed."""
    for number, (reply, text) in enumerate(zip(replies, wanted, strict=True)):
        if not reply.ok:
            raise DrillFailed(f"stream {number}: {reply.status} {reply.error}")
        if reply.text != text:
            raise DrillFailed(f"stream {number} differs: {reply.text!r} is not {text!r}")
        if reply.num_completion_tokens != num_tokens:
            raise DrillFailed(f"stream {number} has {reply.num_completion_tokens} tokens, not {num_tokens}")


async def check_ledger(client: Client, before: dict[str, float], num: int, num_tokens: int) -> dict[str, float]:
    """Everything is given back, and each request is counted once. Raises DrillFailed."""

    async def is_given_back() -> bool:
        after = await figures(client)
        return all(total(after, name) == total(before, name) for name in GAUGES)

    await until(is_given_back, "not all was given back")
    after = await figures(client)
    counted = {
        "vllm:request_success_total": num,
        "vllm:generation_tokens_total": num * num_tokens,
        "lqs_requests_restarted_total": total(after, "lqs_requests_lost_total"),
    }
    for name, wanted in counted.items():
        if total(after, name) != wanted:
            raise DrillFailed(f"{name} is {total(after, name):g}, not {wanted:g}")
    return after


async def back_after_s(client: Client, began_s: float) -> float:
    """Seconds until both device slots work. Raises DrillFailed."""

    async def both_work() -> bool:
        return total(await figures(client), "lqs_device_healthy") == 2

    await until(both_work, "the device slot did not come back")
    return time.monotonic() - began_s


async def one_run(
    name: str, drill: str, args: argparse.Namespace, wanted: Sequence[str] | None
) -> tuple[Run, list[str]]:
    """One process from its start to its end. Raises DrillFailed."""
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder), args.threads, drill, args.nvml)
        try:
            client = await process.ready()
            before = await figures(client)
            began_s = time.monotonic()
            calls = [streams(client, args.streams, args.tokens)]
            if name == "lose-card":
                calls.append(lose_card_meanwhile(process, client, args.streams * args.tokens // 4))
            replies, *_ = await asyncio.gather(*calls)
            texts = [reply.text for reply in replies]
            check_streams(replies, wanted or texts, args.tokens)
            after = await check_ledger(client, before, args.streams, args.tokens)
            num_lost = total(after, "lqs_requests_lost_total")
            if drill and name not in LOSE_NOTHING and not num_lost:
                raise DrillFailed("nothing broke while the streams ran")
            back_s = await back_after_s(client, began_s) if drill and name not in STAY_OUT else 0.0
            if (code := await process.end()) != 0:
                raise DrillFailed(f"it ended with {code}")
            for sign in ("Traceback", "unexpected error"):
                if sign in process.log:
                    raise DrillFailed("the log has an error")
            return Run(longest_gap_s(replies), num_lost, back_s), texts
        except DrillFailed as failure:
            raise DrillFailed(f"{failure}\n{process.log[-4000:]}") from None
        finally:
            process.kill()


async def measure(args: argparse.Namespace) -> list[Results]:
    """All drills, in turns."""
    quiet = Results("undisturbed")
    run, wanted = await one_run("undisturbed", "", args, None)
    quiet.runs.append(run)
    found = {name: Results(name) for name in DRILLS if not args.only or name in args.only.split(",")}
    for number in range(args.runs):
        for name, results in found.items():
            drill = DRILLS[name].format(step=8 + number * 7 % max(args.tokens - 24, 1))
            try:
                run, _ = await one_run(name, drill, args, wanted)
                results.runs.append(run)
                print(f"{name} {number + 1}/{args.runs}: {run.num_lost:g} lost, stood still {run.recovery_s:.2f} s")
            except DrillFailed as failure:
                results.failures.append(str(failure))
                print(f"{name} {number + 1}/{args.runs} ({drill}): FAILED: {failure}")
    return [quiet, *found.values()]


def rows_of(results: Sequence[Results], num_streams: int) -> list[Row]:
    """The table."""
    rows = []
    for one in results:
        num = len(one.runs) + len(one.failures)
        what = f"{one.name}: runs of {num} in which all {num_streams} streams were whole and equal"
        rows.append(Row("kill drills", what, len(one.runs), "runs", passed=not one.failures))
        if one.runs:
            gaps = [run.recovery_s for run in one.runs]
            rows.append(Row(None, f"{one.name}: longest standstill, median", statistics.median(gaps), "s", runs=gaps))
            rows.append(Row(None, f"{one.name}: longest standstill, worst", max(gaps), "s"))
        backs = [run.back_s for run in one.runs if run.back_s]
        if backs:
            rows.append(Row(None, f"{one.name}: both device slots work after, median", statistics.median(backs), "s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="of each drill")
    parser.add_argument("--only", default="", help=", ".join(DRILLS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--threads", type=int, default=1, help="of each device slot")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.nvml = compile_library(Path(folder) / "nvml")
        rows = rows_of(asyncio.run(measure(args)), args.streams)
    for row in rows:
        verdict = {True: "pass", False: "FAIL", None: ""}[row.passed]
        print(f"{row.what:<75} {row.value:>9.2f} {row.unit:<5} {verdict}")
    if args.json:
        args.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
