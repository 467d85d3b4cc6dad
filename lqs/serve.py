"""Builds, wires, runs, drains and closes the server. The only module that knows every part.

In time order: bind the socket; answer at once, refusing until the model is there; load; serve
until a signal; drain; close everything in the reverse order of its start. A thread that does not
end in time is reported once, and the process then leaves without waiting for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
from lqs.engine.catalog import catalog_of
from lqs.engine.drill import Break
from lqs.engine.keeper import Keeper
from lqs.engine.store import Store, store_folder
from lqs.errors import StartError
from lqs.guard import Guard, make_actions
from lqs.listen import HttpServer, bind, make_http, url_of
from lqs.load_watch import watch_load
from lqs.machinery import Machinery, make_machinery
from lqs.observe.alerts import Alerts, Switch
from lqs.observe.door import door_log
from lqs.observe.log import Log
from lqs.observe.metrics import Metrics
from lqs.process import in_thread, leave, raise_file_limit, run_with_signals
from lqs.reload import taken_over
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.scheduling.prefixes import make_prefixes
from lqs.settings import check_exposure

# What is cancelled at the end of a drain still needs a step of the engine and a last write.
_LAST_WORDS_S = 1
_WATCH_INTERVAL_S = 0.5
# A load may stand still for so many times engine.stall_s.
_LOAD_STALLS = 10


class Server:
    """Everything that runs, and its life. Owner: the event loop.

    `reload_config` reads the config again on SIGHUP.
    """

    def __init__(
        self,
        config: Config,
        services: Services,
        *,
        made: Machinery,
        prompts: Prompts,
        guard: Guard,
        reload_config: Callable[[], Config] | None = None,
    ) -> None:
        self._config = config
        self._models, self._cards, self._fleet = made.models, made.cards, made.fleet
        self._services = services
        self._gate: Gate = services.gate
        self._desk: Desk = services.desk
        self._log: Log = services.log
        self._prompts = prompts
        self._guard = guard
        self._keeper = Keeper(config, made.models, self._desk.scheduler, self._log, lost_cards=made.cards.lost)
        self._reload_config = reload_config
        self._stop_wanted = asyncio.Event()
        self._http: HttpServer | None = None
        self._collector = Collector()
        self.port = 0
        self.is_listening = asyncio.Event()
        self.hung: list[str] = []

    async def run(self) -> int:
        """Serve until `stop` is called or a signal comes; the exit code."""
        server = self._config.server
        listening = bind(server)
        app = create_app(self._services, cors_origins=server.cors_origins)
        self._cards.start()
        self.port = listening.getsockname()[1]
        self.is_listening.set()
        self._http = make_http(app, server, self._log, close_s=_LAST_WORDS_S)
        http = asyncio.create_task(self._http.serve([listening]))
        watch = asyncio.create_task(self._watch())
        try:
            return await self._live()
        finally:
            watch.cancel()
            await self._close(http)

    def stop(self) -> None:
        """Begin to drain; `run` returns after it. A second call changes nothing."""
        self._stop_wanted.set()

    def bounds(self) -> dict[str, tuple[int, int]]:
        """How much of each bound is used that the core does not know, and the bound."""
        num_connections = len(self._http.server_state.connections) if self._http is not None else 0
        return {
            "connections": (num_connections, self._config.server.num_connections_max),
            "prompts": (self._prompts.num_pending, self._config.prompts.num_pending_max),
        }

    def reload(self) -> None:
        """Read keys and limits again; what is wrong with them is logged and changes nothing."""
        try:
            read = self._reload_config() if self._reload_config else self._config
            config, waiting = taken_over(self._config, read)
            self._models.check_limits(config)
            self._services.keys.reload(config)
        except StartError as error:
            self._log.error("reload failed, nothing changed", reason=str(error))
            return
        self._gate.reload(config)
        self._models.set_weights(config)
        keys = self._services.keys
        self._log.info("reloaded", keys=keys.num_keys)
        if waiting:
            self._log.warning("some changes wait for a restart", settings=",".join(waiting))
        if keys.is_guarded and not keys.num_keys:
            self._log.warning("nobody can come in: the key file is missing or empty", file=config.keys.file)

    async def _live(self) -> int:
        """Load, serve, drain."""
        shown = self._config.server.host
        self._log.info("listening", host=shown, port=self.port)
        try:
            if not await self._load():
                return 0
        except StartError as error:
            self._log.error("cannot start", reason=str(error))
            return error.exit_code
        self._log.info("ready", models=",".join(self._models.names()), url=url_of(shown, self.port))
        await self._stop_wanted.wait()
        await self._drain()
        return 0

    async def _load(self) -> bool:
        """Start everything and load; False if the server was stopped meanwhile. Each device slot is ready by itself."""
        loop = asyncio.get_running_loop()
        self._desk.start(loop)
        load = partial(self._models.load_residents, loop.call_soon_threadsafe)
        loading = asyncio.ensure_future(in_thread(load, "lqs-load"))
        scheduler = self._desk.scheduler
        try:
            is_loaded = await watch_load(
                loading,
                self._stop_wanted,
                progress=lambda: self._models.load_progress,
                has_died=lambda: any(slot["is_dead"] for slot in scheduler.slots()),
                name=str(self._models.path),
                limit_s=self._config.engine.stall_s * _LOAD_STALLS,
            )
        finally:
            if not loading.done():
                # Nothing can break off a native load; what it works on is left to its thread.
                self.hung.append("lqs-load")
                self._gate.drain(time.monotonic_ns())
        if not is_loaded:
            loading.cancel()
            return False
        loading.result()
        await in_thread(partial(self._collector.start, time.monotonic_ns()), "lqs-load")
        return True

    async def _drain(self) -> None:
        """Let nobody in, serve what is in until the limit, cancel the rest."""
        limit_s = self._config.server.drain_s
        self._gate.drain(time.monotonic_ns())
        self._log.info("draining", requests=self._desk.num_inside, limit_s=limit_s)
        if await self._desk.wait_idle(limit_s):
            return
        self._log.warning("drain limit reached", requests=self._desk.num_inside)
        self._gate.shut()
        self._desk.cancel_all("draining")
        await self._desk.wait_idle(_LAST_WORDS_S)

    async def _close(self, http: asyncio.Task[None]) -> None:
        """End everything, in the reverse order of its start."""
        assert self._http is not None
        self._http.should_exit = True
        (failure,) = await asyncio.gather(http, return_exceptions=True)
        if failure is not None:
            self._log.error("the HTTP server failed", error=type(failure).__name__)
        limit_s = self._config.server.close_s
        self._prompts.close()
        await self._fleet.close()
        self.hung += self._fleet.hung
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
        while True:
            now_ns = time.monotonic_ns()
            self._keeper.look(now_ns)
            self._guard.look(now_ns)
            self._fleet.tend()
            self._collector.tend(self._desk.num_inside, now_ns)
            await asyncio.sleep(_WATCH_INTERVAL_S)


def build(
    config: Config,
    *,
    environ: Mapping[str, str] = os.environ,
    reload_config: Callable[[], Config] | None = None,
    drill: Sequence[Break] = (),
    limits_clock: Callable[[], int] = time.monotonic_ns,
) -> Server:
    """Make and wire all parts; nothing runs yet. `drill` is what breaks on purpose. Raises StartError."""
    keys = KeyRing(config)
    check_exposure(config, keys.num_keys)
    entries = catalog_of(config, Store(store_folder(environ)))
    log = Log(config.log)
    scheduler = make_scheduler(config, keys.weights())
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
        workers=models.snapshots,
        # What is made below.
        closed_reason=lambda: gate.closed_reason(),  # noqa: PLW0108
        bounds=lambda: server.bounds(),  # noqa: PLW0108
        alerts=lambda: alerts,
        promised=outlook.promises,
        rounds=body.snapshot,
        door=lambda: desk.entrance.figures(),  # noqa: PLW0108
        limits=limits.figures,
        gpus=made.cards.families,
    )
    on_door = door_log(log, config.queue.levels)
    past = make_prefixes(config, scheduler.slots)
    desk = Desk(scheduler, metrics, door=make_door(config), outlook=outlook, body=body, prefixes=past, on_door=on_door)
    prompts = Prompts(config.prompts)
    gate = Gate(config, desk=desk, models=models, prompts=prompts, limits=limits, fleet=made.fleet)
    actions = make_actions(lambda: gate.config, tighten=tighten, degrade=gate.degrader.force, desk=desk)
    alerts = Alerts(config.alerts, log, actions)
    services = Services(
        config=config,
        gate=gate,
        desk=desk,
        keys=keys,
        models=models,
        metrics=metrics,
        alerts=alerts,
        log=log,
        fleet=made.fleet,
    )
    guard = Guard(lambda: gate.config, alerts, desk, metrics)
    server = Server(config, services, made=made, prompts=prompts, guard=guard, reload_config=reload_config)
    return server


def run(config: Config, reload_config: Callable[[], Config] | None = None, drill: Sequence[Break] = ()) -> int:
    """Serve in this process until a signal; the exit code. Raises StartError."""
    raise_file_limit()
    server = build(config, reload_config=reload_config, drill=drill)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(run_with_signals(server))
        if server.hung:
            # Neither the loop nor the interpreter could end with these threads still in libllama.
            leave(code)
    return code
