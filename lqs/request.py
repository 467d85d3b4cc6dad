"""The nouns that every room shares: a request, who asks, how to sample, what became of it.

Plain data and no behaviour. The api fills in what the client asked, admission what it decided,
scheduling the handle.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lqs._core import Charge, Finish

NS_PER_S = 1_000_000_000


class RequestState(enum.StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class FinishReason(enum.StrEnum):
    """How a request's completion ended; `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    DEVICE = "device"


# By the core's number.
FINISH_REASONS: dict[int, FinishReason] = {
    Finish.FINISH_STOP: FinishReason.STOP,
    Finish.FINISH_LENGTH: FinishReason.LENGTH,
    Finish.FINISH_CANCELLED: FinishReason.CANCELLED,
    Finish.FINISH_TIMEOUT: FinishReason.TIMEOUT,
    Finish.FINISH_ERROR: FinishReason.ERROR,
    Finish.FINISH_DEVICE: FinishReason.DEVICE,
}


class Lane(enum.IntEnum):
    """Short requests and long ones stand apart, so that the long never block the short."""

    SHORT = 0
    LONG = 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: one API key, or everybody where no key is configured.

    `key_index` is the number the core counts service under: 0 is the anonymous tenant, keys follow.
    `level` is where its requests stand by default, `best_level` the lowest number it may ask for.
    """

    name: str
    tier: str
    key_index: int
    level: int
    best_level: int
    weight: float = 1.0
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are llama-server's.

    `num_logprobs` is -1 for none, else how many alternatives to report (0..20). `seed` None asks
    for a fresh one.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[bytes, ...] = ()
    num_logprobs: int = -1
    grammar: str | None = None
    cache_prompt: bool = True


class Segment(NamedTuple):
    """A piece of a rendered prompt; control markers count only where the text is `trusted`."""

    text: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What a prompt is made from, not yet rendered or tokenised.

    Exactly one of `render` and `ids` is set. `render` runs in a pool thread: it may take long,
    touches no event-loop object, and raises `BadRequest` for what the client got wrong.
    `num_bytes_min` is a lower bound on the UTF-8 bytes of the rendered prompt, known without
    rendering (for chat: the bytes of the message texts that a template cannot leave out; 0 if
    unknown). `remake` makes the source for another model that is served; None: it means nothing there.
    """

    render: Callable[[], Sequence[Segment]] | None = None
    ids: Sequence[int] | None = None
    num_bytes_min: int = 0
    remake: Callable[[Any], PromptSource] | None = None


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion that a client asked for, from arrival to its end.

    Owner: the event loop.
    """

    # Filled in by the api.
    id: str
    tenant: Tenant
    model: str
    arrival_ns: int
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: the model's default.
    priority: int | None = None  # Lower is sooner; None: by service tier, else the tenant's own.
    service_tier: str | None = None
    task_type: str | None = None  # "short" or "long": a wish.
    timeout_s: float | None = None  # The whole request; None: the config's.
    queue_timeout_s: float | None = None  # In the queue; None: the config's.
    read_timeout_s: float | None = None  # How long its client waits for bytes, if it says so.
    is_stream: bool = False
    retry_count: int | None = None  # Tries before this one, by clients that count them.
    allow_degrade: bool | None = None  # Whether a smaller model may answer; None: the tier decides.
    route: str = ""  # Which endpoint it came by: "chat" or "completions".
    # Filled in by admission.
    level: int = 0
    lane: Lane = Lane.SHORT
    is_clamped: bool = False  # It stands in another class than it wished.
    asked_level: int | None = None  # The class that it would stand in, were the load not high; None: `level`.
    degraded_from: str | None = None  # The model that was asked for, if `model` answers in its place.
    prompt: array[int] = field(default_factory=lambda: array("i"))
    max_tokens_granted: int = 0  # What the context leaves of max_tokens.
    kv_tokens: int = 0  # KV tokens that it is expected to be promised; 0: its footprint.
    expire_ns: int = 0  # Leaves the queue unserved then; 0: never.
    stop_ns: int = 0  # The worker ends it then; 0: never.
    deadline_ns: int = 0  # Orders it inside its key; 0: none.
    num_bytes_min: int = 0  # Of its prompt, as its source tells.
    tokens_max: int = 0  # A limit of tokens has no more; bounds an answer whose length is not asked for. 0: none.
    charge: Charge | None = None  # What its limits were charged, until it is settled.
    holds_permit: bool = False  # A place in its class is taken and not yet handed to the core.
    models_held: tuple[int, ...] = ()  # Numbers of the models that stay in memory for it.
    model_wait_ns: int = 0  # Of its time in the queue, until its model was there; that says nothing about the load.
    # Filled in by scheduling.
    handle: int | None = None
    model_index: int = 0  # The core's number of `model`.
    state: RequestState = RequestState.WAITING
    reason: str | None = None  # Why it was refused, if it was.

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt as the model will see them."""
        return len(self.prompt)

    @property
    def class_asked(self) -> int:
        """The class that places are promised in: the load moves `level`, and may be another at the next try."""
        return self.level if self.asked_level is None else self.asked_level

    @property
    def kv_tokens_counted(self) -> int:
        """KV tokens that the door counts for it, from its submission to its end."""
        return self.kv_tokens or self.footprint_tokens

    @property
    def footprint_tokens(self) -> int:
        """The most KV cells that it can come to occupy."""
        return len(self.prompt) + self.max_tokens_granted


class Outcome(Protocol):
    """How a request that ran ended; times are monotonic nanoseconds, 0 if never reached."""

    @property
    def finish(self) -> int: ...
    @property
    def error_code(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_completion_tokens(self) -> int: ...
    @property
    def assigned_ns(self) -> int: ...
    @property
    def prefill_done_ns(self) -> int: ...
    @property
    def first_token_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...


class Sink(Protocol):
    """The receiver of one request's events, called in the event loop and never re-entered.

    Order: started, output..., finished, settled; or ended, settled. `ended` carries one of
    "expired", "no_kv", "cancelled", "evicted" and "no_device": nothing was computed. After `settled` nothing comes.
    A sink must not raise.
    """

    def started(self, queue_ns: int) -> None: ...
    def output(self, text: bytes, num_tokens: int, logprobs: bytes | None) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...
    def ended(self, reason: str) -> None: ...
    def settled(self) -> None: ...
