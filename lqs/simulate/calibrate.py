"""Measures the device slots: real requests through the real workers, and the cost model that explains them.

Each experiment is some equal requests that come at once. What was in each of their steps is known,
because a step is filled by rule: the very simulation that uses the cost model says how often each
of its terms occurs until the first token and until the last, and a fit gives the terms.
"""

from __future__ import annotations

import itertools
import platform
import random
import select
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from lqs._core import EV_FINISHED, EV_SETTLED, Finish, Scheduler, Work
from lqs.config import Config
from lqs.engine import library
from lqs.engine.catalog import Entry, plan_all
from lqs.engine.loading import Loader
from lqs.engine.plan import Plan, probe_machine
from lqs.engine.served import Served
from lqs.engine.slots import Models
from lqs.errors import DeviceError
from lqs.observe.log import Log
from lqs.request import Outcome, Sampling
from lqs.simulate.cost import Calibration, SlotShape, StepCost, fit
from lqs.simulate.play import Devices, play
from lqs.simulate.policy import Policy
from lqs.simulate.trace import at_once

_SHORT_PROMPT, _ANSWER = 24, 16
# What the prompts of one experiment with long contexts may take: of one sequence, and of all together. Many filled
# cells are what tells the cost of others' cells from that of the own context.
_LONG_S, _ALL_LONG_S = 3.0, 6.0
# The middle one of so many runs counts; they lie apart, so that what disturbs one does not disturb the others too.
_NUM_RUNS = 3
# Nanoseconds that stand for one occurrence of a term: large beside the least step of 1 ns.
_UNIT_NS = 1_000_000.0
# An inter-token target that no step misses, so that the budget stays where it is.
_NO_TARGET_MS = 60_000.0
# As the worker has it: how much dearer a token may be for steps to be short.
_FINE_COST_MAX = 1.1
_NUM_TERMS = 5
_CLOSE_S = 5.0
_POLL_MS = 100


class Experiment(NamedTuple):
    """So many requests at once on each device slot, all with a prompt and an answer of that many tokens."""

    num: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Asked:
    """One request of an experiment; `outcome` is what the core tells at its end."""

    outcome: Outcome | None = None
    is_settled: bool = False


def calibrate(config: Config, path: Path, look: Callable[[str], None]) -> Calibration:
    """Open the device slots of the config, measure and close them; takes a minute or so.

    `look` is told what is measured. Raises StartError.
    """
    library.start(verbose=False)
    target_ms = config.engine.inter_token_target_ms
    engine = msgspec.structs.replace(config.engine, inter_token_target_ms=_NO_TARGET_MS)
    config = msgspec.structs.replace(config, engine=engine)
    num_all = config.engine.parallel * len(config.engine.devices)
    scheduler = Scheduler(
        table_capacity=max(num_all, 16),
        level_caps=[num_all],
        total_cap=num_all,
        num_lanes=1,
        lane_weights=[1],
        out_buffer_bytes=config.engine.out_buffer_bytes,
    )
    entry = Entry(path.stem, path, config)
    plans = plan_all([entry], probe_machine())
    loader = Loader(scheduler, make_model=library.Model, make_worker=library.make_worker, log=Log(config.log))
    models = Models(config, [entry], plans, scheduler, loader)
    look(f"loading {path.name}")
    plan = models.load_residents()
    try:
        return _Bench(config, models, scheduler, plan, look).calibration(target_ms)
    finally:
        models.close(_CLOSE_S)


