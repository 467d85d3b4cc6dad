"""Reads the settings: the defaults, the TOML file, `LQS_SECTION_KEY` variables, flags; the later wins.

A key or an LQS_* variable that does not exist is an error and the message offers the nearest one: a
misspelt limit that is ignored in silence is worse than a server that does not start.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from lqs.config import CTX_MIN, Config, is_loopback
from lqs.config_file import read_tree
from lqs.config_limits import LimitConfig, limit_rules
from lqs.config_models import ModelConfig, model_rules
from lqs.config_tiers import TierConfig
from lqs.errors import ConfigError
from lqs.wording import complaint, in_words, offer, pattern_in_words

_ENV_PREFIX = "LQS_"
# NAME=VALUE of what is called LQS_* and is no setting: where models are, the key of `lqs chat`, the
# switches of builds and tests, and what Kubernetes sets for a service named lqs.
_NOT_SETTINGS = re.compile(
    r"LQS_(MODELS_DIR|API_KEY|SUPERVISOR|EXTENSIONS|NATIVE|DEBUG|COVERAGE|ANNOTATE|SANITIZE|STRESS_ITEMS|TEST_\w+)="
    r"|LQS_SERVICE_(HOST|PORT)|LQS_PORT_\d|LQS_PORT=\w+://"
)
# Sections of tables that the operator names, and what such a table holds.
NAMED: dict[str, type[Struct]] = {"tiers": TierConfig, "limits": LimitConfig, "models": ModelConfig}


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
    tree = read_tree(path) if path else {}
    _lay_over(tree, _from_env(env or {}))
    _lay_over(tree, flags or {})
    _check_names(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_name_the_key(str(error), tree)) from None
    config = msgspec.structs.replace(config, tiers=_tiers(config, is_named="tiers" in tree))
    check_together(config)
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
    """The struct of each section; what the operator names is described once."""
    return get_type_hints(Config) | NAMED


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
        words.append(pattern_in_words(meta.pattern))
    return ", ".join(words)


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are settings: `LQS_QUEUE_TIMEOUT_S` is `queue.timeout_s`."""
    known = {
        f"{_ENV_PREFIX}{section}_{key}".upper(): (section, key)
        for section, struct in _sections().items()
        for key in struct.__struct_fields__
        if section not in NAMED
    }
    found = {}
    for name, text in sorted(env.items()):
        if not name.startswith(_ENV_PREFIX) or _NOT_SETTINGS.match(f"{name}={text}"):
            continue
        if name not in known:
            raise ConfigError(_no_such_variable(name, known))
        section, key = known[name]
        found[f"{section}.{key}"] = _from_text(section, key, text, name)
    return found


def _no_such_variable(name: str, known: Mapping[str, tuple[str, str]]) -> str:
    for section in NAMED:
        if name.startswith(f"{_ENV_PREFIX}{section}_".upper()):
            return f"{name}: {section} are set in the file, as [{section}.NAME]."
    bare = {variable.removeprefix(_ENV_PREFIX): variable for variable in known}
    word = name.removeprefix(_ENV_PREFIX)
    # A key without its section, or else what is spelt alike.
    close = [variable for variable, (_, key) in known.items() if key.upper() == word]
    close = close or [bare[match] for match in difflib.get_close_matches(word, bare, n=1, cutoff=0.7)]
    return f"{name}: there is no such setting{offer(close)}"


def _from_text(section: str, key: str, text: str, name: str) -> Any:
    """A variable's text as the type that its key has; a list is `a,b` or `["a", "b"]`."""
    kind = get_args(get_type_hints(_sections()[section], include_extras=True)[key])[0]
    value: Any = _entries(text) if get_origin(kind) is tuple else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        # That it was text goes without saying.
        what = str(error).partition(" - at ")[0].removesuffix(", got `str`")
        raise ConfigError(f"{name}: {in_words(what)}.") from None


