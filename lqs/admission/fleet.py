"""Who uses which model, and which models come and go for that.

A model is held by each request from the moment it is let in until it is over. Nothing is unloaded that is
held. What is to come and go `Residents` decides; here it is done, and who waits for a model is told.

    use(served)      ready: at once. On demand and absent: wait for it, in the line of its class
    load, unload     what an admin wants; a model that is on demand comes back with the next request
    tend             does what is due; called after each change and now and then
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from lqs.admission.errands import Errands
from lqs.admission.failures import Failures, InThread
from lqs.engine.residents import Deed, Residents, Standing
from lqs.errors import RequestRefused, place_of, reason_of
from lqs.observe.log import Log
from lqs.observe.models import ModelFigures

if TYPE_CHECKING:
    from lqs.config import Config
    from lqs.engine.plan import Plan
    from lqs.engine.served import Served
    from lqs.engine.slots import Models

_OFF_RETRY_S = 30.0
# How often a model that is to leave is asked whether it is empty.
_EMPTY_POLL_S = 0.02


class Fleet:
    """The holds on models, and the loads.

    `plan` plans a model anew by what is free now; it is called in a thread. Owner: the event loop.
    """

    def __init__(
        self,
        config: Config,
        models: Models,
        residents: Residents,
        *,
        in_thread: InThread,
        plan: Callable[[Served], Plan],
        log: Log,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._close_s = config.server.close_s
        self._models = models
        self._residents = residents
        self._in_thread = in_thread
        self._plan = plan
        self._log = log
        self._now_ns = now_ns
        self._names = models.names()  # By number.
        self._holds: Counter[str] = Counter()
        self._waiters: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._failures = Failures(in_thread, log)
        self._off: set[str] = set()  # An admin unloaded them: they do not come by themselves.
        self._errands = Errands()
        self._is_closed = False
        self._num_loads: Counter[str] = Counter()
        self._num_unloads: Counter[str] = Counter()
        self.hung: list[str] = []

    def came(self, served: Served) -> None:
        """The first device slot of a model takes work, while others may still be opened."""
        self._residents.came(served.name)
        self._let_in()

    def loaded(self, served: Served) -> None:
        """A model that is there from the start is there with all that opens of it."""
        self._residents.loaded(served.name, self._now_ns())
        self.tend()

    @asynccontextmanager
    async def use(self, served: Served) -> AsyncIterator[None]:
        """Hold a model, once it is there. Raises RequestRefused if it does not come."""
        await self.have(served)
        try:
            yield
        finally:
            self.release(served.index)

    def try_have(self, served: Served) -> bool:
        """Hold a model if it is there."""
        name = served.name
        self._residents.use(name, self._now_ns())
        is_there = self._residents.may_use(name)
        self._holds[name] += is_there
        return is_there

    async def have(self, served: Served) -> None:
        """Hold a model until `release`; wait for it first, if it comes on demand. Raises RequestRefused."""
        if self.try_have(served):
            return
        name, now_ns = served.name, self._now_ns()
        if name in self._off or not served.is_on_demand or self._failures.left_s(name, now_ns) > 0:
            raise self._refusal(served)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[name].append(waiter)
        self._residents.want(name, now_ns)
        self.tend()
        try:
            await waiter
        except asyncio.CancelledError:
            self._give_up(served, waiter)
            raise

    def release(self, index: int) -> None:
        """One use less of the model of that number."""
        name = self._names[index]
        self._holds[name] -= 1
        self._residents.use(name, self._now_ns())
        if not self._holds[name] and self._residents.has_line:
            self.tend()

    def load(self, served: Served) -> None:
        """Bring a model, as soon as there is room."""
        name = served.name
        self._off.discard(name)
        self._failures.let_try(name)
        self._residents.want(name, self._now_ns(), is_order=True)
        self.tend()

    def unload(self, served: Served) -> None:
        """Let nobody new use a model, and take it out of memory when nobody does."""
        name = served.name
        if not served.is_on_demand:
            self._off.add(name)
        # Only one on demand is waited for: it comes back, as for those who come later.
        self._residents.dismiss(name, is_wanted=bool(self._waiters.get(name)))
        self.tend()

    def figures(self, served: Served) -> ModelFigures:
        """How a model stands, and what has become of it so far."""
        name = served.name
        return ModelFigures(
            name=name,
            standing=self._residents.standing(name),
            num_users=self._holds[name],
            num_waiting=len(self._waiters.get(name, ())),
            num_loads=self._num_loads[name],
            num_failed_loads=self._failures.num_ever(name),
            num_unloads=self._num_unloads[name],
            failure=self._failures.reason(name),
        )

    def tend(self) -> None:
        """Do what is due; nothing any more once the server ends."""
        if self._is_closed:
            return
        self._failures.look(self._models.find, self._now_ns())
        # Before every step: who waited for a model that has come uses it before it could leave again.
        self._let_in()
        while (step := self._residents.next(self._is_used, self._now_ns())) is not None:
            served = self._models.find(step.name)
            assert served is not None
            deed = self._load(served) if step.deed is Deed.LOAD else self._unload(served)
            # At once, and not when the task has its turn: it is asked for meanwhile.
            served.is_absent = served.is_absent and step.deed is not Deed.LOAD
            self._errands.start(deed)
            self._let_in()
        self._let_in()

    async def close(self) -> None:
        """Begin nothing more, and wait a while for what libllama works on; then that is left to its thread."""
        self._is_closed = True
        self._failures.close()
        if not await self._errands.close(self._close_s):
            self.hung.append("lqs-load")

    def _is_used(self, name: str) -> bool:
        return self._holds[name] > 0

    def _give_up(self, served: Served, waiter: asyncio.Future[None]) -> None:
        """Who waited leaves; perhaps just as it was let in."""
        name = served.name
        if waiter.done() and not waiter.cancelled():
            if waiter.exception() is None:
                self.release(served.index)
            return
        waiters = self._waiters.get(name, [])
        if waiter not in waiters:
            # It gave up, and those who waited were told, in one turn of the loop.
            return
        waiters.remove(waiter)
        if not waiters:
            self._residents.forget(name)
            self.tend()

    def _let_in(self) -> None:
        """Those who wait for a model that is there have it before anything else can happen to it."""
        for name in [name for name, waiters in self._waiters.items() if waiters]:
            if not self._residents.may_use(name):
                continue
            for waiter in self._waiters.pop(name):
                if not waiter.done():
                    self._holds[name] += 1
                    waiter.set_result(None)

    def _tell(self, name: str, refusal: RequestRefused) -> None:
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_exception(refusal)

    async def _load(self, served: Served) -> None:
        name, loop = served.name, asyncio.get_running_loop()
        self._num_loads[name] += 1
        self._log.info("loading", model=name)
        load = partial(self._models.load_one, served, loop.call_soon_threadsafe)
        try:
            await self._failures.begin(served)
            plan = await self._in_thread(partial(self._plan, served), f"lqs-plan-{name}"[:15])
            self._models.replan(served, plan)
            await self._in_thread(load, f"lqs-load-{name}"[:15])
        except Exception as error:
            # Whatever it is, those who wait are told, and the next model can come.
            await self._try_leave(served)
            self._fail(served, reason_of(error))
            return
        self._failures.end_well(name)
        self._residents.loaded(name, self._now_ns())
        self._log.info("loaded", model=name, devices=",".join(served.devices))
        self.tend()

    def _fail(self, served: Served, reason: str) -> None:
        name, now_ns = served.name, self._now_ns()
        wait_s = self._failures.end_badly(name, reason, now_ns)
        self._log.error("model not loaded", model=name, reason=reason, again_s=wait_s)
        self._residents.failed(name, now_ns)
        self._tell(name, self._refusal(served))
        self.tend()

    async def _try_leave(self, served: Served) -> bool:
        """Give back all that can be given back; False if something may be left."""
        try:
            return await self._leave(served)
        except Exception as error:
            self._log.error("failed to unload, please report it", model=served.name, reason=place_of(error))
            return False

    async def _leave(self, served: Served) -> bool:
        """Give back all that a model takes."""
        name = served.name
        self._models.close_to_newcomers(served)
        while not self._models.is_empty(served):  # noqa: ASYNC110 The core tells nobody when it is.
            await asyncio.sleep(_EMPTY_POLL_S)
        leave = partial(self._models.leave, served, self._close_s)
        has_left: bool = await self._in_thread(leave, f"lqs-unload-{name}"[:15])
        return has_left

    async def _unload(self, served: Served) -> None:
        name = served.name
        has_left = await self._try_leave(served)
        self._num_unloads[name] += 1
        if has_left:
            self._log.info("unloaded", model=name)
        else:
            self._log.error("unloaded, but its memory is not free: a thread may stand in it", model=name)
        self._residents.gone(name, self._now_ns())
        self.tend()

    def _refusal(self, served: Served) -> RequestRefused:
        """Why a model is not there, for a client."""
        name, now_ns = served.name, self._now_ns()
        if name in self._off:
            return RequestRefused("no_device", "The model is not loaded.", retry_after_s=_OFF_RETRY_S)
        left_s = self._failures.left_s(name, now_ns)
        # Another than on demand does not come by itself when the wait is over.
        is_given_up = not served.is_on_demand and self._residents.standing(name) is Standing.ABSENT
        if left_s > 0 or is_given_up:
            wait_s = left_s if left_s > 0 else _OFF_RETRY_S
            return RequestRefused("no_device", "The model could not be loaded.", retry_after_s=wait_s)
        wait_s = served.load_time_left_s(now_ns)
        return RequestRefused("model_loading", "The model is loading.", retry_after_s=wait_s)
