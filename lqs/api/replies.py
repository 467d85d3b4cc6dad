"""The answers that are not streamed, and what both kinds say at their end."""

from __future__ import annotations

from typing import Any, Protocol

from lqs.request import Outcome, Request
from lqs.streaming.logprobs import chat_logprobs, completion_logprobs

NS_PER_MS = 1_000_000


class Reply(Protocol):
    """Builds the whole answer of one shape."""

    def __call__(
        self, head: dict[str, Any], text: str, logprobs: bytes | None, finish_reason: str
    ) -> dict[str, Any]: ...


def chat_reply(head: dict[str, Any], text: str, logprobs: bytes | None, finish_reason: str) -> dict[str, Any]:
    """Build a chat completion. `logprobs` are the records of all tokens, None if not asked for."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None if logprobs is None else chat_logprobs(logprobs),
        "finish_reason": finish_reason,
    }
    return head | {"object": "chat.completion", "choices": [choice]}


def completion_reply(head: dict[str, Any], text: str, logprobs: bytes | None, finish_reason: str) -> dict[str, Any]:
    """Build a text completion; the same arguments."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None if logprobs is None else completion_logprobs(logprobs, 0)[0],
        "finish_reason": finish_reason,
    }
    return head | {"object": "text_completion", "choices": [choice]}


def usage_of(request: Request, outcome: Outcome) -> dict[str, Any]:
    """Count the tokens, as OpenAI does."""
    return {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": outcome.num_completion_tokens,
        "total_tokens": request.num_prompt_tokens + outcome.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.num_cached_tokens},
    }


def timings_of(request: Request, outcome: Outcome) -> dict[str, float]:
    """Tell the times of the two phases, in llama-server's words and milliseconds."""
    num_prefilled = request.num_prompt_tokens - outcome.num_cached_tokens
    prefill_ms = _between_ms(outcome.assigned_ns, outcome.prefill_done_ns)
    decode_ms = _between_ms(outcome.prefill_done_ns, outcome.finished_ns)
    return {
        "cache_n": outcome.num_cached_tokens,
        **_phase("prompt", num_prefilled, prefill_ms),
        **_phase("predicted", outcome.num_completion_tokens, decode_ms),
    }


def _phase(name: str, num_tokens: int, duration_ms: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": duration_ms,
        f"{name}_per_token_ms": duration_ms / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / duration_ms * 1000 if duration_ms else 0.0,
    }


def _between_ms(start_ns: int, end_ns: int) -> float:
    """Return the milliseconds between two times, 0 if either was never reached."""
    return max(end_ns - start_ns, 0) / NS_PER_MS if start_ns and end_ns else 0.0
