"""Policies on the same trace: what each of them is for, and that a trace is always played alike."""

from collections import Counter
from xml.etree import ElementTree

import msgspec
import pytest

from lqs._core import Ending
from lqs.config import Config
from lqs.simulate.cost import SlotShape, StepCost
from lqs.simulate.generate import generate, spread
from lqs.simulate.picture import Panel, bars, svg
from lqs.simulate.play import Devices, Played, capacity_of, play
from lqs.simulate.policy import POLICIES, Policy
from lqs.simulate.summary import Group, Slo, groups_of, rows, table
from lqs.simulate.trace import Item, Trace, make_trace

CONFIG = Config()
LEVELS = CONFIG.queue.levels
SLO = Slo(2.0, 0.5)
SHAPE = SlotShape(num_sequences=4, kv_tokens=4096, budget=32, batch_max=512, context_tokens=2048)
DEVICES = Devices(1, StepCost(5e6, 5e6, 1e6, 100.0), SHAPE)


def played(trace: Trace, name: str, devices: Devices = DEVICES) -> Played:
    return play(trace, Policy.named(name, CONFIG), devices)


def by_name(run: Played) -> dict[str, Group]:
    return {group.name: group for group in groups_of(run, CONFIG.queue, SLO)}


def burst() -> Trace:
    """A flood of long requests of the lowest class at one moment, and a short one of the best every second."""
    flood = [Item(0.0, 300, 150, level=4, key="flood") for _ in range(60)]
    urgent = [Item(1.0 + at_s, 20, 4, level=0, key="urgent") for at_s in range(20)]
    return make_trace([*flood, *urgent], default_level=2)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_exactly_once_and_everything_comes_back(name: str):
    trace = generate("gamma cv=4 rate=20 requests=3000 prompt=lognormal:200:1 answer=exp:40", seed=5)
    spread(trace, {0: 0.2, 2: 0.5, 4: 0.3}, 5, seed=5)
    run = played(trace, name)
    endings = Counter(run.ending)
    assert Ending.ENDING_NONE not in endings
    assert endings[Ending.ENDING_SERVED] > 100
    assert endings[Ending.ENDING_REFUSED] > 100
    figures = run.snapshot
    assert figures["num_broken"] == figures["num_live"] == figures["num_running"] == figures["num_entered"] == 0
    assert all(slot["reserved"] == slot["used"] == 0 for slot in figures["slots"])
    assert sum(level["num_started"] for level in figures["levels"]) == len(run.started_ns) - sum(
        num for ending, num in endings.items() if ending not in (Ending.ENDING_SERVED, Ending.ENDING_TIMED_OUT)
    )
    for number, ending in enumerate(run.ending):
        times = trace.arrival_ns[number], run.started_ns[number], run.first_token_ns[number], run.ended_ns[number]
        if ending == Ending.ENDING_SERVED:
            assert times == tuple(sorted(times))


@pytest.mark.parametrize("name", POLICIES)
def test_a_trace_is_always_played_alike(name: str):
    trace = generate("onoff on=2 off=6 rate=6 requests=800", seed=9)
    one, other = played(trace, name), played(trace, name)
    assert (one.started_ns, one.first_token_ns, one.ended_ns, one.ending) == (
        other.started_ns,
        other.first_token_ns,
        other.ended_ns,
        other.ending,
    )


def test_in_a_burst_the_best_class_stays_near_its_idle_time():
    """S9, S16: the flood waits, and not those before it; the order of arrival lets all of them wait."""
    idle = by_name(played(make_trace([Item(0.0, 20, 4, level=0)], default_level=2), "lqs"))["critical"]
    under_lqs, under_fifo = (by_name(played(burst(), name))["critical"] for name in ("lqs", "fifo"))
    assert under_lqs.num_unserved == 0
    # A sequence must come free first, and a long answer's is free in a quarter of its time.
    assert under_lqs.first_token(0.99) < 0.2 * under_fifo.first_token(0.5)
    assert under_fifo.first_token(0.5) > 50 * idle.first_token(0.5)


def test_fifo_starts_in_the_order_of_arrival():
    run = played(burst(), "fifo")
    starts = [at for at, ending in zip(run.started_ns, run.ending, strict=True) if ending == Ending.ENDING_SERVED]
    assert len(starts) > 60
    assert starts == sorted(starts)


def test_strict_classes_let_the_lowest_wait_and_aging_does_not():
    """S11: under a steady overload of the best class the lowest is served all the same, at its share."""
    high = [Item(at / 10, 50, 20, level=0) for at in range(3000)]
    low = [Item(at * 10.0, 50, 20, level=4) for at in range(6)]
    trace = make_trace([*high, *low], default_level=2)
    patient = msgspec.structs.replace(CONFIG.queue, timeout_s=0.0, request_timeout_s=0.0)
    config = msgspec.structs.replace(CONFIG, queue=patient)
    waits = {}
    for name in ("priority", "lqs"):
        run = play(trace, Policy.named(name, config), DEVICES)
        starts = [(run.started_ns[i] - trace.arrival_ns[i]) / 1e9 for i in range(len(trace)) if trace.level[i] == 4]
        waits[name] = max(starts)
    step_s = CONFIG.queue.aging_step_s
    assert waits["lqs"] < waits["priority"]
    assert waits["lqs"] < 4 * step_s + 60


def test_two_keys_share_by_tokens_while_both_wait():
    """G16: one that sends ten times more gets no more than the other."""
    greedy = [Item(0.0, 50, 20, key="greedy") for _ in range(90)]
    modest = [Item(0.001, 50, 20, key="modest") for _ in range(9)]
    run = played(make_trace([*greedy, *modest], default_level=2), "lqs")
    done = sorted(range(99), key=lambda number: run.started_ns[number])
    modest_key = run.trace.keys.index("modest")
    among_first = [run.trace.key[number] == modest_key for number in done[:22]]
    assert 8 <= sum(among_first) <= 9


