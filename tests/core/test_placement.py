"""On which device slot a request starts: policies, prefixes, lanes, drains and what changes at run time."""

from collections import Counter

import pytest

from lqs._core import EV_NO_DEVICE, EV_STARTED, Placing, Scheduler

from .test_scheduler import S, assert_empty, run, submit

SHORT, LONG = 0, 1


def make(policy=Placing.LEAST_CONNECTIONS, *slots, num_lanes=1, **kwargs):
    """A scheduler whose device slots are told as keywords."""
    shape = {"table_capacity": 512, "level_caps": [500] * 4, "total_cap": 500, "num_keys": 2}
    weights = [3, 1][:num_lanes]
    scheduler = Scheduler(policy=policy, num_lanes=num_lanes, lane_weights=weights, **{**shape, **kwargs})
    for slot in slots:
        scheduler.add_device_slot(**{"kv_tokens": 10_000, "num_sequences": 100, **slot})
    return scheduler


def placed(scheduler, *handles):
    """Run a round: where each of these has started, None for who has not."""
    scheduler.round(0)
    found = {
        handle: slot for slot in range(len(scheduler.slots())) for handle in scheduler.take(slot) if handle in handles
    }
    scheduler.poll()
    return [found.get(handle) for handle in handles]


def place(scheduler, **request):
    """Submit one: where it starts."""
    return placed(scheduler, submit(scheduler, "x", **request))[0]


# --- the policies -----------------------------------------------------------------------


def test_least_connections_takes_the_one_that_runs_least_for_its_weight():
    scheduler = make(Placing.LEAST_CONNECTIONS, {"weight": 2}, {"weight": 1})
    assert [place(scheduler) for _ in range(6)] == [0, 1, 0, 0, 1, 0]


def test_vram_takes_the_one_with_the_most_bytes_left():
    scheduler = make(Placing.VRAM, {"kv_tokens": 100, "token_bytes": 4}, {"kv_tokens": 300, "token_bytes": 1})
    # 400 and 300 bytes; one of 30 tokens leaves 120 less of the first or 30 less of the second.
    assert [place(scheduler) for _ in range(6)] == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("weights", "cycle"),
    [((2, 1), [0, 1, 0]), ((5, 1, 1), [0, 0, 1, 0, 2, 0, 0]), ((1, 1), [0, 1])],
)
def test_weighted_round_robin_is_smooth_and_exact(weights, cycle):
    """The orders that nginx gives with these weights."""
    scheduler = make(Placing.WEIGHTED_ROUND_ROBIN, *({"weight": weight} for weight in weights))
    assert [place(scheduler) for _ in range(4 * len(cycle))] == 4 * cycle


def test_a_split_of_two_to_one_lands_within_two_percent_while_requests_come_and_go():
    scheduler = make(Placing.WEIGHTED_ROUND_ROBIN, {"weight": 2}, {"weight": 1})
    running, counts = [], Counter()
    for number in range(300):
        handle = submit(scheduler, number)
        counts[placed(scheduler, handle)[0]] += 1
        running.append(handle)
        # They end in an order of their own.
        if len(running) > 7:
            scheduler.finish(running.pop(number * 5 % 7))
    assert abs(counts[0] / 300 - 2 / 3) <= 0.02


def test_a_full_device_slot_gains_no_turns():
    scheduler = make(Placing.WEIGHTED_ROUND_ROBIN, {"num_sequences": 1}, {})
    first = submit(scheduler, "x")
    assert placed(scheduler, first) == [0]
    assert [place(scheduler) for _ in range(9)] == [1] * 9
    scheduler.finish(first)
    # As if the nine had not been: the turn is the second one's.
    assert [place(scheduler), place(scheduler)] == [1, 0]


def ended_with_pace(scheduler, step_ns, slot, num=20):
    """Let requests end on a device slot whose steps take so long."""
    others = [other for other in range(len(scheduler.slots())) if other != slot]
    for other in others:
        scheduler.drain_slot(other)
    for _ in range(num):
        handle = submit(scheduler, "x")
        assert placed(scheduler, handle) == [slot]
        scheduler.finish(handle, num_completion_tokens=11, first_token_ns=S, finished_ns=S + 10 * step_ns)
        scheduler.round(0)
    for other in others:
        scheduler.undrain_slot(other)


