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
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.core.measure import Row
from bench.load.client import Client
from bench.load.reply import Reply, read_reply

START_S, STREAM_S, STOP_S = 120.0, 300.0, 60.0
CONFIG = """
engine.devices = ["cpu:0", "cpu:1"]
engine.ctx = 8192
engine.stall_s = 2.0
health.reload_backoff_s = 0.5
server.drain_s = 5
server.close_s = 2
log.access = false
queue.entry_per_s = 0
"""
# What breaks, where {step} is another one in each run.
DRILLS = {
    "abort": "device_slot=1 abort@step={step}",
    "abort-helper": "device_slot=1 abort-helper@step={step}",
    "hang": "device_slot=1 hang@step={step} for=12s",
    "fail-load": "device_slot=1 fail-load times=2",
}
# As it was before the streams came.
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "lqs_queue_depth",
    "lqs_queue_places_taken",
    "lqs_queue_total_places_taken",
    "lqs_requests_lost_waiting",
    "lqs_device_kv_reserved",
    "lqs_events_lost_total",
    "lqs_core_broken_total",
)
_SAMPLE = re.compile(r"^([a-z_:]+)(\{.*\})? (\S+)$", re.MULTILINE)


class DrillFailed(Exception):
    """A run was not as it must be; the message says in what."""


@dataclass
class Run:
    """What one run came to."""

    recovery_s: float
    num_lost: float
    back_s: float  # From the start of the streams until both device slots worked; 0: they always did.


@dataclass
class Results:
    """All runs of one drill."""

    name: str
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Process:
    """`lqs serve` with two device slots, on a free port."""

    def __init__(self, folder: Path, threads: int, drill: str) -> None:
        (folder / "lqs.toml").write_text(CONFIG)
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "lqs", "serve", "--config", str(folder / "lqs.toml"), "--port", "0"]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", str(threads), "--chaos", drill],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )

    async def ready(self) -> Client:
        """Wait until requests are let in."""
        found = await self._until(lambda: re.search(r"listening .*port=(\d+)", self.log))
        client = Client("127.0.0.1", int(found[1]))
        await self._until(lambda: re.search(r"^info +ready ", self.log, re.MULTILINE))
        return client

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def _until(self, holds):  # type: ignore[no-untyped-def]
        end_s = time.monotonic() + START_S
        while not (said := holds()):
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise DrillFailed("it did not start: " + self.log[-2000:])
            await asyncio.sleep(0.05)
        return said

    async def end(self) -> int:
        """End it as an operator does; its exit code."""
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, STOP_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def figures(client: Client) -> dict[str, float]:
    """Every sample of /metrics, by name and labels."""
    text = (await client.get("/metrics", timeout_s=10.0)).text
    return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)}


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


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
    end_s = time.monotonic() + 20
    while True:
        after = await figures(client)
        left = {name: total(after, name) for name in GAUGES if total(after, name) != total(before, name)}
        if not left:
            break
        if time.monotonic() > end_s:
            raise DrillFailed(f"not given back: {left}")
        await asyncio.sleep(0.05)
    counted = {
        "vllm:request_success_total": num,
        "vllm:generation_tokens_total": num * num_tokens,
        "lqs_requests_restarted_total": total(after, "lqs_requests_lost_total"),
    }
    for name, wanted in counted.items():
        if total(after, name) != wanted:
            raise DrillFailed(f"{name} is {total(after, name):g}, not {wanted:g}")
    return after


async def back_after_s(process: Process, client: Client, began_s: float) -> float:
    """Seconds until both device slots work. Raises DrillFailed."""
    while total(await figures(client), "lqs_device_healthy") < 2:
        if time.monotonic() - began_s > START_S:
            raise DrillFailed("the device slot did not come back: " + process.log[-1000:])
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


async def one_run(name: str, drill: str, args: argparse.Namespace, wanted: Sequence[str] | None) -> tuple[Run, list[str]]:
    """One process from its start to its end. Raises DrillFailed."""
    with tempfile.TemporaryDirectory() as folder:
        process = Process(Path(folder), args.threads, drill)
        try:
            client = await process.ready()
            before = await figures(client)
            began_s = time.monotonic()
            replies = await streams(client, args.streams, args.tokens)
            texts = [reply.text for reply in replies]
            check_streams(replies, wanted or texts, args.tokens)
            after = await check_ledger(client, before, args.streams, args.tokens)
            num_lost = total(after, "lqs_requests_lost_total")
            if drill and name != "fail-load" and not num_lost:
                raise DrillFailed("nothing broke while the streams ran")
            back_s = await back_after_s(process, client, began_s) if drill else 0.0
            if (code := await process.end()) != 0:
                raise DrillFailed(f"it ended with {code}")
            for sign in ("Traceback", "unexpected error"):
                if sign in process.log:
                    raise DrillFailed(process.log[-2000:])
            return Run(longest_gap_s(replies), num_lost, back_s), texts
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
            backs = [run.back_s for run in one.runs]
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
    rows = rows_of(asyncio.run(measure(args)), args.streams)
    for row in rows:
        verdict = {True: "pass", False: "FAIL", None: ""}[row.passed]
        print(f"{row.what:<75} {row.value:>9.2f} {row.unit:<5} {verdict}")
    if args.json:
        args.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
