"""The policies that are compared, each as settings of the one scheduler and its door.

    fifo       one class, one lane, one key: the order of arrival
    priority   strict classes: no aging, no fair share, no lanes, no sequences kept for urgent requests; nobody
               passes one that does not fit, is moved, evicted or waits at the door
    lqs        what the config says

All have the same device slots, the same bound on all that wait, and the same limits of time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from lqs._core import Door, Scheduler
from lqs.config import Config, QueueConfig
from lqs.request import NS_PER_S
from lqs.scheduling.core import make_door, make_scheduler
from lqs.simulate.trace import Trace

POLICIES = ("fifo", "priority", "lqs")

_QUEUE_MAX = 16_777_216


@dataclass(frozen=True, slots=True)
class Policy:
    """A name, the settings that it stands for, and what it looks at in a request."""

    name: str
    config: Config
    has_classes: bool = True
    has_keys: bool = True
    has_lanes: bool = True
    has_extra: bool = True

    @classmethod
    def named(cls, name: str, config: Config) -> Policy:
        """One of POLICIES, with the bounds of the config."""
        if name == "lqs":
            return cls(name, config)
        queue = _strict(config.queue)
        if name == "fifo":
            queue = msgspec.structs.replace(queue, levels=("all",), caps=(queue.total,))
        plain = msgspec.structs.replace(config, queue=queue)
        return cls(name, plain, has_classes=name != "fifo", has_keys=False, has_lanes=False, has_extra=False)

    @classmethod
    def unbounded(cls, num: int) -> Policy:
        """The order of arrival, with room for that many and no limit of time."""
        queue = msgspec.structs.replace(
            Config().queue,
            total=num,
            table_capacity=min(max(num, 16), _QUEUE_MAX),
            timeout_s=0.0,
            request_timeout_s=0.0,
        )
        return cls.named("fifo", msgspec.structs.replace(Config(), queue=queue))

    @property
    def queue(self) -> QueueConfig:
        """Its classes and bounds."""
        return self.config.queue

    @property
    def queue_limit_ns(self) -> int:
        """The longest wait; 0: none."""
        return int(self.queue.timeout_s * NS_PER_S)

    @property
    def run_limit_ns(self) -> int:
        """The longest life; 0: none."""
        return int(self.queue.request_timeout_s * NS_PER_S)

    def make_scheduler(self, num_keys: int) -> Scheduler:
        """The server's scheduler with these settings, without device slots."""
        # No text is made.
        engine = msgspec.structs.replace(self.config.engine, out_buffer_bytes=64)
        config = msgspec.structs.replace(self.config, engine=engine)
        return make_scheduler(config, [1.0] * (num_keys if self.has_keys else 1))

    def make_door(self) -> Door:
        """The server's door with these settings."""
        return make_door(self.config)

    def levels(self, trace: Trace) -> array[int]:
        """The class that it takes each request for."""
        return trace.level if self.has_classes else zeros("B", len(trace))

    def keys(self, trace: Trace) -> array[int]:
        """The key that it takes each request to be of."""
        return trace.key if self.has_keys else zeros("I", len(trace))


def _strict(queue: QueueConfig) -> QueueConfig:
    """Nothing but the classes and the bounds."""
    return msgspec.structs.replace(
        queue,
        aging_step_s=0.0,
        bypass_max=0,
        bypass_s=0.0,
        on_full=("refuse",),
        evict=(False,),
        place_wait_s=(0.0,),
        warn_at=0.0,
        warn_clear_at=0.0,
        break_at=0.0,
        high_load_at=1.0,
    )


def zeros(kind: str, num: int) -> array[int]:
    """That many zeros."""
    return array(kind, bytes(num * array(kind).itemsize))
