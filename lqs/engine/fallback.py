"""The second model: where its file is, and how much of the machine is left for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from lqs.config import Config
from lqs.engine.plan import Plan, check_fits, make_plan
from lqs.engine.store import DEFAULT_MODEL, Store


def config_of_fallback(config: Config) -> Config:
    """The config as the fallback model sees it."""
    model = msgspec.structs.replace(config.model, path=config.model.fallback, name="", chat_template="", fallback="")
    engine = msgspec.structs.replace(config.engine, ctx=config.degrade.kv_tokens)
    return msgspec.structs.replace(config, model=model, engine=engine)


def find_models(config: Config, store: Store) -> tuple[Path, Path | None]:
    """The files of the model and its fallback. Raises StartError.

    A file that cannot be a model, or does not fit, is reported at once, not after the port is taken.
    """
    path = store.resolve(config.model.path or DEFAULT_MODEL.name)
    plan = make_plan(config, path)
    check_fits(config, plan)
    if not config.model.fallback:
        return path, None
    fallback_path = store.resolve(config.model.fallback)
    _check_fits_beside(config_of_fallback(config), fallback_path, plan)
    return path, fallback_path


def _check_fits_beside(config: Config, path: Path, plan: Plan) -> None:
    """Raises StartError unless a second model fits into what the first one's plan leaves."""
    left = plan.machine.memory_free_bytes - plan.weights_bytes - plan.kv_bytes
    machine = replace(plan.machine, memory_free_bytes=max(left, 0))
    check_fits(config, make_plan(config, path, machine))
