"""The models that are served: under which names, from which files, and how all of them fit beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lqs.config import CTX_MIN, Config
from lqs.config_models import ModelConfig
from lqs.engine.plan import Machine, Plan, check_fits, make_plan
from lqs.engine.store import DEFAULT_MODEL, Store
from lqs.engine.template import read_template
from lqs.errors import ConfigError

# As many as the core's table holds.
NUM_SLOTS_MAX = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A model: its name in requests, its file, and the config as it sees it. `fallback` is the name of another."""

    name: str
    path: Path
    config: Config
    fallback: str = ""

    @property
    def model(self) -> ModelConfig:
        """What is set for it."""
        return self.config.model


def catalog_of(config: Config, store: Store) -> tuple[Entry, ...]:
    """Everything that is served. Raises StartError for a file that is not there and for names that clash."""
    entries = [_entry(config, model, store) for model in config.served]
    if config.own_fallback:
        own = _own_fallback(config, store)
        if own.name in {entry.name for entry in entries}:
            raise ConfigError("model.fallback: has the name of the model itself; give model.name another.")
        entries = [replace(entries[0], fallback=own.name), *entries[1:], own]
    _check_names(config, entries)
    entries = [_with_fallback(config, entry, entries) for entry in entries]
    check_limits(config, entries)
    return tuple(entries)


def plan_all(entries: Sequence[Entry], machine: Machine) -> tuple[Plan, ...]:
    """A plan for each, the earlier ones first; those on demand as if no other of them were there. Raises StartError.

    Each leaves the later ones what they take at least, and its part of what is left for KV; those on demand
    count as one, the largest of them.
    """
    residents = [entry for entry in entries if not entry.model.on_demand]
    on_demand = [entry for entry in entries if entry.model.on_demand]
    least = {entry.name: _least(entry, machine) for entry in [*residents[1:], *on_demand]}
    largest: Counter[str] = Counter()
    for entry in on_demand:
        largest |= least[entry.name]
    taken: Counter[str] = Counter()
    plans: dict[str, Plan] = {}
    for number, entry in enumerate(residents):
        later = residents[number + 1 :]
        kept = sum((least[other.name] for other in later), largest)
        sharing = 1 + sum(map(_is_automatic, later)) + any(map(_is_automatic, on_demand))
        plans[entry.name] = make_plan(entry.config, entry.path, machine, taken=taken + kept, num_sharing=sharing)
        taken += Counter(plans[entry.name].takes)
    for entry in on_demand:
        plans[entry.name] = make_plan(entry.config, entry.path, machine, taken=taken)
    return tuple(plans[entry.name] for entry in entries)


def check_all(entries: Sequence[Entry], plans: Sequence[Plan]) -> None:
    """Raises StartError for the first model that does not fit, or whose chat template cannot be read.

    And where there are more device slots, or sequences on them, than there may be.
    """
    num_slots = sum(len(plan.slots) for plan in plans)
    if num_slots > NUM_SLOTS_MAX:
        raise ConfigError(f"engine.devices: {num_slots} device slots of all models; at most {NUM_SLOTS_MAX}.")
    queue = entries[0].config.queue
    num_sequences = num_slots * entries[0].config.engine.parallel
    if queue.total + num_sequences > queue.table_capacity:
        raise ConfigError(f"queue.table_capacity: must hold queue.total and all {num_sequences} sequences.")
    for entry, plan in zip(entries, plans, strict=True):
        check_fits(entry.config, plan)
        if entry.model.chat_template:
            read_template(entry.model.chat_template)


def config_of(config: Config, model: ModelConfig) -> Config:
    """The config as one model sees it."""
    engine = msgspec.structs.replace(
        config.engine, devices=model.devices or config.engine.devices, ctx=model.ctx or config.engine.ctx
    )
    return msgspec.structs.replace(config, model=model, models={}, engine=engine)


def check_limits(config: Config, entries: Sequence[Entry]) -> None:
    """Raises ConfigError for a limit of a model that is not served."""
    known = {name for entry in entries for name in (entry.name, entry.name.partition("@")[0])}
    for name, limit in config.limits.items():
        unknown = ", ".join(model for model in limit.models if model not in known)
        if unknown:
            there = ", ".join(sorted(known))
            raise ConfigError(f"limits.{name}.models: there is no model {unknown}; there are: {there}.")


def _entry(config: Config, model: ModelConfig, store: Store) -> Entry:
    path = store.resolve(model.path or DEFAULT_MODEL.name)
    name = model.name or path.name.removesuffix(".gguf")
    return Entry(name, path, config_of(config, model), model.fallback)


def _own_fallback(config: Config, store: Store) -> Entry:
    """A fallback that is a file: nobody says more about it than how much context it gets."""
    path = store.resolve(config.own_fallback)
    model = ModelConfig(path=config.own_fallback, ctx=config.degrade.kv_tokens)
    return Entry(path.name.removesuffix(".gguf"), path, config_of(config, model))


def _check_names(config: Config, entries: Sequence[Entry]) -> None:
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"model.name: {name} is there twice; give one of them another name, such as {name}@2.")
    bases = {name.partition("@")[0] for name in names}
    for entry in entries:
        taken = [alias for alias in entry.model.aliases if alias in bases]
        if taken:
            raise ConfigError(f"{_table_of(config, entry)}.aliases: {', '.join(taken)} is the name of a model.")


def _with_fallback(config: Config, entry: Entry, entries: Sequence[Entry]) -> Entry:
    """The entry with the full name of its fallback. Raises ConfigError where it is not served."""
    if not entry.fallback:
        return entry
    found = next((each for each in entries if entry.fallback in _names_of(each)), None)
    if found is None or found.name == entry.name or found.model.on_demand:
        raise ConfigError(
            f"{_table_of(config, entry)}.fallback: {entry.fallback} is not another model that is there all the time."
        )
    return replace(entry, fallback=found.name)


def _table_of(config: Config, entry: Entry) -> str:
    """Where in the file a model is."""
    return f"models.{entry.name}" if entry.name in config.models else "model"


def _names_of(entry: Entry) -> tuple[str, ...]:
    return (entry.name, entry.name.partition("@")[0], *entry.model.aliases)


def _is_automatic(entry: Entry) -> bool:
    """Whether it takes as much context as there is."""
    return not entry.config.engine.ctx


def _least(entry: Entry, machine: Machine) -> Counter[str]:
    """What it takes at least, by pool."""
    if entry.config.engine.ctx:
        return Counter(make_plan(entry.config, entry.path, machine).takes)
    engine = msgspec.structs.replace(entry.config.engine, ctx=CTX_MIN)
    return Counter(make_plan(msgspec.structs.replace(entry.config, engine=engine), entry.path, machine).takes)
