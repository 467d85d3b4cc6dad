"""What an operator can set: a frozen struct per section, each key with unit, bound and a doc line.

Sources, the later wins: the defaults below, the TOML file, `LQS_SECTION_KEY` variables, flags.
A key that does not exist is an error and the message offers the nearest one: a misspelt limit that
is ignored in silence is worse than a server that does not start.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from lqs.errors import ConfigError

_ENV_PREFIX = "LQS_"


def _key(doc: str, unit: str = "", **bound: Any) -> Meta:
    """Describe a key: what it does, in which unit, within which bound."""
    return Meta(description=doc, extra={"unit": unit}, **bound)


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The listening socket, and what one connection may take."""

    host: Annotated[str, _key("Address to listen on; another than loopback wants keys.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _key("Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8080
    insecure: Annotated[bool, _key("Listen on any address without keys.")] = False
    backlog: Annotated[
        int, _key("Connections the kernel holds until they are accepted.", ge=1, le=65535)
    ] = 4096
    num_connections_max: Annotated[
        int, _key("Open connections; more get 503 at once.", "connections", ge=1, le=1_000_000)
    ] = 16_384
    keep_alive_s: Annotated[
        float, _key("An idle connection is closed after that.", "s", gt=0, le=3600)
    ] = 75.0
    header_bytes_max: Annotated[
        int, _key("Request line and headers of one request.", "bytes", ge=1024, le=1_048_576)
    ] = 65_536
    body_bytes_max: Annotated[
        int, _key("A larger body gets 413.", "bytes", ge=1024, le=1_073_741_824)
    ] = 4_194_304
    body_depth_max: Annotated[int, _key("JSON nested deeper gets 400.", "levels", ge=4, le=512)] = (
        64
    )
    body_timeout_s: Annotated[
        float, _key("A body that is not there by then gets 408.", "s", gt=0, le=3600)
    ] = 30.0
    write_stall_s: Annotated[
        float, _key("A client that reads nothing for so long is dropped.", "s", gt=0, le=3600)
    ] = 30.0
    drain_s: Annotated[
        float,
        _key("After SIGTERM what is queued and running is served for so long.", "s", ge=0, le=3600),
    ] = 30.0
    close_s: Annotated[
        float, _key("How long a thread may take to end at exit.", "s", gt=0, le=600)
    ] = 5.0


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The model that is served."""

    path: Annotated[
        str, _key("GGUF file or the name of a fetched model; empty: the default model.")
    ] = ""
    name: Annotated[str, _key("Its name in requests; empty: the file's name without .gguf.")] = ""
    default_max_tokens: Annotated[
        int,
        _key(
            "When a request names no max_tokens; 0: to the end of the context.",
            "tokens",
            ge=0,
            le=1_000_000_000,
        ),
    ] = 0
    max_tokens_max: Annotated[
        int,
        _key(
            "No answer is longer, whatever it asks; 0: the context is the limit.",
            "tokens",
            ge=0,
            le=1_000_000_000,
        ),
    ] = 0
    chat_template: Annotated[str, _key("File with a Jinja template; empty: the model's own.")] = ""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The device slots and how each runs its steps."""

    devices: Annotated[
        tuple[str, ...], _key("Device slots: auto, cpu:0, cpu:1, ...", min_length=1, max_length=64)
    ] = ("auto",)
    threads: Annotated[
        int,
        _key("Threads of a CPU device slot; 0: its share of the cores.", "threads", ge=0, le=512),
    ] = 0
    parallel: Annotated[int, _key("Sequences per device slot.", "sequences", ge=1, le=256)] = 32
    ctx: Annotated[
        int,
        _key(
            "KV cells per device slot, shared by its sequences; 0: from memory and model.",
            "tokens",
            ge=0,
        ),
    ] = 0
    n_batch: Annotated[int, _key("Most tokens of one step.", "tokens", ge=1, le=65_536)] = 2048
    n_ubatch: Annotated[
        int, _key("Most tokens computed at once within a step.", "tokens", ge=1, le=65_536)
    ] = 512
    kv_unified: Annotated[
        bool, _key("One KV budget for all sequences; false: an equal part each.")
    ] = True
    prefix_cache: Annotated[
        bool, _key("Keep finished sequences to answer the same beginning sooner.")
    ] = True
    prefix_shared: Annotated[
        bool, _key("Keys share the prefix cache and could guess prompts of others by time.")
    ] = False
    flash_attention: Annotated[bool, _key("Use flash attention where the model allows it.")] = True
    inter_token_target_ms: Annotated[
        float,
        _key("Prefill leaves a step at most so long while others decode.", "ms", gt=0, le=60_000),
    ] = 200.0
    kv_margin_mb: Annotated[
        int, _key("Memory that is left free beside weights and KV.", "MB", ge=0, le=1_048_576)
    ] = 512
    out_buffer_bytes: Annotated[
        int,
        _key(
            "Text made and not yet sent, per request; full: the sequence pauses.",
            "bytes",
            ge=4096,
            le=16_777_216,
        ),
    ] = 65_536
    stall_s: Annotated[
        float, _key("A step that takes longer makes its device slot unhealthy.", "s", gt=0, le=3600)
    ] = 30.0


class QueueConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The classes in which requests wait, and for how long."""

    levels: Annotated[
        tuple[Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,31}$")], ...],
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
    total: Annotated[
        int, _key("Most requests waiting, all classes together.", "requests", ge=1, le=1_000_000)
    ] = 256
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
    request_timeout_s: Annotated[
        float, _key("Longest life of a request, queue included.", "s", gt=0, le=86_400)
    ] = 600.0
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
    short_tokens_max: Annotated[
        int,
        _key(
            "Up to that a request is short (prompt and expected answer).",
            "tokens",
            ge=1,
            le=1_000_000_000,
        ),
    ] = 512
    long_tokens_min: Annotated[
        int,
        _key("Above that a request is long, whatever it says.", "tokens", ge=1, le=1_000_000_000),
    ] = 2048
    table_capacity: Annotated[
        int,
        _key(
            "Requests the server can hold at once, waiting and running.",
            "requests",
            ge=16,
            le=16_777_216,
        ),
    ] = 16_384


class TierConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the keys of one tier may ask for."""

    level: Annotated[
        int, _key("Class of its requests by default; 0 is the most urgent.", ge=0, le=7)
    ]
    best: Annotated[int, _key("Best class it may ask for; absent: its own.", ge=0, le=7)] | None = (
        None
    )
    weight: Annotated[float, _key("Share of a key inside its class.", gt=0, le=1000)] = 1.0

    @property
    def best_level(self) -> int:
        """The best class it may ask for."""
        return self.level if self.best is None else self.best


class KeysConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the API keys are, and who may come without one."""

    file: Annotated[
        str, _key("File of hashed keys, written by `lqs keys add`; empty: no keys.")
    ] = ""
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
    level: Annotated[
        str, _key("debug, info, warning or error.", pattern="^(debug|info|warning|error)$")
    ] = "info"
    access: Annotated[bool, _key("One line for each request.")] = True


def _default_tiers() -> dict[str, TierConfig]:
    return {
        "vip": TierConfig(level=0),
        "normal": TierConfig(level=2),
        "free": TierConfig(level=3),
        "batch": TierConfig(level=4),
    }


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set; `load` builds it and checks what one key alone cannot show."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    queue: QueueConfig = QueueConfig()
    tiers: dict[str, TierConfig] = msgspec.field(default_factory=_default_tiers)
    keys: KeysConfig = KeysConfig()
    prompts: PromptsConfig = PromptsConfig()
    log: LogConfig = LogConfig()

    @property
    def level_caps(self) -> tuple[int, ...]:
        """The cap of each class, in the order of `queue.levels`."""
        caps = self.queue.caps
        return caps * len(self.queue.levels) if len(caps) == 1 else caps


class Setting(NamedTuple):
    """One key as an operator sees it; what docs/operating.md lists."""

    section: str
    key: str
    default: Any
    unit: str
    bound: str
    doc: str


def load(
    path: str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Read the file, lay variables and flags (`"section.key": value`) over it, and check it.

    Raises ConfigError that names the key.
    """
    tree = _read(path) if path else {}
    _lay_over(tree, _from_env(env or {}))
    _lay_over(tree, flags or {})
    _check_names(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_name_the_key(str(error))) from None
    _check_together(config)
    return config


def settings() -> Iterator[Setting]:
    """Every key with its unit, default, bound and doc, in the order of the file."""
    for section, struct in _sections().items():
        hints = get_type_hints(struct, include_extras=True)
        for info in msgspec.structs.fields(struct):
            meta = _meta_of(hints[info.name])
            default = None if info.default is msgspec.NODEFAULT else info.default
            unit = (meta.extra or {})["unit"]
            yield Setting(section, info.name, default, unit, _bound(meta), meta.description or "")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name but localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(config: Config, num_keys: int) -> None:
    """Refuse to listen beyond this machine without any key, unless told that it is meant."""
    server = config.server
    if num_keys or server.insecure or is_loopback(server.host):
        return
    raise ConfigError(
        f"server.host: {server.host} can be reached from other machines, and no key is configured. "
        "Make one with `lqs keys add --name NAME`, or pass --insecure."
    )


def _sections() -> dict[str, type[Struct]]:
    """The struct of each section; tiers are named by the operator and described once."""
    hints = get_type_hints(Config)
    hints["tiers"] = TierConfig
    return hints


def _meta_of(hint: Any) -> Meta:
    """The description of a key, from its annotation or that of `... | None`."""
    kind, *rest = get_args(hint)
    return rest[0] if isinstance(rest[0], Meta) else _meta_of(kind)


def _bound(meta: Meta) -> str:
    """A key's bound in words: `> 0, <= 3600`."""
    named = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    words = [
        f"{sign} {getattr(meta, name)}" for name, sign in named if getattr(meta, name) is not None
    ]
    if meta.min_length is not None:
        words.append(f"{meta.min_length} to {meta.max_length} entries")
    if meta.pattern is not None:
        words.append(f"matches {meta.pattern}")
    return ", ".join(words)


def _read(path: str) -> dict[str, Any]:
    """The file as a tree of plain values."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}.") from None


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """The variables that name a section: `LQS_QUEUE_TIMEOUT_S` is `queue.timeout_s`.

    Other LQS_* variables belong to others (where models are kept, for one).
    """
    found = {}
    for name, text in sorted(env.items()):
        section, _, key = name.removeprefix(_ENV_PREFIX).lower().partition("_")
        if name.startswith(_ENV_PREFIX) and key and section in _sections() and section != "tiers":
            found[f"{section}.{key}"] = _from_text(section, key, text, name)
    return found


def _from_text(section: str, key: str, text: str, name: str) -> Any:
    """A variable's text as the type that its key has; lists are separated by commas."""
    hints = get_type_hints(_sections()[section], include_extras=True)
    if key not in hints:
        raise ConfigError(f"{name}: there is no such setting{_nearest(key, hints, section)}")
    kind = get_args(hints[key])[0]
    value: Any = text.split(",") if get_origin(kind) is tuple else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}.") from None


def _lay_over(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put `section.key` values into the tree; what is not a table there is left to the check."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        table = tree.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value


def _check_names(tree: Mapping[str, Any]) -> None:
    """Refuse sections and keys that do not exist, and offer the nearest."""
    sections = _sections()
    for section, table in tree.items():
        if section not in sections:
            raise ConfigError(f"{section}: there is no such section{_nearest(section, sections)}")
        tables = table if section == "tiers" else {section: table}
        for name, keys in (tables if isinstance(tables, dict) else {}).items():
            where = f"tiers.{name}" if section == "tiers" else section
            _check_keys(where, keys, sections[section])


def _check_keys(where: str, table: Any, struct: type[Struct]) -> None:
    known = [info.name for info in msgspec.structs.fields(struct)]
    for key in table if isinstance(table, dict) else ():
        if key not in known:
            raise ConfigError(
                f"{where}.{key}: there is no such setting{_nearest(key, known, where)}"
            )


def _nearest(word: str, known: Any, prefix: str = "") -> str:
    """`; did you mean X?` or a full stop."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    dotted = f"{prefix}." if prefix else ""
    return f"; did you mean {dotted}{close[0]}?" if close else "."


def _name_the_key(message: str) -> str:
    """msgspec's `Expected ... - at `$.queue.total`` with the key first."""
    what, _, where = message.partition(" - at `$.")
    return f"{where.rstrip('`')}: {what}." if where else f"{what}."


def _check_together(config: Config) -> None:
    """What no key alone can show."""
    queue, engine, num_levels = config.queue, config.engine, len(config.queue.levels)
    rules = [
        (len(set(queue.levels)) == num_levels, "queue.levels: a name is there twice."),
        (
            len(queue.caps) in (1, num_levels),
            f"queue.caps: give one number, or one for each of the {num_levels} classes.",
        ),
        (
            queue.total + len(engine.devices) * engine.parallel <= queue.table_capacity,
            "queue.table_capacity: must hold queue.total and every sequence of every device slot.",
        ),
        (
            queue.short_tokens_max <= queue.long_tokens_min,
            "queue.short_tokens_max: must not be above queue.long_tokens_min.",
        ),
        # A step must have room for one token of every running sequence.
        (engine.n_batch >= engine.parallel, "engine.n_batch: must be at least engine.parallel."),
        (engine.n_ubatch <= engine.n_batch, "engine.n_ubatch: must not be above engine.n_batch."),
        (
            config.keys.anonymous_tier in config.tiers,
            f"keys.anonymous_tier: there is no tier {config.keys.anonymous_tier!r}.",
        ),
        *_tier_rules(config),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _tier_rules(config: Config) -> Iterator[tuple[bool, str]]:
    last = len(config.queue.levels) - 1
    for name, tier in config.tiers.items():
        yield tier.level <= last, f"tiers.{name}.level: the last class is {last}."
        yield tier.best_level <= tier.level, f"tiers.{name}.best: must not be below its own class."
