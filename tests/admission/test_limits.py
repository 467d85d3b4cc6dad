"""Limits at the door: charged in two stages, told in words, settled by what was computed, never leaked."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from lqs._core import Finish
from lqs.admission.gate import Gate
from lqs.admission.limits import Limiters
from lqs.admission.prompts import Prompts
from lqs.config import Config, PromptsConfig
from lqs.errors import BadRequest, LimitTooSmall, LqsError, PromptTooLong, RequestRefused
from lqs.request import NS_PER_S, PromptSource, Request, RequestState, Tenant
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load
from tests.admission.parts import OneModel, a_request, text
from tests.api.harness import until
from tests.scheduling.parts import Told

S = NS_PER_S
MS = 1_000_000
ANN = Tenant("ann", "normal", 1, 2, 2)
BOB = Tenant("bob", "free", 2, 3, 3)


class House:
    """A gate over the real core, with limits whose clock the test turns."""

    def __init__(self, limits: dict[str, dict[str, Any]], *, n_ctx: int = 1000, **flags: Any) -> None:
        self.now_ns = 1_000 * S
        self.is_busy = False
        self.config = self.configured(limits, **flags)
        self.core = make_scheduler(self.config, [1.0] * 8)
        self.core.add_device_slot(kv_tokens=100_000, num_sequences=32)
        self.seen = Told()
        self.desk = Desk(
            self.core, self.seen, door=make_door(self.config), outlook=make_outlook(self.config, self.core)
        )
        self.models = OneModel()
        self.models.served.n_ctx = n_ctx
        self.prompts = Prompts(PromptsConfig(threads=1))
        self.limits = Limiters(
            self.config, is_load_high=lambda: self.is_busy, clock=lambda: self.now_ns, rng=random.Random(1)
        )
        self.gate = Gate(
            self.config,
            desk=self.desk,
            models=self.models,  # type: ignore[arg-type]
            prompts=self.prompts,
            limits=self.limits,
        )
        self.at_start = self.shown()

    def configured(self, limits: dict[str, dict[str, Any]], **flags: Any) -> Config:
        return load(None, None, {"engine.parallel": 32} | flags | {f"limits.{name}": of for name, of in limits.items()})

    async def ask(self, num_bytes: int = 4, source: PromptSource | None = None, **given: Any) -> Request:
        request = a_request(**({"tenant": ANN, "arrival_ns": time.monotonic_ns()} | given))
        await self.gate.admit(request, source or text("x" * num_bytes), Told())
        return request

    def come(self, num_bytes: int = 4, **given: Any) -> Request:
        return asyncio.run(self.ask(num_bytes, **given))

    def passes(self, num_bytes: int = 4, **given: Any) -> bool:
        """Whether it comes in; that its limits refuse it is the only other answer."""
        try:
            self.come(num_bytes, **given)
        except RequestRefused as refusal:
            if refusal.reason != "rate_limit_exceeded":
                raise
            return False
        return True

    def run(self, finish: int = Finish.FINISH_STOP, **facts: int) -> None:
        """Let everything that waits run and end so."""
        self.core.round(time.monotonic_ns())
        for handle in self.core.take(0):
            self.core.finish(handle, finish, **facts)
        self.core.round(time.monotonic_ns())
        self.desk.drain_events()

    def shown(self, tenant: Tenant = ANN) -> dict[str, str]:
        """What a client is told of its limits."""
        return self.limits.headers(a_request(tenant=tenant))

    def left(self, unit: str = "requests", tenant: Tenant = ANN) -> int:
        return int(self.shown(tenant)[f"x-ratelimit-remaining-{unit}"])


def refused(house: House, num_bytes: int = 4, **given: Any) -> LqsError:
    with pytest.raises(LqsError) as caught:
        house.come(num_bytes, **given)
    return caught.value


def bucket(**other: Any) -> dict[str, dict[str, Any]]:
    return {"five": {"of": "requests", "amount": 2, "period_s": 1.0, "burst": 5} | other}


def calls(house: House, num: int, apart_ns: int, pass_ns: int) -> list[bool]:
    passed = []
    for _ in range(num):
        passed.append(house.passes())
        house.now_ns += apart_ns + (pass_ns if passed[-1] else 0)
    return passed


def test_the_figures_of_a_bucket_of_five_at_two_a_second() -> None:
    """S3, at the door: 5 of 20 at once; 6 of 8 after 3 s, not 6 and 7; 18 of 20, not 14 and 17."""
    house = House(bucket())
    assert calls(house, 20, 0, 0) == [True] * 5 + [False] * 15
    house.now_ns += 3 * S
    assert house.left() == 5
    assert calls(house, 8, 50 * MS, 50 * MS) == [True] * 6 + [False] * 2
    house.now_ns += 60 * S
    passed = calls(house, 20, 300 * MS, 50 * MS)
    assert [number for number, has_passed in enumerate(passed) if not has_passed] == [14, 17]


def test_a_refusal_names_the_limit_and_the_time_and_retrying_then_succeeds() -> None:
    """B40: Retry-After is a whole number from the true wait."""
    house = House({"ten_a_minute": {"of": "requests", "amount": 10, "kind": "fixed_window"}})
    house.now_ns = 1_000 * 60 * S + 17 * S
    assert all(house.passes() for _ in range(10))
    error = refused(house)
    assert (error.status, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert error.message == (
        "The limit ten_a_minute (10 requests in 1m0s for each key) is used up; this one could pass in 43s."
    )
    assert 43 <= int(error.headers["Retry-After"]) <= 54
    assert int(error.headers["retry-after-ms"]) >= 43_000
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.headers["x-ratelimit-reset-requests"] == "43s"
    house.now_ns += int(error.headers["Retry-After"]) * S
    assert house.passes()


@pytest.mark.parametrize(
    "limit",
    [
        {"of": "requests", "amount": 3},
        {"of": "requests", "amount": 3, "kind": "sliding_window"},
        {"of": "requests", "amount": 3, "kind": "fixed_window"},
        {"of": "tokens", "amount": 40},
        {"of": "tokens", "amount": 40, "kind": "sliding_window"},
        {"of": "tokens", "amount": 40, "kind": "fixed_window"},
        {"of": "requests", "amount": 3, "kind": "leaky_bucket", "burst": 1},
    ],
)
def test_retrying_when_told_succeeds_for_every_kind(limit: dict[str, Any]) -> None:
    """B40: requests a minute, tokens a minute, of every kind."""
    house = House({"it": limit})
    while house.passes(4, max_tokens=8):
        house.now_ns += S
    error = refused(house, 4, max_tokens=8)
    told_s = int(error.headers["Retry-After"])
    assert told_s >= 1
    house.now_ns += told_s * S
    assert house.passes(4, max_tokens=8)


def test_the_refused_do_not_all_return_together() -> None:
    """B40: the values spread a little, and none is too small."""
    house = House({"it": {"of": "requests", "amount": 1, "period_s": 40.0}})
    house.come()
    told = {int(refused(house).headers["retry-after-ms"]) for _ in range(20)}
    assert len(told) > 10
    assert min(told) >= 40_000
    assert max(told) <= 50_000


def test_of_five_at_once_with_80_tokens_each_exactly_one_passes() -> None:
    """B39: 100 tokens a minute; all five are at the door before any of them has its prompt."""
    limits = {"tpm": {"of": "tokens", "amount": 100}, "rpm": {"of": "requests", "amount": 500}}
    house = House(limits)

    async def together() -> list[Any]:
        return await asyncio.gather(*(house.ask(10, max_tokens=70) for _ in range(5)), return_exceptions=True)

    answers = asyncio.run(together())
    refusals = [answer for answer in answers if isinstance(answer, RequestRefused)]
    assert [answer.reason for answer in refusals] == ["rate_limit_exceeded"] * 4
    assert all("tpm" in answer.message for answer in refusals)
    # The refused cost nothing, of neither limit.
    assert (house.left("requests"), house.left("tokens")) == (499, 20)
    house.run(num_completion_tokens=5, assigned_ns=S, finished_ns=2 * S)
    assert house.left("tokens") == 85


def test_windows_of_tokens_and_of_requests_do_not_tangle() -> None:
    """B39: at 59.9 s and 60.1 s; each window recovers at its own time."""
    house = House(
        {
            "tpm": {"of": "tokens", "amount": 100, "kind": "sliding_window"},
            "rpm": {"of": "requests", "amount": 3, "period_s": 10.0, "kind": "fixed_window"},
        }
    )
    house.now_ns = 60_000 * S - 100 * MS
    assert house.passes(10, max_tokens=70)
    house.now_ns += 200 * MS
    error = refused(house, 10, max_tokens=70)
    assert "tpm" in error.message
    assert house.shown()["x-ratelimit-reset-requests"] == "0s"
    assert [house.passes(1, max_tokens=1) for _ in range(4)] == [True, True, True, False]
    assert "rpm" in refused(house, 1, max_tokens=1).message
    house.now_ns += 10 * S
    assert house.passes(1, max_tokens=1)
    house.now_ns += 49 * S + 800 * MS
    assert house.passes(10, max_tokens=70)


def test_what_can_never_pass_is_told_so_at_once_and_without_a_time() -> None:
    """B39: max_tokens 10000 under a limit of 100 is a 4xx, not a 429 for ever."""
    house = House({"tpm": {"of": "tokens", "amount": 100}}, n_ctx=20_000)
    rendered: list[int] = []
    source = PromptSource(render=lambda: rendered.append(1) or [])
    error = refused(house, max_tokens=10_000, source=source)
    assert isinstance(error, LimitTooSmall)
    assert (error.status, error.code, error.headers["x-lqs-reason"]) == (400, "limit_too_small", "limit_too_small")
    assert error.headers["x-should-retry"] == "false"
    assert "Retry-After" not in error.headers
    assert "10001 tokens" in error.message
    assert "tpm (100 tokens in 1m0s for each key)" in error.message
    # Before any work; and a prompt that is too long by itself, once it is known.
    assert rendered == []
    assert refused(house, 100, max_tokens=1).code == "limit_too_small"
    assert house.shown() == house.at_start


def test_who_asks_for_no_length_gets_what_its_limits_have() -> None:
    house = House({"tpm": {"of": "tokens", "amount": 100}})
    request = house.come(30)
    assert request.max_tokens_granted == 70
    assert house.models.served.loaded.worked[-1]["max_tokens"] == 70
    assert House({"rpm": {"of": "requests", "amount": 100}}).come(30).max_tokens_granted == 970


def test_tokens_that_are_used_up_refuse_before_the_prompt_is_made() -> None:
    house = House({"tpm": {"of": "tokens", "amount": 100}})
    house.come(50, max_tokens=50)
    rendered: list[int] = []
    error = refused(house, source=PromptSource(render=lambda: rendered.append(1) or []), max_tokens=20)
    assert (error.reason, rendered) == ("rate_limit_exceeded", [])


ALL_KINDS = {
    "rpm": {"of": "requests", "amount": 100, "kind": "sliding_window"},
    "smooth": {"of": "requests", "amount": 1_000_000, "kind": "leaky_bucket"},
    "tpm": {"of": "tokens", "amount": 1000},
    "tph": {"of": "tokens", "amount": 5000, "kind": "fixed_window", "period_s": 3600.0, "per": "tier"},
    "work": {"of": "compute_s", "amount": 60, "per": "model"},
    "at_once": {"of": "parallel", "amount": 10, "per": "server"},
}


def all_left(house: House) -> dict[str, Any]:
    """Every limiter there is: capacity, remaining, reset."""
    table = house.limits._table
    return {str(key): table.core.state(number, house.now_ns) for key, number in sorted(table._numbers.items())}


def broken() -> list[Any]:
    raise BadRequest("no")


@pytest.mark.parametrize(
    "end",
    [
        lambda house: house.run(Finish.FINISH_CANCELLED),
        lambda house: house.run(Finish.FINISH_DEVICE),
        lambda house: house.run(Finish.FINISH_ERROR, assigned_ns=S, finished_ns=2 * S),
    ],
    ids=["cancelled", "device", "error"],
)
def test_what_was_started_and_gave_nothing_costs_nothing(end: Callable[[House], None]) -> None:
    house = House(ALL_KINDS)
    house.shown()
    start = all_left(house)
    house.come(20, max_tokens=80)
    assert all_left(house) != start
    end(house)
    assert all_left(house) == start


def test_who_is_sent_away_or_leaves_costs_nothing() -> None:
    """B39: a request that is refused, aborted or fails: at its prompt, at the queue, in the queue, at stage two."""
    house = House(ALL_KINDS | {"small": {"of": "tokens", "amount": 500}}, **{"queue.caps": [0], "engine.parallel": 1})
    house.shown()
    start = all_left(house)
    with pytest.raises(BadRequest):
        house.come(source=PromptSource(render=broken))
    with pytest.raises(PromptTooLong):
        house.come(source=PromptSource(ids=[1] * 1000))
    assert refused(house, 450, max_tokens=51).reason == "limit_too_small"
    assert all_left(house) == start

    async def leave() -> None:
        task = asyncio.create_task(house.ask())
        await asyncio.sleep(0)
        assert all_left(house) != start
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert all_left(house) == start
    # In the queue: by its client, and because it waited too long.
    request = house.come()
    assert request.charge is not None
    house.desk.cancel(request)
    house.core.round(time.monotonic_ns())
    house.desk.drain_events()
    assert request.state == RequestState.CANCELLED
    assert all_left(house) == start
    request = house.come(queue_timeout_s=0.5)
    house.core.round(request.expire_ns + 1)
    house.desk.drain_events()
    assert request.reason == "queue_timeout"
    assert all_left(house) == start


def test_a_full_queue_costs_nothing() -> None:
    house = House({"rpm": ALL_KINDS["rpm"], "tpm": ALL_KINDS["tpm"]}, **{"queue.caps": [1]})
    for _ in range(33):
        house.come(max_tokens=1)
    start = all_left(house)
    error = refused(house, max_tokens=1)
    assert error.reason == "queue_full"
    # Also those who are refused for another reason are told how their limits stand.
    assert error.headers["x-ratelimit-remaining-tokens"] == str(1000 - 33 * 5)
    assert all_left(house) == start


@pytest.mark.parametrize("seed", range(5))
def test_after_any_story_every_limit_is_back_at_its_start(seed: int) -> None:
    """Requests of three keys come, are refused, leave, expire, fail, finish short or long, in any order; none leaks."""
    draw = random.Random(seed)
    house = House(ALL_KINDS | {"small": {"of": "tokens", "amount": 300, "per": "tier"}}, **{"queue.caps": [5]})
    tenants = [ANN, BOB, Tenant("carl", "normal", 3, 2, 2)]
    for tenant in tenants:
        house.shown(tenant)
    start = all_left(house)
    told: set[str] = set()
    waiting: list[Request] = []
    for _ in range(300):
        house.now_ns += draw.randrange(10**9)
        house.is_busy = draw.random() < 0.3
        kind = draw.random()
        source = PromptSource(render=broken) if kind < 0.1 else None
        try:
            given = {"max_tokens": draw.choice([None, 1, 20, 400]), "tenant": draw.choice(tenants)}
            waiting.append(house.come(draw.randrange(1, 60), source=source, **given))
        except LqsError as error:
            told.add(str(error.code))
        if waiting and kind > 0.8:
            house.desk.cancel(waiting.pop(draw.randrange(len(waiting))))
        if kind < 0.4:
            finish = draw.choice([1, 2, 3, 4, 5, 6])
            made, ran_ns = draw.randrange(20), draw.randrange(3 * S)
            house.run(finish, num_completion_tokens=made, assigned_ns=S, finished_ns=S + ran_ns)
            waiting.clear()
    house.run(num_completion_tokens=1, assigned_ns=S, finished_ns=2 * S)
    assert house.desk.num_inside == 0
    assert told >= {"rate_limit_exceeded", "limit_too_small", "invalid_value"}
    at_once = [state for name, state in all_left(house).items() if "at_once" in name]
    assert at_once == [(10, 10, 0)]
    house.now_ns += 2 * 3600 * S
    assert all_left(house) == start


@pytest.mark.parametrize("finish", [Finish.FINISH_STOP, Finish.FINISH_CANCELLED, Finish.FINISH_TIMEOUT])
def test_what_was_computed_is_paid_by_the_token_and_by_the_second(finish: int) -> None:
    """Finished or cut off: prompt and what was made; its time on the device; one request."""
    house = House(ALL_KINDS)
    house.come(20, max_tokens=80)
    assert house.left("tokens") == 900
    house.run(finish, num_completion_tokens=7, assigned_ns=10 * S, finished_ns=13 * S + 500 * MS)
    left = {name: state[1] for name, state in all_left(house).items()}
    assert left == {
        "('at_once', '')": 10,
        "('rpm', 'ann')": 99,
        "('smooth', 'ann')": 999_999,
        "('tph', 'normal')": 4973,
        "('tpm', 'ann')": 973,
        "('work', 'm')": 56_500_000,
    }


def test_a_limit_of_compute_counts_seconds_on_the_device_and_takes_debts() -> None:
    """S5: one limiter counts compute seconds, neither requests nor tokens."""
    house = House({"work": {"of": "compute_s", "amount": 10}})
    house.come(20, max_tokens=80)
    # Nothing is known yet, so each is charged five seconds: a token of a slow machine takes 50 ms.
    assert [house.passes(20, max_tokens=80) for _ in range(2)] == [True, False]
    house.run(num_completion_tokens=80, assigned_ns=S, finished_ns=int(1.5 * S))
    # Now a token is known to take 5 ms: another like it half a second.
    assert [house.passes(20, max_tokens=80) for _ in range(19)] == [True] * 18 + [False]
    # All of them take 1.5 s: with the second that went before a debt of 18 s, which 10 s in a minute pay back in 108 s.
    house.run(num_completion_tokens=80, assigned_ns=S, finished_ns=int(2.5 * S))
    error = refused(house, 20, max_tokens=80)
    assert "10 seconds of compute in 1m0s" in error.message
    assert int(error.headers["Retry-After"]) >= 108
    house.now_ns += 107 * S
    assert not house.passes(1, max_tokens=1)
    house.now_ns += 14 * S
    assert house.passes(1, max_tokens=1)


def test_parallel_requests_are_bounded_until_one_ends() -> None:
    """B40: the key's own concurrency."""
    house = House({"two": {"of": "parallel", "amount": 2}})
    assert [house.passes() for _ in range(3)] == [True, True, False]
    error = refused(house)
    assert error.message == "The limit two (2 at once for each key) is used up; wait until one has ended."
    assert 5 <= int(error.headers["Retry-After"]) <= 7
    assert house.passes(tenant=BOB)
    house.run(num_completion_tokens=1)
    assert [house.passes() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("limit", "shared"),
    [
        ({"per": "key"}, [False, False, False]),
        ({"per": "tier"}, [False, False, True]),
        ({"per": "model"}, [True, False, True]),
        ({"per": "route"}, [True, True, True]),
        ({"per": "server"}, [True, True, True]),
        ({"per": "server", "tiers": ["free"]}, [False, False, False]),
        ({"per": "server", "models": ["m"]}, [True, False, True]),
        ({"per": "server", "routes": ["chat"]}, [False, False, False]),
    ],
)
def test_a_limit_is_shared_by_whom_it_says(limit: dict[str, Any], shared: list[bool]) -> None:
    """S5: per key, tier, model, route or server: after one of ann's, who is refused?"""
    house = House({"one": {"of": "requests", "amount": 1} | limit})
    assert house.passes()
    others = [
        {"tenant": BOB},
        {"tenant": BOB, "model": "n"},
        {"tenant": Tenant("carl", "normal", 3, 2, 2)},
    ]
    refusals = []
    for given in others:
        request = a_request(**given)
        try:
            house.limits.enter(request, num_tokens_min=1, patience_ns=S)
        except RequestRefused:
            refusals.append(True)
        else:
            refusals.append(False)
            house.limits.refund(request)
    assert refusals == shared