def test_load_gives_a_device_slot_twice_as_slow_half_of_the_work():
    scheduler = make(Placing.LOAD, {"kv_tokens": 10**6}, {"kv_tokens": 10**6})
    ended_with_pace(scheduler, 10_000_000, 0)
    ended_with_pace(scheduler, 20_000_000, 1)
    assert [slot["step_ns"] for slot in scheduler.slots()] == [10_000_000, 20_000_000]
    counts = Counter(place(scheduler) for _ in range(90))
    assert abs(counts[0] - 60) <= 1


def test_load_looks_at_work_and_not_at_how_many_run():
    scheduler = make(Placing.LOAD, {"kv_tokens": 10**6}, {"kv_tokens": 10**6})
    assert place(scheduler, footprint_tokens=3000) == 0
    assert [place(scheduler, footprint_tokens=1000) for _ in range(4)] == [1, 1, 1, 0]


def test_load_shuns_a_device_that_others_use_and_one_that_is_nearly_full():
    scheduler = make(Placing.LOAD, {"kv_tokens": 10**6}, {"kv_tokens": 10**6})
    scheduler.set_use(0, 60)
    assert [place(scheduler) for _ in range(3)] == [1, 0, 1]
    scheduler = make(Placing.LOAD, {"kv_tokens": 50}, {"kv_tokens": 10**6})
    assert place(scheduler, footprint_tokens=40) == 1


@pytest.mark.parametrize("policy", [Placing.VRAM, Placing.LOAD])
def test_short_requests_prefer_a_device_slot_on_which_nothing_runs(policy):
    slots = [{"kv_tokens": 10**6, "weight": 1000}, {"kv_tokens": 1000}]
    scheduler = make(policy, *slots, num_lanes=2)
    assert place(scheduler, lane=LONG) == 0
    assert place(scheduler, lane=LONG) == 0
    assert place(scheduler, lane=SHORT) == 1
    assert place(scheduler, lane=SHORT) == 0


def test_a_policy_must_be_one():
    with pytest.raises(ValueError, match="policy"):
        make(4)
    with pytest.raises(ValueError, match="prefix_margin"):
        make(0, prefix_margin=-1)


# --- prefixes ---------------------------------------------------------------------------


def test_a_prefix_wins_a_tie():
    scheduler = make(Placing.LEAST_CONNECTIONS, {}, {}, {})
    assert place(scheduler, prefixes=[(2, 300)]) == 2
    assert place(scheduler, prefixes=[(2, 300)]) == 0
    assert place(scheduler, prefixes=[(0, 900), (1, 300)]) == 1


def test_a_prefix_wins_by_the_margin_and_no_further():
    scheduler = make(Placing.LEAST_CONNECTIONS, {}, {"weight": 2}, prefix_margin=2)
    # By connections the second one is always better; the first may run two more.
    assert [place(scheduler, prefixes=[(0, 64)]) for _ in range(5)] == [0, 0, 0, 1, 1]


def test_too_short_a_prefix_is_none():
    scheduler = make(Placing.LEAST_CONNECTIONS, {}, {}, prefix_margin=9, prefix_tokens_min=256)
    assert place(scheduler, prefixes=[(1, 255)]) == 0
    assert place(scheduler, prefixes=[(0, 256)]) == 0


def test_the_longest_of_many_prefixes_count_and_hints_may_be_wrong():
    scheduler = make(Placing.LEAST_CONNECTIONS, {}, {}, {}, {}, prefix_margin=9)
    hints = [(0, 100), (63, 10**9), (70, 10**12), (2, 500), (1, 400)]
    # One without such a device slot takes a place among the two longest; one beyond all bounds does not.
    assert place(scheduler, prefixes=hints) == 2
    scheduler.drain_slot(2)
    assert place(scheduler, prefixes=[(2, 500), (1, 400), (0, 300)]) == 1


