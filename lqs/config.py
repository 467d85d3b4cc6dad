"""What an operator can set: a frozen struct per section, each key with unit, bound and a doc line.

Plain data; `lqs.settings` reads and checks it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lqs.config_engine import EngineConfig
from lqs.config_health import HealthConfig
from lqs.config_limits import LimitConfig
from lqs.config_models import ModelConfig, served_of
from lqs.config_placement import PlacementConfig
from lqs.config_tiers import TierConfig, default_tiers
from lqs.describe import NAME
from lqs.describe import key as _key
from lqs.overflow import OverflowConfig
from lqs.protection import AlertsConfig, DegradeConfig, RefusalsConfig

CTX_MIN = 256  # llama.cpp makes no smaller context.


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The listening socket, and what one connection may take."""

    host: Annotated[str, _key("Address to listen on; another than loopback wants keys.")] = "127.0.0.1"
    port: Annotated[int, _key("Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8080
    insecure: Annotated[bool, _key("Listen on any address without keys.")] = False
    backlog: Annotated[int, _key("Connections the kernel holds until they are accepted.", ge=1, le=65535)] = 4096
    num_connections_max: Annotated[
        int, _key("Open connections; more get 503 at once.", "connections", ge=1, le=1_000_000)
    ] = 16_384
    keep_alive_s: Annotated[float, _key("An idle connection is closed after that.", "s", gt=0, le=3600)] = 75.0
    header_bytes_max: Annotated[
        int, _key("Request line and headers of one request.", "bytes", ge=1024, le=1_048_576)
    ] = 65_536
    cors_origins: Annotated[
        tuple[str, ...], _key("Origins whose pages may call it; * for any.", min_length=0, max_length=64)
    ] = ()
    body_bytes_max: Annotated[int, _key("A larger body gets 413.", "bytes", ge=1024, le=1_073_741_824)] = 4_194_304
    body_depth_max: Annotated[int, _key("JSON nested deeper gets 400.", "levels", ge=4, le=512)] = 64
    body_timeout_s: Annotated[float, _key("A body that is not there by then gets 408.", "s", gt=0, le=3600)] = 30.0
    write_stall_s: Annotated[float, _key("A client that reads nothing for so long is dropped.", "s", gt=0, le=3600)] = (
        30.0
    )
    drain_s: Annotated[
        float,
        _key("After SIGTERM what is queued and running is served for so long.", "s", ge=0, le=3600),
    ] = 30.0
    close_s: Annotated[float, _key("How long a thread may take to end at exit.", "s", gt=0, le=600)] = 5.0
    restart: Annotated[
        str,
        _key(
            "Under --supervise, whether the old server runs while the new one loads: overlap; hold, and connections "
            "wait meanwhile; auto: overlap on CPUs where there is memory for two. It is read when the parent starts.",
            pattern="^(auto|overlap|hold)$",
        ),
    ] = "auto"


class QueueConfig(OverflowConfig, frozen=True, forbid_unknown_fields=True):
    """The classes in which requests wait, for how long, and what happens when they are full."""

    levels: Annotated[
        tuple[Annotated[str, Meta(pattern=NAME)], ...],
        _key("Names of the classes, the most urgent first.", min_length=1, max_length=8),
    ] = ("critical", "high", "normal", "low", "background")
    caps: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1_000_000)], ...],
        _key(
            "Most waiting in each class; one number stands for all.",
            "requests",
            min_length=1,
            max_length=8,
        ),
    ] = (100,)
    total: Annotated[int, _key("Most requests waiting, all classes together.", "requests", ge=1, le=1_000_000)] = 256
    timeout_s: Annotated[float, _key("Longest wait in the queue.", "s", gt=0, le=86_400)] = 60.0
    hold_s: Annotated[
        float,
        _key(
            "A waiting stream is opened after that; until then it can be refused.",
            "s",
            ge=0,
            le=3600,
        ),
    ] = 10.0
    request_timeout_s: Annotated[float, _key("Longest life of a request, queue included.", "s", gt=0, le=86_400)] = (
        600.0
    )
    aging_step_s: Annotated[
        float, _key("After so long a request counts as one class higher.", "s", gt=0, le=86_400)
    ] = 60.0
    aged_every: Annotated[
        int,
        _key(
            "While a better class waits, one start in so many is for an aged one.",
            "starts",
            ge=1,
            le=1000,
        ),
    ] = 4
    lane_weights: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1000)], Annotated[int, Meta(ge=1, le=1000)]],
        _key("Shares of short and long requests."),
    ] = (3, 1)
    lane_share_mins: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1)], Annotated[float, Meta(ge=0, le=1)]],
        _key("Shares follow the backlogs, but short and long requests keep at least these parts of all."),
    ] = (0.5, 0.1)
    lane_sequences: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=65_536)], Annotated[int, Meta(ge=0, le=65_536)]],
        _key(
            "So many short and so many long requests of a model run at most, even if nobody else wants the places; "
            "0: no bound."
        ),
    ] = (0, 0)
    lane_ctx: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=1 << 40)], Annotated[int, Meta(ge=0, le=1 << 40)]],
        _key(
            "No more short or long requests of a model start while those that run are promised so many KV cells; "
            "0: no bound."
        ),
    ] = (0, 0)
    fine_level: Annotated[
        int, _key("Prompts of this class and below are computed in the finest chunks, as long ones are.", ge=0, le=8)
    ] = 3
    bypass_max: Annotated[
        int,
        _key(
            "Starts ahead of a request that does not fit, before a device slot is held for it.",
            "starts",
            ge=0,
            le=1_000_000,
        ),
    ] = 16
    bypass_s: Annotated[float, _key("The same as a time since it first did not fit.", "s", ge=0, le=86_400)] = 10.0
    short_tokens_max: Annotated[
        int,
        _key(
            "Up to that a request is short (prompt and expected answer); the border rises from here with the load.",
            "tokens",
            ge=1,
            le=1_000_000_000,
        ),
    ] = 512
    long_tokens_min: Annotated[
        int,
        _key("Above that a request is long, whatever it says.", "tokens", ge=1, le=1_000_000_000),
    ] = 2048
    entry_per_s: Annotated[
        float,
        _key("Requests let in while the load is high, and only then; 0: as many as come.", "requests/s", ge=0, le=1e6),
    ] = 10.0
    entry_burst: Annotated[
        int, _key("How many of them at once, after a time without.", "requests", ge=1, le=1_000_000)
    ] = 100
    table_capacity: Annotated[
        int,
        _key(
            "Requests the server can hold at once, waiting and running.",
            "requests",
            ge=16,
            le=16_777_216,
        ),
    ] = 16_384

    def lane_rules(self) -> Iterator[tuple[bool, str]]:
        """Whether it holds, and what is wrong if not, of what is set for the lanes."""
        yield (
            self.short_tokens_max <= self.long_tokens_min,
            "queue.short_tokens_max: must not be above queue.long_tokens_min.",
        )
        yield sum(self.lane_share_mins) <= 1 + 1e-9, "queue.lane_share_mins: the two must not be more than 1 together."


class KeysConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the API keys are, and who may come without one."""

    file: Annotated[str, _key("File of hashed keys, written by `lqs keys add`; empty: no keys.")] = ""
    num_keys_max: Annotated[
        int, _key("Keys the server has room for; more need a restart.", "keys", ge=1, le=1_000_000)
    ] = 1024
    anonymous_tier: Annotated[str, _key("Tier of everybody while no key is configured.")] = "normal"


class PromptsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The pool that renders and tokenises prompts, off the event loop."""

    threads: Annotated[int, _key("Threads of the pool.", "threads", ge=1, le=64)] = 2
    num_pending_max: Annotated[
        int, _key("Calls that belong to no queued request and may wait.", "calls", ge=1, le=65_536)
    ] = 256


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is written to stderr. Never a prompt, an answer or a key."""

    format: Annotated[str, _key("text or json.", pattern="^(text|json)$")] = "text"
    level: Annotated[str, _key("debug, info, warning or error.", pattern="^(debug|info|warning|error)$")] = "info"
    access: Annotated[bool, _key("One line for each request.")] = True


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set; `load` builds it and checks what one key alone cannot show."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    models: dict[str, ModelConfig] = msgspec.field(default_factory=dict)
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    health: HealthConfig = HealthConfig()
    queue: QueueConfig = QueueConfig()
    tiers: dict[str, TierConfig] = msgspec.field(default_factory=default_tiers)
    limits: dict[str, LimitConfig] = msgspec.field(default_factory=dict)
    keys: KeysConfig = KeysConfig()
    prompts: PromptsConfig = PromptsConfig()
    refusals: RefusalsConfig = RefusalsConfig()
    degrade: DegradeConfig = DegradeConfig()
    alerts: AlertsConfig = AlertsConfig()
    log: LogConfig = LogConfig()

    @property
    def level_caps(self) -> tuple[int, ...]:
        """The cap of each class, in the order of `queue.levels`."""
        caps = self.queue.caps
        return caps * len(self.queue.levels) if len(caps) == 1 else caps

    @property
    def served(self) -> Sequence[ModelConfig]:
        """All that is served, in order; the fallback of a model follows them if it is none of them."""
        return served_of(self.model, self.models)

    @property
    def own_fallback(self) -> str:
        """The file of a fallback that is not served by itself; empty if there is none."""
        names = {name for each in self.served for name in (each.name, each.base, *each.aliases)}
        return self.model.fallback if self.model.fallback not in names else ""

    @property
    def num_sequences(self) -> int:
        """Sequences of all device slots, as far as their number is known without the machine."""
        devices = [each.devices or self.engine.devices for each in self.served]
        num_slots = sum(map(len, devices)) + bool(self.own_fallback) * len(self.engine.devices)
        return num_slots * self.engine.parallel

    @property
    def num_models(self) -> int:
        """The models, and a fallback beside them."""
        return len(self.served) + bool(self.own_fallback)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name but localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
