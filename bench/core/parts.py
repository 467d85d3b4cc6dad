"""The measurements: each function returns the rows of one part."""

import queue
import random
import statistics
import time
from array import array
from functools import partial

from lqs import _core
from lqs._core import Backlog, Charge, DoorSays, Ledger, LimitKind, Limits, Scheduler, Work
from lqs.admission.classes import Classes
from lqs.admission.limits import Limiters
from lqs.config import Config, QueueConfig
from lqs.config_limits import LimitConfig
from lqs.request import Request, Tenant
from lqs.scheduling.core import make_door

from . import peers
from .measure import Row, alone, beside, in_turns

_IN = int(DoorSays.DOOR_IN)
DEPTHS = (1_000, 100_000, 1_000_000)


def rings(n: int, rounds: int) -> list[Row]:
    """Put + get from Python, beside every queue that Python has."""
    runs = in_turns(
        {
            "ring": (peers.ring(n), n),
            "queue.Queue": (peers.blocking(queue.Queue, n // 4), n // 4),
            "asyncio.Queue": (peers.awaited(n // 4), n // 4),
            "queue.SimpleQueue": (peers.blocking(queue.SimpleQueue, n), n),
            "collections.deque": (peers.plain_deque(n), n),
        },
        rounds,
    )
    bars = {"queue.Queue": 15.0, "asyncio.Queue": 7.0, "queue.SimpleQueue": None, "collections.deque": None}
    return [
        beside(runs, peer, what="ring put + get from Python", goal="G6" if bar else None, at_least=bar)
        for peer, bar in bars.items()
    ]


def filled_backlog(depth: int, *, with_deadlines: bool) -> Backlog:
    """A backlog over 8 levels at this depth."""
    draw = random.Random(depth)
    backlog = Backlog(capacity=depth, aging_step_ns=60 * 10**9)
    for index in range(depth):
        deadline_ns = draw.randrange(1, 10**9) if with_deadlines else 0
        backlog.push(index, level=draw.randrange(8), arrival_ns=index, deadline_ns=deadline_ns)
    return backlog


def backlog(n: int, rounds: int) -> list[Row]:
    """Priority put + get, native, beside Python's priority queues at the same depth."""
    rows = []
    medians: dict[str, dict[int, float]] = {"FIFO levels": {}, "deadline order": {}}
    for depth in DEPTHS:
        fifo = filled_backlog(depth, with_deadlines=False)
        heap = filled_backlog(depth, with_deadlines=True)
        slow = max(n // 20, 2_000)
        runs = in_turns(
            {
                "FIFO levels": (partial(fifo.cycle, n), n),
                "deadline order": (partial(heap.cycle, n, 10**9), n),
                "queue.PriorityQueue": (peers.priority(depth, slow), slow),
                "asyncio.PriorityQueue": (peers.awaited_priority(depth, slow), slow),
            },
            rounds,
        )
        for order, at_depth in medians.items():
            at_depth[depth] = statistics.median(runs[order])
            own = {order: runs[order], **runs}
            for peer in ("queue.PriorityQueue", "asyncio.PriorityQueue"):
                is_goal = (order, depth, peer) == ("FIFO levels", DEPTHS[-1], "queue.PriorityQueue")
                what = f"priority put + get, {order}, {depth:,} waiting"
                rows.append(
                    beside(own, peer, what=what, goal="G7" if is_goal else None, at_least=15.0 if is_goal else None)
                )
    for order, limit in (("FIFO levels", 2.5), ("deadline order", 7.0)):
        deep, shallow = medians[order][DEPTHS[-1]], medians[order][DEPTHS[0]]
        ratio = deep / shallow
        what = f"priority put + get, {order}, 1e6 waiting beside 1e3"
        rows.append(Row("G7", what, deep, "ns", "itself at 1e3", shallow, ratio, ratio <= limit))
    return rows


def ledger(n: int, rounds: int) -> list[Row]:
    """One reserve, grow and settle."""
    one = Ledger(capacities=[10**6], num_sequences=[256])
    return [
        alone(in_turns({"": (partial(one.cycle, n), n)}, rounds)[""], what="ledger reserve + grow + settle, native")
    ]


def loaded_scheduler(depth: int, spare: int) -> Scheduler:
    """A scheduler with one running request and `depth` waiting, over 8 levels."""
    scheduler = Scheduler(
        table_capacity=depth + spare,
        level_caps=[depth + spare] * 8,
        total_cap=depth + spare,
        num_lanes=1,
        lane_weights=[1],
        aging_step_ns=60 * 10**9,
    )
    scheduler.add_device_slot(kv_tokens=10**6, num_sequences=1)
    work, sink = Work(), object()
    for number in range(depth):
        scheduler.try_enter(number % 8)
        scheduler.submit(
            work, sink, level=number % 8, arrival_ns=number, expire_ns=10**15 - number, footprint_tokens=100
        )
    while scheduler.round(depth) == depth:
        pass
    scheduler.poll()
    return scheduler


def decisions(rounds: int) -> list[Row]:
    """One scheduling decision: a round that settles one request and starts the next."""
    rows = []
    for depth in DEPTHS:
        scheduler = loaded_scheduler(depth, 16)
        drive = _core._Drive(scheduler)
        n = min(depth // (rounds + 1), 5_000)
        runs = []
        for _ in range(rounds):
            begin = time.perf_counter_ns()
            num_starts = drive.decide(n, depth)
            runs.append((time.perf_counter_ns() - begin) / num_starts)
            scheduler.poll()
        rows.append(alone(runs, what=f"one scheduling decision with its settlement, {depth:,} waiting"))
    return rows


def usual_limits() -> tuple[Limits, tuple[int, ...], tuple[int, ...]]:
    """A key's usual limits: those of requests and parallel ones, then those of tokens and compute."""
    limits = Limits()
    per_minute = {"capacity": 1 << 40, "amount": 1 << 30, "period_ns": 60 * 10**9}
    requests = limits.add(LimitKind.TOKEN_BUCKET, unit=0, **per_minute)
    parallel = limits.add(LimitKind.PARALLEL, unit=1, capacity=1 << 40)
    tokens = limits.add(LimitKind.SLIDING_WINDOW, unit=2, **per_minute)
    compute = limits.add(LimitKind.TOKEN_BUCKET, unit=3, is_clamped=True, **per_minute)
    return limits, (requests, parallel), (tokens, compute)


def limiters(n: int, rounds: int) -> list[Row]:
    """Charge and settle from Python: what each request's four limits cost it."""
    limits, first, second = usual_limits()

    def one_by_one() -> None:
        reserve, settle = limits.reserve, limits.settle
        for now_ns in range(0, n * 1000, 1000):
            charge = Charge()
            reserve(charge, first + second, (1, 1, 10, 1), now_ns, 2)
            reserve(charge, second, (0, 0, 30, 300), now_ns)
            settle(charge, (1, 0, 20, 250), now_ns)

    def charged() -> None:
        reserve = limits.reserve
        for now_ns in range(0, n * 1000, 1000):
            reserve(Charge(), first, (1, 1, 0, 0), now_ns)

    runs = in_turns({"both": (one_by_one, n), "charge": (charged, n)}, rounds)
    return [
        alone(runs["charge"], what="charge of two limiters from Python", at_most=1_000.0),
        alone(runs["both"], what="a request's four limits from Python: asked, charged twice, settled"),
    ]


def usual_config(depth: int) -> Config:
    """The same four limits as an operator writes them, and a queue of this depth."""
    of = {"requests": 10**9, "parallel": 10**9, "tokens": 10**9, "compute_s": 10**6}
    queue = QueueConfig(caps=(depth,), total=depth, table_capacity=2 * depth)
    return Config(queue=queue, limits={name: LimitConfig(of=name, amount=amount) for name, amount in of.items()})


def admission(n: int) -> list[Row]:
    """One admission from Python at 1e6 waiting: load, class, limits in both stages, place, lane, submit."""
    scheduler = loaded_scheduler(DEPTHS[-1], n)
    config = usual_config(DEPTHS[-1])
    limits, classes, door = Limiters(config), Classes(config.queue), make_door(config)
    tenant = Tenant("t", "normal", 0, 3, 3)
    work, sink, prompt = Work(), object(), array("i", range(10))
    clock, times = time.perf_counter_ns, []
    for number in range(n):
        # Made just before, as in the server, which parses a request and then admits it.
        request = Request(id="r", tenant=tenant, model="m", arrival_ns=0, max_tokens=20)
        request.prompt, request.max_tokens_granted = prompt, 20
        begin = clock()
        door.look(scheduler)
        classes.assign(request, load=door.load)
        limits.enter(request, num_tokens_min=21, patience_ns=10**10)
        says, *_ = door.enter(request.level, begin, expire_ns=begin + 10**10)
        if says == _IN and scheduler.try_enter(request.level):
            classes.assign_lane(request, 512, scheduler.expected_completion(1, 0, 20, 20))
            limits.charge_work(request, patience_ns=10**10)
            scheduler.submit(
                work, sink, key=0, model=0, level=request.level, lane=0, arrival_ns=begin, expire_ns=begin + 10**10,
                stop_ns=0, deadline_ns=0, num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens_granted, footprint_tokens=request.footprint_tokens,
            )  # fmt: skip
            door.submit(request.level, request.footprint_tokens)
        times.append(float(clock() - begin))
        if number % 1000 == 999:
            scheduler.round(DEPTHS[-1])
    assert scheduler.num_waiting(request.level) + scheduler.num_running > n
    cuts = statistics.quantiles(times, n=100)
    what = "one admission from Python, four limits, 1,000,000 waiting"
    return [
        Row("G8", f"{what}, P50", cuts[49], "ns", passed=cuts[49] <= 2_000),
        Row("G8", f"{what}, P99", cuts[98], "ns", passed=cuts[98] <= 10_000),
    ]


def hand_over(num_steps: int, rounds: int) -> list[Row]:
    """A token of each of 32 sequences per step, from the worker's write to the loop's tuple."""
    num_sequences = 32
    scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, num_lanes=1, lane_weights=[1])
    scheduler.add_device_slot(kv_tokens=10**6, num_sequences=num_sequences)
    for number in range(num_sequences):
        scheduler.try_enter(0)
        scheduler.submit(Work(), number, footprint_tokens=1)
    scheduler.round(0)
    scheduler.poll()
    drive = _core._Drive(scheduler)
    drive.begin()

    def steps() -> None:
        emit, poll = drive.emit_steps, scheduler.poll
        for _ in range(num_steps):
            emit(1, b" token")
            poll()

    runs = in_turns({"": (steps, num_steps * num_sequences)}, rounds)[""]
    steps_done, wakes, _ = drive.figures
    return [
        alone(runs, what="hand-over per token, 32 sequences", goal="G9", at_most=120.0),
        Row("G9", "eventfd writes per step", wakes / steps_done, "wakes", passed=wakes <= steps_done),
    ]


def memory() -> list[Row]:
    """Bytes of the core per waiting request, without its prompt."""
    value = loaded_scheduler(1_000, 0).bytes_per_waiting
    return [Row("G11", "core memory per waiting request, one device slot", value, "B", passed=value <= 256)]
