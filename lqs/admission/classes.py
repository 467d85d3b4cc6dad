"""From what a request wishes and its key allows to the class it stands in, and to its lane.

The class is decided once, at arrival: the wish, within what the key may have; one better for a deadline
that is close; one lower while the load is high, unless it is of the best class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lqs.config import QueueConfig
from lqs.errors import BadRequest
from lqs.request import NS_PER_S, Lane, Request

if TYPE_CHECKING:
    from lqs.engine.served import Served

# Looked up in the enum each time they cost more than all else that sorts a request.
_SHORT, _LONG = Lane


class Classes:
    """Knows the classes and their bounds. Owner: the event loop."""

    def __init__(self, queue: QueueConfig) -> None:
        self._queue = queue
        self._lowest = len(queue.levels) - 1

    def assign(self, request: Request, *, load: float = 0.0, service_s: float = 0.0) -> None:
        """Set the request's class. `load` is the server's, `service_s` how long it is expected to run (0: unknown)."""
        best, lowest = request.tenant.best_level, self._lowest
        wish = self._wish(request)
        level = best if wish < best else wish
        level = level if level < lowest else lowest
        if level > best and self._is_urgent(request, service_s):
            level -= 1
        request.asked_level = level
        if 0 < level < lowest and load > self._queue.high_load_at:
            level += 1
        request.level = level
        request.is_clamped = level != wish

    def assign_lane(self, request: Request, border_tokens: int, num_expected: int) -> None:
        """Set the lane from the tokens of its prompt and those that its answer is expected to have.

        In between the bounds of the config `task_type` decides, without it the border of just now.
        """
        num_tokens = len(request.prompt) + num_expected
        if num_tokens > self._queue.long_tokens_min:
            is_long = True
        elif request.task_type is not None:
            is_long = request.task_type == "long"
        else:
            is_long = num_tokens > border_tokens
        request.lane = _LONG if is_long else _SHORT

    def _is_urgent(self, request: Request, service_s: float) -> bool:
        if request.deadline_ns == 0:
            return False
        left_s = (request.deadline_ns - request.arrival_ns) / NS_PER_S
        return left_s < self._queue.urgent_below * service_s

    def _wish(self, request: Request) -> int:
        if request.priority is not None:
            return request.priority
        tenant = request.tenant
        if request.service_tier is None:
            return tenant.level
        match request.service_tier:
            case "auto" | "default":
                return tenant.level
            case "priority":
                return tenant.best_level
            case "flex":
                return min(tenant.level + 1, self._lowest)
        raise BadRequest("service_tier must be one of auto, default, flex and priority.", param="service_tier")


def num_tokens_min(request: Request, served: Served) -> int:
    """What it takes at least, prompt and answer together, as far as that shows before its prompt is made."""
    ceiling = served.config.max_tokens_max or request.max_tokens or 1
    return min(1 + min(request.max_tokens or 1, ceiling), served.n_ctx)
