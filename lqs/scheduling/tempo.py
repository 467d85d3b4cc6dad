"""How fast requests run and come, from what was seen lately. Owner of everything here: the event loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lqs._core import Finish
from lqs.request import NS_PER_S, Outcome

# What finished counts for the next this many that finish.
_MEMORY = 16
# Who was cut off says nothing about how long its kind gets.
_ENDED_ITSELF = (Finish.FINISH_STOP, Finish.FINISH_LENGTH)
# Arrivals of the last so many seconds say how many come.
ARRIVALS_S = 5.0
# The load goes up and down faster than arrivals do.
_MOVED_S = 1.0


@dataclass(slots=True)
class Run:
    """A request that runs."""

    lane: int
    level: int
    num_prompt_tokens: int
    max_tokens: int
    started_ns: int
    first_ns: int = 0
    last_ns: int = 0
    num_tokens: int = 0


class Pace:
    """Time per token of what finished lately, the last ones counting most."""

    def __init__(self) -> None:
        self.decode_ns = self.decode_tokens = 0.0
        self.prefill_ns = self.prompt_tokens = 0.0
        self.made = self.granted = 0.0
        self.run_time_ns = self.num_run = 0.0

    def note(self, run: Run, outcome: Outcome) -> None:
        """One has finished."""
        keep = 1 - 1 / _MEMORY
        self.decode_ns = self.decode_ns * keep + max(outcome.finished_ns - outcome.first_token_ns, 0)
        self.decode_tokens = self.decode_tokens * keep + max(outcome.num_completion_tokens - 1, 0)
        self.prefill_ns = self.prefill_ns * keep + max(outcome.first_token_ns - run.started_ns, 0)
        self.prompt_tokens = self.prompt_tokens * keep + run.num_prompt_tokens
        self.run_time_ns = self.run_time_ns * keep + max(outcome.finished_ns - run.started_ns, 0)
        self.num_run = self.num_run * keep + 1
        if outcome.finish in _ENDED_ITSELF:
            self.made = self.made * keep + outcome.num_completion_tokens
            self.granted = self.granted * keep + run.max_tokens

    @property
    def prefill_ns_each(self) -> float:
        """Time from start to first token, for each token of the prompt."""
        return self.prefill_ns / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def share_made(self) -> float:
        """How much of what they may make requests come to make."""
        return self.made / self.granted if self.granted else 1.0

    def run_ns(self, num: int, num_prompt_tokens: int, max_tokens: int, token_ns: float) -> float:
        """How long so many requests with so many tokens in all will run: each to its first token, then token by token.

        While nothing is known of the first one it is taken to come as fast as the others.
        """
        first_ns = num_prompt_tokens * self.prefill_ns_each if self.prompt_tokens else num * token_ns
        return first_ns + max(max_tokens * self.share_made - num, 0.0) * token_ns


class Rate:
    """How many come in a while, the last ones counting most."""

    def __init__(self) -> None:
        self._count = 0.0
        self._begun_ns = self._last_ns = 0

    def note(self, now_ns: int) -> None:
        """One has come."""
        self._begun_ns = self._begun_ns or now_ns
        self._count = self._left(now_ns) + 1
        self._last_ns = now_ns

    def per_ns(self, now_ns: int) -> float:
        """Arrivals per nanosecond."""
        seen_s = max((now_ns - self._begun_ns) / NS_PER_S, 1.0)
        weight_s = ARRIVALS_S * (1 - math.exp(-seen_s / ARRIVALS_S))
        return self._left(now_ns) / weight_s / NS_PER_S

    def _left(self, now_ns: int) -> float:
        return self._count * math.exp(-max(now_ns - self._last_ns, 0) / (ARRIVALS_S * NS_PER_S))


class Moved:
    """How many of those who come are moved one class down, because the load is high; of the last moment."""

    def __init__(self) -> None:
        self.share = 0.0
        self._last_ns = 0

    def note(self, is_moved: bool, now_ns: int) -> None:
        """One has come."""
        kept = math.exp(-max(now_ns - self._last_ns, 0) / (_MOVED_S * NS_PER_S))
        self.share = self.share * kept + is_moved * (1 - kept)
        self._last_ns = now_ns
