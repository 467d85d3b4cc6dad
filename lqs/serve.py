"""Builds, wires, runs, drains and closes the server. The only module that knows every part.

In time order: bind the socket; answer at once, refusing until the model is there; load; serve
until a signal; drain, or hand over; close everything in the reverse order of its start. A thread that
does not end in time is reported once, and the process then leaves without waiting for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvloop

from lqs.admission.gate import Gate
from lqs.admission.keys import KeyRing
from lqs.admission.limits import Limiters
from lqs.admission.prompts import Prompts
from lqs.api.app import create_app
from lqs.api.services import Services
from lqs.collector import Collector
from lqs.config import Config
from lqs.engine import library
from lqs.engine.budget import wanted_on_demand
from lqs.engine.catalog import catalog_of
from lqs.engine.drill import Break
from lqs.engine.store import Store, store_folder
from lqs.errors import StartError, place_of
from lqs.guard import Guard, make_actions
from lqs.leave import LAST_WORDS_S, announce, make_control, take_leave
from lqs.listen import HttpServer, make_http, url_of
from lqs.load_watch import end_load, watch_load
from lqs.machinery import Machinery, make_machinery
from lqs.observe.alerts import Alerts, Switch
from lqs.observe.door import door_log
from lqs.observe.log import Log
from lqs.observe.metrics import Metrics
from lqs.parent import has_supervisor
from lqs.process import Hangup, in_thread, leave, raise_file_limit, run_with_signals
from lqs.reload import Reloader
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.scheduling.prefixes import make_prefixes
from lqs.settings import check_exposure
from lqs.sockets import bind
from lqs.upkeep import Upkeep

_WATCH_INTERVAL_S = 0.5
# A load may stand still for so many times engine.stall_s.
_LOAD_STALLS = 10


class Server:
    """Everything that runs, and its life. Owner: the event loop.

    `reread` reads the config again on SIGHUP. `passed` is a socket that listens already.
    """

    def __init__(
        self,
        config: Config,
        services: Services,
        *,
        made: Machinery,
        prompts: Prompts,
        guard: Guard,
        reread: Callable[[], Config] | None = None,
        passed: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._models, self._cards, self._fleet = made.models, made.cards, made.fleet
        self._services = services
        self._gate: Gate = services.gate
        self._desk: Desk = services.desk
        self._log: Log = services.log
        self._prompts = prompts
        self._guard = guard
        self._keeper = made.keeper
        self.reload = Reloader(services, reread or (lambda: config)).reload
        self._passed = passed
        self._stop_wanted = asyncio.Event()
        # Set by a stop and by a hand-over.
        self._end_wanted = asyncio.Event()
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loading: asyncio.Future[Any] | None = None
        self._collector = Collector()
        self.port = 0
        self.is_listening = asyncio.Event()
        self.hung: list[str] = []

    async def run(self) -> int:
        """Serve until `stop` or `hand_over` is called or a signal comes; the exit code."""
        server = self._config.server
        listening = self._passed or bind(server)
        app = create_app(self._services, cors_origins=server.cors_origins)
        self._cards.start()
        self.port = listening.getsockname()[1]
        self.is_listening.set()
        self._http = make_http(app, server, self._log, close_s=LAST_WORDS_S)
        # On a socket that was passed nobody is refused while the model loads: connections wait in the kernel.
        if self._passed is None:
            self._accept(listening)
        watch = asyncio.create_task(self._watch())
        try:
            return await self._live(listening)
        except Exception as error:
            # Nothing foresees it; threads, sockets and models are closed all the same.
            self._log.error("failed, please report it", reason=place_of(error))
            return 1
        finally:
            watch.cancel()
            await self._close()

    def stop(self) -> None:
        """Begin to drain; `run` returns after it. A second call changes nothing."""
        self._stop_wanted.set()
        self._end_wanted.set()

    def hand_over(self) -> None:
        """Leave the socket to a successor and serve who is here; `run` returns after it."""
        self._end_wanted.set()

    def bounds(self) -> dict[str, tuple[int, int]]:
        """How much of each bound is used that the core does not know, and the bound."""
        num_connections = self._http.num_connections if self._http is not None else 0
        return {
            "connections": (num_connections, self._config.server.num_connections_max),
            "prompts": (self._prompts.num_pending, self._config.prompts.num_pending_max),
        }

    def _accept(self, listening: socket.socket) -> None:
        assert self._http is not None
        self._serving = asyncio.create_task(self._http.serve([listening]))

    async def _live(self, listening: socket.socket) -> int:
        """Load, serve, drain or hand over."""
        shown = self._config.server.host
        self._log.info("listening", host=shown, port=self.port)
        try:
            if not await self._load():
                return 0
        except StartError as error:
            self._log.error("cannot start", reason=str(error))
            return error.exit_code
        if self._serving is None:
            self._accept(listening)
        self._log.info("ready", models=",".join(self._models.names()), url=url_of(shown, self.port))
        devices = [seat.device for served in self._models.all() for seat in self._models.seats_of(served)]
        announce(os.environ, devices, wanted_on_demand(self._config, self._models))
        await self._end_wanted.wait()
        await take_leave(self._services, self._http, self._stop_wanted)
        return 0

    async def _load(self) -> bool:
        """Start everything and load; False if the server was stopped meanwhile. Each device slot is ready by itself."""
        loop = asyncio.get_running_loop()
        self._desk.start(loop)
        load = partial(self._models.load_residents, loop.call_soon_threadsafe)
        self._loading = asyncio.ensure_future(in_thread(load, "lqs-load"))
        try:
            is_loaded = await watch_load(
                self._loading,
                self._end_wanted,
                progress=lambda: self._models.load_progress,
                name=str(self._models.path),
                limit_s=self._config.engine.stall_s * _LOAD_STALLS,
            )
        finally:
            if not self._loading.done():
                self._gate.drain(time.monotonic_ns())
        if not is_loaded:
            return False
        self._loading.result()
        await in_thread(partial(self._collector.start, time.monotonic_ns()), "lqs-load")
        return True

    async def _close(self) -> None:
        """End everything, in the reverse order of its start."""
        if self._serving is not None and self._http is not None:
            self._http.should_exit = True
            (failure,) = await asyncio.gather(self._serving, return_exceptions=True)
            if failure is not None:
                self._log.error("the HTTP server failed", error=type(failure).__name__)
        limit_s = self._config.server.close_s
        self._prompts.close()
        await self._fleet.close()
        self.hung += self._fleet.hung
        if self._loading is not None and not await end_load(self._loading, limit_s):
            self.hung.append("lqs-load")
        # Threads are joined, which blocks the loop; nobody needs it any more.
        if "lqs-load" not in self.hung and not (self._keeper.close() and self._models.close(limit_s)):
            self.hung.append("workers")
        if not self._desk.close(limit_s):
            self.hung.append("lqs-scheduler")
        self._collector.stop()
        if not self._cards.stop(limit_s):
            self.hung.append("lqs-nvml")
        if self.hung:
            self._log.warning("left behind", threads=",".join(self.hung))
        self._log.info("stopped")

    async def _watch(self) -> None:
        """Look after the device slots and the load; collect garbage."""
        duties = {
            "device slots": self._keeper.look,
            "load": self._guard.look,
            "models": lambda _: self._fleet.tend(),
            "drains": self._gate.drains.look,
            "garbage": lambda now_ns: self._collector.tend(self._desk.num_inside, now_ns),
        }
        upkeep = Upkeep(duties, self._log)
        while True:
            upkeep.look(time.monotonic_ns())
            await asyncio.sleep(_WATCH_INTERVAL_S)


def build(
    config: Config,
    *,
    environ: Mapping[str, str] = os.environ,
    reload_config: Callable[[], Config] | None = None,
    drill: Sequence[Break] = (),
    passed: socket.socket | None = None,
    limits_clock: Callable[[], int] = time.monotonic_ns,
) -> Server:
    """Make and wire all parts, late ones by lambdas; nothing runs yet. `drill` breaks on purpose. Raises StartError."""
    keys = KeyRing(config)
    check_exposure(config, keys.num_keys)
    entries = catalog_of(config, Store(store_folder(environ)))
    log = Log(config.log, pid=os.getpid() if has_supervisor(environ) else None)
    scheduler = make_scheduler(config, keys.weights())
    keys.follow(scheduler.set_key_weight)
    made = make_machinery(config, entries, scheduler, log, drill)
    models = made.models
    body = library.SchedulerBody(scheduler)
    outlook = make_outlook(config, scheduler, observe_promise=lambda ratio: metrics.promised(ratio))  # noqa: PLW0108
    tighten = Switch()
    limits = Limiters(
        config,
        is_load_high=lambda: tighten.is_on or desk.entrance.load() > gate.config.queue.high_load_at,
        clock=limits_clock,
    )
    metrics = Metrics(
        config,
        model_name=models.names()[0],
        core=scheduler.snapshot,
        workers=made.snapshots,
        closed_reason=lambda: gate.closed_reason(),  # noqa: PLW0108
        bounds=lambda: server.bounds(),  # noqa: PLW0108
        alerts=lambda: alerts,
        promised=outlook.promises,
        rounds=body.snapshot,
        door=lambda: desk.entrance.figures(),  # noqa: PLW0108
        limits=limits.figures,
        gpus=made.families,
        lives=made.lives,
    )
    on_door = door_log(log, config.queue.levels)
    past = make_prefixes(config, scheduler.slots)
    desk = Desk(scheduler, metrics, door=make_door(config), outlook=outlook, body=body, prefixes=past, on_door=on_door)
    prompts = Prompts(config.prompts)
    gate = Gate(config, desk=desk, models=models, prompts=prompts, limits=limits, fleet=made.fleet)
    models.obey(gate.drains)
    actions = make_actions(lambda: gate.config, tighten=tighten, degrade=gate.degrader.force, desk=desk)
    alerts = Alerts(config.alerts, log, actions)
    services = Services(
        config=config, gate=gate, desk=desk, keys=keys, models=models, metrics=metrics, alerts=alerts, log=log,
        fleet=made.fleet, keeper=made.keeper,
        control=make_control(lambda: server, lambda: server.reload(), environ),  # noqa: PLW0108
    )  # fmt: skip
    guard = Guard(lambda: gate.config, alerts, desk, metrics, num_out=lambda: made.keeper.num_out)
    server = Server(config, services, made=made, prompts=prompts, guard=guard, reread=reload_config, passed=passed)
    return server


def run(
    config: Config, reload_config: Callable[[], Config] | None = None, hangup: Hangup | None = None, **parts: Any
) -> int:
    """Serve in this process until a signal; the exit code. `hangup` may have come, the rest is `build`'s.

    Raises StartError.
    """
    raise_file_limit()
    server = build(config, reload_config=reload_config, **parts)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(run_with_signals(server, hangup))
        if server.hung:
            # Neither the loop nor the interpreter could end with these threads still in libllama.
            leave(code)
    return code
