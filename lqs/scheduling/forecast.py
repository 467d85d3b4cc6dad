"""How long a request will wait, from what runs, what waits ahead of it and what still arrives.

    running   ####......   each: tokens still expected x time per token      -> when its sequence is free
    waiting   1 2 3 4 5    each takes the next free sequence for a mean time -> when the k-th starts
    arriving  + better classes, for as long as they still pass it            -> k

Lanes that have device slots of their own wait in lines of their own: what runs and waits elsewhere
is nothing to them. A device slot that is drained takes nobody, however much of it is free.

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
from lqs.scheduling.lines import Line, is_for, lines_of, num_more, takes
from lqs.scheduling.tempo import ARRIVALS_S, Moved, Pace, Rate, Run

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
        # By the class that they asked for.
        self.arrivals = [Rate() for _ in range(num_levels)]
        self.moved = Moved()

    def add(self, wait: _Wait, by: int) -> None:
        self.by_level[wait.level] += by
        self.num += by
        self.num_prompt_tokens += by * wait.num_prompt_tokens
        self.max_tokens += by * wait.max_tokens
        self.footprint_tokens += by * wait.footprint_tokens

    def passing_per_ns(self, level: int, now_ns: int) -> float:
        """Arrivals per nanosecond that come before this class: of better ones, as far as the load leaves them there.

        The best class is never moved.
        """
        better = sum(rate.per_ns(now_ns) for rate in self.arrivals[:level])
        if level < 2:
            return better
        return better - self.moved.share * self.arrivals[level - 1].per_ns(now_ns)


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
        # By lane; lanes that share device slots share one.
        self._lines = [Line()] * len(lane_weights)
        self._made_ns = 0
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
        lane.arrivals[request.class_asked].note(now_ns)
        if request.class_asked:
            lane.moved.note(request.level > request.class_asked, now_ns)

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
            run.last_ns = now_ns
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
        """Sequences of the device slots that take requests."""
        return sum(slot["num_sequences"] for slot in self._slots() if takes(slot))

    @property
    def mean_run_ns(self) -> float | None:
        """How long those ran that finished lately, on the average; None: none has."""
        num = sum(pace.num_run for pace in self._paces)
        return sum(pace.run_time_ns for pace in self._paces) / num if num else None

    def num_ahead(self, lane: int, level: int) -> int:
        """How many of its lane are ahead of one that comes to this class now."""
        return sum(self._waiting[lane].by_level[: level + 1])

    def wait_ns(self, lane: int, level: int, num_ahead: int, now_ns: int, waited_ns: int = 0) -> int | None:
        """Time until one starts that has so many ahead of it in its lane; None: nothing is known yet.

        Better classes still pass it, but not for longer than it takes to age beyond them. Nor is it
        foreseen for longer than it was seen: the load that they come with moves who comes after them.
        """
        if num_ahead == 0 and self._has_extra(lane, level):
            return 0
        self._refresh(now_ns)
        better = self._waiting[lane].passing_per_ns(level, now_ns)
        horizon_ns = ARRIVALS_S * NS_PER_S
        if self._aging_step_ns:
            horizon_ns = min(horizon_ns, max(level * self._aging_step_ns - waited_ns, 0))
        wait_ns = self._start_after(lane, self._among_lanes(lane, num_ahead), now_ns)
        for _ in range(_ROUNDS if better and wait_ns else 0):
            assert wait_ns is not None
            num_passing = better * min(wait_ns, horizon_ns)
            wait_ns = self._start_after(lane, self._among_lanes(lane, num_ahead + num_passing), now_ns)
        return None if wait_ns is None else int(wait_ns)

    def _among_lanes(self, lane: int, num_ahead: float) -> int:
        """How many start before it, those of the other lanes that share the sequences among them."""
        others = [n for n in self._lanes_of(self._lines[lane]) if n != lane and self._waiting[n].num]
        own, rest = self._lane_weights[lane], sum(self._lane_weights[n] for n in others)
        num_others = sum(self._waiting[n].num for n in others)
        return int(num_ahead + min(num_others, num_ahead * rest / own))

    def _start_after(self, lane: int, num_before: int, now_ns: int) -> float | None:
        """Time until the start in this lane's line that comes after so many others."""
        line = self._lines[lane]
        if not line.free_at:
            return None
        while len(line.starts) <= min(num_before, _STARTS_MAX):
            if line.mean_ns is None and line.free_at[0] > 0:
                return None
            line.starts.append(line.free_at[0])
            heapreplace(line.free_at, line.free_at[0] + (line.mean_ns or math.inf))
        start_ns = line.starts[min(num_before, _STARTS_MAX)]
        if math.isinf(start_ns):
            return None
        beyond = max(num_before - _STARTS_MAX, 0)
        return max(start_ns + beyond * (line.mean_ns or 0) / len(line.free_at) - (now_ns - self._made_ns), 0)

    def _refresh(self, now_ns: int) -> None:
        """Work it out anew, if it is too old."""
        age_ns = now_ns - self._made_ns
        if not (age_ns > _FRESH_NS or (self._is_stale and age_ns > _STALE_NS) or age_ns < 0 or not self._made_ns):
            return
        self._made_ns, self._is_stale = now_ns, False
        slots = self._slots()
        token_ns = self._token_ns(now_ns)
        self._lines = lines_of(slots, len(self._waiting))
        for line in {id(line): line for line in self._lines}.values():
            self._make(line, slots, token_ns, now_ns)

    def _make(self, line: Line, slots: Sequence[Mapping[str, Any]], token_ns: float | None, now_ns: int) -> None:
        lanes = self._lanes_of(line)
        line.mean_ns = None if token_ns is None else self._mean_service_ns(lanes, token_ns)
        left = [
            math.inf if token_ns is None else self._left_ns(run, token_ns, now_ns)
            for run in self._running.values()
            if run.lane in lanes
        ]
        line.free_at = [*left, *[0.0] * self._num_free(lanes, slots)]
        heapify(line.free_at)

    def _lanes_of(self, line: Line) -> list[int]:
        """The lanes that wait in it."""
        return [lane for lane, other in enumerate(self._lines) if other is line]

    def _token_ns(self, now_ns: int) -> float | None:
        """Time per token of a sequence, of what finished lately and of what runs."""
        time_ns = sum(pace.decode_ns for pace in self._paces)
        tokens = sum(pace.decode_tokens for pace in self._paces)
        for run in self._running.values():
            if run.num_tokens > 1:
                time_ns += run.last_ns - run.first_ns
                tokens += run.num_tokens - 1
        return time_ns / tokens if tokens >= 1 else None

    def _left_ns(self, run: Run, token_ns: float, now_ns: int) -> float:
        """Time that it will still run."""
        pace = self._paces[run.lane]
        num_expected = run.max_tokens * pace.share_made - run.num_tokens
        if num_expected <= 0:
            # It has outrun its kind: as likely to end soon as it is to go on.
            num_expected = (run.max_tokens - run.num_tokens) * pace.share_made
        if not run.num_tokens:
            prefill_ns = max(run.num_prompt_tokens * pace.prefill_ns_each - (now_ns - run.started_ns), 0.0)
            return prefill_ns + max(num_expected - 1, 0) * token_ns
        return max(num_expected * token_ns - (now_ns - run.last_ns), 0.0)

    def _mean_service_ns(self, lanes: list[int], token_ns: float) -> float:
        """How long one that waits in them will run, on the average; if none waits, one like those that run."""
        time_ns = num = 0.0
        for lane, pace in ((self._waiting[n], self._paces[n]) for n in lanes):
            time_ns += pace.run_ns(lane.num, lane.num_prompt_tokens, lane.max_tokens, token_ns)
            num += lane.num
        for run in self._running.values() if not num else ():
            if run.lane in lanes:
                time_ns += self._paces[run.lane].run_ns(1, run.num_prompt_tokens, run.max_tokens, token_ns)
                num += 1
        return time_ns / num if num else 0.0

    def _num_free(self, lanes: list[int], slots: Sequence[Mapping[str, Any]]) -> int:
        """Sequences that are free and have the cells for one of those that wait in these lanes."""
        num = max(sum(self._waiting[n].num for n in lanes), 1)
        num_tokens = sum(self._num_promised(self._waiting[n], self._paces[n]) for n in lanes)
        tokens_each = max(int(num_tokens / num), 1)
        own = [slot for slot in slots if any(is_for(slot, lane) for lane in lanes)]
        return sum(num_more(slot, slot["num_sequences"], tokens_each) for slot in own)

    def _num_promised(self, lane: _Waiting, pace: Pace) -> float:
        """KV tokens that those who wait in a lane will be promised."""
        if self._is_guaranteed:
            return lane.footprint_tokens
        return lane.num_prompt_tokens + lane.max_tokens * pace.share_made

    def _has_extra(self, lane: int, level: int) -> bool:
        """Whether one of the sequences is free that are kept for who is better than one that runs."""
        if all(run.level <= level for run in self._running.values()):
            return False
        own = [slot for slot in self._slots() if is_for(slot, lane)]
        return any(num_more(slot, slot["num_sequences"] + slot["num_extra"], 1) for slot in own)
