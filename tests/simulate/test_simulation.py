"""The core's simulation: its twin, what it must keep, and what it is for."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lqs._core import Door, Ending, Scheduler, Simulation

from .reference import Ask, simulate

MS = 1_000_000
KEY_WEIGHTS = [1.0, 2.0, 0.5]
LANE_WEIGHTS = [3.0, 1.0]
ENDINGS = {
    Ending.ENDING_SERVED: "served",
    Ending.ENDING_EXPIRED: "expired",
    Ending.ENDING_NEVER_FITS: "no_device",
    Ending.ENDING_REFUSED: "refused",
    Ending.ENDING_TIMED_OUT: "timed out",
    Ending.ENDING_BREAKER: "breaker",
    Ending.ENDING_EVICTED: "evicted",
}
COST = (3 * MS, 2 * MS, MS, 0, 0)
# What bounds a step, in the order of the core.
STEP = {"budget": 16, "fine_budget": 1000, "batch_max": 64, "target_ns": 0}

asks = st.lists(
    st.builds(
        Ask,
        arrival_ns=st.integers(0, 60).map(lambda ms: ms * MS),
        prompt=st.integers(1, 60),
        answer=st.integers(1, 15),
        level=st.integers(0, 2),
        key=st.integers(0, 2),
    ),
    min_size=1,
    max_size=24,
)
costs = st.tuples(
    st.integers(1, 9 * MS), st.integers(0, 9 * MS), st.integers(0, MS), st.integers(0, 1000), st.integers(0, 1000)
)


def plain_rules(num_levels):
    """Nobody is moved, evicted or waits at the door, and no breaker opens."""
    none = [0] * num_levels
    return {
        "demotes": none,
        "evicts": none,
        "place_waits_ns": none,
        "num_guests_max": 8,
        "warns": [*none, 0],
        "clears": [*none, 0],
        "full": 0,
        "open_ns": 1,
        "num_probes": 1,
    }


class Run:
    """The core's run of some requests."""

    def __init__(self, asks, *, slots, costs, cap=1000, total=1000, rules=None, **shape):
        limits = {"context_tokens": 10**6, "has_lanes": "border" in shape}
        names = ("context_tokens", "queue_limit_ns", "run_limit_ns", "high_load_at")
        limits |= {name: shape.pop(name) for name in names if name in shape}
        bounds = [shape.pop(name, STEP[name]) for name in STEP]
        num_lanes, num_levels = shape.pop("num_lanes", 1), shape.pop("num_levels", 3)
        border, num_extra = shape.pop("border", 0), shape.pop("num_extra", 0)
        kv_block, times = shape.pop("kv_block", 0), shape.pop("max_tokens_times", 1)
        self.door = Door(num_levels)
        self.door.set_rules(**(plain_rules(num_levels) | {"caps": [cap] * num_levels, "total": total} | (rules or {})))
        self.scheduler = Scheduler(
            table_capacity=64,
            level_caps=[64] * num_levels,
            total_cap=64,
            num_lanes=num_lanes,
            lane_weights=shape.pop("lane_weights", [1.0] * num_lanes),
            borders=(border, border),
            out_buffer_bytes=64,
            **shape,
        )
        for kv_tokens, num_sequences in slots:
            self.scheduler.add_device_slot(
                kv_tokens=kv_tokens, num_sequences=num_sequences, num_extra=num_extra, kv_block=kv_block
            )
        self.asks = asks
        self.columns = [array(kind, bytes(8 * len(asks)))[: len(asks)] for kind in "qqqB"]
        self.start_no = array("I", bytes(4 * len(asks)))
        started_ns, first_token_ns, ended_ns, ending = self.columns
        self.simulation = Simulation(
            self.scheduler,
            self.door,
            [(*cost, *bounds) for cost in costs],
            arrival_ns=array("q", (ask.arrival_ns for ask in asks)),
            prompt_tokens=array("I", (ask.prompt for ask in asks)),
            completion_tokens=array("I", (ask.answer for ask in asks)),
            max_tokens=array("I", (times * ask.answer for ask in asks)),
            level=array("B", (ask.level for ask in asks)),
            key=array("I", (ask.key for ask in asks)),
            started_ns=started_ns,
            first_token_ns=first_token_ns,
            ended_ns=ended_ns,
            start_no=self.start_no,
            ending=ending,
            **limits,
        )

    def to_the_end(self):
        while self.simulation.play(5):
            pass
        assert self.simulation.num_left == 0
        return self

    @property
    def outcomes(self):
        return [(*times, ENDINGS[ending]) for *times, ending in zip(*self.columns, strict=True)]

    def check_given_back(self):
        """Everything that was taken is free again."""
        figures = self.scheduler.snapshot()
        for slot in figures["slots"]:
            assert (slot["reserved"], slot["used"], slot["num_running"]) == (0, 0, 0)
        assert [level["num_waiting"] for level in figures["levels"]] == [0] * len(figures["levels"])
        assert [level["num_entered"] for level in figures["levels"]] == [0] * len(figures["levels"])
        assert (figures["num_entered"], figures["num_running"], figures["num_broken"]) == (0, 0, 0)
        assert figures["num_live"] == 0
        door = self.door.figures(0)
        assert (door["num_pending"], door["num_running"], door["num_asks"], self.door.num_guests) == (0, 0, 0, 0)


