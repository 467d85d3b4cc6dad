"""What a running server takes over of a config that was read again, and what only a restart changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lqs.config import Config
from lqs.errors import ConfigError
from lqs.settings import check_together

# Built once: sockets, models, device slots, the pool, the log.
_FIXED = ("server", "model", "models", "engine", "prompts", "refusals", "alerts", "log")
# The shape of the table, and what the scheduler's thread was started with.
_SHAPE = ("levels", "table_capacity")
_FIXED_QUEUE = (
    *("aging_step_s", "aged_every", "bypass_max", "bypass_s", "fine_level", "short_tokens_max", "long_tokens_min"),
    *("lane_weights", "lane_share_mins", "lane_sequences", "lane_ctx"),
)
_FIXED_PLACEMENT = ("policy", "lanes", "prefix_margin", "prefix_tokens_min", "nvml_s")
_FIXED_KEYS = ("file", "num_keys_max")


_S = TypeVar("_S", bound=msgspec.Struct)


def taken_over(started: Config, read: Config) -> tuple[Config, list[str]]:
    """The config that holds from now on, and the settings whose change waits for a restart.

    Raises ConfigError for classes or a table of another size, and where what is left does not go together.
    """
    for name in _SHAPE:
        if getattr(read.queue, name) != getattr(started.queue, name):
            raise ConfigError(f"queue.{name}: it changes only with a restart.")
    config, waiting = _held(started, read, _FIXED)
    queue, of_queue = _held(started.queue, read.queue, _FIXED_QUEUE)
    keys, of_keys = _held(started.keys, read.keys, _FIXED_KEYS)
    placement, of_placement = _held(started.placement, read.placement, _FIXED_PLACEMENT)
    config = msgspec.structs.replace(config, queue=queue, placement=placement, keys=keys)
    check_together(config)
    parts = (("queue", of_queue), ("placement", of_placement), ("keys", of_keys))
    return config, waiting + [f"{section}.{name}" for section, names in parts for name in names]


def _held(started: _S, read: _S, names: Sequence[str]) -> tuple[_S, list[str]]:
    """What was read with these fields as they were at the start, and which of them would have changed."""
    changed = [name for name in names if getattr(read, name) != getattr(started, name)]
    return msgspec.structs.replace(read, **{name: getattr(started, name) for name in names}), changed
