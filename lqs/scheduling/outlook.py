"""What clients are told about the time ahead: when they start, and when to come back.

Puts together the forecasts, one for each model, and the promises, one line for each class; the desk
tells it what happens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lqs._core import Scheduler
from lqs.config import Config
from lqs.request import NS_PER_S, Lane, Outcome, Request
from lqs.scheduling.forecast import Forecast
from lqs.scheduling.promises import Promises

# Nothing has run yet, so nothing is known about how long a request runs.
_UNKNOWN_RUN_NS = 5 * NS_PER_S


class Outlook:
    """Expected waits, and the promises made to those sent away.

    `now_ns` is the monotonic clock. With a `constant_retry_s` everybody is told that, and promised nothing.

    Owner: the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        forecasts: Sequence[Forecast],
        promises: Promises,
        level_caps: Sequence[int],
        now_ns: Callable[[], int] = time.monotonic_ns,
        constant_retry_s: float = 0.0,
    ) -> None:
        self.promises = promises
        self._scheduler = scheduler
        self._forecasts = forecasts
        self._level_caps = level_caps
        self._now_ns = now_ns
        self._constant_retry_s = constant_retry_s

    def reload(self, level_caps: Sequence[int]) -> None:
        """Take over new caps of the classes."""
        self._level_caps = level_caps

    # What is told.

    def eta_s(self, request: Request, position: int) -> float | None:
        """Seconds until it starts, which stands at `position` in its lane; None: nothing is known yet."""
        now_ns, forecast = self._now_ns(), self._forecasts[request.model_index]
        waited_ns = now_ns - request.arrival_ns
        return _seconds(forecast.wait_ns(request.lane, request.level, position - 1, now_ns, waited_ns))

    def wait_s(self, level: int, lane: Lane, model: int) -> float | None:
        """Seconds that one who came now would wait; None: nothing is known yet."""
        return _seconds(self._new_wait_ns(level, lane, model))

    def retry_after_s(self, request: Request, *, num_free: int, not_before_ns: int = 0) -> float:
        """Seconds until there is a place for the request, who was refused; it is promised that place.

        Nor is it told to come before it would start within the time that it waits.
        """
        if self._constant_retry_s:
            return self._constant_retry_s
        now_ns = self._now_ns()
        service_ns = self._service_ns(request, now_ns)
        wait_ns = self.promises.refused(
            request,
            num_free=num_free,
            service_ns=service_ns,
            now_ns=now_ns,
            least_ns=max(not_before_ns - now_ns, self._too_early_ns(request)),
        )
        return wait_ns / NS_PER_S

    def claim(self, request: Request) -> tuple[int, bool]:
        """Places that the request may not have, because others come for them; and if it was promised one.

        Who was refused in a lower class because the load was high comes back in it: it has been
        in the line behind those who wait there, and does not pass them.
        """
        now_ns, level = self._now_ns(), request.class_asked
        promised_level = self.promises.level_due(request, now_ns)
        if promised_level is not None:
            request.is_clamped |= promised_level > request.level
            request.level = max(request.level, promised_level)
            return 0, True
        return self.promises.num_held(level, now_ns, self._level_caps[level]), False

    # What happens.

    def entered(self, request: Request) -> None:
        """It took a place."""
        self.promises.entered(request, self._now_ns())

    def left(self, request: Request) -> None:
        """It gave its place back before it was submitted."""
        self.promises.freed(request, self._now_ns())

    def submitted(self, request: Request) -> int | None:
        """It has come to wait: for how long, from its arrival on, in nanoseconds; None: nothing is known yet."""
        now_ns = self._now_ns()
        wait_ns = self._new_wait_ns(request.level, request.lane, request.model_index)
        self._forecasts[request.model_index].submitted(request, now_ns)
        return None if wait_ns is None else now_ns - request.arrival_ns + wait_ns

    def started(self, request: Request, queue_ns: int) -> None:
        """It left the queue for a device slot."""
        self.promises.freed(request, self._now_ns())
        self._forecasts[request.model_index].started(request, queue_ns)

    def output(self, request: Request, num_tokens: int) -> None:
        """It made tokens."""
        self._forecasts[request.model_index].output(request, num_tokens, self._now_ns())

    def finished(self, request: Request, outcome: Outcome) -> None:
        """It has run to an end."""
        self._forecasts[request.model_index].finished(request, outcome)

    def ended(self, request: Request) -> None:
        """It left the queue and never ran."""
        self.promises.freed(request, self._now_ns())
        self._forecasts[request.model_index].ended(request)

    def _new_wait_ns(self, level: int, lane: Lane, model: int) -> int | None:
        forecast = self._forecasts[model]
        return forecast.wait_ns(lane, level, forecast.num_ahead(lane, level), self._now_ns())

    def _too_early_ns(self, request: Request) -> int:
        """For how long it would wait in vain if it came again."""
        wait_ns = self._new_wait_ns(request.level, request.lane, request.model_index)
        if not wait_ns or not request.expire_ns:
            return 0
        return max(wait_ns - (request.expire_ns - request.arrival_ns), 0)

    def _service_ns(self, request: Request, now_ns: int) -> float:
        """The time in which the request's class frees a place: as it was lately, else as is expected."""
        rate = self._scheduler.drain_rate_all * self.promises.share_freed(request.class_asked)
        if rate > 0:
            return NS_PER_S / rate
        # Its own lane is not known yet: its prompt was never made.
        forecast = self._forecasts[request.model_index]
        num_ahead = max(forecast.num_ahead(Lane.SHORT, request.level), 1)
        wait_ns = forecast.wait_ns(Lane.SHORT, request.level, num_ahead, now_ns)
        if wait_ns:
            return wait_ns / num_ahead
        # Nobody waits or runs yet, though many may have come: their prompts are still being made.
        return (forecast.mean_run_ns or _UNKNOWN_RUN_NS) / max(forecast.num_sequences, 1)


def make_outlook(
    config: Config,
    scheduler: Scheduler,
    *,
    observe_promise: Callable[[float], None] = lambda ratio: None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    rng: random.Random | None = None,
) -> Outlook:
    """The outlook over the core's device slots, with the lanes and classes of the config."""
    num_levels = len(config.queue.levels)

    def slots_of(model: int) -> Callable[[], list[Mapping[str, Any]]]:
        return lambda: [slot for slot in scheduler.slots() if slot["model"] == model]

    forecasts = [
        Forecast(
            num_levels=num_levels,
            lane_weights=config.queue.lane_weights,
            aging_step_ns=int(config.queue.aging_step_s * NS_PER_S),
            slots=slots_of(model),
            is_guaranteed=not config.engine.grows_kv,
        )
        for model in range(config.num_models)
    ]
    promises = Promises(num_levels, observe=observe_promise, rng=rng)
    constant_s = config.refusals.retry_after_s
    return Outlook(scheduler, forecasts, promises, config.level_caps, now_ns, constant_s)


def _seconds(wait_ns: int | None) -> float | None:
    return None if wait_ns is None else wait_ns / NS_PER_S
