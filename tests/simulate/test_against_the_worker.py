"""The model's steps are the worker's: the same requests, on a real worker and on a model slot, step for step."""

import random
import select
import threading
import time
from array import array
from collections import defaultdict

import llama_cpp  # noqa: F401
import pytest

from lqs import _core, _engine
from lqs.engine.synth import Recipe, parse_shape, write

from .reference import Ask
from .test_simulation import MS, Run

KV_TOKENS, NUM_SEQUENCES, BATCH_MAX = 2048, 8, 64
LANE_WEIGHTS, BORDER = (3, 1), 50
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    _engine.install_callbacks()
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write(path, Recipe(shape=parse_shape("tiny")), lambda *_: None)
    model = _engine.Model(str(path))
    model.load()
    return model


class Real:
    """A worker on a thread of its own; the scheduler's rounds are ours, so that all requests start in one step."""

    def __init__(self, model, budget: int) -> None:
        self.model = model
        self.scheduler = _core.Scheduler(
            table_capacity=16, level_caps=[16] * 3, total_cap=16, lane_weights=LANE_WEIGHTS
        )
        self.scheduler.add_device_slot(kv_tokens=KV_TOKENS, num_sequences=NUM_SEQUENCES)
        shape = {"n_ctx": KV_TOKENS, "n_seq": NUM_SEQUENCES, "n_batch": BATCH_MAX, "prefix_cache": False}
        self.worker = _engine.Worker(self.scheduler, 0, model, **shape)
        self.worker.open()
        self.worker.budget = budget
        self.poller = select.poll()
        self.poller.register(self.scheduler.loop_fd, select.POLLIN)

    def outcomes(self, asks: list[Ask]):
        """How each of them ended, and how many steps that took."""
        found = {}
        for number, ask in enumerate(asks):
            self.submit(number, ask)
        thread = threading.Thread(target=self.worker.run, daemon=True)
        self.scheduler.round(1)
        thread.start()
        ends_s = time.monotonic() + LIMIT_S
        while len(found) < len(asks):
            assert time.monotonic() < ends_s, "the worker did not get there in time"
            self.poller.poll(100)
            found |= {event[1]: event[2] for event in self.scheduler.poll() if event[0] == _core.EV_FINISHED}
        self.worker.stop()
        thread.join(LIMIT_S)
        num_steps = self.worker.snapshot()["num_steps"]
        self.worker.close()
        return [found[number] for number in range(len(asks))], num_steps

    def submit(self, number: int, ask: Ask) -> None:
        prompt = array("i", [1 + (7 * number + place) % 200 for place in range(ask.prompt)])
        work = _engine.Completion(self.model, prompt, max_tokens=ask.answer, ignore_eos=True, temperature=0.0)
        self.scheduler.try_enter(ask.level)
        self.scheduler.submit(
            work,
            number,
            level=ask.level,
            lane=int(ask.prompt + ask.answer > BORDER),
            arrival_ns=1,
            num_prompt_tokens=ask.prompt,
            max_tokens=ask.answer,
            footprint_tokens=ask.prompt + ask.answer,
        )


def in_order(times: dict[tuple[str, int], int]) -> list[set[tuple[str, int]]]:
    """What happened in the same step together, the steps in their order."""
    steps = defaultdict(set)
    for what, at_ns in times.items():
        steps[at_ns].add(what)
    return [steps[at_ns] for at_ns in sorted(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_first_tokens_and_ends_fall_into_the_same_steps(model, seed: int):
    """Decodes first, prefill by class and lane up to the budget, lesser decodes left out for so long."""
    draw = random.Random(seed)
    asks = [
        Ask(0, draw.choice((1, 9, 40, 150)), draw.choice((1, 3, 20, 60)), level=draw.randrange(3))
        for _ in range(draw.choice((1, 5, NUM_SEQUENCES)))
    ]
    budget = draw.choice((16, 24, 64))
    outcomes, num_steps = Real(model, budget).outcomes(asks)
    run = Run(
        asks,
        slots=[(KV_TOKENS, NUM_SEQUENCES)],
        costs=[(MS, 0, 0, 0, 0)],
        budget=budget,
        # A worker that was not calibrated has the least of it.
        fine_budget=16,
        batch_max=BATCH_MAX,
        num_lanes=2,
        lane_weights=LANE_WEIGHTS,
        border=BORDER,
    ).to_the_end()
    real = {("first", number): one.first_token_ns for number, one in enumerate(outcomes)}
    real |= {("end", number): one.finished_ns for number, one in enumerate(outcomes)}
    played = {("first", number): first_ns for number, (_, first_ns, *_) in enumerate(run.outcomes)}
    played |= {("end", number): end_ns for number, (_, _, end_ns, _) in enumerate(run.outcomes)}
    assert in_order(real) == in_order(played)
    assert num_steps == run.simulation.slot_figures[0][0]
