"""What a running server takes over of a config that was read again, and what only a restart changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from lqs.api.services import Reloaded, Services
from lqs.config import Config
from lqs.errors import ConfigError, StartError
from lqs.settings import check_together

# Built once: sockets, models, device slots and who looks after them, the pool, the log.
_FIXED = ("server", "model", "models", "engine", "health", "prompts", "refusals", "alerts", "log")
# The shape of the table, and what the scheduler's thread was started with.
_SHAPE = ("levels", "table_capacity")
_FIXED_QUEUE = (
    *("aging_step_s", "aged_every", "bypass_max", "bypass_s", "fine_level", "short_tokens_max", "long_tokens_min"),
    *("lane_weights", "lane_share_mins", "lane_sequences", "lane_ctx"),
)
_FIXED_PLACEMENT = ("policy", "lanes", "prefix_margin", "prefix_tokens_min", "nvml_s")
_FIXED_KEYS = ("file", "num_keys_max")


_S = TypeVar("_S", bound=msgspec.Struct)


class Reloader:
    """Reads keys and limits again while the server runs. `read` reads the config. Owner: the event loop."""

    def __init__(self, services: Services, read: Callable[[], Config]) -> None:
        self._services = services
        self._read = read

    def reload(self) -> Reloaded:
        """Take over what may change; what is wrong with what was read changes nothing. Both are logged and returned."""
        services = self._services
        log, keys = services.log, services.keys
        try:
            config, waiting = taken_over(services.config, self._read())
            services.models.check_limits(config)
            keys.reload(config)
        except StartError as error:
            log.error("reload failed, nothing changed", reason=str(error))
            return Reloaded(problem=str(error))
        services.gate.reload(config)
        services.models.set_weights(config)
        log.info("reloaded", keys=keys.num_keys)
        if waiting:
            log.warning("some changes wait for a restart", settings=",".join(waiting))
        if keys.is_guarded and not keys.num_keys:
            log.warning("nobody can come in: the key file is missing or empty", file=config.keys.file)
        return Reloaded(waiting=waiting)


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
    waiting += [f"{section}.{name}" for section, names in parts for name in names]
    return config, waiting


def _held(started: _S, read: _S, names: Sequence[str]) -> tuple[_S, list[str]]:
    """What was read with these fields as they were at the start, and which of them would have changed."""
    changed = [name for name in names if getattr(read, name) != getattr(started, name)]
    return msgspec.structs.replace(read, **{name: getattr(started, name) for name in names}), changed