def test_what_a_prefix_decided_is_no_turn():
    scheduler = make(Placing.WEIGHTED_ROUND_ROBIN, {}, {}, prefix_margin=9)
    assert place(scheduler) == 0
    assert [place(scheduler, prefixes=[(0, 640)]) for _ in range(3)] == [0] * 3
    assert [place(scheduler), place(scheduler)] == [1, 0]


# --- lanes ------------------------------------------------------------------------------


def test_a_device_slot_for_one_lane_takes_no_other():
    scheduler = make(0, {"lanes": 1 << SHORT}, {"lanes": 1 << LONG}, num_lanes=2)
    assert [place(scheduler, lane=SHORT) for _ in range(3)] == [0] * 3
    assert [place(scheduler, lane=LONG) for _ in range(3)] == [1] * 3
    assert [slot["lanes"] for slot in scheduler.slots()] == [1, 2]


def test_a_lane_whose_device_slots_are_full_hides_nobody_of_the_other():
    """However many wait: of a lane without a sequence nobody is looked at."""
    slots = [{"lanes": 1 << SHORT, "num_sequences": 1}, {"lanes": 1 << LONG, "num_sequences": 1}]
    scheduler = make(0, *slots, num_lanes=2)
    for number in range(101):
        submit(scheduler, number, lane=SHORT)
    assert [sink for kind, sink in run(scheduler) if kind == EV_STARTED] == [0]
    num_before = scheduler.snapshot()["num_decisions"]
    submit(scheduler, "long", lane=LONG, level=3)
    assert run(scheduler) == [(EV_STARTED, "long")]
    assert scheduler.snapshot()["num_decisions"] == num_before + 1


def test_a_head_is_held_for_on_a_device_slot_of_its_lane():
    slots = [{"lanes": 1 << SHORT, "kv_tokens": 200}, {"lanes": 1 << LONG, "kv_tokens": 100}]
    scheduler = make(0, *slots, num_lanes=2, bypass_max=0)
    running = submit(scheduler, "running", lane=LONG, footprint_tokens=60)
    assert placed(scheduler, running) == [1]
    head = submit(scheduler, "head", lane=LONG, footprint_tokens=80)
    assert placed(scheduler, head) == [None]
    assert scheduler.snapshot()["num_holding"] == 1
    # The hold is on the second, so the first has room for its own.
    assert place(scheduler, lane=SHORT, footprint_tokens=150) == 0
    scheduler.finish(running)
    assert placed(scheduler, head) == [1]


def test_a_request_that_only_another_lanes_device_slot_could_hold_never_fits():
    slots = [{"lanes": 1 << SHORT, "kv_tokens": 100}, {"lanes": 1 << LONG, "kv_tokens": 1000}]
    scheduler = make(0, *slots, num_lanes=2)
    submit(scheduler, "a", lane=SHORT, footprint_tokens=500)
    assert (EV_NO_DEVICE, "a") in run(scheduler)


def test_a_lane_whose_last_device_slot_dies_may_use_the_others():
    scheduler = make(0, {"lanes": 1 << SHORT}, {"lanes": 1 << LONG}, num_lanes=2)
    assert place(scheduler, lane=SHORT) == 0
    scheduler.report_dead(0)
    assert place(scheduler, lane=SHORT) == 1
    assert scheduler.slots()[1]["lanes"] == 3


def test_a_device_slot_is_for_some_lane():
    scheduler = make(0)
    with pytest.raises(ValueError, match="lane"):
        scheduler.add_device_slot(kv_tokens=1, num_sequences=1, lanes=2)
    with pytest.raises(ValueError, match="models"):
        scheduler.add_device_slot(kv_tokens=1, num_sequences=1, model=64)


# --- models -----------------------------------------------------------------------------


def test_no_model_hides_another_however_many_wait():
    slots = [{"model": 0, "num_sequences": 1}, {"model": 1, "num_sequences": 1}]
    scheduler = make(0, *slots)
    for number in range(200):
        submit(scheduler, number, model=0)
    run(scheduler)
    submit(scheduler, "other", model=1, level=3)
    assert run(scheduler) == [(EV_STARTED, "other")]