def _entries(text: str) -> Any:
    """The entries of a list."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            pass
    return [entry.strip() for entry in text.split(",")] if text.strip() else []


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
    usual = {name: msgspec.structs.replace(tier, level=min(tier.level, last)) for name, tier in Config().tiers.items()}
    return usual | config.tiers if is_named else usual


def _check_names(tree: Mapping[str, Any]) -> None:
    """Refuse sections and keys that do not exist, and offer the nearest."""
    sections = _sections()
    for section, table in tree.items():
        if section not in sections:
            close = _homes(section) or difflib.get_close_matches(section, list(sections), n=1, cutoff=0.5)
            raise ConfigError(f"{section}: there is no such section{offer(close)}")
        tables = table if section in NAMED else {section: table}
        for name, keys in (tables if isinstance(tables, dict) else {}).items():
            where = f"{section}.{name}" if section in NAMED else section
            _check_keys(where, keys, sections[section])


def _check_keys(where: str, table: Any, struct: type[Struct]) -> None:
    known = struct.__struct_fields__
    for key in table if isinstance(table, dict) else ():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            close = _homes(key) or [f"{where}.{word}" for word in near]
            raise ConfigError(f"{where}.{key}: there is no such setting{offer(close)}")


def _homes(key: str) -> list[str]:
    """The settings of that name, in whatever section."""
    sections = _sections().items()
    return [f"{name}.{key}" for name, struct in sections if name not in NAMED and key in struct.__struct_fields__]


def _name_the_key(message: str, tree: Mapping[str, Any]) -> str:
    """msgspec's `Expected ... - at `$.queue.total`` with the key first, in an operator's words."""
    what, _, where = message.partition(" - at `$.")
    where = where.rstrip("`")
    section, is_inside, _ = where.partition("[...]")
    if is_inside and section in NAMED:
        where = where.replace("[...]", f".{_wrong_table(tree[section], NAMED[section])}", 1)
    return f"{where}: {complaint(what, _value_at(tree, where))}"


def _value_at(tree: Any, where: str) -> Any:
    """What stands in the tree at `section.key[0]`; None if a name in it has a dot."""
    for part in re.findall(r"[^.\[\]]+", where):
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _wrong_table(tables: Mapping[str, Any], struct: type[Struct]) -> str:
    """The name of the first table that is wrong; msgspec does not tell it."""
    for name, table in tables.items():
        try:
            msgspec.convert(table, struct)
        except msgspec.ValidationError:
            return name
    raise AssertionError("every table is right")


def check_together(config: Config) -> None:
    """What no key alone can show."""
    queue, engine, num_levels = config.queue, config.engine, len(config.queue.levels)
    rules = [
        (len(set(queue.levels)) == num_levels, "queue.levels: a name is there twice."),
        (
            len(queue.caps) in (1, num_levels),
            f"queue.caps: give one number, or one for each of the {num_levels} classes.",
        ),
        (
            queue.total + config.num_sequences <= queue.table_capacity,
            "queue.table_capacity: must hold queue.total and every sequence of every device slot.",
        ),
        (
            engine.out_buffer_bytes & (engine.out_buffer_bytes - 1) == 0,
            "engine.out_buffer_bytes: must be a power of two.",
        ),
        *config.placement.rules(engine.devices),
        *model_rules(config.model, config.models),
        (engine.ctx == 0 or engine.ctx >= CTX_MIN, f"engine.ctx: must be 0 or at least {CTX_MIN}."),
        # A step must have room for one token of every running sequence.
        (engine.n_batch >= engine.parallel, "engine.n_batch: must be at least engine.parallel."),
        (engine.n_ubatch <= engine.n_batch, "engine.n_ubatch: must not be above engine.n_batch."),
        (
            config.keys.anonymous_tier in config.tiers,
            f"keys.anonymous_tier: there is no tier {config.keys.anonymous_tier!r}.",
        ),
        *queue.overflow_rules(num_levels),
        *queue.lane_rules(),
        *config.alerts.rules(),
        *_tier_rules(config),
        *limit_rules(config.limits, config.tiers),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _tier_rules(config: Config) -> Iterator[tuple[bool, str]]:
    last = len(config.queue.levels) - 1
    for name, tier in config.tiers.items():
        yield tier.level <= last, f"tiers.{name}.level: the last class is {last}."
        yield tier.best_level <= tier.level, f"tiers.{name}.best: must not be below its own class."