def test_a_leaky_bucket_lets_requests_through_one_by_one() -> None:
    """S4: they come together and reach the scheduler 20 ms apart."""
    house = House({"smooth": {"of": "requests", "amount": 50, "period_s": 1.0, "burst": 5, "kind": "leaky_bucket"}})
    began_ns = time.monotonic_ns()
    real = Limiters(house.config)
    house.gate._limits = real
    house.desk.when_over(real.over)
    arrived_ns = []

    async def one() -> None:
        await house.ask()
        arrived_ns.append(time.monotonic_ns() - began_ns)

    async def together() -> list[Any]:
        return await asyncio.gather(*(one() for _ in range(7)), return_exceptions=True)

    answers = asyncio.run(together())
    assert sum(isinstance(answer, RequestRefused) for answer in answers) == 2
    assert [arrived >= 20 * MS * place for place, arrived in enumerate(arrived_ns)] == [True] * 5


def test_a_turn_beyond_what_a_request_may_wait_is_a_refusal_with_the_time() -> None:
    house = House({"smooth": {"of": "requests", "amount": 1, "period_s": 10.0, "burst": 9, "kind": "leaky_bucket"}})
    house.come()
    error = refused(house, queue_timeout_s=3)
    assert error.reason == "rate_limit_exceeded"
    assert 7 <= int(error.headers["Retry-After"]) <= 9
    house.now_ns += int(error.headers["Retry-After"]) * S
    assert house.left() == 8


