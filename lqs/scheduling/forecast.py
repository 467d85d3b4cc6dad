"""How long a request will wait, from what runs, what waits ahead of it and what still arrives.

    running   ####......   each: tokens still expected x time per token      -> when its sequence is free
    waiting   1 2 3 4 5    each takes the next free sequence for a mean time -> when the k-th starts
    arriving  + better classes, for as long as they still pass it            -> k

At the very start, when nothing has finished yet, the time per token is that of the running requests
so far. Times come in as `now_ns`; nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

from lqs.request import NS_PER_S, Outcome, Request
from lqs.scheduling.tempo import ARRIVALS_S, Pace, Rate, Run

# What was worked out is good for so long, or until something starts or ends, but at least so long.
_FRESH_NS, _STALE_NS = 100_000_000, 2_000_000
# So many starts are worked out one by one, the later ones by the pace of these.
_STARTS_MAX = 1024
_ROUNDS = 6

Slots = Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request that waits, as it came."""

    lane: int
    level: int
    num_prompt_tokens: int
    max_tokens: int
    footprint_tokens: int


class _Waiting:
    """What waits in one lane."""

    def __init__(self, num_levels: int) -> None:
        self.by_level = [0] * num_levels
        self.num = self.num_prompt_tokens = self.max_tokens = self.footprint_tokens = 0
        self.arrivals = [Rate() for _ in range(num_levels)]

    def add(self, wait: _Wait, by: int) -> None:
        self.by_level[wait.level] += by
        self.num += by
        self.num_prompt_tokens += by * wait.num_prompt_tokens
        self.max_tokens += by * wait.max_tokens
        self.footprint_tokens += by * wait.footprint_tokens


