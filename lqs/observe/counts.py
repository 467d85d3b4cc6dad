"""What the event loop counts about requests: plain numbers, as cheap as counting can be."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lqs.errors import is_overload
from lqs.observe.histogram import Histogram
from lqs.request import FINISH_REASONS, NS_PER_S, FinishReason, Outcome, Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1, 2.5, 5)
_ERRORS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)
# A wait below that is no wait: whatever was foretold, nobody was kept waiting for it.
_FORETOLD_NS_MIN = NS_PER_S // 2
# A median is that of the last so many.
_MEDIAN_OF = 256
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
# vLLM's words for how a request finished.
_REASON_LABELS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.ERROR: "error",
    FinishReason.DEVICE: "error",
}


class Errors:
    """How far what was told was from what came, as a part of what came. Owner: the event loop."""

    def __init__(self) -> None:
        self.histogram = Histogram(_ERRORS)
        self._last: deque[float] = deque(maxlen=_MEDIAN_OF)

    def observe(self, ratio: float) -> None:
        """What was told, over what came."""
        error = abs(ratio - 1)
        self.histogram.observe(error)
        self._last.append(error)

    def median(self) -> float:
        """The middle one of the last; 0 before the first."""
        return sorted(self._last)[len(self._last) // 2] if self._last else 0.0


class Counts:
    """Counts what the desk sees, and what the door refuses.

    Owner: the event loop.
    """

    def __init__(self, num_levels: int, num_lanes: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._last_output_ns: dict[str, int] = {}
        self.num_prompt_tokens = self.num_completion_tokens = 0
        self.num_events_lost = 0
        self.finished_by_reason = dict.fromkeys(_REASON_LABELS.values(), 0)
        self.refused_by_reason: dict[str, int] = {}
        self.num_too_many = 0
        self.num_degraded = 0
        self.wait_error = Errors()
        self.retry_error = Errors()
        self.ttft = Histogram(_SECONDS)
        self.inter_token = Histogram(_TOKEN_SECONDS)
        self.e2e = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.prefill = Histogram(_SECONDS)
        self.decode = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.completion_tokens = Histogram(_TOKENS)
        self.queue_by_class = [[Histogram(_SECONDS) for _ in range(num_lanes)] for _ in range(num_levels)]

    def started(self, request: Request, queue_ns: int) -> None:
        """A request got its sequence."""
        self.num_degraded += request.degraded_from is not None
        self.queue.observe(queue_ns / NS_PER_S)
        self.queue_by_class[request.level][request.lane].observe(queue_ns / NS_PER_S)

    def foretold(self, expected_ns: int, queue_ns: int) -> None:
        """A request that waited was told this when it came."""
        if queue_ns >= _FORETOLD_NS_MIN:
            self.wait_error.observe(expected_ns / queue_ns)

    def promised(self, ratio: float) -> None:
        """A time was promised that is this part of when the place came free."""
        self.retry_error.observe(ratio)

    def output(self, request: Request, num_tokens: int) -> None:
        """Text of a running request arrived in the loop."""
        now_ns = self._now_ns()
        last_ns = self._last_output_ns.get(request.id)
        self._last_output_ns[request.id] = now_ns
        if last_ns is None:
            self.ttft.observe((now_ns - request.arrival_ns) / NS_PER_S)
        elif num_tokens:
            self.inter_token.observe((now_ns - last_ns) / num_tokens / NS_PER_S, num_tokens)

    def finished(self, request: Request, outcome: Outcome) -> None:
        """A request that ran is over."""
        self._last_output_ns.pop(request.id, None)
        finish = FINISH_REASONS.get(outcome.finish, FinishReason.ERROR)
        self.finished_by_reason[_REASON_LABELS[finish]] += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_completion_tokens += outcome.num_completion_tokens
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.completion_tokens.observe(outcome.num_completion_tokens)
        self.e2e.observe((self._now_ns() - request.arrival_ns) / NS_PER_S)
        self._phases(outcome)

    def ended(self, request: Request, reason: str) -> None:
        """A request never ran: refused for its `reason`, or cancelled by its client if it has none."""
        self._last_output_ns.pop(request.id, None)
        if request.reason is None:
            self.finished_by_reason["abort"] += 1
        else:
            self.count_refusal(request.reason)

    def event_lost(self, request: Request, error: Exception) -> None:
        """A receiver failed; expected never."""
        self.num_events_lost += 1

    def count_refusal(self, reason: str) -> None:
        """A request was refused; `reason` is one of the codes that lqs itself gives."""
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1
        self.num_too_many += is_overload(reason)

    def _phases(self, outcome: Outcome) -> None:
        """Prefill and decode times, of those that got so far."""
        if outcome.first_token_ns and outcome.assigned_ns:
            self.prefill.observe((outcome.first_token_ns - outcome.assigned_ns) / NS_PER_S)
            self.decode.observe((outcome.finished_ns - outcome.first_token_ns) / NS_PER_S)
