"""Models on their device slots: planned, loaded, started, watched, stopped.

A device slot is one model on one device with a worker thread of its own. `cpu:0`, `cpu:1`, ... share
the cores and the weights of the machine; each has a context, and so a KV budget, of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lqs.config import Config, ModelConfig
from lqs.engine.drill import Break
from lqs.engine.plan import Plan, make_plan
from lqs.engine.slot import Slot, Worker
from lqs.engine.template import ChatTemplate, TemplateInvalid
from lqs.errors import EngineFailed, StartError
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs._core import Scheduler
    from lqs.engine.library import Model

# How far the KV of a token may be from what was planned, as a share of it.
_KV_TOLERANCE = 0.05
_MB = 1_000_000

# Until something is loaded nothing is known about how long it will take.
_UNKNOWN_LOAD_S = 5.0


class Served:
    """A model under its name in requests. Owner: the event loop, once it is loaded."""

    def __init__(self, config: Config, name: str, index: int, model: Model) -> None:
        self.name = name
        self.index = index
        self.config: ModelConfig = config.model
        self.is_prefix_shared = config.engine.prefix_shared
        self.created = int(time.time())
        self.n_ctx = 0
        self.template: ChatTemplate | None = None
        self.template_error: str | None = None
        self.slots: list[Slot] = []
        self.kv_problem: str | None = None
        self.is_loading = True
        self._stall_s = config.engine.stall_s
        self._model = model
        self._load_began_ns = time.monotonic_ns()

    @property
    def model(self) -> Model | None:
        """The model, None while it is loading."""
        return None if self.is_loading else self._model

    @property
    def loaded(self) -> Model:
        """The model. Raises EngineFailed while it is loading."""
        if self.is_loading:
            raise EngineFailed("The model is loading.")
        return self._model

    @property
    def state(self) -> str:
        """loading, ready or failed."""
        if self.is_loading:
            return "loading"
        return "ready" if self.has_healthy_device else "failed"

    @property
    def devices(self) -> list[str]:
        """The devices that serve it."""
        return [slot.device for slot in self.slots]

    @property
    def has_healthy_device(self) -> bool:
        """Whether anything can run it now."""
        now_ns = time.monotonic_ns()
        return any(slot.is_healthy(now_ns, self._stall_s) for slot in self.slots)

    def load_time_left_s(self, now_ns: int) -> float:
        """Seconds until it is loaded, from how long the part that is there took."""
        progress = self._model.progress
        if progress <= 0:
            return _UNKNOWN_LOAD_S
        return (now_ns - self._load_began_ns) / NS_PER_S * (1 - progress) / progress

    def meta(self) -> dict[str, Any]:
        """What `/v1/models` tells about it."""
        meta: dict[str, Any] = {"state": self.state, "devices": self.devices}
        if self.model is None:
            return meta
        has_template = "ok" if self.template else "none"
        return meta | {
            "n_ctx": self.n_ctx,
            "n_ctx_train": self.model.native.n_ctx_train,
            "n_vocab": self.model.n_vocab,
            "n_params": self.model.native.n_params,
            "size": self.model.native.size_bytes,
            "chat_template": self.template_error or has_template,
        }

    def prepare(self, plan: Plan) -> None:
        """What is known once the weights are there: limits and the chat template."""
        self.n_ctx = plan.request_tokens_max
        try:
            self.template = self._make_template()
        except TemplateInvalid as error:
            # The model still completes plain prompts; chat says what is wrong.
            self.template_error = str(error)

    def _make_template(self) -> ChatTemplate | None:
        model = self._model
        source = model.chat_template
        if self.config.chat_template:
            source = _read_template(self.config.chat_template)
        if source is None:
            return None
        bos, eos = model.bos, model.native.eos
        return ChatTemplate(
            source,
            special_texts=model.control_texts,
            bos_text=model.token_text(bos) if bos is not None else "",
            eos_text=model.token_text(eos) if eos >= 0 else "",
        )


class Models:
    """All that is served; one model for now.

    `make_model` and `make_worker` are the library's; tests bring their own. `drill` is what breaks on purpose.

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
        drill: Sequence[Break] = (),
    ) -> None:
        self._config = config
        self._path = path
        self._scheduler = scheduler
        self._make_worker = make_worker
        self._drill = drill
        name = config.model.name or path.name.removesuffix(".gguf")
        self._served = {name: Served(config, name, 0, make_model(path))}

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

    def load(self) -> Plan:
        """Load the weights and open every device slot; takes long. Raises StartError."""
        (served,) = self._served.values()
        served._model.load()
        plan = make_plan(self._config, self._path)
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

    def close(self, limit_s: float) -> bool:
        """Stop every worker, then free contexts and weights; False if a thread did not end."""
        ended = [slot.close(limit_s) for slot in reversed(list(self.slots))]
        if all(ended):
            for served in self._served.values():
                served._model.close()
        return all(ended)

    def _open(self, served: Served, device: str, plan: Plan) -> Slot:
        engine = self._config.engine
        number = self._scheduler.add_device_slot(
            model=served.index,
            kv_tokens=plan.kv_tokens,
            num_sequences=engine.parallel,
            num_extra=plan.num_extra,
            kv_block=self._kv_block(served),
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
        return Slot(device, worker, plan.kv_tokens, number)

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
    if kept and abs(kept - planned) > _KV_TOLERANCE * planned:
        served.kv_problem = f"it takes {kept:g} bytes a token, and {planned} were planned; set engine.ctx by hand"


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"model.chat_template: {path}: {error}.") from None
