"""The memory that all loaded models together may take, and whether each model on demand fits into it at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lqs.config import Config
from lqs.engine.catalog import Entry
from lqs.engine.plan import Plan
from lqs.engine.residents import Resident, Residents, Standing
from lqs.errors import ConfigError
from lqs.placement.gpus import SYSTEM_POOL
from lqs.request import NS_PER_S

if TYPE_CHECKING:
    from lqs.engine.slots import Models

_MB = 1_000_000


def room_of(config: Config, plans: Sequence[Plan]) -> dict[str, int]:
    """Bytes by pool for all loaded models: what is free beside the margin, at most `engine.loaded_mb`.

    A pool of which nobody knows what is free is left out.
    """
    bound = config.engine.loaded_mb * _MB
    room = {pool: free for plan in plans for pool, free in plan.all_room.items() if free is not None}
    return {pool: min(free, bound) if bound else free for pool, free in room.items()}


def staying(entries: Sequence[Entry], plans: Sequence[Plan]) -> Counter[str]:
    """Bytes by pool of the models that are there from the start."""
    total: Counter[str] = Counter()
    for entry, plan in zip(entries, plans, strict=True):
        if not entry.model.on_demand:
            total.update(plan.takes)
    return total


def check_budget(entries: Sequence[Entry], plans: Sequence[Plan]) -> None:
    """Raises ConfigError for a model on demand that could never come: requests for it would only wait."""
    config = entries[0].config
    room, stay = room_of(config, plans), staying(entries, plans)
    for entry, plan in zip(entries, plans, strict=True):
        for pool, takes in plan.takes.items():
            if not entry.model.on_demand or pool not in room or stay[pool] + takes <= room[pool]:
                continue
            takes_mb, stay_mb = -(-takes // _MB), -(-stay[pool] // _MB)
            raise ConfigError(
                f"engine.loaded_mb: {entry.name} can never be loaded. It takes {takes_mb} MB of {where(pool)} "
                f"and the models that stay {stay_mb} MB; {max(room[pool], 0) // _MB} MB are for all. "
                f"Set at least {takes_mb + stay_mb}, or 0 for what is free; or less engine.ctx "
                f"or models.{entry.name}.ctx."
            )


def wanted_on_demand(config: Config, models: Models) -> int:
    """Bytes of this machine's memory without which a start refuses the largest model on demand; 0 without one."""
    takes = [models.plan_of(served).takes.get(SYSTEM_POOL, 0) for served in models.all() if served.is_on_demand]
    return max(takes) + config.engine.kv_margin_mb * _MB if takes else 0


def residents_of(config: Config, models: Models, room: Mapping[str, int]) -> Residents:
    """The models and their memory; `room` is what all together may take of each pool."""
    known = {
        served.name: Resident(
            models.plan_of(served).takes,
            is_pinned=not served.is_on_demand,
            standing=Standing.ABSENT if served.is_on_demand else Standing.LOADING,
        )
        for served in models.all()
    }
    return Residents(known, room, int(config.engine.load_patience_s * NS_PER_S))


def num_together(takes: Sequence[Mapping[str, int]], left: Mapping[str, int]) -> tuple[int, int]:
    """How many of the models may be there at once, whichever they are, and how many at most."""
    return _num_fitting(takes, left, largest_first=True), _num_fitting(takes, left, largest_first=False)


def where(pool: str) -> str:
    """A pool in words."""
    return "this machine" if pool == SYSTEM_POOL else pool


def _num_fitting(takes: Sequence[Mapping[str, int]], left: Mapping[str, int], *, largest_first: bool) -> int:
    num = len(takes)
    for pool, free in left.items():
        in_order = sorted((each.get(pool, 0) for each in takes), reverse=largest_first)
        while num and sum(in_order[:num]) > free:
            num -= 1
    return num
