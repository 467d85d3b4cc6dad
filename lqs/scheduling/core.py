"""Makes the core's scheduler and its door as the config wants them."""

from __future__ import annotations

import math

from lqs._core import Door, Placing, Scheduler
from lqs.config import Config
from lqs.overflow import per_class
from lqs.request import NS_PER_S


def make_scheduler(config: Config, key_weights: list[float]) -> Scheduler:
    """The core's scheduler with the bounds of the config.

    Its permits bind nobody: the door counts exactly and sooner, and its bounds may change.
    """
    queue = config.queue
    return Scheduler(
        table_capacity=queue.table_capacity,
        level_caps=[queue.table_capacity] * len(queue.levels),
        total_cap=queue.table_capacity,
        num_keys=len(key_weights),
        key_weights=key_weights,
        aging_step_ns=int(queue.aging_step_s * NS_PER_S),
        aged_every=queue.aged_every,
        lane_weights=queue.lane_weights,
        lane_share_mins=queue.lane_share_mins,
        lane_caps=queue.lane_sequences,
        lane_token_caps=queue.lane_ctx,
        borders=(queue.short_tokens_max, queue.long_tokens_min),
        fine_level=queue.fine_level,
        bypass_max=queue.bypass_max,
        bypass_ns=int(queue.bypass_s * NS_PER_S),
        out_buffer_bytes=config.engine.out_buffer_bytes,
        policy=Placing[config.placement.policy.upper()],
        prefix_margin=config.placement.prefix_margin,
        prefix_tokens_min=config.placement.prefix_tokens_min,
    )


def make_door(config: Config) -> Door:
    """The core's door with the rules of the config."""
    door = Door(len(config.queue.levels))
    set_rules(door, config)
    return door


def set_rules(door: Door, config: Config) -> None:
    """Give a door the rules of the config; who is inside stays. The classes are those that it has."""
    queue, num_levels = config.queue, len(config.queue.levels)
    bounds = (*config.level_caps, queue.total)
    door.set_rules(
        caps=config.level_caps,
        total=queue.total,
        demotes=[what == "demote" for what in per_class(queue.on_full, num_levels)],
        evicts=per_class(queue.evict, num_levels),
        place_waits_ns=[int(wait_s * NS_PER_S) for wait_s in per_class(queue.place_wait_s, num_levels)],
        num_guests_max=queue.place_waiters_max,
        warns=[_share_of(bound, queue.warn_at) for bound in bounds],
        clears=[max(_share_of(bound, queue.warn_clear_at), 1) for bound in bounds],
        full=_share_of(queue.total, queue.break_at),
        open_ns=int(queue.breaker_open_s * NS_PER_S) or 1,
        num_probes=queue.breaker_probes,
    )


def _share_of(bound: int, share: float) -> int:
    """The least number of requests that is at least this share; 0 for a share of 0."""
    # Without the rounding 0.7 of 10 would be 8: the product is a hair above 7.
    return math.ceil(round(bound * share, 6))