def test_capacity_is_what_can_be_served_and_load_is_measured_by_it():
    trace = generate("poisson requests=2000 prompt=100 answer=20", seed=2)
    capacity = capacity_of(trace, DEVICES)
    # Of a step of 4 decodes: (5 + 4 x 5) ms and 4 tokens; a prompt is 99 ms and its own token.
    assert capacity == pytest.approx(1 / (0.099 + 20 * 0.005 + 20 * 0.005 / 4), rel=0.05)
    calm, crowded = (by_name(played(trace.at_rate(load * capacity), "lqs"))["all"] for load in (0.5, 1.5))
    assert calm.num_unserved == 0
    assert crowded.num_unserved > 0
    assert crowded.first_token(0.5) > 5 * calm.first_token(0.5)


def test_twice_the_device_slots_serve_twice_as_much():
    trace = generate("poisson requests=2000", seed=2)
    two = Devices(2, DEVICES.cost, SHAPE)
    assert capacity_of(trace, two) == pytest.approx(2 * capacity_of(trace, DEVICES), rel=0.05)


def test_whoever_looks_is_told_how_far_it_is():
    trace = generate("poisson requests=120 prompt=2 answer=1 rate=1000", seed=2)
    seen: list[tuple[int, int]] = []
    play(trace, Policy.named("fifo", CONFIG), DEVICES, look=lambda *far: seen.append(far), look_every=50)
    assert seen == [(50, 120), (100, 120)]


def test_groups_count_what_was_good_and_what_was_not():
    trace = make_trace(
        [Item(0.0, 10, 3, level=0, key="a"), Item(0.0, 10, 3, level=2, key="b"), Item(1.0, 5000, 3, level=2, key="b")],
        default_level=2,
    )
    groups = by_name(played(trace, "lqs"))
    assert list(groups) == ["all", "critical", "normal", "short", "long", "key a", "key b"]
    assert [group.num for group in groups.values()] == [3, 1, 2, 2, 1, 1, 2]
    assert [group.num_good for group in groups.values()] == [2, 1, 1, 2, 0, 1, 1]
    assert groups["normal"].unserved == {"too long": 1}
    assert groups["all"].goodput == pytest.approx(2 / groups["all"].span_s)
    strict = {group.name: group for group in groups_of(played(trace, "lqs"), CONFIG.queue, Slo(2.0, 0.001))}
    assert strict["all"].num_good == 0


def test_the_table_and_the_rows_say_the_same():
    runs = [played(burst(), name) for name in ("fifo", "lqs")]
    groups = [group for run in runs for group in groups_of(run, CONFIG.queue, SLO)]
    lines = list(table(groups))
    assert len(lines) == 1 + len(groups)
    assert lines[0].startswith("policy")
    found = {row["what"]: row for row in rows(groups, "load 1")}
    own = found["load 1, lqs, critical: TTFT P99"]
    theirs = found["load 1, fifo, critical: TTFT P99"]
    assert own["peer"] == "fifo"
    assert own["peer_value"] == theirs["value"]
    assert own["ratio"] == pytest.approx(own["value"] / theirs["value"])
    assert theirs["peer"] is None
    assert set(own) == {"goal", "what", "value", "unit", "peer", "peer_value", "ratio", "pass", "runs"}


def test_the_drawings_show_every_class_and_policy():
    runs = [played(burst(), name) for name in ("fifo", "lqs")]
    groups = [group for run in runs for group in groups_of(run, CONFIG.queue, SLO)]
    drawn = list(bars(groups))
    assert sum(line.startswith("critical") for line in drawn) == 2
    under_fifo, under_lqs = (line.partition("|")[2] for line in drawn if line.startswith("critical"))
    assert under_lqs.index("-") < under_fifo.index("-")
    picture = svg([[Panel(f"{run.policy}", run) for run in runs]], LEVELS)
    assert picture.count("<polyline") == 4
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_run_in_which_nothing_was_served_is_drawn_too():
    trace = make_trace([Item(0.0, 5000, 1), Item(1.0, 5000, 1)], default_level=0)
    run = played(trace, "lqs")
    groups = groups_of(run, CONFIG.queue, SLO)
    assert list(bars(groups)) == []
    assert "-" in list(table(groups))[1]
    assert "<polyline" not in svg([[Panel("x", run)]], LEVELS)
    assert all(row["value"] is None for row in rows(groups, "x") if "TTFT" in row["what"])


def test_short_requests_keep_their_share_of_the_sequences_from_long_ones():
    """S16: of one class, with lanes the P99 of short requests falls by over 80 %; strict order knows none."""
    long = [Item(at_s / 4, 700, 20) for at_s in range(80)]
    short = [Item(0.1 + at_s / 4, 10, 5) for at_s in range(80)]
    trace = make_trace([*long, *short], default_level=2)
    # Nobody between the two bounds: there the border follows the load, and lets them be short.
    queue = msgspec.structs.replace(CONFIG.queue, short_tokens_max=64, long_tokens_min=256)
    config = msgspec.structs.replace(CONFIG, queue=queue)
    runs = (play(trace, Policy.named(name, config), DEVICES) for name in ("priority", "lqs"))
    under_strict, under_lqs = (
        next(group for group in groups_of(run, queue, SLO) if group.name == "short") for run in runs
    )
    assert under_lqs.num_unserved == 0
    assert under_lqs.first_token(0.99) < 0.2 * under_strict.first_token(0.99)
