"""Renders, tokenises and compiles grammars: everything about a prompt that takes time.

It happens in a few pool threads, never in the event loop. The pool has no queue of its own that
could grow unseen: an admitted request already holds its place in its class, and everything else is
counted here. No pool thread waits for a lock or for the loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lqs.config import PromptsConfig
from lqs.engine import tokens
from lqs.errors import BadRequest, PromptTooLong, RequestRefused
from lqs.request import PromptSource, Request

if TYPE_CHECKING:
    from lqs._core import Work
    from lqs.engine.served import Served

P = ParamSpec("P")
T = TypeVar("T")

# Where cores are short the event loop gets three times the share of one of these threads. Otherwise a
# burst of long prompts keeps it from answering, and it is the loop that lets the others in.
_NICENESS, _NICENESS_MAX = 5, 19
_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF


class Prompts:
    """The pool. Owner: the event loop."""

    def __init__(self, config: PromptsConfig) -> None:
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="lqs-prompts", initializer=_step_back)
        self._num_pending_max = config.num_pending_max
        self.num_pending = 0

    async def prepare(self, request: Request, source: PromptSource, served: Served) -> Work:
        """Fill in the request's prompt and limits; return the work for the engine.

        Raises BadRequest, and PromptTooLong before any rendering where the length alone shows it.
        """
        check_bytes(source.num_bytes_min, served)
        return await self._call(prepare, request, source, served)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something slow that belongs to no admitted request; refuse when too much waits."""
        if self.num_pending >= self._num_pending_max:
            raise RequestRefused("queue_full", "Too many prompts wait.", retry_after_s=1.0)
        return await self._call(function, *args, **kwargs)

    def close(self) -> None:
        """Start nothing more. Threads end after what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        job = self._pool.submit(function, *args, **kwargs)
        self.num_pending += 1
        try:
            # A caller that leaves cancels the job too, if no thread has begun it.
            return await asyncio.wrap_future(job)
        finally:
            self.num_pending -= 1


def _step_back() -> None:
    # On Linux each thread has a niceness of its own.
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _NICENESS_MAX))


def check_bytes(num_bytes_min: int, served: Served) -> None:
    """Refuse a prompt that is too long however well it is tokenised.

    No token stands for more bytes than the longest piece of the vocabulary, so the bytes bound the
    number of tokens from below.
    """
    longest = served.loaded.longest_piece_bytes
    if longest is None:
        return
    num_tokens_min = -(-num_bytes_min // longest)
    if num_tokens_min + 1 > served.n_ctx:
        raise PromptTooLong(num_tokens_min, served.n_ctx, is_exact=False)


def prepare(request: Request, source: PromptSource, served: Served) -> Work:
    """Everything `Prompts.prepare` does, in a pool thread."""
    prompt = make_prompt(source, served)
    if len(prompt) + 1 > served.n_ctx:
        raise PromptTooLong(len(prompt), served.n_ctx)
    _check_bias(request, served.loaded.n_vocab)
    request.prompt = prompt
    request.max_tokens_granted = grant(request.max_tokens, len(prompt), served)
    if request.max_tokens is None and request.tokens_max:
        # Who asks for no length gets no more than its limits have, rather than a refusal.
        left = max(request.tokens_max - len(prompt), 1)
        request.max_tokens_granted = min(request.max_tokens_granted, left)
    return _work(request, served)


def make_prompt(source: PromptSource, served: Served) -> array[int]:
    """The token ids of a prompt. Raises BadRequest for an empty one without a start token."""
    model = served.loaded
    if source.ids:
        return _checked_ids(source.ids, model.n_vocab)
    segments = source.render() if source.render is not None else ()
    # The template adds to what the client sent; the bound holds for the whole too.
    check_bytes(sum(len(segment.text) for segment in segments), served)
    prompt = tokens.tokenize(segments, model)
    if not prompt:
        raise BadRequest("The prompt is empty, and this model has no start token.", param="prompt")
    return prompt


def grant(wish: int | None, num_prompt_tokens: int, served: Served) -> int:
    """How long the answer may get: wish or default, the ceiling, what the context leaves."""
    config = served.config
    bounds = [wish or config.default_max_tokens, config.max_tokens_max]
    return min([served.n_ctx - num_prompt_tokens, *filter(None, bounds)])


def _checked_ids(ids: Sequence[int], n_vocab: int) -> array[int]:
    if min(ids) < 0 or max(ids) >= n_vocab:
        raise BadRequest(f"prompt: this model's token ids go from 0 to {n_vocab - 1}.", param="prompt")
    return array("i", ids)


def _check_bias(request: Request, n_vocab: int) -> None:
    if any(not 0 <= token < n_vocab for token, _ in request.sampling.logit_bias):
        raise BadRequest(f"logit_bias: this model's token ids go from 0 to {n_vocab - 1}.", param="logit_bias")


def _work(request: Request, served: Served) -> Work:
    model, sampling = served.loaded, request.sampling
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _SEED_MASK
    # Scope 0 is everybody's; it is also the anonymous tenant's, who has nobody to hide from.
    scope = 0 if served.is_prefix_shared else request.tenant.key_index
    grammar = model.grammar(sampling.grammar) if sampling.grammar is not None else None
    return model.work(
        request.prompt,
        scope,
        sampling,
        seed=seed,
        grammar=grammar,
        max_tokens=request.max_tokens_granted,
    )
