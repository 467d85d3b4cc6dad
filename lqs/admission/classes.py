"""From what a request wishes and its key allows to the class it stands in, and to its lane.

The class is decided once, at arrival: the wish, within what the key may have; one better for a deadline
that is close; one lower while the load is high, unless it is of the best class.
"""

from __future__ import annotations

from lqs.config import QueueConfig
from lqs.errors import BadRequest
from lqs.request import NS_PER_S, Lane, Request

# How long an answer without max_tokens is taken to be while nothing is known.
_UNKNOWN_TOKENS = 256
# A max_tokens of more than so many times what answers have says nothing.
_FAR_OFF = 4


def expected_tokens(request: Request, num_seen: int) -> int:
    """How long its answer is taken to be; `num_seen` is what answers of its key had of late, 0 for unknown.

    Its own `max_tokens` counts, unless it is far above what answers really have.
    """
    if request.max_tokens is None:
        return min(request.max_tokens_granted, num_seen or _UNKNOWN_TOKENS)
    is_far_off = 0 < num_seen * _FAR_OFF < request.max_tokens_granted
    return num_seen if is_far_off else request.max_tokens_granted


class Classes:
    """Knows the classes and their bounds. Owner: the event loop."""

    def __init__(self, queue: QueueConfig) -> None:
        self._queue = queue
        self._lowest = len(queue.levels) - 1

    def assign(self, request: Request, *, load: float = 0.0, service_s: float = 0.0) -> None:
        """Set the request's class. `load` is the server's, `service_s` how long it is expected to run (0: unknown)."""
        wish, best = self._wish(request), request.tenant.best_level
        level = min(max(wish, best), self._lowest)
        if level > best and self._is_urgent(request, service_s):
            level -= 1
        request.asked_level = level
        if level > 0 and load > self._queue.high_load_at:
            level = min(level + 1, self._lowest)
        request.level = level
        request.is_clamped = level != wish

    def assign_lane(self, request: Request, border_tokens: int, num_expected: int) -> None:
        """Set the lane from the tokens of its prompt and those that its answer is expected to have.

        In between the bounds of the config `task_type` decides, without it the border of just now.
        """
        num_tokens = request.num_prompt_tokens + num_expected
        request.lane = Lane.LONG if self._is_long(request.task_type, num_tokens, border_tokens) else Lane.SHORT

    def _is_urgent(self, request: Request, service_s: float) -> bool:
        if request.deadline_ns == 0:
            return False
        left_s = (request.deadline_ns - request.arrival_ns) / NS_PER_S
        return left_s < self._queue.urgent_below * service_s

    def _is_long(self, wish: str | None, num_tokens: int, border_tokens: int) -> bool:
        if num_tokens > self._queue.long_tokens_min:
            return True
        if wish is not None:
            return wish == "long"
        return num_tokens > border_tokens

    def _wish(self, request: Request) -> int:
        if request.priority is not None:
            return request.priority
        tenant = request.tenant
        match request.service_tier:
            case None | "auto" | "default":
                return tenant.level
            case "priority":
                return tenant.best_level
            case "flex":
                return min(tenant.level + 1, self._lowest)
        raise BadRequest("service_tier must be one of auto, default, flex and priority.", param="service_tier")
