"""A rush on the real core and desk under a virtual clock: clients that come, are refused and come back."""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from lqs._core import Work
from lqs.admission.classes import Classes
from lqs.request import NS_PER_S, Request, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from tests.scheduling.parts import Told

S = NS_PER_S
RETRIES_MAX = 2  # The official client's.
NUM_TOKENS = 10


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine comes to that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


@dataclass
class Client:
    """One that comes, and comes back."""

    number: int
    num_tries: int = 0
    is_in: bool = False


@dataclass
class Rush:
    """Sequences that take `mean_s` for a request, and a queue of `num_places`.

    `obeys` is what a refused client waits: given the promised seconds, how long it really does.
    """

    num_sequences: int = 4
    num_places: int = 40
    mean_s: float = 1.0
    seed: int = 1
    counts_tries: bool = True
    obeys: Callable[[float], float] = field(default=lambda told_s: told_s)

    def __post_init__(self) -> None:
        flags = {"engine.parallel": self.num_sequences, "queue.caps": [self.num_places]}
        config = load(None, None, flags | {"queue.total": self.num_places, "queue.timeout_s": 3600.0})
        self.rng = random.Random(self.seed)
        self.numbers = itertools.count()
        self.core = make_scheduler(config, [1.0, 1.0])
        self.core.add_device_slot(kv_tokens=10**6, num_sequences=self.num_sequences)
        self.now_ns = S
        self.ratios: list[float] = []
        outlook = make_outlook(
            config, self.core, observe_promise=self.ratios.append, now_ns=lambda: self.now_ns, rng=self.rng
        )
        self.seen = Told()
        self.desk = Desk(self.core, self.seen, door=make_door(config), outlook=outlook, now_ns=lambda: self.now_ns)
        self.classes = Classes(config.queue)
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.clients: list[Client] = []
        self.first_retries: list[bool] = []

    def at(self, when_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_ns, next(self.numbers), act))

    def arrive(self, per_s: float, from_s: float, seconds: float) -> None:
        """Newcomers, at random."""
        when_s = from_s
        while (when_s := when_s + self.rng.expovariate(per_s)) < from_s + seconds:
            client = Client(len(self.clients))
            self.clients.append(client)
            self.at(S + int(when_s * S), lambda client=client: self.try_in(client))  # type: ignore[misc]

    def run(self) -> Rush:
        """Until nobody is there any more."""
        while self.events:
            when_ns, _, act = heapq.heappop(self.events)
            self.now_ns = max(self.now_ns, when_ns)
            act()
            self.turn()
        return self

    def turn(self) -> None:
        self.core.round(self.now_ns)
        self.desk.drain_events()
        for handle in self.core.take(0):
            length_s = self.mean_s * self.rng.uniform(0.5, 1.5)
            for tenth in range(1, NUM_TOKENS):
                self.at(self.now_ns + int(length_s * S * tenth / NUM_TOKENS), lambda handle=handle: self.speak(handle))  # type: ignore[misc]
            self.at(
                self.now_ns + int(length_s * S), lambda handle=handle, length_s=length_s: self.end(handle, length_s)
            )  # type: ignore[misc]

    def speak(self, handle: int) -> None:
        self.core.emit(handle, b"x", 1)

    def end(self, handle: int, length_s: float) -> None:
        first_ns = self.now_ns - int(0.9 * length_s * S)
        facts: dict[str, Any] = {"first_token_ns": first_ns, "finished_ns": self.now_ns}
        self.core.finish(handle, num_completion_tokens=NUM_TOKENS, **facts)

    def try_in(self, client: Client) -> None:
        count = client.num_tries if self.counts_tries else None
        tenant = Tenant("t", "normal", 1, 2, 2)
        request = Request(
            id=str(client.number), tenant=tenant, model="m", arrival_ns=self.now_ns, level=2, retry_count=count
        )
        self.classes.assign(request, load=self.desk.entrance.load())
        request.prompt, request.max_tokens_granted = array("i", [1] * 5), NUM_TOKENS
        client.num_tries += 1
        client.is_in = at_once(self.desk.enter(request, self.now_ns)) is None
        if client.num_tries == 2:
            self.first_retries.append(client.is_in)
        if client.is_in:
            self.desk.submit(request, Work(), Told(), model=0)
        else:
            told_s = self.desk.retry_after_s(request)
            if client.num_tries <= RETRIES_MAX:
                back_ns = self.now_ns + int((self.obeys(told_s) + self.rng.uniform(0.002, 0.03)) * S)
                self.at(back_ns, lambda: self.try_in(client))

    @property
    def share_at_first_retry(self) -> float:
        return sum(self.first_retries) / len(self.first_retries)

    @property
    def share_failed(self) -> float:
        return sum(not client.is_in for client in self.clients) / len(self.clients)
