"""Counts the streams that have, among others, exactly the text they have alone; `python -m bench.exact`.

Each prompt is answered alone, then all of them at once, at temperature 0. A quantised file gives
the same logits whatever the batch; an f16 file is multiplied by other kernels for larger batches,
so a few of its texts turn at a close call. The sum of all `usage` is held against the server's own
counters, which are settled from its ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.compare.metrics import read_metrics
from bench.compare.report import Row, fact, table, write_json
from bench.compare.server import Live, Server, Setup, lqs_from_here, running
from bench.load.client import Client
from bench.load.prompts import Prompts
from bench.load.reply import Reply, read_reply
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder

NUM_WORDS, NUM_TOKENS = 28, 64
SETTLE_S = 10.0


def payloads(client: Client, num_streams: int) -> list[bytes]:
    """The requests: completions of 64 tokens, no two prompts alike."""
    prompts = Prompts(NUM_WORDS, seed=32)
    body = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [client.payload("POST", "/v1/completions", body | {"prompt": prompts.next()}) for _ in range(num_streams)]


async def measure(live: Live, num_streams: int) -> tuple[list[Reply], list[Reply], bool]:
    """Replies alone and together, and whether their usage adds up to the server's counters."""
    before = await read_metrics(live.client)
    requests = payloads(live.client, num_streams)
    alone = [read_reply(await live.client.send(request)) for request in requests]
    together = [read_reply(e) for e in await asyncio.gather(*map(live.client.send, requests))]
    replies = [*alone, *together]
    wanted = (sum(r.num_prompt_tokens for r in replies), sum(r.num_completion_tokens for r in replies))
    return alone, together, await adds_up(live, before.get, wanted)


async def adds_up(live: Live, before: object, wanted: tuple[int, int]) -> bool:
    """Whether the counters have grown by just what the answers said. They settle a moment later."""
    assert callable(before)
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    for _ in range(int(SETTLE_S * 10)):
        now = await read_metrics(live.client)
        if tuple(int(now.get(name) - before(name)) for name in names) == wanted:
            return True
        await asyncio.sleep(0.1)
    return False


async def compare(server: Server, setup: Setup, num_streams: int) -> list[Row]:
    """One server from start to end."""
    async with running(server, setup) as live:
        alone, together, is_whole = await measure(live, num_streams)
    complete = sum(r.ok and r.num_completion_tokens == NUM_TOKENS for r in together)
    same = sum(a.ok and a.text == b.text for a, b in zip(alone, together, strict=True))
    name = setup.model.stem
    return [
        Row(
            None,
            f"{name}: streams that complete, of {num_streams}",
            "streams",
            (complete,),
            passed=complete == num_streams,
        ),
        Row(None, f"{name}: with exactly the text they have alone", "streams", (same,)),
        Row(None, f"{name}: usage adds up to the ledger", "yes=1", (float(is_whole),), passed=is_whole),
    ]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.exact", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--f16", action="store_true", help="also an f16 copy of it")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    model = args.model or Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [model]
        if args.f16:
            files.append(Path(folder, f"{model.stem}-f16.gguf"))
            command = [sys.executable, "-m", "bench.exact.requantize", str(model), str(files[1])]
            subprocess.run(command, check=True, capture_output=True)
        for file in files:
            setup = Setup(file, args.threads, args.streams, args.streams * 256)
            rows += asyncio.run(compare(lqs_from_here(), setup, args.streams))
    print(table(rows))
    if args.json:
        write_json(args.json, [fact("threads", str(args.threads))], rows)
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
