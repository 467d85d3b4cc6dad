"""Stand-ins for what admission needs of the engine: a model with a token per byte."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from typing import Any

from lqs._core import Work
from lqs.config_models import ModelConfig
from lqs.request import PromptSource, Request, Segment, Tenant

N_VOCAB = 256


@dataclass
class ByteModel:
    """A vocabulary of bytes. `worked` keeps what `work` was asked for."""

    n_vocab: int = N_VOCAB
    add_bos: bool = False
    bos: int | None = None
    markers: re.Pattern[str] | None = None
    longest_piece_bytes: int | None = 1
    worked: list[dict[str, Any]] = field(default_factory=list)

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> array[int]:
        return array("i", list(text))

    def detokenize(self, ids: array[int]) -> bytes:
        return bytes(list(ids))

    def grammar(self, gbnf: str) -> str:
        return f"compiled {gbnf}"

    def work(self, prompt: array[int], scope: int, sampling: object, **rest: Any) -> Work:
        self.worked.append({"prompt": prompt, "scope": scope, "sampling": sampling, **rest})
        return Work()


@dataclass
class ByteServed:
    """A served model with settable health."""

    n_ctx: int = 64
    loaded: ByteModel = field(default_factory=ByteModel)
    config: ModelConfig = field(default_factory=ModelConfig)
    name: str = "m"
    index: int = 0
    is_prefix_shared: bool = False
    is_loading: bool = False
    is_absent: bool = False
    is_on_demand: bool = False
    has_healthy_device: bool = True

    def load_time_left_s(self, now_ns: int) -> float:
        return 7.0


@dataclass
class OneModel:
    """A catalogue with one model."""

    served: ByteServed = field(default_factory=ByteServed)

    @property
    def is_loading(self) -> bool:
        return self.served.is_loading

    @property
    def has_healthy_device(self) -> bool:
        return self.served.has_healthy_device

    def fallback_of(self, served: ByteServed) -> ByteServed | None:
        return None

    def find(self, name: str) -> ByteServed | None:
        return self.served if name == self.served.name else None


def text(prompt: str) -> PromptSource:
    return PromptSource(render=lambda: [Segment(prompt, True)], num_bytes_min=len(prompt.encode()))


def a_request(**given: Any) -> Request:
    tenant = Tenant("ann", "normal", 3, 2, 2)
    given = {"id": "r", "tenant": tenant, "model": "m", "arrival_ns": 0} | given
    return Request(**given)
