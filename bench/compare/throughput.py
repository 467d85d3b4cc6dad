"""G1: tokens a second at 1, 8 and 32 clients. G4 and G5: what a token costs beside its decode."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

from bench.compare.metrics import read_metrics
from bench.compare.quiet import Watch
from bench.compare.report import Row
from bench.compare.rounds import Bench, Measure, Runs, Values, answers, compare, say
from bench.compare.server import Live, Server, Setup
from bench.compare.workload import GREEDY, SAMPLED, completions
from bench.load.drive import closed_loop
from bench.load.reply import Reply

NUM_WORDS, NUM_TOKENS = 28, 64
PARALLEL, CTX = 32, 8192
# Clients, and how many requests each sends in a full run: enough that the start and the end of
# the run, where fewer than all are decoding, weigh little.
FULL = {1: 8, 8: 4, 32: 4}
QUICK = {1: 2, 8: 1, 32: 1}


async def g1(bench: Bench) -> list[Row]:
    """Compare tokens a second with unified KV, and in a full run with split KV too."""
    rows = []
    for unified in (True,) if bench.quick else (True, False):
        layout = "unified KV" if unified else "split KV"
        setup = bench.setup(PARALLEL, CTX, unified)
        mine, *peers = await bench.alternate(
            f"G1 {layout}", setup, bench.everyone(_tokens_per_s(QUICK if bench.quick else FULL))
        )
        for peer in peers:
            rows += _g1_rows(bench, layout, mine, peer)
        rows += await _ceiling(bench, setup, layout, mine)
    return rows


def _g1_rows(bench: Bench, layout: str, mine: Runs, peer: Runs) -> list[Row]:
    note = f"{NUM_WORDS} words are {mine.of('prompt_tokens')[0]:.0f} prompt tokens"
    return [
        compare(
            "G1",
            f"{layout}, {num_clients} clients",
            "tokens/s",
            f"{num_clients}",
            mine,
            peer,
            lambda row: row.ratio >= 0.98,
            note if num_clients == 1 else "",
        )
        for num_clients in FULL
    ]


def _tokens_per_s(num_each_by_clients: dict[int, int]) -> Measure:
    async def measure(live: Live) -> Values:
        values: Values = {}
        for num_clients, num_each in num_each_by_clients.items():
            supply = completions(live.client, NUM_WORDS, NUM_TOKENS, draw=num_clients)
            replies = answers(await closed_loop(live.client, num_clients, num_each, supply))
            values[f"{num_clients}"] = num_tokens(replies) / elapsed_s(replies)
            values["prompt_tokens"] = replies[0].num_prompt_tokens
        return values

    return measure


def num_tokens(replies: list[Reply]) -> int:
    """Return the generated tokens, as the server's usage counts them."""
    return sum(reply.num_completion_tokens for reply in replies)


def elapsed_s(replies: list[Reply]) -> float:
    """Return the time from the first request to the last answer."""
    return max(reply.end_s for reply in replies) - min(reply.start_s for reply in replies)


async def _ceiling(bench: Bench, setup: Setup, layout: str, mine: Runs) -> list[Row]:
    """Return what the same library does without a server, if its tool lies beside a peer."""
    tool = next((path for peer in bench.peers if (path := _batched_bench(peer))), None)
    if tool is None:
        return []
    say(f"G1 {layout}: ceiling")
    command = _ceiling_command(tool, setup, int(mine.of("prompt_tokens")[0]))
    bench.flags[f"G1 {layout}: ceiling"] = " ".join([tool.name, *command[1:]]).replace(
        str(setup.model), setup.model.name
    )
    output, disturbers = await _run_alone(command)
    ceilings = parse_ceiling(output)
    return [
        Row(
            None,
            f"{layout}, {num_clients} clients, beside the ceiling",
            "tokens/s",
            mine.of(f"{num_clients}"),
            tool.name,
            (ceilings.get(num_clients, math.nan),),
            disturbed=(*mine.disturbed, *disturbers),
        )
        for num_clients in FULL
    ]


async def _run_alone(command: list[str]) -> tuple[str, list[str]]:
    """Return a tool's output, and who disturbed it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    async with Watch(process.pid) as watch:
        output, _ = await process.communicate()
    disturbers = watch.disturbers()
    return output.decode(), [f"G1 ceiling: {', '.join(disturbers)}"] if disturbers else []


def _batched_bench(peer: Server) -> Path | None:
    path = Path(peer.program[0]).with_name("llama-batched-bench")
    return path if path.exists() else None


def _ceiling_command(tool: Path, setup: Setup, num_prompt_tokens: int) -> list[str]:
    return [
        *(str(tool), "-m", str(setup.model), "-c", str(setup.ctx)),
        *("-t", str(setup.threads), "-tb", str(setup.threads)),
        *("-npp", str(num_prompt_tokens), "-ntg", str(NUM_TOKENS)),
        *("-npl", ",".join(map(str, FULL)), "--output-format", "jsonl"),
        "--kv-unified" if setup.unified else "--no-kv-unified",
    ]


def parse_ceiling(output: str) -> dict[int, float]:
    """Return generated tokens a second, prompts' time included, by number of sequences."""
    ceilings = {}
    for line in output.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            ceilings[int(found["pl"])] = found["pl"] * found["tg"] / found["t"]
    return ceilings


async def g4(bench: Bench) -> list[Row]:
    """Compare the host time per token of the decoding thread, greedy and sampled."""
    rows = []
    for name, fields, limit_us in (("greedy", GREEDY, 15.0), ("sampled", SAMPLED, 35.0)):
        mine, *peers = await _costs(bench, f"G4 {name}", fields)

        def within(row: Row, limit_us: float = limit_us) -> bool:
            return row.value <= limit_us

        what = f"host time per token, {PARALLEL} sequences, {name}"
        for peer in peers:
            rows.append(compare("G4", what, "us", "host_us", mine, peer, within))
        if mine.of("reported_us"):
            what += ", by its own metrics"
            rows.append(compare("G4", what, "us", "reported_us", mine, None, within))
    return rows


async def g5(bench: Bench) -> list[Row]:
    """Compare the CPU time of the whole server per token outside llama_decode."""
    mine, *peers = await _costs(bench, "G5", GREEDY)
    what = f"CPU per streamed token outside decode, {PARALLEL} clients"
    return [compare("G5", what, "us", "server_us", mine, peer, lambda row: row.ratio <= 0.5) for peer in peers]


async def _costs(bench: Bench, title: str, fields: dict[str, Any]) -> list[Runs]:
    """Measure the costs per token at 32 clients. They hold for one thread only."""
    num_each = 1 if bench.quick else 2
    setup = bench.setup(PARALLEL, CTX)

    async def measure(live: Live) -> Values:
        supply = completions(live.client, NUM_WORDS, NUM_TOKENS, draw=4, **fields)
        metrics_before, before = await read_metrics(live.client), live.clock.read(live.pid)
        replies = answers(await closed_loop(live.client, PARALLEL, num_each, supply))
        cost = live.clock.read(live.pid) - before
        reported = (await read_metrics(live.client)).since(metrics_before)
        values = {}
        if not math.isnan(reported_us := reported.host_us_per_token()):
            values["reported_us"] = reported_us
        if not cost.num_decodes:
            return values
        per_token = 1e6 / num_tokens(replies)
        values["host_us"] = (cost.decoder_s - cost.decode_s) * per_token
        values["server_us"] = (cost.process_s - cost.decode_s) * per_token
        return values

    return await bench.alternate(title, setup, bench.everyone(measure))