def test_heads_of_one_model_that_do_not_fit_leave_another_its_records():
    slots = [{"model": 0, "kv_tokens": 100}, {"model": 1, "kv_tokens": 100}]
    scheduler = make(0, *slots)
    for model in (0, 1):
        assert place(scheduler, model=model, footprint_tokens=50) == model
    for number in range(40):
        submit(scheduler, number, model=0, footprint_tokens=60)
    large, small = (submit(scheduler, "x", model=1, footprint_tokens=tokens) for tokens in (60, 10))
    assert placed(scheduler, large, small) == [None, 1]


def test_the_lowest_and_youngest_of_all_models_is_evicted():
    slots = [{"model": 0, "num_sequences": 1}, {"model": 1, "num_sequences": 1}]
    scheduler = make(0, *slots)
    for model in (0, 1):
        place(scheduler, model=model)
    for name, model, level in [("a", 1, 2), ("b", 0, 1), ("c", 1, 2), ("d", 0, 2), ("e", 1, 1)]:
        submit(scheduler, name, model=model, level=level)
    run(scheduler)
    evicted = []
    for _ in range(4):
        assert scheduler.evict(0)
        evicted += {sink for _, sink in run(scheduler) if sink is not None}
    assert evicted == ["d", "c", "a", "e"]


def test_a_model_without_a_device_slot_is_told_so():
    scheduler = make(0, {})
    for model in (1, 63, 64, 9999):
        submit(scheduler, model, model=model)
    assert Counter(run(scheduler))[EV_NO_DEVICE, 9999] == 1
    assert scheduler.snapshot()["num_live"] == 0


# --- drained, weighed and bounded at run time -------------------------------------------


def test_a_drained_device_slot_takes_nobody_and_ends_what_it_runs():
    scheduler = make(0, {}, {})
    first, second = submit(scheduler, "a"), submit(scheduler, "b")
    assert placed(scheduler, first, second) == [0, 1]
    scheduler.drain_slot(0)
    # Submitted after it was drained: it does not go there, though the scheduler hears of both at once.
    assert [place(scheduler) for _ in range(3)] == [1] * 3
    assert [slot["is_drained"] for slot in scheduler.slots()] == [True, False]
    assert scheduler.emit(first, b"still here")
    scheduler.finish(first)
    scheduler.round(0)
    assert scheduler.slots()[0]["num_running"] == 0
    scheduler.undrain_slot(0)
    assert [place(scheduler) for _ in range(2)] == [0, 0]


def test_who_waits_for_a_drained_device_slot_waits_until_it_is_back():
    scheduler = make(0, {"num_sequences": 1})
    scheduler.drain_slot(0)
    handle = submit(scheduler, "a")
    assert placed(scheduler, handle) == [None]
    assert scheduler.state_of(handle) == "waiting"
    scheduler.undrain_slot(0)
    assert placed(scheduler, handle) == [0]


def test_a_hold_ends_when_its_device_slot_is_drained():
    scheduler = make(0, {"kv_tokens": 100}, {"kv_tokens": 90}, bypass_max=0)
    for name, tokens in (("x", 60), ("y", 60)):
        submit(scheduler, name, footprint_tokens=tokens)
    run(scheduler)
    head = submit(scheduler, "head", footprint_tokens=70)
    assert placed(scheduler, head) == [None]
    assert scheduler.snapshot()["num_holding"] == 1
    scheduler.drain_slot(0)
    assert placed(scheduler, head) == [None]
    # It is held for on the other one now, so nobody takes what that has free.
    assert scheduler.snapshot()["num_holding"] == 1
    assert place(scheduler, footprint_tokens=20) is None


def test_lanes_share_what_is_not_drained():
    scheduler = make(0, {"num_sequences": 4}, {"num_sequences": 4}, num_lanes=2)
    scheduler.drain_slot(1)
    long = [submit(scheduler, "x", lane=LONG, level=0) for _ in range(4)]
    short = [submit(scheduler, "x", lane=SHORT, level=1) for _ in range(4)]
    # Of four places one is the long lane's own, and two of eight would be.
    assert placed(scheduler, *long, *short) == [0, None, None, None, 0, 0, 0, None]