def test_who_waits_for_its_turn_may_leave() -> None:
    house = House({"smooth": {"of": "requests", "amount": 1, "period_s": 10.0, "burst": 9, "kind": "leaky_bucket"}})
    house.come()

    async def leave() -> None:
        task = asyncio.create_task(house.ask())
        await until(lambda: len(house.models.served.loaded.worked) == 2)
        assert house.left() == 7
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert house.left() == 8
    assert house.desk.num_inside == 1


def test_who_waits_for_its_turn_when_a_drain_ends_is_sent_away_with_a_reason() -> None:
    house = House({"smooth": {"of": "requests", "amount": 1, "period_s": 10.0, "burst": 9, "kind": "leaky_bucket"}})
    house.come()

    async def shut() -> None:
        task = asyncio.create_task(house.ask())
        await until(lambda: len(house.models.served.loaded.worked) == 2)
        house.gate.drain(time.monotonic_ns())
        house.gate.shut()
        with pytest.raises(RequestRefused) as caught:
            await task
        assert caught.value.reason == "draining"

    asyncio.run(shut())
    assert house.left() == 8


def test_the_entry_is_narrowed_only_while_the_load_is_high() -> None:
    """S35: bucket 100, 10 a second, while the load is high and only then."""
    house = House({}, **{"queue.caps": [1000], "queue.total": 1000})

    def num_let_in(num: int) -> int:
        return sum(house.passes(max_tokens=1) for _ in range(num))

    assert num_let_in(150) == 150
    house.is_busy = True
    assert num_let_in(150) == 100
    error = refused(house)
    assert (error.status, error.reason) == (429, "rate_limit_exceeded")
    assert error.message.startswith("The load is high and only 10 requests a second are let in;")
    assert int(error.headers["Retry-After"]) >= 1
    house.now_ns += 3 * S
    assert num_let_in(50) == 30
    house.is_busy = False
    assert num_let_in(150) == 150
    house.is_busy = True
    assert num_let_in(1) == 0
    assert house.limits.figures()["entry"] == (50 + 1 + 20 + 1, 0)
    house.now_ns += 20 * S
    assert num_let_in(150) == 100