class _Bench:
    """Runs experiments on the open device slots. Owner: one thread, which is the scheduler's and the loop's too."""

    def __init__(
        self, config: Config, models: Models, scheduler: Scheduler, plan: Plan, look: Callable[[str], None]
    ) -> None:
        self._served = _only(models)
        self._config = config
        self._scheduler = scheduler
        self._plan = plan
        self._look = look
        self._draw = random.Random(1)
        self._poller = select.poll()
        self._poller.register(scheduler.loop_fd, select.POLLIN)
        self._num_slots = len(plan.devices)
        slot = next(models.slots)
        worker = slot.worker
        self._sizes_ms = worker.calibration
        self._swapping = worker.swapping
        self._shape = SlotShape(
            num_sequences=slot.num_sequences,
            kv_tokens=plan.kv_tokens,
            budget=worker.budget,
            batch_max=min(config.engine.n_batch, plan.num_cells),
            context_tokens=plan.request_tokens_max,
            num_extra=plan.num_extra,
            fine_budget=worker.budget,
        )

    def calibration(self, target_ms: float) -> Calibration:
        """Measure everything and fit; the step is bounded as the worker bounds it for this target."""
        self._run(Experiment(1, _SHORT_PROMPT, 2))
        experiments = list(self._experiments())
        rounds = [self._run_all(experiments, f"{number} of {_NUM_RUNS}") for number in range(1, _NUM_RUNS + 1)]
        rows = [row for experiment in experiments for row in occurrences(experiment, self._shape)]
        values = [statistics.median(times) for times in zip(*rounds, strict=True)]
        terms = fit(rows, values)
        errors = [
            abs(sum(term * cell for term, cell in zip(terms, row, strict=True)) / value - 1)
            for row, value in zip(rows, values, strict=True)
        ]
        return Calibration(
            model=self._served.name,
            machine=machine_name(self._plan.machine.num_cores),
            threads=self._plan.threads,
            devices=self._num_slots,
            cost=StepCost(*terms),
            shape=bounded(self._shape, self._sizes_ms, target_ms),
            error_p50=statistics.median(errors),
            error_max=max(errors),
            swap_tokens=int(self._swapping.get("tokens", 0)),
            swap_ms=self._swapping.get("swap_ms", 0.0),
            recompute_ms=self._swapping.get("compute_ms", 0.0),
        )

    def _experiments(self) -> Iterator[Experiment]:
        """Few and many sequences with short contexts, then long ones, as long as time and memory allow."""
        shape = self._shape
        num = 1
        while num < 2 * shape.num_sequences:
            num = min(num, shape.num_sequences)
            if num * (_SHORT_PROMPT + _ANSWER) <= shape.kv_tokens:
                yield Experiment(num, _SHORT_PROMPT, _ANSWER)
            num *= 2
        token_ns = self._run(Experiment(1, _SHORT_PROMPT * 4, 2))[0] / (_SHORT_PROMPT * 4)
        for num, limit_s in ((1, _LONG_S), (shape.num_sequences, _ALL_LONG_S)):
            room = min(shape.context_tokens, shape.kv_tokens // num) - _ANSWER - 1
            prompt = min(int(limit_s * 1e9 / token_ns) // num, room)
            if prompt > 2 * _SHORT_PROMPT:
                yield Experiment(num, prompt, _ANSWER)

    def _run_all(self, experiments: Sequence[Experiment], which: str) -> list[float]:
        """Do each once: what `_run` gives, one after the other."""
        times = []
        for experiment in experiments:
            num, prompt, answer = experiment
            self._look(f"{which}: {num} at once, {prompt} tokens in, {answer} tokens out")
            times += self._run(experiment)
        return times

    def _run(self, experiment: Experiment) -> list[float]:
        """Do it once: mean nanoseconds to the first token, and from there to the last."""
        asked = [self._ask(experiment) for _ in range(experiment.num * self._num_slots)]
        self._wait(asked)
        outcomes = [one.outcome for one in asked if one.outcome is not None]
        if len(outcomes) < len(asked) or any(one.finish != Finish.FINISH_LENGTH for one in outcomes):
            raise DeviceError("a request of the calibration failed; see the lines above.")
        first_ns = statistics.fmean(one.first_token_ns - one.assigned_ns for one in outcomes)
        return [first_ns, statistics.fmean(one.finished_ns - one.first_token_ns for one in outcomes)]

    def _ask(self, experiment: Experiment) -> Asked:
        asked = Asked()
        self._scheduler.try_enter(0)
        self._scheduler.submit(
            self._work(experiment),
            asked,
            arrival_ns=time.monotonic_ns(),
            num_prompt_tokens=experiment.prompt_tokens,
            max_tokens=experiment.answer_tokens,
            footprint_tokens=experiment.prompt_tokens + experiment.answer_tokens,
        )
        return asked

    def _work(self, experiment: Experiment) -> Work:
        """A prompt that nobody has had before, and an answer that ends by its length alone."""
        model = self._served.loaded
        prompt = array("i", self._draw.choices(range(model.n_vocab), k=experiment.prompt_tokens))
        sampling = Sampling(ignore_eos=True, cache_prompt=False)
        return model.work(prompt, 0, sampling, seed=1, grammar=None, max_tokens=experiment.answer_tokens)

    def _wait(self, asked: list[Asked]) -> None:
        """Play the scheduler's thread and the event loop until all are settled."""
        moved_s = time.monotonic()
        while not all(one.is_settled for one in asked):
            self._scheduler.round(time.monotonic_ns())
            self._poller.poll(_POLL_MS)
            events = self._scheduler.poll()
            if events:
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > self._config.engine.stall_s:
                raise DeviceError("a device slot does not answer.")
            for kind, one, *rest in events:
                if kind == EV_FINISHED:
                    one.outcome = rest[0]
                elif kind == EV_SETTLED:
                    one.is_settled = True


def _only(models: Models) -> Served:
    """The model that is there; a calibration has one."""
    (served,) = (models.find(name) for name in models.names())
    assert served is not None
    return served


def occurrences(experiment: Experiment, shape: SlotShape) -> list[list[float]]:
    """How often each term of the cost occurs, on the average, until the first token and from there to the last."""
    trace = at_once(*experiment)
    policy = Policy.unbounded(len(trace))
    first_rows, rest_rows = [], []
    for term in range(_NUM_TERMS):
        cost = StepCost(*(_UNIT_NS * (term == other) for other in range(_NUM_TERMS)))
        played = play(trace, policy, Devices(1, cost, shape))
        first_rows.append(statistics.fmean(played.first_token_ns) / _UNIT_NS)
        spans = zip(played.ended_ns, played.first_token_ns, strict=True)
        rest_rows.append(statistics.fmean(end - first for end, first in spans) / _UNIT_NS)
    return [first_rows, rest_rows]


def bounded(shape: SlotShape, sizes_ms: Mapping[int, float], target_ms: float) -> SlotShape:
    """The shape with the budgets that a worker finds for this target.

    `sizes_ms` are milliseconds of a step by its tokens. A worker tries no size beyond the first that
    misses the target.
    """
    sizes = sorted(sizes_ms)
    num_met = sum(1 for _ in itertools.takewhile(lambda size: sizes_ms[size] <= target_ms, sizes))
    tried = sizes[: num_met + 1]
    cheapest = min(sizes_ms[size] / size for size in tried)
    fine = next(size for size in tried if sizes_ms[size] / size <= _FINE_COST_MAX * cheapest)
    return msgspec.structs.replace(shape, budget=sizes[max(num_met - 1, 0)], fine_budget=fine, target_ms=target_ms)


def machine_name(num_cores: int) -> str:
    """The processor, and how many cores of it there are to use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else name}, {num_cores} cores"