def test_a_device_slot_shows_how_busy_it_is_said_to_be_and_who_waits_for_its_model():
    scheduler = make(0, {"num_sequences": 1, "model": 0}, {"num_sequences": 1, "model": 1}, num_lanes=2)
    scheduler.set_use(1, 70)
    for name, model, lane in (("a", 0, SHORT), ("b", 1, SHORT), ("c", 1, SHORT), ("d", 1, LONG)):
        submit(scheduler, name, model=model, lane=lane)
    scheduler.round(0)
    assert [slot["num_running"] for slot in scheduler.slots()] == [1, 1]
    assert [slot["num_waiting"] for slot in scheduler.slots()] == [0, 2]
    assert [slot["use_percent"] for slot in scheduler.slots()] == [0, 70]


def test_a_weight_counts_from_the_next_start_on():
    scheduler = make(Placing.WEIGHTED_ROUND_ROBIN, {}, {})
    assert [place(scheduler) for _ in range(2)] == [0, 1]
    scheduler.set_weight(1, 3)
    assert Counter(place(scheduler) for _ in range(40)) == {0: 10, 1: 30}
    assert scheduler.slots()[1]["weight"] == 3
    with pytest.raises(ValueError, match="weight"):
        scheduler.set_weight(1, 0)


def test_a_headroom_bounds_who_starts_and_takes_nothing_away():
    scheduler = make(0, {"kv_tokens": 1000})
    running = submit(scheduler, "running", footprint_tokens=500)
    assert placed(scheduler, running) == [0]
    scheduler.set_headroom(0, 100)
    assert place(scheduler, footprint_tokens=101) is None
    assert scheduler.slots()[0]["headroom"] == 100
    assert scheduler.slots()[0]["reserved"] == 500
    assert place(scheduler, footprint_tokens=100) == 0
    # What comes free may be promised again; what was promised counts against what is said anew.
    scheduler.finish(running)
    scheduler.round(0)
    assert scheduler.slots()[0]["headroom"] == 399
    scheduler.set_headroom(0, 0)
    assert place(scheduler, footprint_tokens=1) is None
    scheduler.set_headroom(0, None)
    assert place(scheduler, footprint_tokens=30) == 0


def test_the_same_headroom_again_is_news():
    scheduler = make(0, {"kv_tokens": 1000})
    scheduler.set_headroom(0, 100)
    assert place(scheduler, footprint_tokens=80) == 0
    scheduler.round(0)
    assert scheduler.slots()[0]["headroom"] == 20
    scheduler.set_headroom(0, 100)
    scheduler.round(0)
    assert scheduler.slots()[0]["headroom"] == 100
    scheduler.set_headroom(0, 2**40)
    scheduler.round(0)
    assert scheduler.slots()[0]["headroom"] == 920
    with pytest.raises(ValueError, match="headroom"):
        scheduler.set_headroom(0, -1)


def test_what_runs_grows_beyond_a_headroom():
    scheduler = make(0, {"kv_tokens": 200, "kv_block": 16})
    handle = submit(scheduler, "x", num_prompt_tokens=20, max_tokens=100, footprint_tokens=120)
    assert placed(scheduler, handle) == [0]
    scheduler.set_headroom(0, 0)
    scheduler.ask_growth(handle, 52)
    scheduler.round(0)
    assert scheduler.granted(handle) == 52
    assert place(scheduler, num_prompt_tokens=1, max_tokens=1, footprint_tokens=2) is None
    scheduler.finish(handle)
    scheduler.round(0)
    assert scheduler.slots()[0]["reserved"] <= 2


def test_everything_is_given_back():
    scheduler = make(Placing.LOAD, {"weight": 2}, {"lanes": 2}, num_lanes=2)
    handles = [submit(scheduler, "x", lane=number % 2) for number in range(20)]
    placed(scheduler, *handles)
    scheduler.drain_slot(1)
    for handle in handles:
        scheduler.finish(handle, num_completion_tokens=3, first_token_ns=1, finished_ns=2)
    run(scheduler)
    assert_empty(scheduler)
