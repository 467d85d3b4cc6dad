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
from lqs.engine.drill import Break
from lqs.engine.fallback import config_of_fallback
from lqs.engine.plan import Plan, make_plan
from lqs.engine.served import Served
from lqs.engine.slot import Slot, Worker
from lqs.errors import ConfigError

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
        return plan

    def _load(self, served: Served) -> Plan:
        served._model.load()
        plan = make_plan(served.whole_config, served.path)
        for device in plan.devices:
            served.slots.append(self._open(served, device, plan))
        served.prepare(plan)
        return plan

    def start(self) -> None:
        """Start the workers; from now on requests are let in."""
        for served in self._served.values():
            for slot in served.slots:
                slot.start()
            served.is_loading = False

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
        ended = [slot.close(limit_s) for slot in reversed(list(self.slots))]
        if all(ended):
            for served in self._served.values():
                served._model.close()
        return all(ended)

    def _open(self, served: Served, device: str, plan: Plan) -> Slot:
        engine, placement = self._config.engine, self._config.placement
        number = self._scheduler.add_device_slot(
            model=served.index,
            kv_tokens=plan.kv_tokens,
            num_sequences=engine.parallel,
            num_extra=plan.num_extra,
            kv_block=self._kv_block(served),
            weight=placement.weight_of(len(served.slots)),
            lanes=placement.lanes_of(len(served.slots)),
            token_bytes=plan.kv_bytes_per_token,
        )
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
        for each in self._drill:
            if each.slot == number:
                worker.break_at(each.kind, step=each.step)
        # A device has a slot for each model.
        name = device if served.index == 0 else f"{device}@{served.name}"
        return Slot(name, worker, plan.kv_tokens, number)

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