class Forecast:
    """The expected waits for one model.

    `slots` tells the core's figures of the device slots that serve it. The desk tells what happens to
    requests that are in the core's hands, in its order. `is_guaranteed` says that KV is promised for the
    longest answer and not for the expected one.

    Owner: the event loop.
    """

    def __init__(
        self,
        *,
        num_levels: int,
        lane_weights: Sequence[float],
        aging_step_ns: int,
        slots: Slots,
        is_guaranteed: bool = True,
    ) -> None:
        self._lane_weights = lane_weights
        self._aging_step_ns = aging_step_ns
        self._is_guaranteed = is_guaranteed
        self._slots = slots
        # By the core's handle.
        self._running: dict[int, Run] = {}
        self._waits: dict[int, _Wait] = {}
        self._waiting = [_Waiting(num_levels) for _ in lane_weights]
        self._paces = [Pace() for _ in lane_weights]
        # When sequences come free, as a heap, and the starts worked out from it so far.
        self._free_at: list[float] = []
        self._starts: list[float] = []
        self._made_ns = 0
        self._mean_ns: float | None = None
        self._is_stale = True

    # What happens.

    def submitted(self, request: Request, now_ns: int) -> None:
        """It has come to wait."""
        assert request.handle is not None
        wait = self._waits[request.handle] = _Wait(
            request.lane,
            request.level,
            request.num_prompt_tokens,
            request.max_tokens_granted,
            request.footprint_tokens,
        )
        lane = self._waiting[wait.lane]
        lane.add(wait, 1)
        lane.arrivals[wait.level].note(now_ns)

    def started(self, request: Request, queue_ns: int) -> None:
        """It got a sequence."""
        assert request.handle is not None
        wait = self._leave(request.handle)
        started_ns = request.arrival_ns + queue_ns
        self._running[request.handle] = Run(wait.lane, wait.level, wait.num_prompt_tokens, wait.max_tokens, started_ns)

    def output(self, request: Request, num_tokens: int, now_ns: int) -> None:
        """It made tokens."""
        run = self._running.get(request.handle or 0)
        if run is not None:
            run.first_ns = run.first_ns or now_ns
            run.num_tokens += num_tokens

    def finished(self, request: Request, outcome: Outcome) -> None:
        """It has run to an end."""
        run = self._running.pop(request.handle or 0, None)
        if run is not None and outcome.first_token_ns:
            self._paces[run.lane].note(run, outcome)
        self._is_stale = True

    def ended(self, request: Request) -> None:
        """It left the queue and never ran."""
        assert request.handle is not None
        self._leave(request.handle)

    def _leave(self, handle: int) -> _Wait:
        wait = self._waits.pop(handle)
        self._waiting[wait.lane].add(wait, -1)
        self._is_stale = True
        return wait

    # What is expected.

    @property
    def num_sequences(self) -> int:
        """Sequences of the living device slots."""
        return sum(slot["num_sequences"] for slot in self._slots() if not slot["is_dead"])

    def num_waiting(self, lane: int) -> int:
        """How many wait in this lane."""
        return self._waiting[lane].num

    def num_ahead(self, lane: int, level: int) -> int:
        """How many of its lane are ahead of one that comes to this class now."""
        return sum(self._waiting[lane].by_level[: level + 1])

    def wait_ns(self, lane: int, level: int, num_ahead: int, now_ns: int, waited_ns: int = 0) -> int | None:
        """Time until one starts that has so many ahead of it in its lane; None: nothing is known yet.

        Better classes still pass it, but not for longer than it takes to age beyond them. Nor is it
        foreseen for longer than it was seen: the load that they come with moves who comes after them.
        """
        if num_ahead == 0 and self._has_extra(level):
            return 0
        better = sum(rate.per_ns(now_ns) for rate in self._waiting[lane].arrivals[:level])
        horizon_ns = ARRIVALS_S * NS_PER_S
        if self._aging_step_ns:
            horizon_ns = min(horizon_ns, max(level * self._aging_step_ns - waited_ns, 0))
        wait_ns = self._start_after(self._among_lanes(lane, num_ahead), now_ns)
        for _ in range(_ROUNDS if better and wait_ns else 0):
            assert wait_ns is not None
            num_passing = better * min(wait_ns, horizon_ns)
            wait_ns = self._start_after(self._among_lanes(lane, num_ahead + num_passing), now_ns)
        return None if wait_ns is None else int(wait_ns)

    def _among_lanes(self, lane: int, num_ahead: float) -> int:
        """How many start before it, those of the other lanes that share the sequences among them."""
        others = [n for n in range(len(self._waiting)) if n != lane and self._waiting[n].num]
        own, rest = self._lane_weights[lane], sum(self._lane_weights[n] for n in others)
        num_others = sum(self._waiting[n].num for n in others)
        return int(num_ahead + min(num_others, num_ahead * rest / own))

    def _start_after(self, num_before: int, now_ns: int) -> float | None:
        """Time until the start that comes after so many others."""
        age_ns = now_ns - self._made_ns
        if age_ns > _FRESH_NS or (self._is_stale and age_ns > _STALE_NS) or age_ns < 0 or not self._made_ns:
            self._make(now_ns)
            age_ns = 0
        if not self._free_at:
            return None
        while len(self._starts) <= min(num_before, _STARTS_MAX):
            if self._mean_ns is None and self._free_at[0] > 0:
                return None
            self._starts.append(self._free_at[0])
            heapreplace(self._free_at, self._free_at[0] + (self._mean_ns or math.inf))
        start_ns = self._starts[min(num_before, _STARTS_MAX)]
        if math.isinf(start_ns):
            return None
        beyond = max(num_before - _STARTS_MAX, 0)
        return max(start_ns + beyond * (self._mean_ns or 0) / len(self._free_at) - age_ns, 0)

    def _make(self, now_ns: int) -> None:
        """Work it out anew."""
        self._made_ns, self._is_stale, self._starts = now_ns, False, []
        token_ns = self._token_ns(now_ns)
        self._mean_ns = None if token_ns is None else self._mean_service_ns(token_ns)
        left = [
            math.inf if token_ns is None else self._left_ns(run, token_ns, now_ns) for run in self._running.values()
        ]
        self._free_at = [*left, *[0.0] * self._num_free()]
        heapify(self._free_at)

    def _token_ns(self, now_ns: int) -> float | None:
        """Time per token of a sequence, of what finished lately and of what runs."""
        time_ns = sum(pace.decode_ns for pace in self._paces)
        tokens = sum(pace.decode_tokens for pace in self._paces)
        for run in self._running.values():
            if run.num_tokens > 1:
                time_ns += now_ns - run.first_ns
                tokens += run.num_tokens - 1
        return time_ns / tokens if tokens >= 1 else None

    def _left_ns(self, run: Run, token_ns: float, now_ns: int) -> float:
        """Time that it will still run."""
        pace = self._paces[run.lane]
        num_expected = run.max_tokens * pace.share_made - run.num_tokens
        if num_expected <= 0:
            # It has outrun its kind: as likely to end soon as it is to go on.
            num_expected = (run.max_tokens - run.num_tokens) * pace.share_made
        prefill_ns = 0.0
        if not run.num_tokens:
            prefill_ns = max(run.num_prompt_tokens * pace.prefill_ns_each - (now_ns - run.started_ns), 0.0)
        return prefill_ns + num_expected * token_ns

    def _mean_service_ns(self, token_ns: float) -> float:
        """How long one that waits will run, on the average; if none waits, one like those that run."""
        time_ns = num = 0.0
        for lane, pace in zip(self._waiting, self._paces, strict=True):
            time_ns += lane.num_prompt_tokens * pace.prefill_ns_each + lane.max_tokens * pace.share_made * token_ns
            num += lane.num
        for run in self._running.values() if not num else ():
            pace = self._paces[run.lane]
            time_ns += run.num_prompt_tokens * pace.prefill_ns_each + run.max_tokens * pace.share_made * token_ns
            num += 1
        return time_ns / num if num else 0.0

    def _num_free(self) -> int:
        """Sequences that are free and have the cells for one of those that wait."""
        num = max(sum(lane.num for lane in self._waiting), 1)
        num_tokens = sum(self._num_promised(lane, pace) for lane, pace in zip(self._waiting, self._paces, strict=True))
        tokens_each = max(int(num_tokens / num), 1)
        return sum(_num_more(slot, slot["num_sequences"], tokens_each) for slot in self._slots())

    def _num_promised(self, lane: _Waiting, pace: Pace) -> float:
        """KV tokens that those who wait in a lane will be promised."""
        if self._is_guaranteed:
            return lane.footprint_tokens
        return lane.num_prompt_tokens + lane.max_tokens * pace.share_made

    def _has_extra(self, level: int) -> bool:
        """Whether one of the sequences is free that are kept for who is better than one that runs."""
        if all(run.level <= level for run in self._running.values()):
            return False
        return any(_num_more(slot, slot["num_sequences"] + slot["num_extra"], 1) for slot in self._slots())


def _num_more(slot: Mapping[str, Any], num_sequences: int, tokens_each: int) -> int:
    """How many more requests of that size could start on a device slot that has so many sequences."""
    if slot["is_dead"]:
        return 0
    num_running: int = slot["num_running"]
    num_fitting: int = (slot["capacity"] - slot["reserved"]) // tokens_each
    return max(min(num_sequences - num_running, num_fitting), 0)
