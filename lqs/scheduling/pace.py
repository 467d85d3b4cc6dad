"""How fast a model has been of late: what its requests took, so what the next will take.

Prefill is told in nanoseconds per prompt token that was computed, decoding in nanoseconds per token
made. Both are means that forget at a fixed pace, weighted by tokens, so one odd request moves them
little. Nothing is known before the first request has ended.
"""

from __future__ import annotations

from lqs.request import NS_PER_S, Outcome, Request

# Tokens after which what was seen before counts for half as much as what was seen since.
_MEMORY_TOKENS = 4096
# How fast the mean of whole requests follows the latest one.
_SERVICE_SHARE = 0.1


class _Rate:
    """Nanoseconds per token, forgetting."""

    def __init__(self) -> None:
        self._ns = 0.0
        self._tokens = 0.0

    def note(self, ns: int, num_tokens: int) -> None:
        """Take in what so many tokens took."""
        kept = _MEMORY_TOKENS / (_MEMORY_TOKENS + num_tokens)
        self._ns = self._ns * kept + ns
        self._tokens = self._tokens * kept + num_tokens

    def of(self, num_tokens: int) -> float:
        """What so many tokens will take; 0 when nothing is known."""
        return self._ns / self._tokens * num_tokens if self._tokens else 0.0


class Pace:
    """The pace of one model. Owner: the event loop."""

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._decode = _Rate()
        self.mean_service_s = 0.0  # From start to end; 0 when nothing is known.

    def note(self, request: Request, outcome: Outcome) -> None:
        """Learn from one that has ended."""
        num_prefilled = request.num_prompt_tokens - outcome.num_cached_tokens
        if outcome.prefill_done_ns and num_prefilled > 0:
            self._prefill.note(outcome.prefill_done_ns - outcome.assigned_ns, num_prefilled)
        if outcome.prefill_done_ns and outcome.num_completion_tokens > 0:
            self._decode.note(outcome.finished_ns - outcome.prefill_done_ns, outcome.num_completion_tokens)

        if outcome.assigned_ns and outcome.first_token_ns:
            took_s = (outcome.finished_ns - outcome.assigned_ns) / NS_PER_S
            known_s = self.mean_service_s or took_s
            self.mean_service_s = known_s + _SERVICE_SHARE * (took_s - known_s)

    def service_ns(self, num_prompt_tokens: int, num_completion_tokens: int) -> int:
        """What a request will take from its start to its end; 0 when nothing is known."""
        return int(self._prefill.of(num_prompt_tokens) + self._decode.of(num_completion_tokens))
