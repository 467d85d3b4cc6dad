"""The limiters of the config: which of them a request comes under, and what a reload makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lqs._core import LimitKind, Limits
from lqs.config import Config, QueueConfig
from lqs.config_limits import LimitConfig
from lqs.request import NS_PER_S, Request

# The units of the core's limiters, and so the order of a request's costs.
REQUESTS, PARALLEL, TOKENS, COMPUTE_US = range(4)
# How the limit goes by that holds while the load is high.
ENTRY = "entry"

_UNITS = {"requests": REQUESTS, "parallel": PARALLEL, "tokens": TOKENS, "compute_s": COMPUTE_US}
_US_PER_S = 1_000_000
# entry_per_s may have thousandths.
_ENTRY_PERIOD_S = 1_000


# Not a NamedTuple: reading its fields takes twice as long, and each admission reads them.
@dataclass(frozen=True, slots=True)
class Plan:
    """The limiters that one kind of request comes under, by their numbers in the core."""

    at_arrival: tuple[int, ...]  # Of requests and of parallel ones; then those asked only whether they are used up.
    num_charged: int  # How many of these are charged.
    by_work: tuple[int, ...]  # Of tokens and compute.
    tokens_max: int  # What the smallest of tokens has at most; 0: there is none.
    counts_compute: bool
    shown: tuple[tuple[str, tuple[int, ...]], ...]  # Those that clients see, by what they count.
    version: int  # Of the table: another one's numbers may be gone.


class LimitTable:
    """Makes limiters when they are first needed and finds them again.

    There are at most as many as limits times keys, tiers, models or routes. `clock` is in monotonic
    nanoseconds.

    Owner: the event loop.
    """

    def __init__(self, config: Config, clock: Callable[[], int]) -> None:
        self.core = Limits()
        self.config = config
        self.version = 0  # Grows with each reload.
        self._clock = clock
        self._numbers: dict[tuple[str, str], int] = {}  # By the limit's name and whom it is for.
        self._names: dict[int, str] = {}
        self._plans: dict[tuple[str, str, str, str], Plan] = {}
        self.entry = self._make_entry(config.queue)

    def plan(self, request: Request) -> Plan:
        """The limiters that a request comes under."""
        tenant = request.tenant
        kind = (tenant.name, tenant.tier, request.model, request.route)
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = self._make_plan(request)
        return plan

    def reload(self, config: Config) -> None:
        """Take over new limits. One that did not change goes on as it stands, and so does one of
        parallel requests with another amount."""
        old, self.config = self.config, config
        self.version += 1
        self._plans.clear()
        for (name, whom), number in list(self._numbers.items()):
            before, after = old.limits[name], config.limits.get(name)
            if after is not None and after.of == before.of == "parallel" and after.per == before.per:
                self.core.resize(number, after.capacity)
            elif after is None or _counting(after) != _counting(before) or self._is_as_new(before, number):
                self._drop(name, whom)
        if _entry(config.queue) != _entry(old.queue):
            if self.entry is not None:
                self.core.remove(self.entry)
            self.entry = self._make_entry(config.queue)

    def name_of(self, number: int) -> str:
        """The name of the limit that a limiter is of."""
        return self._names.get(number, ENTRY)

    def remaining(self, name: str) -> int | None:
        """What is left of a limit for the whole server; None for any other."""
        number = self.entry if name == ENTRY else self._numbers.get((name, ""))
        return None if number is None else self.core.state(number, self._clock())[1]

    def _make_plan(self, request: Request) -> Plan:
        numbers: dict[str, list[int]] = {of: [] for of in _UNITS}
        tokens_max = []
        for name, limit in self.config.limits.items():
            if _is_meant(limit, request):
                numbers[limit.of].append(self._number(name, limit, _whom(limit, request)))
                if limit.of == "tokens":
                    tokens_max.append(limit.capacity)
        charged = (*numbers["requests"], *numbers["parallel"])
        by_work = (*numbers["tokens"], *numbers["compute_s"])
        shown = tuple((of, tuple(numbers[of])) for of in ("requests", "tokens") if numbers[of])
        return Plan(
            at_arrival=charged + by_work,
            num_charged=len(charged),
            by_work=by_work,
            tokens_max=min(tokens_max, default=0),
            counts_compute=bool(numbers["compute_s"]),
            shown=shown,
            version=self.version,
        )

    def _number(self, name: str, limit: LimitConfig, whom: str) -> int:
        """The limiter of a limit for somebody; made when it is first needed."""
        number = self._numbers.get((name, whom))
        if number is None:
            scale = _US_PER_S if limit.of == "compute_s" else 1
            number = self.core.add(
                LimitKind.PARALLEL if limit.of == "parallel" else LimitKind[limit.kind.upper()],
                capacity=limit.capacity * scale,
                amount=limit.amount * scale,
                period_ns=round(limit.period_s * NS_PER_S),
                unit=_UNITS[limit.of],
                is_clamped=limit.of == "compute_s",
            )
            self._numbers[name, whom] = number
            self._names[number] = name
        return number

    def _make_entry(self, queue: QueueConfig) -> int | None:
        if not queue.entry_per_s:
            return None
        return self.core.add(
            LimitKind.TOKEN_BUCKET,
            capacity=queue.entry_burst,
            amount=max(round(queue.entry_per_s * _ENTRY_PERIOD_S), 1),
            period_ns=_ENTRY_PERIOD_S * NS_PER_S,
            unit=REQUESTS,
        )

    def _is_as_new(self, limit: LimitConfig, number: int) -> bool:
        """Whether one made anew would be the same, so that those of keys that are gone need not stay.

        One of compute may still get a debt.
        """
        capacity, remaining, reset_ns = self.core.state(number, self._clock())
        return limit.of != "compute_s" and remaining == capacity and reset_ns == 0

    def _drop(self, name: str, whom: str) -> None:
        number = self._numbers.pop((name, whom))
        del self._names[number]
        self.core.remove(number)


def _is_meant(limit: LimitConfig, request: Request) -> bool:
    # A model is meant by its full name, or by the one that all its versions have.
    is_model = not limit.models or not {request.model, request.model.partition("@")[0]}.isdisjoint(limit.models)
    asked = ((limit.tiers, request.tenant.tier), (limit.routes, request.route))
    return is_model and all(not chosen or value in chosen for chosen, value in asked)


def _whom(limit: LimitConfig, request: Request) -> str:
    """Who shares one limiter: empty for all."""
    tenant = request.tenant
    shared = {"key": tenant.name, "tier": tenant.tier, "model": request.model, "route": request.route}
    return shared.get(limit.per, "")


def _counting(limit: LimitConfig) -> tuple[object, ...]:
    """All that a limiter's state depends on: to whom it applies may change."""
    return (limit.of, limit.kind, limit.per, limit.amount, limit.burst, limit.period_s)


def _entry(queue: QueueConfig) -> tuple[float, int]:
    return queue.entry_per_s, queue.entry_burst
