"""Lets a smaller, faster model answer when the wait for the one that was asked for is too long.

    expected wait for the asked model > degrade.wait_s, or an alert says so
      and the fallback would answer sooner
      and the key's tier and the request allow it        -> the fallback answers, and says so
      and the request is a simple one

A request is simple if it is not long and can be put to another model as it is: token ids, and what is
said of single tokens, mean nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lqs.config import Config
from lqs.errors import BadRequest
from lqs.request import Lane, PromptSource, Request
from lqs.scheduling.desk import Desk

if TYPE_CHECKING:
    from lqs.engine.served import Served
    from lqs.engine.slots import Models


class Degrader:
    """Decides who answers. Owner: the event loop."""

    def __init__(self, config: Config, *, desk: Desk, models: Models) -> None:
        self._config = config
        self._desk = desk
        self._models = models
        self._is_forced = False

    def reload(self, config: Config) -> None:
        """Take over new limits."""
        self._config = config

    def force(self, is_on: bool) -> None:
        """Take every wait for too long, until it is taken back."""
        self._is_forced = is_on

    def choose(self, request: Request, source: PromptSource, served: Served) -> tuple[PromptSource, Served] | None:
        """The fallback and the prompt made for it; None where the asked model answers itself."""
        fallback = self._models.fallback_of(served)
        if fallback is None or source.remake is None or not fallback.has_healthy_device:
            return None
        if (
            not self._is_allowed(request)
            or not self._is_simple(request)
            or not self._is_worth(request, served, fallback)
        ):
            return None
        try:
            return source.remake(fallback), fallback
        except BadRequest:
            # It cannot be put to the fallback, which has no chat template.
            return None

    def _is_allowed(self, request: Request) -> bool:
        # A reload may have taken its tier away while it was at the door.
        tier = self._config.tiers.get(request.tenant.tier)
        match "never" if tier is None else tier.degrade:
            case "never":
                return False
            case "ask":
                return request.allow_degrade is True
        return request.allow_degrade is not False

    def _is_simple(self, request: Request) -> bool:
        is_long = request.task_type == "long" or (request.max_tokens or 0) > self._config.queue.long_tokens_min
        return not is_long and not request.sampling.logit_bias

    def _is_worth(self, request: Request, served: Served, fallback: Served) -> bool:
        outlook, level = self._desk.outlook, request.level
        wait_s = outlook.wait_s(level, Lane.SHORT, served.index)
        instead_s = outlook.wait_s(level, Lane.SHORT, fallback.index) or 0.0
        if wait_s is None:
            return self._is_forced
        return wait_s > instead_s and (self._is_forced or wait_s > self._config.degrade.wait_s)
