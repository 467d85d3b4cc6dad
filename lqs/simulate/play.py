"""Plays a trace: makes the scheduler and the model slots of a policy, runs the virtual clock, keeps what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from lqs._core import Ending, Scheduler, Simulation
from lqs.config import Config
from lqs.config_placement import BOTH_LANES
from lqs.request import NS_PER_S
from lqs.simulate.cost import Calibration, SlotShape, StepCost
from lqs.simulate.policy import Policy, zeros
from lqs.simulate.trace import Trace

# Between two of these anybody may look how far it has come, or break it off.
_ARRIVALS_PER_LOOK = 50_000
# Enough to know what a trace takes; more would cost as much as playing it.
_CAPACITY_SAMPLE = 20_000


@dataclass(frozen=True, slots=True)
class Devices:
    """The device slots: so many of one kind.

    With a `kv_block` a request is promised its prompt and grows by so many KV tokens; 0: it is promised all.
    """

    num: int
    cost: StepCost
    shape: SlotShape
    kv_block: int = 0

    @classmethod
    def of(cls, calibration: Calibration, config: Config, num: int | None = None) -> Devices:
        """What was calibrated, with KV promised as the config says; `num` of them, or as many as there were."""
        engine = config.engine
        kv_block = engine.kv_block_tokens if engine.grows_kv else 0
        return cls(num or calibration.devices, calibration.cost, calibration.shape, kv_block)

    def native_cost(self) -> tuple[float, float, float, float, float, int, int, int, int]:
        """As the core takes it."""
        cost, shape = self.cost, self.shape
        batch_max = max(shape.batch_max, shape.num_sequences + shape.num_extra)
        return (
            *(cost.fixed_ns, cost.decode_ns, cost.prefill_ns, cost.context_ns, cost.cells_ns),
            *(shape.budget, shape.fine_budget, batch_max, int(shape.target_ms * 1e6)),
        )


@dataclass(frozen=True, slots=True)
class Played:
    """What became of each request of `trace`: the clock's times, 0 for what did not come, and its `Ending`.

    `start_no` is the order of the starts, from 1 on, 0 for who did not start. `busy` is the share of the time that
    the device slots computed, `snapshot` the scheduler's counters.
    """

    policy: str
    trace: Trace
    started_ns: array[int]
    first_token_ns: array[int]
    ended_ns: array[int]
    start_no: array[int]
    ending: array[int]
    busy: float
    snapshot: dict[str, object]

    @property
    def span_s(self) -> float:
        """From the first arrival to the last end."""
        return max(self.ended_ns, default=0) / NS_PER_S


def play(
    trace: Trace,
    policy: Policy,
    devices: Devices,
    *,
    look: Callable[[int, int], None] | None = None,
    look_every: int = _ARRIVALS_PER_LOOK,
) -> Played:
    """Play all of a trace; the same trace gives the same times.

    `look` is told how many requests have arrived, and of how many, after each `look_every`.
    """
    n = len(trace)
    scheduler = _make_scheduler(policy, len(trace.keys), devices)
    started_ns, first_token_ns, ended_ns = zeros("q", n), zeros("q", n), zeros("q", n)
    start_no, ending = zeros("I", n), zeros("B", n)
    simulation = Simulation(
        scheduler,
        policy.make_door(),
        [devices.native_cost()] * devices.num,
        arrival_ns=trace.arrival_ns,
        prompt_tokens=trace.prompt_tokens,
        completion_tokens=trace.completion_tokens,
        max_tokens=trace.max_tokens,
        level=policy.levels(trace),
        key=policy.keys(trace),
        started_ns=started_ns,
        first_token_ns=first_token_ns,
        ended_ns=ended_ns,
        start_no=start_no,
        ending=ending,
        has_lanes=policy.has_lanes,
        context_tokens=min(devices.shape.context_tokens, devices.shape.kv_tokens),
        queue_limit_ns=policy.queue_limit_ns,
        run_limit_ns=policy.run_limit_ns,
        high_load_at=policy.queue.high_load_at,
    )
    num_arrived = 0
    while simulation.play(look_every):
        num_arrived = min(num_arrived + look_every, n)
        if look is not None:
            look(num_arrived, n)
    return Played(
        policy=policy.name,
        trace=trace,
        started_ns=started_ns,
        first_token_ns=first_token_ns,
        ended_ns=ended_ns,
        start_no=start_no,
        ending=ending,
        busy=_busy(simulation, max(ended_ns, default=0) * devices.num),
        snapshot=scheduler.snapshot(),
    )


def _busy(simulation: Simulation, span_ns: int) -> float:
    """The part of the time of all devices in which they computed."""
    return sum(figures[1] for figures in simulation.slot_figures) / span_ns if span_ns else 0.0


def _make_scheduler(policy: Policy, num_keys: int, devices: Devices) -> Scheduler:
    scheduler, shape, placement = policy.make_scheduler(num_keys), devices.shape, policy.config.placement
    for number in range(devices.num):
        scheduler.add_device_slot(
            kv_tokens=shape.kv_tokens,
            num_sequences=shape.num_sequences,
            num_extra=shape.num_extra if policy.has_extra else 0,
            kv_block=devices.kv_block,
            weight=placement.weight_of(number),
            lanes=placement.lanes_of(number) if policy.has_lanes else BOTH_LANES,
        )
    return scheduler


def capacity_of(trace: Trace, devices: Devices) -> float:
    """Requests per second that the device slots can serve of what this trace is made of.

    Found by serving a sample of it from a queue that never runs dry: its first requests only
    fill the sequences and its last only empty them, so the middle half is what counts.
    """
    sample = trace.sampled(_CAPACITY_SAMPLE)
    played = play(sample, Policy.unbounded(len(sample)), devices)
    ended = sorted(
        at_ns for at_ns, ending in zip(played.ended_ns, played.ending, strict=True) if ending == Ending.ENDING_SERVED
    )
    if not ended:
        return 0.0
    low, high = len(ended) // 4, max(3 * len(ended) // 4, len(ended) // 4 + 1)
    if high >= len(ended) or ended[high] == ended[low]:
        return len(ended) * NS_PER_S / max(ended[-1], 1)
    return (high - low) * NS_PER_S / (ended[high] - ended[low])
