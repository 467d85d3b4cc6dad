"""Clients on the official SDK that come by the clock, are refused, and come back as the SDK does."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from bench.load.prompts import Prompts

NUM_WORDS = 12
TOKENS_MIN, TOKENS_MAX = 8, 24
RETRIES_MAX = 2  # The SDK's own default.
TIMEOUT_S = 600.0


@dataclass
class Outcome:
    """What became of the crowd. `tries` counts, for each that was served, how often it had come before."""

    tries: list[int] = field(default_factory=list)
    num_failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def num_clients(self) -> int:
        return len(self.tries) + self.num_failed

    @property
    def num_refused(self) -> int:
        """Clients that were refused at least once."""
        return sum(count > 0 for count in self.tries) + self.num_failed

    @property
    def share_at_first_retry(self) -> float:
        """Of the refused, those that got in when they came back for the first time."""
        return self.tries.count(1) / self.num_refused if self.num_refused else 1.0

    @property
    def share_failed(self) -> float:
        """Clients whose SDK gave up."""
        return self.num_failed / self.num_clients


class Crowd:
    """Sends completions of 8 to 24 tokens through the SDK. Owner: the event loop."""

    def __init__(self, port: int, seed: int) -> None:
        url = f"http://127.0.0.1:{port}/v1"
        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=RETRIES_MAX, timeout=TIMEOUT_S)
        self._prompts = Prompts(NUM_WORDS, seed)
        self._draw = random.Random(seed)

    async def close(self) -> None:
        await self._client.close()

    async def capacity(self, num_clients: int, seconds: float) -> float:
        """Requests a second with so many clients at all times."""
        began_s = time.perf_counter()
        ends_s: list[float] = []

        async def one() -> None:
            while time.perf_counter() - began_s < seconds:
                await self._complete()
                ends_s.append(time.perf_counter())

        await asyncio.gather(*(one() for _ in range(num_clients)))
        return len(ends_s) / (max(ends_s) - began_s)

    async def rush(self, phases: list[tuple[float, float]]) -> Outcome:
        """Let newcomers come at random, `(a second, for so many seconds)` each phase; only the last is counted."""
        outcome = Outcome()
        tasks = []
        when_s = time.perf_counter()
        for number, (per_s, seconds) in enumerate(phases):
            end_s = when_s + seconds
            while (when_s := when_s + self._draw.expovariate(per_s)) < end_s:
                await asyncio.sleep(when_s - time.perf_counter())
                counted = outcome if number == len(phases) - 1 else Outcome()
                tasks.append(asyncio.create_task(self._come(counted)))
            when_s = end_s
        await asyncio.gather(*tasks)
        return outcome

    async def _come(self, outcome: Outcome) -> None:
        try:
            outcome.tries.append(await self._complete())
        except openai.APIStatusError as error:
            outcome.num_failed += 1
            code = str(error.code)
            outcome.errors[code] = outcome.errors.get(code, 0) + 1

    async def _complete(self) -> int:
        """One completion; how often it came before it got in."""
        extra: dict[str, Any] = {"ignore_eos": True, "cache_prompt": False}
        answer = await self._client.completions.with_raw_response.create(
            model="",
            prompt=self._prompts.next(),
            max_tokens=self._draw.randint(TOKENS_MIN, TOKENS_MAX),
            temperature=0,
            extra_body=extra,
        )
        return answer.retries_taken
