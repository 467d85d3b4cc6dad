"""How much context, and how many sequences, each device slot of a model gets beside the others in the same memory.

Context first: as much as is set, or else as is useful and fits. Where memory leaves less than is useful, sequences
follow: each has `SEQUENCE_TOKENS` at least, or they would only push each other out. A context that was set by hand
is for as many sequences as are set, until it turns out not to fit (`smaller`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lqs.config import Config
from lqs.engine.cores import cores_of
from lqs.engine.needs import Needs
from lqs.errors import ConfigError
from lqs.placement.gpus import SYSTEM_POOL
from lqs.placement.survey import Group

_MB = 1_000_000
# A default for all: that many whole contexts of the model, but not beyond this many tokens.
_AUTO_CONTEXTS = 4
_AUTO_TOKENS_MAX = 32_768
PAD_TOKENS = 256  # llama.cpp rounds the size of a context up to that.
SEQUENCE_TOKENS = 256  # Of context, for each sequence where memory is short.


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One device slot. `parts` say how a model is split over its GPUs; `takes` are bytes by pool, weights left out."""

    group: Group
    threads: int
    kv_tokens: int
    num_sequences: int
    takes: Mapping[str, int]
    cores: frozenset[int] = frozenset()
    parts: tuple[float, ...] = ()

    @property
    def num_cells(self) -> int:
        """KV cells as llama.cpp makes them: rounded up."""
        return padded(self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Size:
    """What a device slot is opened with."""

    kv_tokens: int
    num_sequences: int


def padded(kv_tokens: int) -> int:
    """A context's size as llama.cpp makes it."""
    return -(-kv_tokens // PAD_TOKENS) * PAD_TOKENS


def smaller(size: Size) -> Size | None:
    """What to try next where this did not fit; None: there is nothing.

    Half of the context, and no more sequences than that is good for; in the end fewer sequences alone, as their
    outputs take memory too.
    """
    half = in_pads(size.kv_tokens // 2) or size.kv_tokens
    less = Size(half, fewer_sequences(size.num_sequences, half))
    return None if less == size else less


def fewer_sequences(num_sequences: int, kv_tokens: int) -> int:
    """So many of them as a context is good for where memory is short; at least one."""
    return max(min(num_sequences, kv_tokens // SEQUENCE_TOKENS), 1)


def weights_by_pool(groups: Sequence[Group], needs: Needs) -> Counter[str]:
    """The machine's memory holds them once for all CPU device slots, a GPU its part for each of its own."""
    weights: Counter[str] = Counter()
    if any(group.is_cpu for group in groups):
        weights[SYSTEM_POOL] += needs.weights_bytes
    for group in groups:
        for gpu in group.gpus:
            weights[gpu.pool] += needs.weights_bytes // len(group.gpus)
    return weights


def budget_bytes(config: Config, group: Group) -> int:
    """What a CPU device slot may take beside the weights; 0: no bound."""
    budgets = config.engine.memory_mb
    return budgets[min(group.number, len(budgets) - 1)] * _MB if budgets and group.is_cpu else 0


def tokens_within(budget: int, group: Group, needs: Needs) -> int:
    """The cells that a CPU device slot has in so many bytes, its compute buffers beside them; 0 or less: none."""
    return (budget - needs.compute_bytes(group)) // max(needs.token_bytes(group), 1)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the device slots of one model beside each other."""

    config: Config
    groups: Sequence[Group]
    needs: Needs
    room: Mapping[str, int | None]
    num_cores: int
    num_sharing: int

    def slot(self, group: Group) -> SlotPlan:
        """One device slot, with as much context as is set, or else useful and there."""
        engine, needs = self.config.engine, self.needs
        kv_tokens, num_sequences = engine.ctx, engine.parallel
        if not kv_tokens:
            kv_tokens = self._auto_tokens(group)
            if kv_tokens < self._useful_tokens:
                num_sequences = fewer_sequences(num_sequences, kv_tokens)
        each = needs.compute_bytes(group) + -(-kv_tokens * needs.token_bytes(group) // len(group.pools))
        cores = cores_of(engine.cores, group.number) if group.is_cpu else frozenset()
        num_cpu = sum(one.is_cpu for one in self.groups)
        share = len(cores) or max(self.num_cores // max(num_cpu, 1), 1)
        return SlotPlan(
            group=group,
            # A GPU's thread only sends work; one more would spin.
            threads=(engine.threads or share) if group.is_cpu else 1,
            kv_tokens=kv_tokens,
            num_sequences=num_sequences,
            takes=dict.fromkeys(group.pools, each),
            cores=cores,
            parts=_parts(group),
        )

    @property
    def _useful_tokens(self) -> int:
        """More cells than these would help nobody."""
        n_ctx_train = self.needs.n_ctx_train
        return in_pads(min(_AUTO_CONTEXTS * n_ctx_train, max(_AUTO_TOKENS_MAX, n_ctx_train)))

    def _auto_tokens(self, group: Group) -> int:
        """As many cells as are useful and fit beside weights, compute buffers and margin; at least one pad."""
        needs, tokens = self.needs, self._useful_tokens
        for pool in group.pools:
            fitting = self._fitting(group, pool)
            tokens = tokens if fitting is None else min(tokens, fitting)
        if budget := budget_bytes(self.config, group):
            tokens = min(tokens, tokens_within(budget, group, needs))
            if tokens < PAD_TOKENS:
                least = -(-(needs.compute_bytes(group) + PAD_TOKENS * needs.token_bytes(group)) // _MB)
                what = f"{budget // _MB} MB hold no context of {PAD_TOKENS} tokens on {group}"
                raise ConfigError(f"engine.memory_mb: {what}; {least} would.")
        return in_pads(tokens)

    def _fitting(self, group: Group, pool: str) -> int | None:
        """The cells that fit in a pool, None where nobody knows. Raises ConfigError for less than one pad."""
        free = self.room[pool]
        if free is None:
            return None
        weights = weights_by_pool(self.groups, self.needs)[pool]
        here = [each for each in self.groups if pool in each.pools]
        left = free - weights - sum(map(self.needs.compute_bytes, here))
        # Of a cell each GPU of the group has its part.
        a_token = self.needs.token_bytes(group) * len(here) * self.num_sharing
        fitting = left * len(group.pools) // max(a_token, 1)
        if fitting < PAD_TOKENS:
            where = "" if pool == SYSTEM_POOL else f"on {pool} "
            raise ConfigError(
                f"engine.ctx: the model does not fit: {where}{max(free, 0) // _MB} MB may be taken, its weights take "
                f"{weights // _MB} MB. Free some memory, take a smaller model, or lower engine.kv_margin_mb or "
                "engine.gpu_margin_mb."
            )
        return fitting


def in_pads(tokens: int) -> int:
    """The largest size of a context that is not above this one."""
    return tokens // PAD_TOKENS * PAD_TOKENS


def _parts(group: Group) -> tuple[float, ...]:
    """Layers go to the GPUs as their free memory stands; equally where one does not tell."""
    free = [gpu.memory_free_bytes for gpu in group.gpus]
    if not all(free):
        return (1.0,) * len(free)
    return tuple(float(each or 0) for each in free)
