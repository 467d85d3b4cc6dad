"""Which device slots have computed the beginning of a prompt already, as far as the loop can tell.

A worker keeps the cells of what it has finished for as long as it has room, and does not tell what it
drops. So this is a guess: of each device slot the blocks of prompts that it computed last, no more of
them than it has cells for. A block is known by what stands before it too, so prompts have a beginning
in common for as long as their blocks are the same.

    prompt      |  64 tokens  |  64 tokens  |  64 tokens  | rest
    known as       h(scope)      h(h, block)   h(h, block)            a wrong guess costs nothing but the choice
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lqs.config import Config
from lqs.request import Request

_BLOCK_TOKENS = 64

Slots = Callable[[], Sequence[Mapping[str, Any]]]


class Ended(Protocol):
    """What is asked of an outcome."""

    @property
    def slot(self) -> int: ...
    @property
    def prefill_done_ns(self) -> int: ...


class Prefixes:
    """The beginnings of prompts, by device slot.

    `slots` tells the core's figures of all device slots. With `is_shared` their cache is one for all keys;
    without `is_kept` they keep nothing.

    Owner: the event loop.
    """

    def __init__(self, slots: Slots, *, is_shared: bool = False, is_kept: bool = True) -> None:
        self._slots = slots
        self._is_shared = is_shared
        self._is_kept = is_kept
        self._models: dict[int, list[int]] = {}
        self._bounds: list[int] = []
        self._held: list[OrderedDict[int, None]] = []

    def find(self, request: Request, model: int) -> list[tuple[int, int]]:
        """(device slot, tokens of the prompt that it probably holds), where there is a choice."""
        if not self._has_choice(request, model):
            return []
        numbers = self._models[model]
        left, found = numbers, dict.fromkeys(numbers, 0)
        for key in self._keys(request, model):
            left = [number for number in left if key in self._held[number]]
            if not left:
                break
            for number in left:
                found[number] += _BLOCK_TOKENS
        return [(number, tokens) for number, tokens in found.items() if tokens]

    def note(self, request: Request, outcome: Ended) -> None:
        """A request has ended: its device slot has computed its prompt, if it came so far."""
        model = request.model_index
        if outcome.slot >= len(self._held):
            self._look()
        if not outcome.prefill_done_ns or not self._has_choice(request, model):
            return
        held, bound = self._held[outcome.slot], self._bounds[outcome.slot]
        # The last block is the first to be forgotten: without those before it it is worth nothing.
        for key in reversed(list(self._keys(request, model))):
            held[key] = None
            held.move_to_end(key)
        while len(held) > bound:
            held.popitem(last=False)

    def _has_choice(self, request: Request, model: int) -> bool:
        if model not in self._models:
            self._look()
        return self._is_kept and request.sampling.cache_prompt and len(self._models.get(model, ())) > 1

    def _look(self) -> None:
        """See which device slots have come."""
        for slot in self._slots()[len(self._held) :]:
            self._models.setdefault(slot["model"], []).append(len(self._held))
            self._held.append(OrderedDict())
            self._bounds.append(slot["capacity"] // _BLOCK_TOKENS)

    def _keys(self, request: Request, model: int) -> Iterator[int]:
        scope = -1 if self._is_shared else request.tenant.key_index
        return _chain(request.prompt, hash((model, scope)))


def _chain(prompt: array[int], key: int) -> Iterator[int]:
    """A name for each whole block of the prompt together with all before it."""
    for end in range(_BLOCK_TOKENS, len(prompt) + 1, _BLOCK_TOKENS):
        key = hash((key, prompt[end - _BLOCK_TOKENS : end].tobytes()))
        yield key


def make_prefixes(config: Config, slots: Slots) -> Prefixes:
    """As the device slots of the config keep them."""
    return Prefixes(slots, is_shared=config.engine.prefix_shared, is_kept=config.engine.prefix_cache)
