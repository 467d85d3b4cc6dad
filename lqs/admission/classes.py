"""From what a request wishes and its key allows to the class it stands in, and to its lane."""

from __future__ import annotations

from lqs.config import QueueConfig
from lqs.errors import BadRequest
from lqs.request import Lane, Request

# What a request without max_tokens is taken to answer, when it is sorted into a lane.
_EXPECTED_COMPLETION_TOKENS = 256


class Classes:
    """Knows the classes and their bounds. Owner: the event loop."""

    def __init__(self, queue: QueueConfig) -> None:
        self._queue = queue
        self._lowest = len(queue.levels) - 1

    def assign(self, request: Request) -> None:
        """Set the request's class: its wish, within what its key may have and what there is."""
        wish = self._wish(request)
        request.level = min(max(wish, request.tenant.best_level), self._lowest)
        request.is_clamped = request.level != wish

    def assign_lane(self, request: Request, border_tokens: int) -> None:
        """Set the lane from the tokens it is expected to take.

        In between the bounds of the config `task_type` decides, without it the border of just now.
        """
        num_tokens = request.num_prompt_tokens + self.expected_tokens(request)
        request.lane = Lane.LONG if self._is_long(request.task_type, num_tokens, border_tokens) else Lane.SHORT

    def expected_tokens(self, request: Request) -> int:
        """How long its answer is taken to be."""
        if request.max_tokens is None:
            return min(request.max_tokens_granted, _EXPECTED_COMPLETION_TOKENS)
        return request.max_tokens_granted

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