def test_the_load_is_the_doors_own() -> None:
    """S35: high is more than 0.80 of the queue, here 81 of 100 waiting; below it nobody is counted."""
    flags = {"queue.caps": [1000], "queue.total": 100, "queue.entry_burst": 3, "queue.entry_per_s": 0.01}
    house = House({}, **flags)

    def is_load_high() -> bool:
        return house.desk.entrance.load() > house.config.queue.high_load_at

    house.limits = Limiters(house.config, is_load_high=is_load_high)
    house.gate = Gate(
        house.config,
        desk=house.desk,
        models=house.models,  # type: ignore[arg-type]
        prompts=house.prompts,
        limits=house.limits,
    )
    assert all(house.passes(max_tokens=1) for _ in range(32))
    house.core.round(time.monotonic_ns())
    house.desk.drain_events()
    assert all(house.passes(max_tokens=1) for _ in range(81))
    assert is_load_high()
    assert [house.passes(max_tokens=1) for _ in range(5)] == [True] * 3 + [False] * 2
    for _ in range(4):
        house.run(num_completion_tokens=1)
    assert not is_load_high()
    assert all(house.passes(max_tokens=1) for _ in range(10))


def test_the_entry_may_be_left_wide() -> None:
    house = House({}, **{"queue.entry_per_s": 0, "queue.caps": [200]})
    house.is_busy = True
    assert sum(house.passes(max_tokens=1) for _ in range(150)) == 150


