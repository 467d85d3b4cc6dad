"""Ways of sending: clients that wait for their answers, or arrivals by the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.load.client import Client
from bench.load.reply import Exchange

NextPayload = Callable[[], bytes]


async def closed_loop(client: Client, num_clients: int, num_each: int, next_payload: NextPayload) -> list[Exchange]:
    """Let `num_clients` clients send `num_each` requests each, one after the other."""
    exchanges: list[Exchange] = []

    async def one_client() -> None:
        for _ in range(num_each):
            exchanges.append(await client.send(next_payload()))

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return exchanges


async def open_loop(client: Client, arrivals_s: Sequence[float], next_payload: NextPayload) -> list[Exchange]:
    """Send a request at each time (seconds from now, rising), whatever became of the earlier."""
    start_s = time.perf_counter()
    tasks = []
    for arrival_s in arrivals_s:
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        tasks.append(asyncio.create_task(client.send(next_payload())))
    return list(await asyncio.gather(*tasks))


class Backdrop:
    """Load that runs behind a measurement until it is told to end.

    Owner: the event loop. A pair: `start` and `finish`.
    """

    def __init__(self, client: Client, num_clients: int, next_payload: NextPayload) -> None:
        self._client = client
        self._next_payload = next_payload
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        # The exchange that each client is in, and those that have ended.
        self.current = [Exchange(0.0) for _ in range(num_clients)]
        self._ended: list[Exchange] = []

    def start(self) -> None:
        """Begin with all clients at once."""
        self._tasks = [asyncio.create_task(self._one_client(number)) for number in range(len(self.current))]

    async def _one_client(self, number: int) -> None:
        while not self._stopping:
            exchange = self.current[number] = Exchange(time.perf_counter())
            await self._client.send(self._next_payload(), exchange=exchange)
            self._ended.append(exchange)

    async def finish(self, drain_s: float) -> list[Exchange]:
        """Send nothing new and return what has ended.

        Requests that have had no event yet are broken off at once; the others have `drain_s`
        seconds to end, so that their tokens can be counted.
        """
        self._stopping = True
        pairs = list(zip(self._tasks, self.current, strict=True))
        await cancel_all(task for task, exchange in pairs if not has_event(exchange))
        answered = [task for task, exchange in pairs if has_event(exchange)]
        if answered:
            _, late = await asyncio.wait(answered, timeout=drain_s)
            await cancel_all(late)
        return self._ended


def has_event(exchange: Exchange) -> bool:
    """Whether an event has come; the comments of a waiting stream are none."""
    return any(b"data:" in piece for _, piece in exchange.pieces)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
