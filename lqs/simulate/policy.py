"""The policies that are compared, each as settings of the one scheduler.

    fifo       one class, one lane, one key: the order of arrival
    priority   strict classes: no aging, no fair share, no lanes
    lqs        what the config says

All have the same device slots, the same bound on all that wait, and the same limits of time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lqs._core import Scheduler
from lqs.config import Config
from lqs.request import NS_PER_S, Lane
from lqs.simulate.trace import Trace

POLICIES = ("fifo", "priority", "lqs")


@dataclass(frozen=True, slots=True)
class Policy:
    """A name and what it looks at. `level_caps` are those of the classes that it knows."""

    name: str
    level_caps: tuple[int, ...]
    total_cap: int
    table_capacity: int
    aging_step_ns: int = 0
    aged_every: int = 4
    lane_weights: tuple[int, ...] = (1,)
    short_tokens_max: int = 0
    has_classes: bool = True
    has_keys: bool = False

    @classmethod
    def named(cls, name: str, config: Config) -> Policy:
        """One of POLICIES, with the bounds of the config."""
        queue = config.queue
        strict = cls(name, config.level_caps, queue.total, queue.table_capacity)
        if name == "fifo":
            return replace(strict, level_caps=(queue.total,), has_classes=False)
        if name == "priority":
            return strict
        return replace(
            strict,
            aging_step_ns=int(queue.aging_step_s * NS_PER_S),
            aged_every=queue.aged_every,
            lane_weights=queue.lane_weights,
            short_tokens_max=queue.short_tokens_max,
            has_keys=True,
        )

    def make_scheduler(self, num_keys: int) -> Scheduler:
        """The core's scheduler with these settings, without device slots."""
        return Scheduler(
            table_capacity=self.table_capacity,
            level_caps=self.level_caps,
            total_cap=self.total_cap,
            num_lanes=len(self.lane_weights),
            num_keys=num_keys if self.has_keys else 1,
            aging_step_ns=self.aging_step_ns,
            aged_every=self.aged_every,
            lane_weights=self.lane_weights,
            # No text is made.
            out_buffer_bytes=64,
        )

    def levels(self, trace: Trace) -> array[int]:
        """The class that it takes each request for."""
        return trace.level if self.has_classes else zeros("B", len(trace))

    def keys(self, trace: Trace) -> array[int]:
        """The key that it takes each request to be of."""
        return trace.key if self.has_keys else zeros("I", len(trace))

    def lanes(self, trace: Trace) -> array[int]:
        """The lane of each request, by its tokens."""
        if len(self.lane_weights) == 1:
            return zeros("B", len(trace))
        return array("B", _lanes(trace.prompt_tokens, trace.max_tokens, self.short_tokens_max))


def zeros(kind: str, num: int) -> array[int]:
    """That many zeros."""
    return array(kind, bytes(num * array(kind).itemsize))


def _lanes(prompts: Sequence[int], answers: Sequence[int], short_max: int) -> Sequence[int]:
    sizes = zip(prompts, answers, strict=True)
    return [Lane.LONG if prompt + answer > short_max else Lane.SHORT for prompt, answer in sizes]
