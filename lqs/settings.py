"""Reads the settings: the defaults, the TOML file, `LQS_SECTION_KEY` variables, flags; the later wins.

A key that does not exist is an error and the message offers the nearest one: a misspelt limit that
is ignored in silence is worse than a server that does not start.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from lqs.config import Config, TierConfig, is_loopback
from lqs.errors import ConfigError

_ENV_PREFIX = "LQS_"


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
    config = msgspec.structs.replace(config, tiers=_tiers(config, is_named="tiers" in tree))
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


def check_exposure(config: Config, num_keys: int) -> None:
    """Refuse to listen beyond this machine without any key, unless told that it is meant."""
    server = config.server
    if num_keys or server.insecure or is_loopback(server.host):
        return
    raise ConfigError(
        f"server.host: {server.host} can be reached from other machines, and no key is configured. "
        "Set keys.file and make a key with `lqs keys add --name NAME --config FILE`, or pass --insecure."
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
    words = [f"{sign} {getattr(meta, name)}" for name, sign in named if getattr(meta, name) is not None]
    if meta.max_length is not None:
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


def _tiers(config: Config, *, is_named: bool) -> dict[str, TierConfig]:
    """The tiers that the file names, beside and instead of the usual ones.

    Where there are fewer classes than usual, a usual tier stands in the last.
    """
    last = len(config.queue.levels) - 1
    usual = {name: TierConfig(level=min(tier.level, last)) for name, tier in Config().tiers.items()}
    return usual | config.tiers if is_named else usual


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
            raise ConfigError(f"{where}.{key}: there is no such setting{_nearest(key, known, where)}")


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
        (
            engine.out_buffer_bytes & (engine.out_buffer_bytes - 1) == 0,
            "engine.out_buffer_bytes: must be a power of two.",
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