def test_a_reload_keeps_what_did_not_change_and_takes_what_did() -> None:
    limits = {
        "same": {"of": "requests", "amount": 10},
        "other": {"of": "tokens", "amount": 1000},
        "gone": {"of": "tokens", "amount": 1000, "per": "server"},
        "at_once": {"of": "parallel", "amount": 3, "per": "server"},
    }
    house = House(limits)
    waiting = house.come(50, max_tokens=50)
    changed = limits | {
        "other": {"of": "tokens", "amount": 2000},
        "at_once": {"of": "parallel", "amount": 1, "per": "server"},
        "new": {"of": "requests", "amount": 7},
    }
    del changed["gone"]
    house.gate.reload(house.configured(changed, **{"queue.entry_burst": 5}))
    assert (house.left("requests"), house.left("tokens")) == (9, 2000)
    assert house.limits._table.remaining("at_once") == 0
    assert set(house.limits.figures()) == {"same", "other", "at_once", "new", "entry"}
    assert house.limits._table.remaining("entry") == 5
    assert "at_once" in refused(house, max_tokens=1).message
    # What was in before ends as it would have, and touches no limit that is not its own.
    house.run(num_completion_tokens=10, assigned_ns=S, finished_ns=2 * S)
    assert waiting.charge is None
    states = {name: state[1] for name, state in all_left(house).items()}
    assert states == {
        "('at_once', '')": 1,
        "('new', 'ann')": 7,
        "('other', 'ann')": 2000,
        "('same', 'ann')": 9,
    }


