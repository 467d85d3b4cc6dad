"""One served model: what is loaded of it, and what clients are told of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lqs.config import Config
from lqs.config_models import ModelConfig
from lqs.engine.fitting import Size
from lqs.engine.plan import Plan, longest
from lqs.engine.slot import NoWorker, Slot
from lqs.engine.template import ChatTemplate, TemplateInvalid, read_template
from lqs.errors import RequestRefused
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs.engine.library import Model

# Until something is loaded nothing is known about how long it will take.
_UNKNOWN_LOAD_S = 5.0


class Served:
    """A model under its name in requests. Owner: the event loop, but for what is loaded while it loads.

    `config` is the whole one, as this model sees it.
    """

    def __init__(self, config: Config, path: Path, index: int, name: str, fallback: str = "") -> None:
        self.path = path
        self.name = name
        self.fallback = fallback
        self.index = index
        self.whole_config = config
        self.config: ModelConfig = config.model
        self.is_prefix_shared = config.engine.prefix_shared
        self.created = int(time.time())
        self.n_ctx = 0
        self.template: ChatTemplate | None = None
        self.template_error: str | None = None
        self.slots: list[Slot] = []
        self.kv_problem: str | None = None
        # Not ready to be used: it is loaded, or waits to be.
        self.is_loading = True
        self.is_absent = config.model.on_demand
        self.is_on_demand = config.model.on_demand
        self.weights: dict[str, Model] = {}  # By where they lie: all that are to be freed in the end.
        self.is_closed: Callable[[], bool] = lambda: False  # By an operator.
        self._stall_s = config.engine.stall_s
        self._model: Model | None = None
        self._load_began_ns = time.monotonic_ns()

    @property
    def model(self) -> Model | None:
        """The model, None while it is loading."""
        return None if self.is_loading else self._model

    @property
    def loaded(self) -> Model:
        """The model. Raises RequestRefused while it is not there."""
        if self.is_loading or self._model is None:
            raise RequestRefused("model_loading", "The model is loading.", retry_after_s=_UNKNOWN_LOAD_S)
        return self._model

    @property
    def own(self) -> Model:
        """The model, also while it loads, for who loads it."""
        assert self._model is not None
        return self._model

    @property
    def progress(self) -> float:
        """How much of its weights is loaded, 0 to 1."""
        # Once: the thread that unloads may set it to None.
        model = self._model
        return 0.0 if model is None else model.progress

    def renew(self, model: Model) -> None:
        """It is loaded, from the beginning, as this."""
        self._load_began_ns = time.monotonic_ns()
        self._model = model

    def forget(self) -> None:
        """It has left memory: nothing of it is loaded."""
        self._model = None

    @property
    def state(self) -> str:
        """absent, loading, drained, ready or failed."""
        if self.is_loading:
            return "absent" if self.is_absent else "loading"
        if self.is_closed():
            return "drained"
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
        progress = self.progress
        if progress <= 0:
            return _UNKNOWN_LOAD_S
        return (now_ns - self._load_began_ns) / NS_PER_S * (1 - progress) / progress

    def meta(self) -> dict[str, Any]:
        """What `/v1/models` tells about it."""
        meta: dict[str, Any] = {"state": self.state, "devices": self.devices}
        if self.config.aliases:
            meta["aliases"] = list(self.config.aliases)
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
        # The file may be another one than in its life before.
        self.template = self.template_error = None
        try:
            self.template = self._make_template()
        except TemplateInvalid as error:
            # The model still completes plain prompts; chat says what is wrong.
            self.template_error = str(error)

    def fit(self, plan: Plan) -> None:
        """A request may get as long, prompt and answer, as the open device slots hold."""
        sizes = [
            Size(slot.kv_tokens, slot.num_sequences) for slot in self.slots if not isinstance(slot.worker, NoWorker)
        ]
        self.n_ctx = min(longest(self.whole_config, sizes), plan.n_ctx_train)

    def _make_template(self) -> ChatTemplate | None:
        model = self.own
        source = model.chat_template
        if self.config.chat_template:
            source = read_template(self.config.chat_template)
        if source is None:
            return None
        bos, eos = model.bos, model.native.eos
        return ChatTemplate(
            source,
            special_texts=model.control_texts,
            bos_text=model.token_text(bos) if bos is not None else "",
            eos_text=model.token_text(eos) if eos >= 0 else "",
        )
