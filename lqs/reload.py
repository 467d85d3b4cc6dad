"""What a running server takes over of a config that was read again, and what only a restart changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lqs.config import Config
from lqs.errors import ConfigError
from lqs.settings import check_together

S = TypeVar("S", bound=msgspec.Struct)

# Built once: sockets, models, device slots, the pool, the log.
_FIXED = ("server", "model", "engine", "prompts", "log")
_FIXED_PLACEMENT = ("policy", "lanes", "prefix_margin", "prefix_tokens_min")
_FIXED_QUEUE = ("levels", "table_capacity")
_FIXED_KEYS = ("file", "num_keys_max")


def taken_over(started: Config, read: Config) -> tuple[Config, list[str]]:
    """The config that holds from now on, and the settings whose change waits for a restart.

    Raises ConfigError for classes or a table of another size, and where what is left does not go together.
    """
    for name in _FIXED_QUEUE:
        if getattr(read.queue, name) != getattr(started.queue, name):
            raise ConfigError(f"queue.{name}: it changes only with a restart.")
    waiting = [name for name in _FIXED if getattr(read, name) != getattr(started, name)]
    keys, waiting_keys = _partly("keys", started.keys, read.keys, _FIXED_KEYS)
    placement, waiting_placement = _partly("placement", started.placement, read.placement, _FIXED_PLACEMENT)
    waiting += waiting_keys + waiting_placement
    config = msgspec.structs.replace(
        read, keys=keys, placement=placement, **{name: getattr(started, name) for name in _FIXED}
    )
    check_together(config)
    return config, waiting


def _partly(section: str, started: S, read: S, fixed: Sequence[str]) -> tuple[S, list[str]]:
    """A section as it was read, but for what only a restart changes; and what of that differs."""
    waiting = [f"{section}.{name}" for name in fixed if getattr(read, name) != getattr(started, name)]
    return msgspec.structs.replace(read, **{name: getattr(started, name) for name in fixed}), waiting
