"""Which limits a request comes under, what they are charged, and what they say.

A request is charged twice: when it comes, before any work is done for it, by what counts requests;
and when its prompt is known, by what counts tokens and seconds of compute. When it ends it is
settled by what it did take, and if nothing was computed for it all is given back. The arithmetic is
the core's.

The most that a request can take of compute is not known. It is charged its tokens at the pace of those
that its model answered before it, at a slow machine's until one was, and never more than its time limit
or than the limit has; what it took is settled exactly, so a wrong guess is a debt or is given back.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from lqs._core import Charge, LimitSays
from lqs.admission import limit_words
from lqs.admission.limit_table import ENTRY, LimitTable
from lqs.config import Config
from lqs.errors import LimitTooSmall, RequestRefused
from lqs.request import FINISH_REASONS, NS_PER_S, FinishReason, Outcome, Request, RequestState

_PASSED = int(LimitSays.PASSED)
_NOTHING = (0, 0, 0, 0)
_NS_PER_US = 1_000
# Waits are stretched by up to this factor, at random, so that the refused do not return together.
_SPREAD = 1.25
# What a token takes, until one was made: a small model on a slow core.
_UNKNOWN_US_PER_TOKEN = 50_000.0
# How long requests take, until one has run.
_UNKNOWN_RUN_S = 5.0
# How much the latest request counts in the mean of all.
_NEWS = 0.1
# What a template adds to a short prompt, so that its tokens per byte say something about longer ones.
_TEMPLATE_BYTES = 64
# The client is not to blame for these.
_FAILURES = (FinishReason.ERROR, FinishReason.DEVICE)


class Figures(NamedTuple):
    """What the metrics show of one limit."""

    num_refused: int
    remaining: int | None  # None: it is not one for the whole server.


class Limiters:
    """Charges requests, tells those that have to wait for how long, and settles.

    `is_load_high` says whether the entry is to be narrowed; `clock` is in monotonic nanoseconds.

    Owner: the event loop.
    """

    def __init__(
        self,
        config: Config,
        *,
        is_load_high: Callable[[], bool] = lambda: False,
        clock: Callable[[], int] = time.monotonic_ns,
        rng: random.Random | None = None,
    ) -> None:
        self._table = LimitTable(config, clock)
        self._core = self._table.core
        self._clock = clock
        self._is_load_high = is_load_high
        self._rng = rng or random.Random()
        self._us_per_token: dict[str, float] = {}
        self._run_s = _UNKNOWN_RUN_S
        self._tokens_per_byte = 1.0
        self._num_refused: dict[str, int] = {}

    def enter(self, request: Request, *, num_tokens_min: int, patience_ns: int) -> None:
        """Charge what counts requests; refuse as well where tokens or compute are used up.

        `num_tokens_min` is what it takes at least, `patience_ns` how long it may wait for its turn.
        Raises RequestRefused, LimitTooSmall, and has charged nothing then.
        """
        table = self._table
        plan = table.plan(request)
        limiters, num_charged = plan.at_arrival, plan.num_charged
        if table.entry is not None and self._is_load_high():
            limiters, num_charged = (table.entry, *limiters), num_charged + 1
        request.tokens_max = plan.tokens_max
        if not limiters:
            return
        charge = request.charge = Charge(plan)
        now_ns = self._clock()
        costs = (1, 1, num_tokens_min, 1)
        verdict = self._core.reserve(charge, limiters, costs, now_ns, num_charged)
        if verdict == _PASSED and charge.turn_ns - now_ns <= patience_ns:
            return
        if verdict == LimitSays.REFUSED and charge.binding in plan.by_work:
            # That much it takes at least; what it is told is when it will pass with what it is likely to take.
            num_tokens = max(self._num_tokens_likely(request, plan.tokens_max), num_tokens_min)
            likely = (1, 1, num_tokens, self._compute_us_max(request, num_tokens))
            self._core.reserve(charge, limiters, likely, now_ns, 0)
        self._refuse(request, charge, verdict, num_tokens_min, now_ns, patience_ns)

    def charge_work(self, request: Request, *, patience_ns: int) -> None:
        """Charge tokens and compute, now that the prompt is known.

        Raises RequestRefused, LimitTooSmall, and has given everything back then.
        """
        charge = request.charge
        if charge is None:
            return
        # A reload may have come in between.
        plan = charge.plan if charge.plan.version == self._table.version else self._table.plan(request)
        if not plan.by_work:
            return
        now_ns = self._clock()
        num_tokens = request.footprint_tokens
        compute_us = self._compute_us_max(request, num_tokens) if plan.counts_compute else 0
        verdict = self._core.reserve(charge, plan.by_work, (0, 0, num_tokens, compute_us), now_ns)
        if verdict != _PASSED or charge.turn_ns - now_ns > patience_ns:
            self._refuse(request, charge, verdict, num_tokens, now_ns, patience_ns)

    def turn_s(self, request: Request) -> float:
        """Seconds until a leaky bucket lets it pass; 0 for at once."""
        charge = request.charge
        return max(charge.turn_ns - self._clock(), 0) / NS_PER_S if charge is not None else 0.0

    def refund(self, request: Request) -> None:
        """Give everything back: nothing was computed. May be repeated."""
        charge, request.charge = request.charge, None
        if charge is not None:
            self._core.settle(charge, _NOTHING, self._clock())

    def over(self, request: Request, outcome: Outcome | None) -> None:
        """Settle a request by how it ended; None: it never ran."""
        if outcome is None or _is_free(outcome):
            self.refund(request)
            return
        charge, request.charge = request.charge, None
        num_tokens = request.num_prompt_tokens + outcome.num_completion_tokens
        compute_us = max(outcome.finished_ns - outcome.assigned_ns, 0) // _NS_PER_US if outcome.assigned_ns else 0
        self._learn(request, outcome, compute_us)
        if charge is not None:
            self._core.settle(charge, (1, 0, num_tokens, compute_us), self._clock())

    def headers(self, request: Request) -> dict[str, str]:
        """How the limits stand that bind this client most: those with the least share left."""
        found = {}
        for unit, numbers in self._table.plan(request).shown:
            now_ns = self._clock()
            states = [self._core.state(number, now_ns) for number in numbers]
            capacity, remaining, reset_ns = min(states, key=lambda state: state[1] / state[0])
            found[f"x-ratelimit-limit-{unit}"] = str(capacity)
            found[f"x-ratelimit-remaining-{unit}"] = str(remaining)
            found[f"x-ratelimit-reset-{unit}"] = limit_words.duration(reset_ns)
        return found

    def reload(self, config: Config) -> None:
        """Take over new limits; the state of those that did not change goes on."""
        self._table.reload(config)

    def figures(self) -> dict[str, Figures]:
        """What the metrics show, by the limit's name."""
        names = (*self._table.config.limits, ENTRY)
        return {name: Figures(self._num_refused.get(name, 0), self._table.remaining(name)) for name in names}

    def _refuse(
        self, request: Request, charge: Charge, verdict: int, num_tokens: int, now_ns: int, patience_ns: int
    ) -> NoReturn:
        """Refuse what did not pass, and what would have to wait for its turn longer than it may."""
        wait_ns: int | None = charge.wait_ns
        if verdict == _PASSED:
            # It may come back when the line is that much shorter.
            wait_ns = charge.turn_ns - now_ns - patience_ns
        elif charge.wait_ns < 0:
            wait_ns = None
        name = self._table.name_of(charge.binding)
        self.refund(request)
        self._num_refused[name] = self._num_refused.get(name, 0) + 1
        request.state, request.reason = RequestState.REFUSED, "rate_limit_exceeded"
        if verdict == LimitSays.NEVER:
            request.reason = "limit_too_small"
            message = limit_words.too_small(name, self._table.config.limits[name], num_tokens)
            raise LimitTooSmall(message, param="max_tokens")
        raise self._refusal(name, wait_ns)

    def _refusal(self, name: str, wait_ns: int | None) -> RequestRefused:
        wait_s = self._run_s if wait_ns is None else wait_ns / NS_PER_S
        if name == ENTRY:
            message = limit_words.too_busy(self._table.config.queue, wait_ns or 0)
        else:
            message = limit_words.used_up(name, self._table.config.limits[name], wait_ns)
        spread_s = max(wait_s, 1.0) * self._rng.uniform(1.0, _SPREAD)
        return RequestRefused("rate_limit_exceeded", message, retry_after_s=spread_s)

    def _compute_us_max(self, request: Request, num_tokens: int) -> int:
        limit_us = (request.stop_ns - request.arrival_ns) // _NS_PER_US
        likely_us = math.ceil(self._us_per_token.get(request.model, _UNKNOWN_US_PER_TOKEN) * num_tokens)
        return likely_us if likely_us < limit_us else limit_us

    def _num_tokens_likely(self, request: Request, tokens_max: int) -> int:
        """What it will be charged, as far as its bytes tell: the whole limit if it asks for no length."""
        if request.max_tokens is None:
            return tokens_max
        prompt = math.ceil((request.num_bytes_min + _TEMPLATE_BYTES) * self._tokens_per_byte)
        return min(prompt + request.max_tokens, tokens_max)

    def _learn(self, request: Request, outcome: Outcome, compute_us: int) -> None:
        """How long requests take, their tokens on the device, and how many tokens a byte comes to: the most of late."""
        seen = request.num_prompt_tokens / (request.num_bytes_min + _TEMPLATE_BYTES)
        self._tokens_per_byte = max(seen, _mean(self._tokens_per_byte, seen))
        num_computed = request.num_prompt_tokens - outcome.num_cached_tokens + outcome.num_completion_tokens
        if not compute_us or num_computed <= 0:
            return
        pace = compute_us / num_computed
        self._us_per_token[request.model] = _mean(self._us_per_token.get(request.model, pace), pace)
        self._run_s = _mean(self._run_s, (outcome.finished_ns - request.arrival_ns) / NS_PER_S)


def _is_free(outcome: Outcome) -> bool:
    """Whether a request that was started costs nothing: no device took it, or it failed and gave nothing."""
    if outcome.num_completion_tokens:
        return False
    return not outcome.assigned_ns or FINISH_REASONS.get(outcome.finish) in _FAILURES


def _mean(mean: float, news: float) -> float:
    return mean + _NEWS * (news - mean)
