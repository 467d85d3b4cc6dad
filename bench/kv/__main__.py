"""Gives up cells and takes them back; loads a server beyond its KV; `python -m bench.kv`.

First the price: copying a sequence of 256 tokens out to host memory and in again, beside computing
it again. Then the load: twice as many streams at once as the KV cache holds, answers of whatever
length the model gives them, once with KV promised for the longest answer and once as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.compare.metrics import Metrics, read_metrics
from bench.compare.report import Row, fact, table, write_json
from bench.compare.server import Live, Setup, lqs_from_here, running
from bench.load.prompts import Prompts
from bench.load.reply import Reply, read_reply
from lqs._core import Scheduler
from lqs.engine import library
from lqs.engine.store import DEFAULT_MODEL, Store, store_folder

NUM_SWAPPED_TOKENS = 256
SWAP_SHARE_MAX = 0.01
KV_USE_MIN = 0.9
NUM_WORDS, MAX_TOKENS = 3, 400
STREAM_TOKENS = 75  # What a stream comes to on average, prompt and answer.
SAMPLE_S = 0.1


def swap_rows(model_path: Path, threads: int, rounds: int) -> list[Row]:
    """Copying out and in beside computing again, in turns on one device slot."""
    library.start(verbose=False)
    model = library.Model(model_path)
    model.load()
    scheduler = Scheduler(table_capacity=16, level_caps=[1], total_cap=1)
    slot = scheduler.add_device_slot(kv_tokens=1024, num_sequences=4, kv_block=64)
    worker = library.make_worker(
        scheduler,
        slot,
        model,
        n_ctx=1024,
        n_seq=4,
        n_batch=512,
        n_ubatch=48,
        threads=threads,
        kv_unified=True,
        prefix_cache=True,
        prefix_sequences=4,
        flash_attention=True,
        inter_token_target_ms=200.0,
        n_extra=0,
        swap_bytes=1 << 28,
    )
    runs = [worker.calibrate_swap(NUM_SWAPPED_TOKENS) for _ in range(rounds)]
    worker.close()
    model.close()
    row = Row(
        "G14",
        f"copy {NUM_SWAPPED_TOKENS} tokens out and in",
        "ms",
        tuple(run["swap_ms"] for run in runs),
        "compute again",
        tuple(run["compute_ms"] for run in runs),
    )
    return [
        Row(row.goal, row.what, row.unit, row.values, row.peer, row.peer_values, passed=row.ratio <= SWAP_SHARE_MAX)
    ]


@dataclass
class Load:
    """What one run under load came to."""

    replies: list[Reply]
    seconds: float
    grown: Metrics
    promised: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Streams that did not come to an end of their own."""
        return sum(not reply.ok for reply in self.replies)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time of the run."""
        return sum(reply.num_completion_tokens for reply in self.replies) / self.seconds


async def load(live: Live, num_streams: int, num_requests: int) -> Load:
    """Keep `num_streams` going until `num_requests` are answered; KV is looked at while all of them go."""
    prompts = Prompts(NUM_WORDS, seed=17)
    payloads = [
        live.client.payload(
            "POST",
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Say in one short sentence what this is: " + prompts.next()}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0.9,
                "seed": i,
                "stream": True,
                "stream_options": {"include_usage": True},
                "priority": 2 + i % 3,
            },
        )
        for i in range(num_requests)
    ]
    before = await read_metrics(live.client)
    found = Load([], 0.0, before)
    waiting = iter(payloads)

    async def stream() -> None:
        for payload in waiting:
            found.replies.append(read_reply(await live.client.send(payload)))

    began_s = time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
    while not all(task.done() for task in streams):
        await asyncio.sleep(SAMPLE_S)
        if num_streams <= len(found.replies) <= num_requests - num_streams:
            now = await read_metrics(live.client)
            capacity = now.get("lqs_device_kv_tokens")
            found.promised.append(now.get("lqs_device_kv_reserved") / capacity)
            found.filled.append(now.get("lqs_device_kv_cells") / capacity)
    await asyncio.gather(*streams)
    found.seconds = time.perf_counter() - began_s
    found.grown = (await read_metrics(live.client)).since(before)
    return found


@contextlib.contextmanager
def kv_mode(mode: str) -> Iterator[None]:
    """Let servers that are started here promise KV this way."""
    name = "LQS_ENGINE_KV_MODE"
    before = os.environ.get(name)
    os.environ[name] = mode
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


async def load_rows(model: Path, threads: int, ctx: int, num_requests: int) -> list[Row]:
    """Both ways of promising under the same load."""
    runs: dict[str, Load] = {}
    num_streams = max(2 * ctx // STREAM_TOKENS, 2)
    for mode in ("guaranteed", "expected"):
        with kv_mode(mode):
            async with running(lqs_from_here(), Setup(model, threads, num_streams, ctx)) as live:
                runs[mode] = await load(live, num_streams, num_requests)
    expected, guaranteed = runs["expected"], runs["guaranteed"]
    grown = expected.grown
    kv_use = sum(expected.promised) / max(len(expected.promised), 1)
    peer_use = sum(guaranteed.promised) / max(len(guaranteed.promised), 1)
    num_kv_failures = grown.get("lqs_device_kv_failures_total")
    return [
        Row(
            "G17",
            f"killed or failed, of {num_requests} streams",
            "streams",
            (expected.num_failed + num_kv_failures,),
            passed=expected.num_failed == 0 and num_kv_failures == 0 and kv_use >= KV_USE_MIN,
            note=f"{num_streams} at once over {ctx} tokens of KV",
        ),
        Row("G17", "KV promised while all go", "share", (kv_use,), "guaranteed", (peer_use,)),
        Row(
            None,
            "KV cells filled, prefix cache among them",
            "share",
            (sum(expected.filled) / max(len(expected.filled), 1),),
            "guaranteed",
            (sum(guaranteed.filled) / max(len(guaranteed.filled), 1),),
        ),
        Row(None, "tokens a second", "1/s", (expected.tokens_per_s,), "guaranteed", (guaranteed.tokens_per_s,)),
        Row(None, "put out and back", "times", (grown.get("vllm:num_preemptions_total"),)),
        Row(None, "growths that had to wait", "times", (grown.get("lqs_kv_growths_refused_total"),)),
        Row(None, "growths", "times", (grown.get("lqs_kv_growths_total"),)),
        Row(None, "time copying KV", "s", (grown.get("lqs_swap_seconds_total"),)),
    ]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kv", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ctx", type=int, default=2048, help="tokens of KV")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and requests: about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    model = args.model or Store(store_folder(os.environ)).resolve(DEFAULT_MODEL.name)
    ctx, num_requests, rounds = (1024, 60, 3) if args.quick else (args.ctx, args.requests, 7)
    rows = swap_rows(model, args.threads, rounds)
    rows += asyncio.run(load_rows(model, args.threads, ctx, num_requests))
    print(table(rows))
    if args.json:
        write_json(args.json, [fact("threads", str(args.threads))], rows)
    return 0 if all(row.passed is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