def test_a_reload_while_a_prompt_is_made_uses_the_new_limits() -> None:
    house = House({"tpm": {"of": "tokens", "amount": 100, "kind": "fixed_window"}})

    async def reload_meanwhile() -> Request:
        task = asyncio.create_task(house.ask(10, max_tokens=5))
        await asyncio.sleep(0)
        house.gate.reload(house.configured({"tpm": {"of": "tokens", "amount": 200, "kind": "fixed_window"}}))
        return await task

    request = asyncio.run(reload_meanwhile())
    assert request.charge is not None
    assert house.left("tokens") == 185


def test_limiters_of_keys_that_are_gone_do_not_stay() -> None:
    house = House({"rpm": {"of": "requests", "amount": 10}})
    for number in range(50):
        assert house.passes(tenant=Tenant(f"k{number}", "normal", 1, 2, 2), max_tokens=1)
    assert len(house.limits._table.core) == 51 + 1
    house.run(num_completion_tokens=1, assigned_ns=S, finished_ns=2 * S)
    house.now_ns += 60 * S
    house.gate.reload(house.config)
    assert len(house.limits._table.core) == 1


def test_clients_see_the_limit_with_the_least_share_left() -> None:
    house = House(
        {
            "day": {"of": "requests", "amount": 100, "period_s": 86_400.0},
            "second": {"of": "requests", "amount": 4, "period_s": 1.0, "kind": "fixed_window"},
            "tpm": {"of": "tokens", "amount": 6000},
        }
    )
    house.come(50, max_tokens=50)
    assert house.shown() == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5900",
        "x-ratelimit-reset-tokens": "1s",
    }
    house.now_ns += S
    assert house.shown()["x-ratelimit-limit-requests"] == "100"
    assert house.shown()["x-ratelimit-reset-requests"] == "14m23s"


def test_an_unknown_model_makes_no_limiter() -> None:
    house = House({"rpm": {"of": "requests", "amount": 10, "per": "model"}})
    for number in range(20):
        assert refused(house, model=f"x{number}").code == "model_not_found"
    assert len(house.limits._table.core) == 2


def test_a_reload_while_a_prompt_is_made_does_not_charge_one_request_by_too_many_limits() -> None:
    """It was charged by 24 limits that are gone when it is charged by 24 others."""

    async def scene() -> None:
        house = House({f"r{n}": {"of": "requests", "amount": 100} for n in range(24)})
        request = a_request(tenant=ANN, arrival_ns=time.monotonic_ns(), max_tokens=2)
        await house.gate.enter(request, request.arrival_ns)
        request.prompt, request.max_tokens_granted = array("i", [1] * 3), 2
        house.gate.reload(house.configured({f"t{n}": {"of": "tokens", "amount": 100} for n in range(24)}))
        house.limits.charge_work(request, patience_ns=S)
        charged = house.limits.figures()
        house.limits.refund(request)
        house.desk.leave(request)
        assert set(charged) == {f"t{n}" for n in range(24)} | {"entry"}
        assert house.desk.num_inside == 0

    asyncio.run(scene())
