"""A trace sent to a real server at its own times, and what steps of such a server take on this machine."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.compare.server import Live, Setup
from bench.load.drive import open_loop
from bench.load.reply import Reply, read_reply
from lqs.request import NS_PER_S
from lqs.simulate.cost import Calibration, load_calibration
from lqs.simulate.trace import Trace


def calibrate(setup: Setup) -> Calibration:
    """What `lqs check --calibrate` measures here, with the server's own shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cost.json")
        shape = ("--threads", str(setup.threads), "--parallel", str(setup.parallel), "--ctx", str(setup.ctx))
        command = [sys.executable, "-m", "lqs", "check", str(setup.model), *shape, "--calibrate", "--cost", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return load_calibration(path)


async def replay(live: Live, trace: Trace, seed: int) -> list[Reply]:
    """Send the trace at its times; a request that is not answered in full ends the run."""
    payloads = iter(_payloads(live, trace, random.Random(seed)))
    exchanges = await open_loop(live.client, [at_ns / NS_PER_S for at_ns in trace.arrival_ns], lambda: next(payloads))
    replies = [read_reply(exchange) for exchange in exchanges]
    failed = [reply for reply in replies if not reply.ok]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(replies)} requests failed, the first with {failed[0].error}")
    return replies


def _payloads(live: Live, trace: Trace, draw: random.Random) -> list[bytes]:
    """Prompts of token ids, so that their lengths are exact."""
    body = {"stream": True, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
    columns = zip(trace.prompt_tokens, trace.completion_tokens, trace.level, strict=True)
    return [
        live.client.payload(
            "POST",
            "/v1/completions",
            body
            | {"prompt": [draw.randrange(1000, 20_000) for _ in range(num)], "max_tokens": answer, "priority": level},
        )
        for num, answer, level in columns
    ]
