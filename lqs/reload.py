"""What a running server takes over of a config that was read again, and what only a restart changes."""

from __future__ import annotations

import msgspec

from lqs.config import Config
from lqs.errors import ConfigError
from lqs.settings import check_together

# Built once: sockets, models, device slots, the pool, the log.
_FIXED = ("server", "model", "engine", "prompts", "log")
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
    waiting += [f"keys.{name}" for name in _FIXED_KEYS if getattr(read.keys, name) != getattr(started.keys, name)]
    keys = msgspec.structs.replace(read.keys, **{name: getattr(started.keys, name) for name in _FIXED_KEYS})
    config = msgspec.structs.replace(read, keys=keys, **{name: getattr(started, name) for name in _FIXED})
    check_together(config)
    return config, waiting