@settings(deadline=None, max_examples=150)
@given(
    asks=asks,
    slots=st.lists(st.tuples(st.integers(40, 200), st.integers(1, 4)), min_size=1, max_size=2),
    data=st.data(),
    num_extra=st.integers(0, 2),
    budget=st.integers(1, 40),
    fine_budget=st.integers(1, 40),
    target_ns=st.sampled_from([0, 10 * MS, 40 * MS]),
    aged_every=st.integers(1, 3),
    aging_step_ns=st.sampled_from([0, 20 * MS, 400 * MS]),
    queue_limit_ns=st.sampled_from([0, 50 * MS]),
)
def test_skipping_over_equal_steps_changes_nothing(
    asks, slots, data, num_extra, budget, fine_budget, target_ns, aged_every, aging_step_ns, queue_limit_ns
):
    """Starts, their order, first tokens and ends are those of the plain twin, to the nanosecond."""
    asks.sort(key=lambda ask: ask.arrival_ns)
    shape = {
        "slots": slots,
        "costs": [data.draw(costs) for _ in slots],
        "num_extra": num_extra,
        "budget": budget,
        "fine_budget": fine_budget,
        "batch_max": data.draw(st.integers(6, 60)),
        "target_ns": target_ns,
        "border": 40,
        "fine_level": data.draw(st.integers(0, 3)),
        "num_lanes": 2,
        "num_levels": 3,
        "num_keys": 3,
        "key_weights": KEY_WEIGHTS,
        "lane_weights": LANE_WEIGHTS,
        "aging_step_ns": aging_step_ns,
        "aged_every": aged_every,
        "queue_limit_ns": queue_limit_ns,
    }
    run = Run(asks, **shape).to_the_end()
    simulate(asks, **shape)
    assert run.outcomes == [(ask.started_ns, ask.first_token_ns, ask.ended_ns, ask.ending) for ask in asks]
    assert list(run.start_no) == [ask.start_no for ask in asks]
    run.check_given_back()


