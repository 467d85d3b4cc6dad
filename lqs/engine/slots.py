"""Models on their device slots: planned, loaded, started, watched, stopped.

A device slot is one model on one device with a worker thread of its own. `cpu:0`, `cpu:1`, ... share
the cores and the weights of the machine; each has a context, and so a KV budget, of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lqs.config import Config
from lqs.engine.drill import FAIL_LOAD, ON_CARD, Break, check_slots
from lqs.engine.fallback import config_of_fallback
from lqs.engine.plan import Plan, make_plan
from lqs.engine.served import Served
from lqs.engine.slot import NoWorker, Slot, Worker
from lqs.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from lqs._core import Scheduler
    from lqs.engine.library import Model

# How far the KV of a token may be from what was planned, as a share of it.
_KV_TOLERANCE = 0.05
_MB = 1_000_000


class Models:
    """All that is served: the model, and its fallback if there is one.

    `path` is the model's file, `fallback_path` the other's. `make_model` and `make_worker` are the
    library's; tests bring their own. `drill` is what breaks on purpose.

    Owner: the event loop, but for `load`, which a thread of its own runs.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        scheduler: Scheduler,
        *,
        make_model: Callable[[Path], Model],
        make_worker: Callable[..., Worker],
        fallback_path: Path | None = None,
        drill: Sequence[Break] = (),
    ) -> None:
        self._config = config
        self._path = path
        self._scheduler = scheduler
        self._make_worker = make_worker
        self._drill = drill
        self._loads_to_fail = {each.slot: each.times for each in drill if each.kind == FAIL_LOAD}
        self._cards = {each.slot: each.card for each in drill if each.kind == ON_CARD}
        # Dead ones that others stand for by now.
        self._left: list[Slot] = []
        served = [Served(config, path, 0, make_model(path))]
        if fallback_path is not None:
            served.append(Served(config_of_fallback(config), fallback_path, 1, make_model(fallback_path)))
        self._served = {each.name: each for each in served}
        if len(self._served) < len(served):
            raise ConfigError("model.fallback: has the name of the model itself; give model.name another.")

    @property
    def path(self) -> Path:
        """The file that is served."""
        return self._path

    @property
    def cards(self) -> frozenset[str]:
        """The UUIDs of the GPUs that device slots are on."""
        return frozenset(self._cards.values())

    @property
    def load_progress(self) -> float:
        """Grows while `load` gets on: what is read of the weights, and device slots that are open."""
        return sum(served._model.progress + len(served.slots) for served in self._served.values())

    @property
    def is_loading(self) -> bool:
        """Whether any model is not there yet."""
        return any(served.is_loading for served in self._served.values())

    @property
    def has_healthy_device(self) -> bool:
        """Whether anything can run."""
        return any(served.has_healthy_device for served in self._served.values())

    @property
    def slots(self) -> Iterator[Slot]:
        """All device slots."""
        return (slot for served in self._served.values() for slot in served.slots)

    def names(self) -> list[str]:
        """The names of all models."""
        return list(self._served)

    def find(self, name: str) -> Served | None:
        """The model of that name."""
        return self._served.get(name)

    def fallback_of(self, served: Served) -> Served | None:
        """The model that may answer in its place."""
        others = (other for other in self._served.values() if other.index == served.index + 1)
        return next(others, None)

    def load(self) -> Plan:
        """Load the weights and open every device slot; takes long. The model's own plan. Raises StartError."""
        plan, *_ = [self._load(served) for served in self._served.values()]
        check_slots(self._drill, len(list(self.slots)))
        return plan

    def _load(self, served: Served) -> Plan:
        served._model.load()
        served.plan = plan = make_plan(served.whole_config, served.path)
        for place, device in enumerate(plan.devices):
            served.slots.append(self._open(served, place, device))
        failed = [slot.worker for slot in served.slots if isinstance(slot.worker, NoWorker)]
        if len(failed) == len(served.slots):
            raise DeviceError(failed[0].death)
        counted = next(slot.worker.snapshot() for slot in served.slots if slot.worker not in failed)
        for worker in failed:
            worker.figures = dict.fromkeys(counted, 0)
        served.prepare(plan)
        return plan

    def start(self) -> None:
        """Start the workers; from now on requests are let in."""
        for served in self._served.values():
            for slot in served.slots:
                self.start_slot(slot)
            served.is_loading = False

    def start_slot(self, slot: Slot) -> None:
        """Start a worker that was opened, and let requests come to it."""
        if slot.worker.state == "failed":
            return
        slot.start()
        self._scheduler.set_stall(slot.number, slot.stall_ns(self._config.engine.stall_s))
        self._scheduler.rest_slot(slot.number, False)

    def served_of(self, slot: Slot) -> Served:
        """The model that a device slot is for."""
        return next(served for served in self._served.values() if slot in served.slots)

    def add_again(self, slot: Slot) -> int:
        """A place in the core for a device slot that is opened anew; nobody starts there yet.

        Raises ValueError when there are as many as there may be.
        """
        served = self.served_of(slot)
        return self._add(served, slot.place)

    def open_again(self, slot: Slot, number: int) -> Slot:
        """Open it anew, beside what is left of it: a thread of its own calls this. Raises DeviceError."""
        served = self.served_of(slot)
        return Slot(slot.device, self._make(served, number), slot.kv_tokens, number, slot.place, slot.card)

    def replace(self, slot: Slot, new: Slot) -> None:
        """Let the new one stand for the old one, which is never freed, and start it."""
        served = self.served_of(slot)
        served.slots[served.slots.index(slot)] = new
        self._left.append(slot)
        self.start_slot(new)

    def template_problems(self) -> Iterator[tuple[str, str]]:
        """The models that cannot chat, and why."""
        for served in self._served.values():
            if served.template is None:
                problem = served.template_error
                yield served.name, "is missing" if problem is None else f"cannot be used: {problem}"

    def kv_problems(self) -> Iterator[tuple[str, str]]:
        """The models whose KV is not promised as the config says, or not as large as planned."""
        for served in self._served.values():
            if served.kv_problem is not None:
                yield served.name, served.kv_problem

    def snapshots(self) -> Mapping[str, Mapping[str, Any]]:
        """The published counters of every device slot, by device."""
        now_ns, stall_s = time.monotonic_ns(), self._config.engine.stall_s
        return {
            slot.device: {
                **slot.worker.snapshot(),
                "is_healthy": slot.is_healthy(now_ns, stall_s),
                "state": slot.state,
                "slot": slot.number,
            }
            for slot in self.slots
        }

    def set_weights(self, config: Config) -> None:
        """Give the device slots the weights of a config that was read again."""
        for served in self._served.values():
            for number, slot in enumerate(served.slots):
                self._scheduler.set_weight(slot.number, config.placement.weight_of(number))

    def close(self, limit_s: float) -> bool:
        """Stop every worker, then free contexts and weights; False if a thread did not end."""
        ended = [slot.close(limit_s) for slot in [*reversed(list(self.slots)), *self._left]]
        if all(ended):
            for served in self._served.values():
                served._model.close()
        return all(ended)

    def _open(self, served: Served, place: int, device: str) -> Slot:
        """Open one; where it cannot be opened, it stands there and says why."""
        number = self._add(served, place)
        worker: Worker
        try:
            worker = self._make(served, number)
        except DeviceError as error:
            worker = NoWorker(str(error))
        else:
            for each in self._drill:
                if each.slot == number and each.kind not in (FAIL_LOAD, ON_CARD):
                    worker.break_at(each.kind, step=each.step, rc=each.rc, times=each.times, for_s=each.for_s)
        # A device has a slot for each model.
        name = device if served.index == 0 else f"{device}@{served.name}"
        kv_tokens, card = served.loaded_plan.kv_tokens, self._cards.get(number, "")
        return Slot(name, worker, kv_tokens, number, place, card)

    def _add(self, served: Served, place: int) -> int:
        """Make it known to the core, where it rests until its worker runs."""
        engine, placement, plan = self._config.engine, self._config.placement, served.loaded_plan
        return self._scheduler.add_device_slot(
            model=served.index,
            kv_tokens=plan.kv_tokens,
            num_sequences=engine.parallel,
            num_extra=plan.num_extra,
            kv_block=self._kv_block(served),
            weight=placement.weight_of(place),
            lanes=placement.lanes_of(place),
            token_bytes=plan.kv_bytes_per_token,
            is_resting=True,
        )

    def _make(self, served: Served, number: int) -> Worker:
        """Open its worker. Raises DeviceError."""
        engine, plan = self._config.engine, served.loaded_plan
        self._fail_load(number)
        worker = self._make_worker(
            self._scheduler,
            number,
            served._model,
            # As llama.cpp makes it: what it takes in a step is bounded by the size that it is told.
            n_ctx=plan.num_cells,
            n_seq=engine.parallel,
            n_batch=min(engine.n_batch, plan.num_cells),
            n_ubatch=engine.n_ubatch,
            threads=plan.threads,
            kv_unified=engine.kv_unified,
            prefix_cache=engine.prefix_cache,
            prefix_sequences=engine.prefix_sequences,
            flash_attention=engine.flash_attention,
            inter_token_target_ms=engine.inter_token_target_ms,
            n_extra=plan.num_extra,
            swap_bytes=engine.swap_mb * _MB,
        )
        _check_kv(served, plan, worker)
        return worker

    def _fail_load(self, number: int) -> None:
        """What a drill ordered for this load. Raises DeviceError."""
        if self._loads_to_fail.get(number, 0) > 0:
            self._loads_to_fail[number] -= 1
            raise DeviceError("the device slot cannot be opened: a drill says so")

    def _kv_block(self, served: Served) -> int:
        """Tokens by which promises of KV grow, 0 where they cannot."""
        engine = self._config.engine
        if engine.kv_mode == "guaranteed":
            return 0
        if engine.kv_unified and served._model.native.can_reuse_prefix:
            return engine.kv_block_tokens
        why = "the model's memory cannot be cut" if engine.kv_unified else "engine.kv_unified is false"
        served.kv_problem = f"it is promised for the longest answer, because {why}"
        return 0


def _check_kv(served: Served, plan: Plan, worker: Worker) -> None:
    """Note where llama.cpp keeps more or less for a token than was planned."""
    kept, planned = worker.swapping.get("bytes_per_token", 0), plan.kv_bytes_per_token
    if kept > 0 and abs(kept - planned) > _KV_TOLERANCE * planned:
        served.kv_problem = f"it takes {kept:g} bytes a token, and {planned} were planned; set engine.ctx by hand"
