"""The door: whether a request comes in, and where it stands once it is in.

Refuses early and says when to come back: a request that finds no place costs less here than in
the backlog. The place in its class is taken first, before any work on the prompt, so that what
waits for a pool thread counts against the same bound as what waits for a device. Some may wait for
a place; that is part of their time in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lqs.admission.classes import Classes, num_tokens_min
from lqs.admission.deadlines import set_latest_start, set_limits
from lqs.admission.degrade import Degrader
from lqs.admission.holds import Holds
from lqs.admission.limits import Limiters
from lqs.admission.prompts import Prompts
from lqs.config import Config
from lqs.errors import (
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    BadRequest,
    LqsError,
    NotFound,
    PromptTooLong,
    RequestRefused,
)
from lqs.request import NS_PER_S, Outcome, PromptSource, Request, RequestState, Sink
from lqs.scheduling.desk import Desk
from lqs.scheduling.drains import Drains
from lqs.scheduling.entrance import NoPlace

if TYPE_CHECKING:
    from lqs._core import Work
    from lqs.admission.fleet import Fleet
    from lqs.engine.served import Served
    from lqs.engine.slots import Models

P = ParamSpec("P")
T = TypeVar("T")

# Where nobody knows when: how often it is worth a look.
_UNKNOWN_RETRY_S = 30.0
# What a client is told by the reason for which it does not come in.
_NO_PLACE = {
    "queue_full": "The queue is full for class {level}.",
    "breaker_open": "The queue is overloaded; class {level} is let in again later.",
    "queue_timeout": "It waited longer for a place in the queue than it may; nothing was computed.",
}
# Waits are stretched by up to this factor, at random, so that the refused do not return together.
_SPREAD = 1.25


class Gate:
    """Lets requests in or refuses them.

    `fleet` brings models; absent: all are there. `service_s` tells how long a request may run; absent: as the latest.

    Owner: the event loop.
    """

    def __init__(
        self,
        config: Config,
        *,
        desk: Desk,
        models: Models,
        prompts: Prompts,
        limits: Limiters | None = None,
        fleet: Fleet | None = None,
        rng: random.Random | None = None,
        service_s: Callable[[Request], float] | None = None,
    ) -> None:
        self._config = config
        self._desk = desk
        self._models = models
        self._prompts = prompts
        self._holds = Holds(fleet)
        self.place_for_model = self._holds.position
        self._classes = Classes(config.queue)
        self.degrader = Degrader(config, desk=desk, models=models)
        self.drains = Drains(desk, config.server.drain_s)
        self._limits = limits or Limiters(config)
        desk.when_over(self._over)
        self._rng = rng or random.Random()
        self._service_s = service_s or desk.service_s
        self.drained_at_ns: int | None = None  # Since then the server ends.
        self._shut = asyncio.Event()

    @property
    def config(self) -> Config:
        """The one that holds now."""
        return self._config

    async def admit(self, request: Request, source: PromptSource, sink: Sink) -> None:
        """Take a place, make the prompt, submit. Raises LqsError.

        If it raises, or its task is cancelled, everything it took is given back.
        """
        request.num_bytes_min = source.num_bytes_min
        try:
            await self._admit(request, source, sink)
        except LqsError as error:
            if not isinstance(error, NotFound):
                error.headers.update(self._limits.headers(request))
            raise

    async def _admit(self, request: Request, source: PromptSource, sink: Sink) -> None:
        try:
            served = await self.enter(request, time.monotonic_ns())
            await self._holds.take(request, served)
            await self._submit(request, source, sink, served)
        except asyncio.CancelledError:
            self._holds.give_back(request)
            self._limits.refund(request)
            self._desk.abandon(request)
            raise
        except BaseException:
            self._holds.give_back(request)
            self._limits.refund(request)
            self._desk.leave(request)
            raise

    async def _submit(self, request: Request, source: PromptSource, sink: Sink, served: Served) -> None:
        """Make the prompt, charge what it costs, hand it to the scheduler."""
        work, served = await self._work(request, source, served)
        num_expected = self._desk.expected_completion(request, served.index)
        if self._config.engine.grows_kv:
            request.kv_tokens = request.num_prompt_tokens + num_expected
        self._classes.assign_lane(request, self._desk.border_tokens, num_expected)
        self._limits.charge_work(request, patience_ns=request.expire_ns - time.monotonic_ns())
        await self._wait_turn(request)
        set_latest_start(request, self._config.queue, self._desk.pace(served.index), num_expected)
        if self._shut.is_set() or self.drains.is_closed(served.index):
            raise self._draining(request, time.monotonic_ns())
        self._desk.submit(request, work, sink, model=served.index)

    async def enter(self, request: Request, now_ns: int) -> Served:
        """Take a place in the request's class. Raises NotFound, RequestRefused."""
        served = self._open(request, now_ns)
        request.model_index = served.index
        set_limits(request, self._config.queue)
        if request.expire_ns <= now_ns:
            raise self._refusal(request, "queue_timeout", "Its time was over when it came.", RETRY_AFTER_S_MIN)
        self._limits.enter(
            request, num_tokens_min=num_tokens_min(request, served), patience_ns=request.expire_ns - now_ns
        )
        load = self._desk.entrance.load()
        self._classes.assign(request, load=load, service_s=self._service_s(request))
        no_place = await self._desk.enter(request, now_ns)
        if no_place is not None:
            raise self._no_place(request, no_place)
        return served

    def drain(self, now_ns: int) -> None:
        """Let nobody in any more; `now_ns` starts the time that clients are told to wait."""
        self.drained_at_ns = now_ns
        self._desk.entrance.dismiss("draining")

    def shut(self) -> None:
        """The drain is over: also who is at the door already is sent away."""
        self._shut.set()

    def reload(self, config: Config) -> None:
        """Take over new limits; requests that are in keep theirs."""
        self._config = config
        self._classes = Classes(config.queue)
        self.degrader.reload(config)
        self._desk.reload(config)
        self._limits.reload(config)

    def limit_headers(self, request: Request) -> dict[str, str]:
        """How the limits that it comes under stand just now."""
        return self._limits.headers(request)

    def closed_reason(self) -> str | None:
        """Why nobody can come in just now, as a refusal's code; None when the server is ready."""
        if self.drained_at_ns is not None:
            return "draining"
        if self._models.is_loading:
            return "model_loading"
        if not self._models.has_healthy_device:
            return "no_device"
        return "draining" if self._are_all_closed() else None

    async def tokenize(self, served: Served, text: str, *, add_special: bool, parse_special: bool) -> array[int]:
        """The tokens of a text, made in the pool."""
        data = text.encode(errors="replace")
        return await self.run(served.loaded.tokenize, data, add_special, parse_special)

    async def detokenize(self, served: Served, ids: array[int]) -> bytes:
        """The text of tokens, made in the pool."""
        return await self.run(served.loaded.detokenize, ids)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something slow in the pool, for no admitted request. Raises RequestRefused."""
        return await self._prompts.run(function, *args, **kwargs)

    def refuse_rest(self, request: Request) -> RequestRefused:
        """What a request is told that a drain cuts off."""
        return self._draining(request, time.monotonic_ns())

    def _open(self, request: Request, now_ns: int) -> Served:
        """The model that is asked for, if it is served just now."""
        if self.drained_at_ns is not None:
            raise self._draining(request, now_ns)
        served = self._models.find(request.model)
        if served is None:
            raise NotFound(
                f"There is no model {request.model[:100]!r} here; GET /v1/models lists them.",
                param="model",
                code="model_not_found",
            )
        if self.drains.is_closed(served.index):
            raise self._draining(request, now_ns)
        # One on demand is waited for, or that says why it does not come.
        if served.is_absent or (served.is_loading and served.is_on_demand):
            return served
        if served.is_loading:
            wait_s = served.load_time_left_s(now_ns)
            raise self._refusal(request, "model_loading", "The model is loading.", self._spread(wait_s))
        if not served.has_healthy_device:
            message = "No device can serve the model just now."
            raise self._refusal(request, "no_device", message, self._spread(_UNKNOWN_RETRY_S))
        return served

    def _over(self, request: Request, outcome: Outcome | None) -> None:
        """A submitted request is over."""
        self._holds.give_back(request)
        self._limits.over(request, outcome)

    def _are_all_closed(self) -> bool:
        """Whether an operator has drained every model."""
        return self.drains.has_closed and all(self.drains.is_closed(each.index) for each in self._models.all())

    async def _work(self, request: Request, source: PromptSource, served: Served) -> tuple[Work, Served]:
        """The prompt for whoever is to answer, the model that was asked for or its fallback."""
        instead = self.degrader.choose(request, source, served)
        if instead is not None and not self.drains.is_closed(instead[1].index):
            await self._holds.take(request, instead[1])
            try:
                work = await self._prepare(request, *instead)
            except (BadRequest, PromptTooLong):
                # The fallback cannot; the asked model may be able to.
                pass
            else:
                request.degraded_from, request.model = served.name, instead[1].name
                return work, instead[1]
        return await self._prepare(request, source, served), served

    async def _prepare(self, request: Request, source: PromptSource, served: Served) -> Work:
        """The prompt, made while the request's time in the queue already counts."""
        left_s = (request.expire_ns - time.monotonic_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(left_s):
                return await self._prompts.prepare(request, source, served)
        except TimeoutError:
            message = "Its prompt was not prepared in time; nothing was computed."
            raise self._refusal(request, "queue_timeout", message, self._desk.retry_after_s(request)) from None

    async def _wait_turn(self, request: Request) -> None:
        """Let it through when a leaky bucket does; its place in its class is its place in that line."""
        wait_s = self._limits.turn_s(request)
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._shut.wait(), wait_s)

    def _no_place(self, request: Request, no_place: NoPlace) -> RequestRefused:
        now_ns = time.monotonic_ns()
        if no_place.reason == "draining":
            return self._draining(request, now_ns)
        wait_s = self._desk.retry_after_s(request, no_place.again_ns)
        message = _NO_PLACE[no_place.reason].format(level=self._config.queue.levels[request.level])
        return self._refusal(request, no_place.reason, message, wait_s)

    def _draining(self, request: Request, now_ns: int) -> RequestRefused:
        if self.drained_at_ns is None:
            message = "An operator has drained the model; nobody has said until when."
            return self._refusal(request, "draining", message, self._spread(_UNKNOWN_RETRY_S))
        left_s = self._config.server.drain_s - (now_ns - self.drained_at_ns) / NS_PER_S
        return self._refusal(request, "draining", "The server is shutting down.", self._spread(left_s))

    def _refusal(self, request: Request, reason: str, message: str, wait_s: float) -> RequestRefused:
        request.state, request.reason = RequestState.REFUSED, reason
        return RequestRefused(reason, message, retry_after_s=wait_s)

    def _spread(self, wait_s: float) -> float:
        """A time at which nobody was promised anything, drawn out so that not all return at once."""
        bounded_s = min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX / _SPREAD)
        return bounded_s * self._rng.uniform(1.0, _SPREAD)