def test_a_million_steps_are_one_event():
    """Answers as long as that come to their end, at the time that the series says."""
    shape = {"slots": [(2 * 10**6, 1)], "costs": [(10, 5, 0, 1, 0)], "context_tokens": 2 * 10**6}
    run = Run([Ask(0, 1, 10**6)], **shape).to_the_end()
    # The n-th step, from 1 on, has a context of n tokens.
    assert run.outcomes == [(0, 16, 15 * 10**6 + 10**6 * (10**6 + 1) // 2, "served")]
    assert run.simulation.slot_figures == [(10**6, run.outcomes[0][2])]


def test_a_prompt_in_pieces_waits_for_its_last_piece():
    run = Run([Ask(0, 40, 2)], slots=[(64, 1)], costs=[COST]).to_the_end()
    # 16 + 24 tokens, as a rest of 8 goes along; the last of them is drawn for. Then one decode.
    first_ns = (3 + 16) * MS + (3 + 23 + 2) * MS
    assert run.outcomes == [(0, first_ns, first_ns + 5 * MS, "served")]


def test_what_comes_during_a_step_starts_with_the_next_one():
    """The scheduler places it at once, the worker takes it when its step is over."""
    asks = [Ask(0, 1, 3), Ask(6 * MS, 1, 1)]
    run = Run(asks, slots=[(64, 2)], costs=[COST]).to_the_end()
    # Steps of 5 ms end at 5 and 10; the third has both.
    assert run.outcomes == [(0, 5 * MS, 17 * MS, "served"), (6 * MS, 17 * MS, 17 * MS, "served")]


def test_a_request_that_runs_too_long_is_ended_between_two_steps():
    asks = [Ask(0, 1, 1000), Ask(10 * MS, 1, 1)]
    run = Run(asks, slots=[(2000, 1)], costs=[COST], run_limit_ns=52 * MS).to_the_end()
    assert run.outcomes == [(0, 5 * MS, 55 * MS, "timed out"), (55 * MS, 60 * MS, 60 * MS, "served")]
    run.check_given_back()


def test_who_can_start_at_once_needs_no_place():
    asks = [Ask(0, 1, 1), Ask(0, 1, 1), Ask(0, 1, 1)]
    run = Run(asks, slots=[(64, 2)], costs=[COST], cap=0, total=0).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["served", "served", "refused"]


def test_who_finds_no_place_is_refused():
    asks = [Ask(0, 1, 1), *(Ask(MS, 1, 1, level=level) for level in (0, 1, 0, 1))]
    run = Run(asks, slots=[(64, 1)], costs=[COST], cap=1, total=2).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["served", "served", "served", "refused", "refused"]
    run.check_given_back()


def test_the_youngest_of_the_lowest_class_leaves_for_a_better_one():
    """Evicted as the server does it: the door asks, the scheduler answers, the place goes to who asked."""
    asks = [Ask(0, 1, 9, level=1), *(Ask(at, 1, 1, level=2) for at in (1, 2)), Ask(3, 1, 1, level=0)]
    run = Run(asks, slots=[(64, 1)], costs=[COST], total=2, rules={"evicts": [1, 0, 0]}).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["served", "served", "evicted", "served"]
    assert run.outcomes[2][2] == 3
    # The one that came in by it starts first.
    assert run.outcomes[3][0] < run.outcomes[1][0]
    run.check_given_back()


def test_a_class_that_may_wait_gets_the_next_place_or_is_refused_when_its_time_is_over():
    asks = [Ask(0, 1, 3), Ask(1, 1, 1), Ask(2, 1, 1), Ask(3, 1, 50), Ask(4, 1, 1)]
    waits = {"place_waits_ns": [21 * MS, 0, 0], "num_guests_max": 2}
    run = Run(asks, slots=[(64, 1)], costs=[COST], total=1, rules=waits).to_the_end()
    endings = [ending for *_, ending in run.outcomes]
    # The first has the sequence, the second the place; two may stand at the door.
    assert endings == ["served", "served", "served", "served", "refused"]
    asks[1] = Ask(1, 1, 50)
    run = Run(asks, slots=[(64, 1)], costs=[COST], total=1, rules=waits).to_the_end()
    # The place comes free at 15 ms, then the second runs for long; the fourth waits 21 ms in vain.
    assert [ending for *_, ending in run.outcomes] == ["served", "served", "served", "refused", "refused"]
    assert run.outcomes[3][2] == 3 + 21 * MS
    run.check_given_back()


def test_a_full_queue_opens_the_breaker_of_the_lowest_class():
    asks = [Ask(0, 1, 9, level=0), *(Ask(at, 1, 1, level=2) for at in (1, 2, 3, 4))]
    full = {"full": 2, "warns": [0, 0, 0, 2], "clears": [1, 1, 1, 1], "open_ns": 1000 * MS}
    run = Run(asks, slots=[(64, 1)], costs=[COST], total=2, rules=full).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["served", "served", "served", "breaker", "breaker"]


def test_under_a_high_load_all_but_the_best_class_come_in_one_lower():
    asks = [Ask(0, 1, 3, level=0), Ask(1, 59, 1, level=1), Ask(2, 1, 1, level=2), Ask(3, 1, 1, level=1)]
    outcomes = {}
    for high_load_at in (1.0, 0.2):
        run = Run(asks, slots=[(60, 1)], costs=[COST], total=4, high_load_at=high_load_at)
        outcomes[high_load_at] = run.to_the_end().outcomes
    starts = {load: [at for at, *_ in found] for load, found in outcomes.items()}
    # While one runs and one waits the load is 0.25: the last one, of class 1, then comes behind the one of class 2.
    assert starts[1.0][3] < starts[1.0][2]
    assert starts[0.2][3] > starts[0.2][2]


@settings(deadline=None, max_examples=60)
@given(
    asks=asks,
    slots=st.lists(st.tuples(st.integers(140, 300), st.integers(2, 6)), min_size=1, max_size=2),
    kv_block=st.sampled_from([8, 16]),
    times=st.sampled_from([1, 3]),
)
def test_with_promises_that_grow_all_are_served_and_everything_comes_back(asks, slots, kv_block, times):
    """Whoever finds no room to grow waits or gives up its cells, and comes back."""
    asks.sort(key=lambda ask: ask.arrival_ns)
    shape = {"slots": slots, "costs": [COST] * len(slots), "num_keys": 3, "max_tokens_times": times}
    run = Run(asks, kv_block=kv_block, **shape).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["served"] * len(asks)
    run.check_given_back()
    # With memory enough for all, nothing waits for a promise, and nothing is as if it were made at the start.
    roomy = shape | {"slots": [(10_000, num) for _, num in slots]}
    grown, whole = (Run(asks, kv_block=block, **roomy).to_the_end() for block in (kv_block, 0))
    assert grown.outcomes == whole.outcomes


def test_answers_that_come_out_longer_than_there_is_memory_give_up_their_cells():
    asks = [Ask(at, 10, 60, level=at % 2) for at in range(8)]
    run = Run(asks, slots=[(200, 8)], costs=[COST], kv_block=16).to_the_end()
    growth = run.scheduler.snapshot()["slots"][0]
    assert growth["num_put_out"] > 0
    assert growth["num_put_out"] == growth["num_resumed"]
    assert {ending for *_, ending in run.outcomes} == {"served"}
    # The low classes pay.
    assert max(end for _, _, end, _ in run.outcomes[0::2]) < max(end for _, _, end, _ in run.outcomes[1::2])
    run.check_given_back()


def test_a_prompt_that_fills_the_context_never_fits_and_a_long_answer_is_cut():
    asks = [Ask(0, 32, 1), Ask(0, 30, 50)]
    run = Run(asks, slots=[(64, 1)], costs=[COST], budget=64, context_tokens=32).to_the_end()
    assert [ending for *_, ending in run.outcomes] == ["no_device", "served"]
    # Two tokens, not fifty.
    assert run.outcomes[1][2] - run.outcomes[1][1] == 5 * MS


def test_the_table_bounds_who_is_inside():
    asks = [Ask(0, 1, 1) for _ in range(70)]
    run = Run(asks, slots=[(64, 1)], costs=[COST]).to_the_end()
    endings = [ending for *_, ending in run.outcomes]
    assert (endings.count("served"), endings.count("refused")) == (64, 6)


def test_a_simulation_that_is_left_in_the_middle_gives_its_memory_back():
    run = Run([Ask(i, 1, 50) for i in range(20)], slots=[(640, 4)], costs=[COST])
    assert run.simulation.play(10) is True
    assert run.simulation.num_left == 20
    assert run.scheduler.num_running == 4
    del run


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"costs": []}, ValueError),
        ({"costs": [(-1, 0, 0, 0, 0)]}, ValueError),
        ({"batch_max": 1}, ValueError),
        ({"num_levels": 1}, IndexError),
    ],
)
def test_what_cannot_be_played_is_refused(change, error):
    shape = {"slots": [(64, 2)], "costs": [COST]} | change
    with pytest.raises(error):
        Run([Ask(0, 1, 1, level=1)], **shape)


def test_arrivals_go_forward_and_columns_are_of_one_length():
    with pytest.raises(ValueError, match="do not go back"):
        Run([Ask(5, 1, 1), Ask(4, 1, 1)], slots=[(64, 1)], costs=[COST])
    with pytest.raises(ValueError, match="do not go back"):
        Run([Ask(-5, 1, 1)], slots=[(64, 1)], costs=[COST])
