"""Makes the core's scheduler as the config wants it."""

from __future__ import annotations

from lqs._core import Scheduler
from lqs.config import Config
from lqs.request import NS_PER_S


def make_scheduler(config: Config, key_weights: list[float]) -> Scheduler:
    """The core's scheduler with the bounds of the config.

    In the core a request holds its place until it has started, so there are places there for those
    that only pass through too; `Places` has the exact count.
    """
    queue = config.queue
    num_sequences = config.num_models * len(config.engine.devices) * config.engine.parallel
    return Scheduler(
        table_capacity=queue.table_capacity,
        level_caps=[cap + num_sequences for cap in config.level_caps],
        total_cap=queue.total + num_sequences,
        num_keys=len(key_weights),
        key_weights=key_weights,
        aging_step_ns=int(queue.aging_step_s * NS_PER_S),
        aged_every=queue.aged_every,
        lane_weights=queue.lane_weights,
        out_buffer_bytes=config.engine.out_buffer_bytes,
    )
